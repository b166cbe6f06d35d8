"""The request of a run: its recipe, and the objects of a Python caller, a data set among them.

A recipe cannot name a task, a reward or a sampler from Python: config.yaml has what they replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeAlias, TypeVar

from flatpeak.config.load import Settings, apply_settings, parse_config, read_recipe
from flatpeak.config.run_config import RunConfig
from flatpeak.config.unused_settings import explicit_settings
from flatpeak.episodes.tools import check_importable
from flatpeak.errors import UserError
from flatpeak.functional.policy_losses import PolicyLoss
from flatpeak.pipeline.prompt_record import read_prompt_record
from flatpeak.pipeline.samplers import SamplerFactory
from flatpeak.policy.config import ModelConfig
from flatpeak.protocols import Progress, SamplerLike, Task
from flatpeak.rewards.functions import function_name
from flatpeak.rewards.reward_set import as_reward
from flatpeak.runs.callbacks import Callback, check_callbacks
from flatpeak.runs.manifest import flatten
from flatpeak.tasks.dataset import GOLDS, task_of, with_replies_as_golds
from flatpeak.training.objective import Objective
from flatpeak.training.reward_tensors import Advantages
from flatpeak.training.user_functions import make_advantages, make_objective
from flatpeak.utils.huggingface import load_errors, load_tokenizer, local_or_hub
from flatpeak.utils.user_code import FROM_PYTHON, REFERENCES, file_digest, source_digest

if TYPE_CHECKING:
    import pandas  # type: ignore[import-untyped]
    from peft import PeftModel
    from torch import Tensor
    from transformers import PreTrainedModel

    from flatpeak.functional.policy_losses import TokenFunction
    from flatpeak.rewards.base import Scorer

    ModelInput: TypeAlias = str | Path | PreTrainedModel | PeftModel
    """The name or the directory of a model, or the model itself."""
    Rows: TypeAlias = Iterable[Mapping[str, Any]] | Iterable[str] | pandas.DataFrame | str | Path
    DataInput: TypeAlias = Rows | Mapping[str, Rows]
    """Rows (a `datasets.Dataset` has them too) or a file of rows, or these by `train` and `test`."""
    RewardFunction: TypeAlias = Callable[..., Any] | Scorer
    RewardInput: TypeAlias = RewardFunction | Mapping[str, RewardFunction | tuple[RewardFunction, float]]
    """A function with one of the signatures of docs/own_data.md; or several by name, alone or with a weight."""
    SamplerInput: TypeAlias = SamplerLike | SamplerFactory
    """A sampler, or a function that makes one of the policy."""
    LossInput: TypeAlias = TokenFunction | PolicyLoss
    """A function (logprobs_T, ratio_T, advantages_T, config) -> loss_T, or a PolicyLoss."""
    ToolInput: TypeAlias = Callable[..., Any] | str
    """A function that other processes can import, or the name of one."""
    AdvantageInput: TypeAlias = Callable[[Tensor, Tensor], Tensor]
    """A function (rewards_PG, valid_PG) -> advantages_PG."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

RecipeSource = RunConfig | Mapping[str, Any] | str | Path
"""A checked recipe, the mapping of one, or the path or name of one."""
OWN_DATA: Final = "flatpeak:own_data"
"""The recipe of a call that gives none."""
_ARGUMENTS: Final = {
    "model_name_or_path": "model",
    "processing_class": "tokenizer",
    "train_dataset": "dataset",
    "eval_dataset": "dataset={'train': ..., 'test': ...}",
    "reward_funcs": "reward",
    "rewards": "reward",
    "args": "settings",
    "config": "the first argument, a recipe,",
}
"""Arguments of other libraries' trainers, and those that take their place here."""
_FUNCTIONS: Final = {"loss": "objective.loss", "advantage": "advantage.function"}
"""The settings in whose place a caller gives functions."""
_SECTIONS: Final = {"task": "task", "reward": "rewards"}
"""The sections in whose place a caller gives objects."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The recipe of a run and the way to start it, as a Python caller gives them."""

    recipe: RecipeSource
    settings: Settings | None = None
    progress: Progress | bool | None = None
    resume: bool = False
    overwrite: bool = False
    command: Sequence[str] | None = None
    """The command line; None for a call from Python."""
    report: bool = True
    """Whether the report page is written at the end, which takes a second."""
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        """UserError for callbacks of another class."""
        check_callbacks(self.callbacks)


def naming_settings(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The function, with a UserError for an argument that it lacks: most are settings, under a name of flatpeak's."""
    known = inspect.signature(function).parameters

    @wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        unknown = [name for name in kwargs if name not in known]
        if unknown:
            hints = "; ".join(f"{name}: {_in_its_place(name)}" for name in unknown)
            raise UserError(
                f"{function.__name__}() has no argument {hints} (settings are given as settings={{'key.path': value}})"
            )
        return function(*args, **kwargs)

    return checked


def _in_its_place(name: str) -> str:
    """The argument or setting that an unknown argument stands for."""
    if name in _ARGUMENTS:
        return f"here it is {_ARGUMENTS[name]}"
    try:
        parse_config({name: {}})
    except UserError as error:
        return str(error).removeprefix(f"unknown key {name}: ")
    return f"here it is settings={{'{name}.KEY': value}}"


def resolve_config(recipe: RecipeSource, settings: Settings | None = None) -> RunConfig:
    """The checked configuration of a recipe, changed by `settings`."""
    if not isinstance(recipe, RunConfig):
        return parse_config(read_recipe(recipe, settings or ()))
    return parse_config(apply_settings(recipe.model_dump(mode="json"), settings)) if settings else recipe


def acting_settings(tools: Sequence[ToolInput] | None, environment: type[Any] | str | None) -> dict[str, Any]:
    """The settings that name a caller's tools or environment; UserError for what no other process can import."""
    named: dict[str, Any] = {}
    if tools is not None:
        named["tools"] = [_reference(tool, where="tools") for tool in tools]
    if environment is not None:
        named["environment"] = _reference(environment, where="environment")
    return named


def _reference(code: Any, *, where: str) -> str:
    if isinstance(code, str):
        return code
    check_importable(code, where=f"{where}: {function_name(code)}")
    return f"{code.__module__}:{code.__qualname__}"


def with_settings(settings: Settings | None, more: Mapping[str, Any]) -> Settings | None:
    """The settings of a caller, a mapping or `key=value` texts, with further ones after them."""
    if not more:
        return settings
    if settings is None or isinstance(settings, Mapping):
        return {**(settings or {}), **more}
    written = [settings] if isinstance(settings, str) else settings
    return [*written, *(f"{key}={value}" for key, value in more.items())]


@dataclass(frozen=True, kw_only=True)
class CallerObjects:
    """Objects that a Python caller passes in place of those that the recipe names; None leaves it to the recipe."""

    model: Any = None
    tokenizer: Any = None
    task: Task | None = None
    reward: Any = None
    sampler: SamplerInput | None = None
    loss: Any = None
    """A policy loss: a function, or a PolicyLoss."""
    advantage: Any = None
    """A function from rewards to advantages."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the objects that are given; a model's tokenizer belongs to it."""
        known = ("model", "task", "reward", "sampler", "loss", "advantage")
        return tuple(name for name in known if getattr(self, name) is not None)

    def named_in(self, settings: Settings | None) -> Settings | None:
        """The settings, with the names of the caller's functions as those of loss and advantage.

        So a run's own recipe never names another loss than it was trained by.
        """
        given = {key: getattr(self, name) for name, key in _FUNCTIONS.items() if getattr(self, name) is not None}
        return with_settings(
            settings, {key: f"{FROM_PYTHON}{function_name(_function(own))}" for key, own in given.items()}
        )


def without_model_source(config: RunConfig, objects: CallerObjects, request: RunRequest) -> tuple[RunConfig, list[str]]:
    """The configuration for a caller's own model, if there is one, and the notices of settings that it replaces.

    A model that this call names beside it, in a mapping or in settings, is a UserError. One that comes from a shared
    recipe, given by its name, resolved before or extended, is left out.
    """
    settings = list(explicit_settings(config.model, *(name for name in ModelConfig.model_fields if name != "dropout")))
    if objects.model is None or not settings:
        return config, []
    recipe = request.recipe
    section = apply_settings(recipe if isinstance(recipe, Mapping) else {}, request.settings or ()).get("model", {})
    contradicted = [name for name in settings if not isinstance(section, Mapping) or name in section]
    keys = ", ".join(f"model.{name}" for name in contradicted or settings)
    if contradicted:
        raise UserError(f"{keys} beside train(model=...), which brings the model: leave {keys} out of the recipe")
    named = str(recipe) if isinstance(recipe, str | Path) else "the recipe"
    without = config.model_copy(update={"model": ModelConfig(dropout=config.model.dropout)})
    return without, [f"{keys} of {named} not used: train(model=...) brings the model"]


def check_given_again(checkpoint: Path | None, config: RunConfig, objects: CallerObjects) -> None:
    """UserError where a run lacks an object that its checkpoint was trained with, and the recipe names no other."""
    record = None if checkpoint is None else read_prompt_record(checkpoint)
    if record is None:
        return
    for name in ("task", "reward", "sampler"):
        section = _SECTIONS.get(name)
        if name not in record.objects or getattr(objects, name) is not None:
            continue
        recorded = flatten(record.evaluation.get(section, {})) if section else {}  # it lacks what is of later versions
        named = flatten(config.model_dump(mode="json")[section]) if section else {}
        if recorded.items() <= named.items():
            other = "" if section is None else f", or fork the run with another in the recipe ({section}...=...)"
            argument = "dataset=... or task" if name == "task" else name
            raise UserError(
                f"{checkpoint} was trained with a {name} from Python, which no recipe has: give it again, "
                f"{argument}=... of flatpeak.train or flatpeak.fork{other}"
            )


def is_reward_from_python(key: str) -> bool:
    """Whether this key of `code_digests` is of a caller's reward, which a fork is given anew."""
    return key == "rewards" or (key.startswith("rewards.") and key.count(".") == 1)


def _reward_functions(reward: Any) -> dict[str, object]:
    """The functions of a caller's reward, by their place among the settings."""
    if isinstance(reward, Mapping):
        return {f"rewards.{name}": value[0] if isinstance(value, tuple) else value for name, value in reward.items()}
    return {} if reward is None else {"rewards": reward}


def _function(own: object) -> object:
    return own.value if isinstance(own, PolicyLoss) else own


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """The objective and the advantages that a policy is trained by."""

    objective: Objective
    advantages: Advantages


def make_algorithm(config: RunConfig, objects: CallerObjects) -> Algorithm:
    """The objective and the advantages of a recipe or its caller; UserError where a function is unfit."""
    rollout, rewards = config.rollout, objects.reward
    weights = {name: reward.weight for name, reward in config.rewards.items()}
    if rewards is not None:
        weights = as_reward(rewards, name=config.evaluation.accuracy_part).weights
        if config.advantage.credit == "turn":
            raise UserError(
                "advantage.credit=turn with a reward from Python, which replaces the environment's: name it in the "
                "recipe's rewards, beside one of type environment"
            )
    return Algorithm(
        objective=make_objective(config.objective, config.kl, own=objects.loss),
        advantages=make_advantages(
            config.advantage,
            own=objects.advantage,
            num_prompts=rollout.prompts_per_step,
            group_size=rollout.group_size,
            part_weights=weights,
        ),
    )


def code_digests(config: RunConfig, objects: CallerObjects) -> dict[str, str]:
    """A digest of each function of the user's that the recipe or its caller gives, by its setting.

    Of a recipe's, the file that the function lies in; of a caller's, the function's text, where there is one. To be
    called once they are loaded.
    """
    recipe = flatten(
        config.model_dump(
            mode="json",
            include={
                *("objective", "advantage", "rewards", "task", "tasks", "curriculum", "evaluation"),
                *("tools", "environment"),
            },
        )
    )
    digests = {
        key: file_digest(value)
        for key, value in recipe.items()
        if (key.rpartition(".")[2] in REFERENCES or key.split(".")[0] in ("tools", "environment"))
        and isinstance(value, str)
        and ":" in value
    }
    for name, key in _FUNCTIONS.items():
        own = getattr(objects, name)
        if own is not None:
            digests[key] = source_digest(_function(own))
    rewards = _reward_functions(objects.reward).items()
    digests |= {key: source_digest(own) for key, own in rewards if not type(own).__module__.startswith("flatpeak.")}
    return {key: digest for key, digest in digests.items() if digest is not None}


def with_own_data(
    request: RunRequest, objects: CallerObjects, dataset: Any, *, sft: bool = False
) -> tuple[RunRequest, CallerObjects]:
    """The request and the objects of a run on a caller's data set, with a task made of it; None: of another's data.

    A model given by its name moves into the settings. The recipe `flatpeak:own_data` is worded by the tokenizer's chat
    template if it has one. With `sft` alone, and neither reward nor gold answers, answers are compared with the
    demonstrations. UserError if no data are given for the recipe.
    """
    if dataset is not None and objects.task is not None:
        raise UserError("train(dataset=..., task=...): both are the data to train on; give one of them")
    without_recipe = request.recipe == OWN_DATA
    if without_recipe and dataset is None and objects.task is None:
        raise UserError(
            "train() needs a recipe, or a model and a data set: flatpeak.train(model=NAME, dataset=rows, reward=f)"
        )
    if isinstance(objects.model, str | Path):
        request = replace(request, settings=with_settings(request.settings, {"model.path": str(objects.model)}))
        objects = replace(objects, model=None)
    graded_as = "math"
    if dataset is not None:
        task = task_of(dataset)
        if sft and without_recipe and objects.reward is None and (replied := with_replies_as_golds(task)) is not None:
            task, graded_as = replied, "exact"
        objects = replace(objects, task=task)
        check_golds(objects, built_in=without_recipe)
    if without_recipe:
        recipe = {
            "extends": OWN_DATA,
            "prompt": {"template": _template(request.settings, objects.tokenizer)},
            "evaluation": accuracy_settings(objects.reward),
            "rewards": {"correctness": {"type": graded_as}},
        }
        request = replace(request, recipe=recipe)
    return request, objects


def check_golds(objects: CallerObjects, *, built_in: bool) -> None:
    """UserError if no row of a part has a gold answer, and the reward asks for it: an empty one is part of every text.

    `built_in` says that the recipe's own reward grades where the caller gives none.
    """
    reward = objects.reward
    sides = {} if objects.task is None else {"training": objects.task.train, "held-out": objects.task.test}
    without = [name for name, rows in sides.items() if rows and not any(example.gold for example in rows)]
    if not without:
        return
    functions = list(reward.values()) if isinstance(reward, Mapping) else [reward]
    if (reward is None and built_in) or any(map(_asks_for_gold, functions)):
        raise UserError(
            f"dataset has no column with gold answers, which the reward asks for, in its {without[0]} rows: name it "
            f"{' or '.join(GOLDS[:4])}; a recipe with task.type=rows can name any column "
            "(task.train.0.answer=extra_info.label)"
        )


def _asks_for_gold(function: Any) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get("gold")
    except (TypeError, ValueError):  # not a function, or one that does not show its parameters
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


def accuracy_settings(reward: Any) -> dict[str, Any]:
    """The evaluation's settings for rewards by name: one says what is right; of several, their sum is measured."""
    if not isinstance(reward, Mapping) or "correctness" in reward:
        return {}
    return {"accuracy": next(iter(reward))} if len(reward) == 1 else {"accuracy": None, "metric": "reward"}


def _template(settings: Settings | None, tokenizer: Any) -> str:
    """`chat` if the tokenizer of the model has a chat template, else `plain`."""
    if tokenizer is None:
        section = apply_settings(read_recipe(OWN_DATA), settings or ()).get("model", {})
        path = section.get("path") if isinstance(section, Mapping) else None
        if path is None:
            return "plain"
        with load_errors(path, where="model.path"):
            tokenizer = load_tokenizer(local_or_hub(path, revision=section.get("revision")))
    return "chat" if getattr(tokenizer, "chat_template", None) else "plain"
