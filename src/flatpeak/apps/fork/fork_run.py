"""`flatpeak.fork`: a new run that starts from a checkpoint of another, with changed settings."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from flatpeak.apps.fork.forked_recipe import forked_recipe, source_run
from flatpeak.config.load import Settings
from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.launch import check_alone
from flatpeak.errors import RunError, UserError
from flatpeak.pipeline.request import CallerObjects, is_reward_from_python
from flatpeak.pipeline.run_result import RunResult
from flatpeak.pipeline.train import train
from flatpeak.protocols import Progress, Task
from flatpeak.runs.callbacks import Callback
from flatpeak.runs.checkpoints import CheckpointState, broken_file, checkpoint_name, checkpoint_steps, read_checkpoint
from flatpeak.runs.directory import RunPaths, check_no_secret_missing
from flatpeak.runs.manifest import DIGESTS, changes, describe_start, last_digests
from flatpeak.runs.metrics import truncate_metrics
from flatpeak.runs.notices import truncate_notices
from flatpeak.runs.rollout_log import logged_steps
from flatpeak.utils.redaction import redact

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from flatpeak.pipeline.request import AdvantageInput, DataInput, LossInput, ModelInput, RewardInput, SamplerInput

FIXED_SETTINGS = {
    "model.path": "the model",
    "model.new": "the model",
    "model.revision": "the model",
    "model.dtype": "weights of that type",
    "model.lora": "adapters of that kind",
    "model.quantization": "adapters over such weights",
    "optimizer.name": "the state of that optimizer",
    "sft": "what SFT made",
    "evaluation.metric": "the best value of that metric so far",
}
"""Settings that a fork cannot change, and the content of its checkpoint that depends on them."""
_NEED_ACCURACY = ("evaluation.accuracy", "evaluation.choices", "evaluation.robustness", "training.stop_at")
"""Settings for which evaluations have to say which answers are right."""


def fork(
    run: str | Path,
    step: int,
    *,
    name: str,
    settings: Settings = (),
    model: ModelInput | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: DataInput | None = None,
    task: Task | None = None,
    reward: RewardInput | None = None,
    sampler: SamplerInput | None = None,
    loss: LossInput | None = None,
    advantage: AdvantageInput | None = None,
    callbacks: Sequence[Callback] = (),
    progress: Progress | bool | None = None,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Train a new run, `name`, from the checkpoint of an RL step of `run`, and return its result.

    Weights, optimizer, the position in the data and the logs so far come from `run`, a directory or the name of a run
    in `runs/`. `settings` change its recipe. Objects that its caller gave must be given again. Raises UserError, and
    leaves no files of the fork, if the checkpoint is missing or the changes make it unusable.
    """
    source = source_run(run)
    origin = read_origin(source, step)
    before, config = forked_recipe(source, name, CallerObjects(loss=loss, advantage=advantage).named_in(settings) or ())
    _check_fork(source, origin, before, config)
    target = Path(config.run.directory) / name
    copy_run(source, origin, target, before=before, config=config, command=command)
    try:
        return train(
            config,
            model=model,
            tokenizer=tokenizer,
            dataset=dataset,
            task=task,
            reward=reward,
            sampler=sampler,
            loss=loss,
            advantage=advantage,
            callbacks=callbacks,
            progress=progress,
            resume=True,
            command=command,
        )
    except UserError as error:
        if not isinstance(error, RunError):  # otherwise the fork has taken steps, so it is kept
            shutil.rmtree(target, ignore_errors=True)
        raise


def read_origin(source: RunPaths, step: int) -> CheckpointState:
    """The checkpoint that a fork starts from, verified; if it is missing, UserError lists the existing ones."""
    if not source.is_run():
        raise UserError(f"{source.path} is not a run's directory: give the directory, or the name of a run in runs/")
    steps = checkpoint_steps(source.checkpoints)
    if step not in steps:
        choices = f"choose one of {', '.join(map(str, steps))}" if steps else "RL has not begun in this run"
        raise UserError(f"{source.path} has no checkpoint of step {step}: {choices}")
    return read_checkpoint(source.checkpoints / checkpoint_name(step))


def _check_fork(source: RunPaths, origin: CheckpointState, before: RunConfig, config: RunConfig) -> None:
    """UserError if the recipe cannot continue from the checkpoint."""
    check_alone(config.distributed, "forks")
    levels = Path(config.run.name).parts
    if not levels or Path(config.run.name).is_absolute() or ".." in levels:
        raise UserError(f"--name {config.run.name}: give a name such as my-fork")
    check_no_secret_missing(config.model_dump(mode="json"))
    if "cursors" not in origin.state["stage"]:
        raise UserError(f"{source.path} is a run of a reward model, which cannot be forked: start a new one")
    fixed = dict(FIXED_SETTINGS)
    if config.gradient_regularization.enabled and any(name.startswith("gradreg.") for name in origin.tensors):
        fixed |= {
            f"gradient_regularization.{key}": "a penalty that later updates use" for key in ("perturbed", "every")
        }
    if origin.state["history"].get("graded") and not config.may_lack_accuracy:
        fixed |= dict.fromkeys(_NEED_ACCURACY, "evaluations without accuracy, which this needs")
    if origin.state["stage"].get("resets"):
        fixed |= {"reference.model": "a reference that has moved since"}
    if config.kl.adaptive is not None and "kl_coefficient" in origin.state["stage"]:
        fixed |= {"kl.coefficient": "a coefficient that has adapted since"}
    if config.objective.adaptive_entropy is not None and "entropy_coefficient" in origin.state["stage"]:
        fixed |= {"objective.adaptive_entropy.start": "a coefficient that has adapted since"}
    for key in changes(before.model_dump(mode="json"), config.model_dump(mode="json")):
        for setting, content in fixed.items():
            if key == setting or key.startswith(f"{setting}."):
                raise UserError(
                    f"{key} cannot change in a fork, whose checkpoint holds {content}: leave it as it was, or start a "
                    f"new run with model.path={origin.path}"
                )
    phases = 2 if config.curriculum else 1
    if len(origin.state["stage"]["cursors"]) != phases:
        raise UserError(
            f"the checkpoint has {len(origin.state['stage']['cursors'])} places in the data and the recipe "
            f"{phases} tasks: leave curriculum as it was"
        )
    if config.training.steps <= origin.step:
        raise UserError(f"training.steps={config.training.steps}: nothing is left to train after step {origin.step}")


def copy_run(
    source: RunPaths,
    origin: CheckpointState,
    target: Path,
    *,
    before: RunConfig,
    config: RunConfig,
    command: Sequence[str] | None,
) -> None:
    """Create the run `target`, in the state of `source` after `origin`, with the recipe `config`.

    `before` is the source's recipe. The copy is made under another name and renamed, so that it is complete or absent.
    Raises UserError if `target` exists, or if a file to be copied is missing or damaged.
    """
    if target.exists():
        raise UserError(
            f"{target} exists: choose another --name; a fork that was made is continued by "
            f"flatpeak train {target / 'config.yaml'} --resume"
        )
    temporary = target.with_name(f".fork-{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        _copy(source, origin, RunPaths(temporary))
        resolved = config.model_dump(mode="json")
        recipe = redact(json.loads(json.dumps(resolved)))
        changed = changes(redact(json.loads(json.dumps(before.model_dump(mode="json")))), recipe)
        forked = {"run": str(source.path.absolute()), "step": origin.step, "changed": changed}
        # Another function is a change of the recipe, or of the call, not of the function's code.
        earlier = json.loads(source.manifest.read_text(encoding="utf-8"))
        code, data = (
            {
                key: digest
                for key, digest in last_digests(earlier, kind).items()
                if key not in changed and not is_reward_from_python(key)
            }
            for kind in DIGESTS
        )
        manifest = redact(describe_start(command, code=code, data=data) | {"forked": forked})
        paths = RunPaths(temporary)
        paths.config.write_text(yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True), encoding="utf-8")
        paths.manifest.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        temporary.rename(target)
    except OSError as error:  # includes shutil.Error
        raise UserError(f"{target} cannot be made of {source.path} ({error}): free space or fix the cause") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy(source: RunPaths, origin: CheckpointState, target: RunPaths) -> None:
    history = origin.state["history"]
    steps = {0, origin.step, history["best_step"]} & set(checkpoint_steps(source.checkpoints))
    for step in sorted(steps):
        copy = target.checkpoints / checkpoint_name(step)
        shutil.copytree(source.checkpoints / checkpoint_name(step), copy)
        broken = broken_file(copy)
        if broken is not None:
            raise UserError(f"{source.checkpoints / copy.name / broken.name}: {broken.problem}; use another checkpoint")
    shutil.copy(source.metrics, target.metrics)
    evaluated = bool(origin.state["evaluated"])
    truncate_metrics(target.metrics, step=origin.step, stage="train", evaluated=evaluated)
    if source.notices.exists():  # a full disk may have prevented them
        shutil.copy(source.notices, target.notices)
        truncate_notices(target.notices, step=origin.step, stage="train")
    target.rollouts.mkdir()
    for step, path in logged_steps(source.rollouts).items():
        if step <= origin.step:
            shutil.copy(path, target.rollouts)
    target.evaluations.mkdir()
    for row in history["evaluations"]:
        for path in source.evaluations.glob(f"{row['stage']}_{row['step']:06d}*.jsonl"):
            shutil.copy(path, target.evaluations)
