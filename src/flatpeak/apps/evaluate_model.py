"""`flatpeak.evaluate`: the figures of a model on a caller's rows, or on the held-out questions of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flatpeak.config.load import Settings, merge
from flatpeak.errors import UserError
from flatpeak.evaluation.estimates import format_estimate
from flatpeak.evaluation.result import HEADLINES, Evaluation, no_accuracy
from flatpeak.pipeline.build import open_evaluation
from flatpeak.pipeline.model_source import locate_model, recipe_of
from flatpeak.pipeline.progress import as_progress
from flatpeak.pipeline.request import (
    OWN_DATA,
    CallerObjects,
    RecipeSource,
    RunRequest,
    accuracy_settings,
    check_golds,
    resolve_config,
    with_own_data,
)
from flatpeak.pipeline.run_result import RunResult
from flatpeak.protocols import Progress
from flatpeak.runs.notices import NoticeLog, RecordedProgress
from flatpeak.tasks.dataset import held_out_task
from flatpeak.utils.torch_state import usual_torch_state

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    from transformers import PreTrainedTokenizerBase

    from flatpeak.pipeline.request import DataInput, ModelInput, RewardInput

_SECTIONS = ("task", "prompt", "rewards", "rollout", "evaluation", "run", "tools", "environment", "episodes")
"""The sections of a run's recipe that determine how its model is evaluated."""
_LOADING = ("dtype", "trust_remote_code", "device")
"""The settings of a run's model that hold for its checkpoints."""
_ALL_ROWS = {"evaluation": {"size": None, "final_size": None}}


@dataclass(frozen=True, kw_only=True, repr=False)
class EvaluationResult:
    """The figures of a model and its answers."""

    evaluation: Evaluation

    def __repr__(self) -> str:
        estimates = self.evaluation.estimates
        named = ", ".join(f"{name} {format_estimate(estimates[name])}" for name in HEADLINES if name in estimates)
        return f"EvaluationResult({self.evaluation.size} questions: {named})"

    @property
    def metrics(self) -> dict[str, float]:
        """The mean of each metric over the questions (docs/metrics.md): accuracy, reward, length, ..."""
        return self.evaluation.metrics()

    @property
    def answers(self) -> pandas.DataFrame:
        """A row for each question: the question, its gold answer, the model's text and its scores."""
        import pandas  # slow, and installed with `datasets`

        return pandas.DataFrame(self.evaluation.rows)


def evaluate(
    model: ModelInput | RunResult,
    dataset: DataInput | None = None,
    reward: RewardInput | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    settings: Settings | None = None,
    progress: Progress | bool | None = None,
) -> EvaluationResult:
    """Ask a model every row of a data set, and grade its answers by a reward.

    `model` is a run, whose best checkpoint is asked as in training, a checkpoint, another model's name or directory, or
    a model with its tokenizer. A data set is given as to `flatpeak.train`; of one with parts the held-out part is
    asked. Without a data set, a run's model is asked the held-out questions of its recipe, and without a reward,
    the recipe's rewards grade; a model without a run is graded by `math`. `settings` change the recipe, such as
    `{"evaluation.samples": 4}`. UserError if nothing says what to ask.
    """
    if isinstance(model, RunResult):
        model = model.path
    task = None if dataset is None else held_out_task(dataset)
    objects = CallerObjects(model=model, tokenizer=tokenizer, task=task, reward=reward)
    recipe: RecipeSource = OWN_DATA
    if isinstance(model, str | Path):
        recipe, objects = _recipe_of_model(str(model), objects)
    elif task is None:
        raise UserError("evaluate(model) needs a data set: flatpeak.evaluate(model, rows, tokenizer=tokenizer)")
    request = RunRequest(recipe=recipe, settings=settings)
    request, objects = with_own_data(request, objects, None)
    check_golds(objects, built_in=recipe == OWN_DATA)
    if task is not None and isinstance(request.recipe, Mapping):
        request = replace(request, recipe=merge(request.recipe, _ALL_ROWS))
    config = resolve_config(request.recipe, request.settings)
    display = RecordedProgress(as_progress(progress), NoticeLog())
    size = config.evaluation.final_size or config.evaluation.size
    with usual_torch_state(), open_evaluation(config, objects, progress=display) as evaluator:
        evaluation = evaluator.evaluate(size=size, robustness=True)
    if evaluation.graded_by is not None:
        display.notice(no_accuracy(evaluation.graded_by))
        evaluation = evaluation.without_verdicts()
    return EvaluationResult(evaluation=evaluation)


def _recipe_of_model(name: str, objects: CallerObjects) -> tuple[RecipeSource, CallerObjects]:
    """The recipe by which a named model is evaluated, and the caller's objects with the path of the model.

    UserError where its run was asked questions, or graded, from Python, and the caller does not give them again.
    """
    source = locate_model(name)
    own = recipe_of(source)
    missing = {"task": ("dataset", objects.task), "reward": ("reward", objects.reward)}
    for recorded in source.record.objects if source.record is not None else ():
        argument, given = missing.get(recorded, (recorded, recorded))
        if given is None:
            raise UserError(f"{name} was trained with a {argument} from Python: give it again, {argument}=...")
    if objects.task is None and "task" not in own:
        raise UserError(f"{name} belongs to no run with a task: give a data set, flatpeak.evaluate({name!r}, rows)")
    objects = replace(objects, model=source.path)
    if not own:
        return OWN_DATA, objects
    loading = {key: value for key, value in own.get("model", {}).items() if key in _LOADING}
    recipe = {"model": loading, **{section: own[section] for section in _SECTIONS if section in own}}
    given = objects.reward is not None and not isinstance(objects.reward, Mapping)
    evaluation = {"accuracy": "auto"} if given else accuracy_settings(objects.reward)
    return merge(recipe, {"evaluation": evaluation}), objects
