"""`flatpeak eval`: finds models, loads them one after another, and evaluates each on the same questions."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatpeak.config.load import apply_overrides, load_recipe, merge, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.evaluation.result import Evaluation, no_accuracy
from flatpeak.evaluation.tables import Comparison
from flatpeak.pipeline.build import open_evaluation
from flatpeak.pipeline.model_source import ModelSource, locate_model, locate_stages, recipe_of
from flatpeak.pipeline.progress import SilentProgress
from flatpeak.protocols import Progress
from flatpeak.runs.notices import NoticeLog, RecordedProgress
from flatpeak.tasks.prompts import CHAT, TEXT_TEMPLATES, PromptConfig, template_text
from flatpeak.utils.torch_state import usual_torch_state

RawRecipe = Mapping[str, Any]
"""A recipe as written in YAML, unchecked."""
TASK_SECTIONS = ("task", "tasks")
ACTING = ("tools", "environment")
"""The sections that make the answers of a model episodes."""
EVALUATION_SECTIONS = (*TASK_SECTIONS, "prompt", "rewards", "rollout", "evaluation", *ACTING, "episodes")
"""The sections of a recipe that determine how a model is evaluated."""
_WORDING = ("template", "system", "user", "chat_template_kwargs")
_LONGEST_VALUE = 100
"""The most characters of a setting that an error repeats."""


@dataclass(frozen=True, kw_only=True)
class _ComparedModel:
    """A model that is a column of the comparison."""

    label: str
    path: str | None
    """None: the model that the run's recipe names."""
    recipe: RawRecipe = field(default_factory=dict)
    """The recipe of its run, or the part of it in the model's record; empty if there is neither."""
    unsafe: str | None = None
    """The part of its record that only its own run may load."""
    objects: tuple[str, ...] = ()
    """The Python objects that replaced parts of its run's recipe."""

    def section(self, base: RawRecipe) -> dict[str, Any]:
        """The section `model` of a recipe that evaluates it: loaded as in its run, on the device of the first model."""
        own = dict(self.recipe.get("model") or {})
        device = (base.get("model") or {}).get("device", "auto")
        if self.path is None:
            return {**own, "device": device}
        loading = {key: own[key] for key in ("dtype", "trust_remote_code") if key in own}
        return {"path": self.path, "device": device, **loading}


def compare_checkpoints(
    names: Sequence[str],
    overrides: Sequence[str] = (),
    *,
    recipe: str | None = None,
    stages: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Evaluate runs, checkpoints or Hub names on the held-out set of the first model's recipe, with overrides.

    `recipe`, a path or name, replaces that: with a task it decides everything about questions and grading; without a
    task it changes the first model's recipe. With `stages`, each run stands for its initial model and its models after
    SFT, at the best step and at the last.

    Raises UserError if nothing says what to evaluate on, or if a run has other prompts or another grading than the
    first, which would replace them here.
    """
    progress = RecordedProgress(SilentProgress() if progress is None else progress, NoticeLog())
    models = [model for name in names for model in _compared_models(name, stages=stages, several=len(names) > 1)]
    recipes = [model.recipe for model in models if model.recipe]
    base = next((recipe for recipe in recipes if _names_task(recipe)), recipes[0] if recipes else {})
    explicit = list(overrides)
    if recipe is not None:
        evaluation_recipe = load_recipe(recipe)
        base = evaluated_by(evaluation_recipe, base)
        explicit += [
            f"{section}="
            for section in EVALUATION_SECTIONS
            if section in evaluation_recipe or _names_task(evaluation_recipe)
        ]
    if not _names_task(base) and not _overridden(overrides, *TASK_SECTIONS):
        unsafe = next((f" ({model.unsafe} is loaded for its own run only)" for model in models if model.unsafe), "")
        raise UserError(
            f"none of these models belongs to a run with a config.yaml, so the task is unknown{unsafe}: give --recipe "
            "or task.type=..."
        )
    notices: list[str] = []
    evaluations: list[Evaluation] = []
    for model in models:
        # A new model is made again with the seed of its own run.
        run = model.recipe.get("run") or base.get("run") or {}
        config = parse_config(apply_overrides({**base, "run": run, "model": model.section(base)}, overrides))
        notices += _check_comparable(model, config, explicit)
        with usual_torch_state(), open_evaluation(config, progress=progress) as evaluator:
            evaluations.append(evaluator.evaluate(size=_evaluation_size(config, overrides), robustness=True))
        del evaluator  # otherwise this model would still be in memory while the next one loads
    evaluations, ungraded = _without_graded_accuracy(evaluations)
    evaluations, left_out = _on_common_questions(evaluations)
    notices = list(dict.fromkeys([*notices, *ungraded, *left_out]))
    return Comparison(labels=[model.label for model in models], evaluations=evaluations, notices=notices)


def _without_graded_accuracy(evaluations: list[Evaluation]) -> tuple[list[Evaluation], list[str]]:
    """The evaluations without accuracy, and a notice about it, if a function grades the answers of any model."""
    graded_by = next((evaluation.graded_by for evaluation in evaluations if evaluation.graded_by), None)
    if graded_by is None:
        return evaluations, []
    return [evaluation.without_verdicts() for evaluation in evaluations], [no_accuracy(graded_by)]


def _on_common_questions(evaluations: list[Evaluation]) -> tuple[list[Evaluation], list[str]]:
    """The evaluations on the questions that fit into every model's context, with a notice if some are left out.

    UserError if no question fits.
    """
    common = set.intersection(*(evaluation.all_ids for evaluation in evaluations))
    if all(len(evaluation.all_ids) == len(common) for evaluation in evaluations):
        return evaluations, []
    if not common:
        raise UserError("there is no question whose prompt fits into every model's context: compare fewer models")
    most = max(len(evaluation.all_ids) for evaluation in evaluations)
    notices = [f"{len(common)} of {most} questions fit into every model's context; the tables are of those"]
    if any(evaluation.robustness or evaluation.sharpness for evaluation in evaluations):
        notices.append("perturbed questions and sharpness are of a model's whole set, and are left out")
    chosen = [replace(evaluation.only(common), robustness={}, sharpness=None) for evaluation in evaluations]
    return chosen, notices


def evaluated_by(recipe: RawRecipe, base: RawRecipe) -> dict[str, Any]:
    """`base`, evaluated according to another recipe.

    If that has a task, no evaluation section of `base` is kept: its rewards and metric mean nothing for another task.
    """
    kept = {key: value for key, value in base.items() if not _names_task(recipe) or key not in EVALUATION_SECTIONS}
    return merge(kept, {section: recipe[section] for section in EVALUATION_SECTIONS if section in recipe})


def _names_task(recipe: RawRecipe) -> bool:
    """Whether a recipe says what a model is asked."""
    return any(section in recipe for section in TASK_SECTIONS)


def _compared_models(name: str, *, stages: bool, several: bool) -> list[_ComparedModel]:
    if not stages:
        return [_compared_model(_label(name), locate_model(name))]
    prefix = f"{_label(name)}/" if several else ""
    return [
        _compared_model(prefix + label, source)
        for label, source in locate_stages(name).items()
        if source.path is not None or _names_a_model(recipe_of(source))
    ]


def _compared_model(label: str, source: ModelSource) -> _ComparedModel:
    recipe, record = recipe_of(source), source.record
    unsafe = record.unsafe if source.recipe is None and recipe and record is not None else None
    objects = record.objects if source.recipe is not None and record is not None else ()
    return _ComparedModel(label=label, path=source.path, recipe=recipe, unsafe=unsafe, objects=objects)


def _names_a_model(recipe: RawRecipe) -> bool:
    """Whether the model before training is available: a model passed by a Python caller is gone."""
    model = recipe.get("model") or {}
    return bool(model.get("path") or model.get("new"))


def _check_comparable(model: _ComparedModel, config: RunConfig, explicit: Sequence[str]) -> list[str]:
    """UserError if the model's own run used other prompts or another grader; other differences become notices."""
    if not model.recipe:
        return []
    own = parse_config(model.recipe)
    _check_named(model, own, config, explicit)
    same_template = _template(own.prompt) == _template(config.prompt)
    if model.path is None and own.model.new is not None and not (own.main_tasks == config.main_tasks and same_template):
        raise UserError(
            f"{model.label} would be made again from the text of another task than its own: compare checkpoints by "
            "name in place of --stages, or leave its task and prompt.template as they are"
        )
    for key in _WORDING:
        own_wording, here = getattr(own.prompt, key), getattr(config.prompt, key)
        same = same_template if key == "template" else own_wording == here
        if not same and not _overridden(explicit, f"prompt.{key}"):
            raise UserError(
                f"{model.label} was trained with prompt.{key}={_short(own_wording)}, but the first model's recipe asks "
                f"with {_short(here)}: say how all are asked, with prompt.{key}=... or --recipe"
            )
    trained, asked = (one.model_dump(mode="json", include=set(ACTING)) for one in (own, config))
    for key in ACTING:
        if trained[key] != asked[key] and not _overridden(explicit, key):
            raise UserError(
                f"{model.label} was trained with {key}={_short(trained[key])}, but the first model's recipe has "
                f"{_short(asked[key])}: say how all answer, with {key}=... or --recipe"
            )
    name = config.evaluation.accuracy_part
    if (
        name is not None
        and "rewards" in model.recipe
        and not _overridden(explicit, f"rewards.{name}", "evaluation.accuracy")
    ):
        rewards = (own.rewards.get(name), config.rewards.get(name))
        graders = [None if reward is None else reward.model_dump(exclude={"weight"}) for reward in rewards]
        if graders[0] != graders[1]:
            raise UserError(
                f"{model.label} was trained with another reward {name} ({_format(graders[0])}) than the first model's "
                f"recipe judges by ({_format(graders[1])}): say how all are judged, with rewards.{name}.type=... or "
                "--recipe"
            )
    other = own.main_tasks != config.main_tasks and not _overridden(explicit, *TASK_SECTIONS)
    if _names_task(model.recipe) and other:
        types = " and ".join(task.type for task in own.main_tasks)
        return [f"{model.label} was trained on another task ({types}); it is asked the first one's questions"]
    return []


def _check_named(model: _ComparedModel, own: RunConfig, config: RunConfig, explicit: Sequence[str]) -> None:
    """UserError if the questions or the grader were Python objects, which recipes cannot contain."""
    name = config.evaluation.accuracy_part or "NAME"
    same = own.main_tasks == config.main_tasks and not _overridden(explicit, *TASK_SECTIONS)
    if "task" in model.objects and same:
        raise UserError(
            f"{model.label} was trained on a task from Python, which no recipe has: say what is asked, with "
            "task.type=custom task.factory=FILE.py:NAME, or --recipe"
        )
    if "reward" in model.objects and not _overridden(explicit, "rewards"):
        raise UserError(
            f"{model.label} was trained with a reward from Python, which no recipe has: say how answers are judged, "
            f"with rewards.{name}.type=function rewards.{name}.function=FILE.py:NAME, or --recipe"
        )


def _template(prompt: PromptConfig) -> str:
    """A template by its text if that is in a file or the recipe itself, else by its name."""
    if prompt.template == CHAT or prompt.template in TEXT_TEMPLATES:
        return prompt.template
    try:
        return template_text(prompt.template)
    except UserError:  # the file is gone
        return prompt.template


def _short(value: object) -> str:
    return textwrap.shorten(str(value), _LONGEST_VALUE, placeholder=" ...")


def _evaluation_size(config: RunConfig, overrides: Sequence[str]) -> int | None:
    """The number of questions: as many as a run asks at its end, unless an override gives a size."""
    size_given = _overridden(overrides, "evaluation.size") and not _overridden(overrides, "evaluation.final_size")
    return config.evaluation.size if size_given else config.evaluation.final_size or config.evaluation.size


def _format(reward: Mapping[str, Any] | None) -> str:
    return "none" if reward is None else " ".join(f"{key}={value}" for key, value in reward.items())


def _overridden(overrides: Sequence[str], *keys: str) -> bool:
    """Whether an override sets one of the keys, something inside it, or a section that contains it."""
    paths = [override.partition("=")[0].strip() + "." for override in overrides]
    return any(path.startswith(f"{key}.") or f"{key}.".startswith(path) for path in paths for key in keys)


def _label(name: str) -> str:
    return "/".join(level for level in name.rstrip("/").split("/") if level != "checkpoints")[-40:]
