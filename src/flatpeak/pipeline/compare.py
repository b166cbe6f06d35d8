"""`flatpeak eval`: load models one after another and evaluate each on the same questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatpeak.config.load import apply_overrides, load_recipe, merge, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.evaluation.result import Evaluation
from flatpeak.evaluation.tables import Comparison
from flatpeak.pipeline.build import CallerObjects, open_evaluation
from flatpeak.pipeline.progress import Silence
from flatpeak.protocols import Progress
from flatpeak.runs.checkpoints import BEST, LAST, checkpoint_name, verify_checkpoint
from flatpeak.runs.directory import RunPaths, run_hint


@dataclass(frozen=True, kw_only=True, slots=True)
class Located:
    """A model, and the run it came from if it came from one."""

    path: str | None
    """A directory that `from_pretrained` loads, or a Hub name; None is the model that the recipe names."""
    recipe: Path | None
    """The run's config.yaml; None where the model comes from no run, or the file is missing."""
    run: Path | None = None
    """The run's directory."""


def locate_model(name: str) -> Located:
    """A run stands for its best checkpoint (its SFT's last where RL has not begun). Raises UserError if it has none."""
    path = Path(name)
    run = RunPaths(path)
    if run.is_run():
        candidates = (run.checkpoints / BEST, run.checkpoints / LAST, run.checkpoints / "sft" / LAST)
        for candidate in candidates:
            if candidate.is_dir():
                return _whole(_of_run(run, path=str(candidate)))
        raise UserError(f"{name} is a run without a checkpoint: give another, or go on with --resume")
    if path.is_dir():
        # Not resolved: a link beside a run is a model by itself.
        runs = (RunPaths(parent) for parent in path.absolute().parents)
        found = next((run for run in runs if run.is_run()), None)
        return _whole(Located(path=name, recipe=None) if found is None else _of_run(found, path=name))
    # A Hub name has at most one slash and no local folder before it: anything else was meant as a path.
    if (
        name.startswith((".", "/", "~"))
        or name.count("/") > 1
        or (len(path.parts) > 1 and Path(path.parts[0]).is_dir())
    ):
        raise UserError(f"{name}: no such run or model directory{run_hint(name)}")
    hint = run_hint(name)
    if hint:
        raise UserError(f"{name} is no directory{hint}")
    return Located(path=name, recipe=None)


def _of_run(run: RunPaths, *, path: str | None) -> Located:
    """A model that belongs to a run."""
    return Located(path=path, recipe=run.config if run.config.is_file() else None, run=run.path)


def locate_stages(name: str) -> dict[str, Located]:
    """What a run's model was: `base` before training, `sft` after SFT, `best` and `last` of RL, those that there are.

    Stages that share a checkpoint stand together, as in `best = last`. Raises UserError for what is not a run.
    """
    run = RunPaths(Path(name))
    if not run.is_run():
        hint = run_hint(name) or "; give runs, or leave --stages out"
        raise UserError(f"--stages {name}: not a run's directory{hint}")
    start, after_sft = run.checkpoints / checkpoint_name(0), run.sft_checkpoints / LAST
    places = {
        # Without SFT, RL began with the model as it was.
        "base": start if start.is_dir() and not after_sft.is_dir() else None,
        "sft": after_sft,
        "best": run.checkpoints / BEST,
        "last": run.checkpoints / LAST,
    }
    by_place: dict[Path | None, list[str]] = {}
    for stage, place in places.items():
        if place is None or place.is_dir():
            by_place.setdefault(_stage_of(place, run), []).append(stage)
    return {
        " = ".join(stages): _whole(_of_run(run, path=None if place is None else str(place)))
        for place, stages in by_place.items()
    }


def _whole(located: Located) -> Located:
    """The same. UserError where it is a checkpoint that is not as it was written."""
    if located.path is not None:
        verify_checkpoint(Path(located.path))
    return located


def _stage_of(place: Path | None, run: RunPaths) -> Path | None:
    """The checkpoint behind a link; RL's step 0 is what SFT made."""
    if place is None:
        return None
    found = place.resolve()
    after_sft = run.sft_checkpoints / LAST
    begins = found == (run.checkpoints / checkpoint_name(0)).resolve()
    return after_sft.resolve() if begins and after_sft.is_dir() else found


Recipe = Mapping[str, Any]
SECTIONS = ("task", "prompt", "rewards", "rollout", "evaluation")
"""What a recipe says about how a model is evaluated."""
_WORDING = ("template", "system", "chat_template_kwargs")


@dataclass(frozen=True, kw_only=True)
class _Model:
    """One column of the comparison."""

    label: str
    path: str | None
    """None: the model that the run's recipe names."""
    recipe: Recipe = field(default_factory=dict)
    """Of the run it comes from; empty where it comes from none."""

    def section(self, base: Recipe) -> dict[str, Any]:
        """`model` of a recipe that evaluates it: loaded as in its own run, on the device of the first."""
        own = dict(self.recipe.get("model") or {})
        device = (base.get("model") or {}).get("device", "auto")
        if self.path is None:
            return {**own, "device": device}
        kept = {key: own[key] for key in ("dtype", "trust_remote_code") if key in own}
        return {"path": self.path, "device": device, **kept}


def compare_checkpoints(
    names: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    recipe: str | None = None,
    stages: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Evaluate runs, checkpoints or Hub names on the held-out set of the first one's recipe, as overridden.

    `recipe`, a path or name, says how instead: one with a task is all that is asked and judged by, one without changes
    the first model's. With `stages`, each run stands for the model it began with, and what SFT, the best and the last
    step made of it.

    Raises UserError where nothing says what to evaluate on, and for a run that was asked, or judged, in another way
    than the first and would be asked in the first one's way here.
    """
    progress = Silence() if progress is None else progress
    models = [model for name in names for model in _models(name, stages=stages, several=len(names) > 1)]
    base = next((model.recipe for model in models if model.recipe), {})
    said = list(overrides)
    if recipe is not None:
        asked = load_recipe(recipe)
        base = evaluated_by(asked, base)
        said += [f"{section}=" for section in SECTIONS if section in asked or "task" in asked]
    if "task" not in base and not _overridden(overrides, "task"):
        raise UserError(
            "none of these models belongs to a run with a config.yaml, so the task is unknown: give --recipe or "
            "task.type=..."
        )
    notices: list[str] = []
    evaluations: list[Evaluation] = []
    for model in models:
        # What a new model is made from, its seed included, is its own run's.
        run = model.recipe.get("run") or base.get("run") or {}
        config = parse_config(apply_overrides({**base, "run": run, "model": model.section(base)}, overrides))
        notices += _check_alike(model, config, said)
        with open_evaluation(config, CallerObjects(), progress=progress) as evaluator:
            evaluations.append(evaluator.evaluate(size=_size(config, overrides), robustness=True))
        del evaluator  # else this model would still be in memory while the next one loads
    common = set.intersection(*(set(evaluation.ids) for evaluation in evaluations))
    if any(len(evaluation.ids) > len(common) for evaluation in evaluations):
        if not common:
            raise UserError("there is no question whose prompt fits into every model's context: compare fewer models")
        most = max(evaluation.size for evaluation in evaluations)
        notices.append(f"{len(common)} of {most} questions fit into every model's context; the tables are of those")
        evaluations = [evaluation.only(common) for evaluation in evaluations]
    labels = [model.label for model in models]
    return Comparison(labels=labels, evaluations=evaluations, notices=list(dict.fromkeys(notices)))


def evaluated_by(recipe: Recipe, base: Recipe) -> dict[str, Any]:
    """`base`, evaluated as a recipe says.

    Where that has a task, nothing is kept of how `base` was asked and judged: another task's rewards and metric mean
    nothing to it.
    """
    kept = {key: value for key, value in base.items() if "task" not in recipe or key not in SECTIONS}
    return merge(kept, {section: recipe[section] for section in SECTIONS if section in recipe})


def _models(name: str, *, stages: bool, several: bool) -> list[_Model]:
    if not stages:
        located = locate_model(name)
        return [_Model(label=_label(name), path=located.path, recipe=_recipe(located))]
    prefix = f"{_label(name)}/" if several else ""
    found = locate_stages(name)
    return [
        _Model(label=prefix + label, path=located.path, recipe=_recipe(located))
        for label, located in found.items()
        if located.path is not None or _names_a_model(_recipe(located))
    ]


def _names_a_model(recipe: Recipe) -> bool:
    """Whether the model before training can be had: one that a Python caller brought is gone."""
    model = recipe.get("model") or {}
    return bool(model.get("path") or model.get("new"))


def _recipe(located: Located) -> Recipe:
    return load_recipe(Path(located.recipe)) if located.recipe is not None else {}


def _check_alike(model: _Model, config: RunConfig, said: Sequence[str]) -> list[str]:
    """UserError where the model's own run worded or judged otherwise; what else differs, as notices."""
    if not model.recipe:
        return []
    own = parse_config(model.recipe)
    alike = (own.task, own.prompt.template) == (config.task, config.prompt.template)
    if model.path is None and own.model.new is not None and not alike:
        raise UserError(
            f"{model.label} would be made again from the text of another task than its own: compare checkpoints by "
            "name in place of --stages, or leave its task and prompt.template as they are"
        )
    for key in _WORDING:
        own_wording, here = getattr(own.prompt, key), getattr(config.prompt, key)
        if own_wording != here and not _overridden(said, f"prompt.{key}"):
            raise UserError(
                f"{model.label} was trained with prompt.{key}={own_wording}, but the first model's recipe asks "
                f"with {here}: say how all are asked, with prompt.{key}=... or --recipe"
            )
    part = config.evaluation.accuracy
    if part is not None and not _overridden(said, f"rewards.{part}", "evaluation.accuracy"):
        rewards = (own.rewards.get(part), config.rewards.get(part))
        judged = [None if one is None else one.model_dump(exclude={"weight"}) for one in rewards]
        if judged[0] != judged[1]:
            raise UserError(
                f"{model.label} was trained with another reward {part} ({_said(judged[0])}) than the first model's "
                f"recipe judges by ({_said(judged[1])}): say how all are judged, with rewards.{part}.type=... or "
                "--recipe"
            )
    if own.task != config.task and not _overridden(said, "task"):
        return [f"{model.label} was trained on another task ({own.task.type}); it is asked the first one's questions"]
    return []


def _size(config: RunConfig, overrides: Sequence[str]) -> int | None:
    """How many questions: as many as a run asks at its end, unless a size was given here."""
    given = _overridden(overrides, "evaluation.size") and not _overridden(overrides, "evaluation.final_size")
    return config.evaluation.size if given else config.evaluation.final_size or config.evaluation.size


def _said(part: Mapping[str, Any] | None) -> str:
    return "none" if part is None else " ".join(f"{key}={value}" for key, value in part.items())


def _overridden(overrides: Sequence[str], *keys: str) -> bool:
    """Whether an override sets one of the keys, something in it, or a section that it is in."""
    said = [override.partition("=")[0].strip() + "." for override in overrides]
    return any(one.startswith(f"{key}.") or f"{key}.".startswith(one) for one in said for key in keys)


def _label(name: str) -> str:
    return "/".join(part for part in name.rstrip("/").split("/") if part != "checkpoints")[-40:]
