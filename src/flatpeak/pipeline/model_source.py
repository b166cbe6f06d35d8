"""Locate models: a checkpoint, a directory, a Hub name or the best checkpoint of a run, with the run it came from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatpeak.config.load import load_recipe, merge, parse_config
from flatpeak.errors import UserError
from flatpeak.pipeline.prompt_record import PromptRecord, read_prompt_record
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import adapter_source
from flatpeak.runs.checkpoints import BEST, LAST, checkpoint_name, verify_checkpoint
from flatpeak.runs.directory import RunPaths, run_hint
from flatpeak.utils.gguf import SUFFIX
from flatpeak.utils.huggingface import is_surely_local

_MODEL_FILES = ("config.json", "adapter_config.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSource:
    """A model, and the run it came from if it came from one."""

    path: str | None
    """A directory that `from_pretrained` loads, or a Hub name; None is the model that the recipe names."""
    recipe: Path | None
    """The run's config.yaml; None where the model comes from no run, or the file is missing."""
    run: Path | None = None
    """The run's directory."""
    record: PromptRecord | None = None
    """The record in the model's directory."""


def locate_model(name: str) -> ModelSource:
    """A run stands for its best checkpoint (its SFT's last where RL has not begun); UserError where it has none."""
    path = Path(name)
    run = RunPaths(path)
    if run.is_run():
        candidates = (run.checkpoints / BEST, run.checkpoints / LAST, run.checkpoints / "sft" / LAST)
        for candidate in candidates:
            if candidate.is_dir():
                return _verified(_model_of_run(run, path=str(candidate)))
        raise UserError(f"{name} is a run without a checkpoint: give another, or go on with --resume")
    if path.is_dir():
        # Not resolved: a link beside a run is a model by itself.
        parents = (RunPaths(parent) for parent in path.absolute().parents)
        own_run = next((parent for parent in parents if parent.is_run()), None)
        if not any((path / file).is_file() for file in _MODEL_FILES):
            raise UserError(f"{name}: neither a run (manifest.json) nor a model (config.json){_runs_below(path)}")
        return _verified(ModelSource(path=name, recipe=None) if own_run is None else _model_of_run(own_run, path=name))
    if path.suffix == SUFFIX and path.is_file():
        return ModelSource(path=name, recipe=None)
    if path.is_file():
        raise UserError(f"{name} is a file, not a model: give a run, a model's directory or a GGUF file")
    # A Hub name has no local folder before it either.
    if is_surely_local(name) or (len(path.parts) > 1 and Path(path.parts[0]).is_dir()):
        raise UserError(f"{name}: no such run or model directory{run_hint(name)}")
    hint = run_hint(name)
    if hint:
        raise UserError(f"{name} is no directory{hint}")
    return ModelSource(path=name, recipe=None)


def _runs_below(path: Path) -> str:
    """A hint at the newest run in a directory of runs."""
    runs = [below for below in path.iterdir() if RunPaths(below).is_run()]
    return f": did you mean {max(runs, key=lambda run: run.stat().st_mtime)}?" if runs else ": name one"


def locate_stages(name: str) -> dict[str, ModelSource]:
    """The models of a run's stages: `base` before training, `sft` after SFT, `best` and `last` of RL, if there.

    Stages that share a checkpoint stand together, as in `best = last`. Raises UserError for what is not a run.
    """
    run = RunPaths(Path(name))
    if not run.is_run():
        hint = run_hint(name) or "; give runs, or leave --stages out"
        raise UserError(f"--stages {name}: not a run's directory{hint}")
    start, after_sft = run.checkpoints / checkpoint_name(0), run.sft_checkpoints / LAST
    checkpoints = {
        # Without SFT, RL began with the model as it was.
        "base": start if start.is_dir() and not after_sft.is_dir() else None,
        "sft": after_sft,
        "best": run.checkpoints / BEST,
        "last": run.checkpoints / LAST,
    }
    stages_of: dict[Path | None, list[str]] = {}
    for stage, checkpoint in checkpoints.items():
        if checkpoint is None or checkpoint.is_dir():
            stages_of.setdefault(_resolved(checkpoint, run), []).append(stage)
    return {
        " = ".join(stages): _verified(_model_of_run(run, path=None if checkpoint is None else str(checkpoint)))
        for checkpoint, stages in stages_of.items()
    }


def recipe_of(source: ModelSource) -> dict[str, Any]:
    """The recipe of a model's run, or what the record beside it has of that; empty where neither is there.

    A template in a file is replaced by its text at the time of the checkpoint, where that is recorded.
    """
    record = source.record
    if source.recipe is None:
        return record.recipe() if record is not None and record.kind == "policy" else {}
    recipe = load_recipe(Path(source.recipe))
    template = (recipe.get("prompt") or {}).get("template")
    if record is None or template is None or template != record.template_name:
        return recipe
    return merge(recipe, {"prompt": {"template": record.recipe_template}})


def trained_as(source: Path) -> ModelConfig:
    """The model of a checkpoint, in the type that its run had; float32 where it belongs to none."""
    recipe = recipe_of(locate_model(str(source)))
    model = parse_config(recipe).model if recipe else ModelConfig()
    return adapter_source(
        ModelConfig(path=str(source), dtype=model.dtype, trust_remote_code=model.trust_remote_code, device="cpu")
    )


def _model_of_run(run: RunPaths, *, path: str | None) -> ModelSource:
    return ModelSource(path=path, recipe=run.config if run.config.is_file() else None, run=run.path)


def _verified(source: ModelSource) -> ModelSource:
    """The source with its record; UserError where it is a checkpoint whose files are not as they were written."""
    if source.path is None:
        return source
    verify_checkpoint(Path(source.path))
    return replace(source, record=read_prompt_record(Path(source.path)))


def _resolved(checkpoint: Path | None, run: RunPaths) -> Path | None:
    """The checkpoint behind a link; RL's step 0 is the last one of SFT."""
    if checkpoint is None:
        return None
    target = checkpoint.resolve()
    after_sft = run.sft_checkpoints / LAST
    is_start = target == (run.checkpoints / checkpoint_name(0)).resolve()
    return after_sft.resolve() if is_start and after_sft.is_dir() else target
