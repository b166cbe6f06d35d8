"""The arguments of `flatpeak.train` for a caller without a recipe: the name of a model, a data set and a reward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flatpeak.config.load import Settings, apply_settings, read_recipe
from flatpeak.errors import UserError
from flatpeak.pipeline.request import RecipeSource, with_settings
from flatpeak.protocols import Task
from flatpeak.tasks.dataset import GOLDS, task_of
from flatpeak.utils.huggingface import load_errors, load_tokenizer, local_or_hub

RECIPE: Final = "flatpeak:own_data"
"""The recipe of a call that gives none."""


@dataclass(frozen=True, kw_only=True)
class OwnData:
    """The same call with a recipe, a task and settings."""

    recipe: RecipeSource
    model: Any
    """The caller's model; None if it is named in the settings."""
    task: Task | None
    settings: Settings | None


def read_own_data(
    recipe: RecipeSource | None,
    *,
    reward: Any = None,
    model: Any,
    tokenizer: Any,
    dataset: Any,
    task: Task | None,
    settings: Settings | None,
) -> OwnData:
    """Name the model in the settings if it is given by its name, and make a task of the data set.

    Without a recipe it is `flatpeak:own_data`, worded by the tokenizer's chat template if it has one. UserError if
    neither a recipe nor a data set or task is given.
    """
    if dataset is not None and task is not None:
        raise UserError("train(dataset=..., task=...): both are the data to train on; give one of them")
    if recipe is None and dataset is None and task is None:
        raise UserError(
            "train() needs a recipe, or a model and a data set: flatpeak.train(model=NAME, dataset=rows, reward=f)"
        )
    if isinstance(model, str | Path):
        settings = with_settings(settings, {"model.path": str(model)})
        model = None
    if dataset is not None:
        task = task_of(dataset)
        _check_golds(task, reward, built_in=recipe is None)
    if recipe is None:
        recipe = {
            "extends": RECIPE,
            "prompt": {"template": _template(settings, tokenizer)},
            "evaluation": _evaluation(reward),
        }
    return OwnData(recipe=recipe, model=model, task=task, settings=settings)


def _check_golds(task: Task, reward: Any, *, built_in: bool) -> None:
    """UserError if no row has a gold answer, and the reward asks for it: an empty one is part of every text.

    `built_in` says that the recipe's own reward grades where the caller gives none.
    """
    if any(example.gold for example in task.train):
        return
    functions = list(reward.values()) if isinstance(reward, Mapping) else [reward]
    if (reward is None and built_in) or any(map(_asks_for_gold, functions)):
        raise UserError(
            f"dataset has no column with gold answers, which the reward asks for: name it {' or '.join(GOLDS[:4])}"
        )


def _asks_for_gold(function: Any) -> bool:
    try:
        parameter = inspect.signature(function).parameters.get("gold")
    except (TypeError, ValueError):  # not a function, or one that does not show its parameters
        return False
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _evaluation(reward: Any) -> dict[str, Any]:
    """The evaluation's settings for rewards by name: one says what is right; of several, their sum is measured."""
    if not isinstance(reward, Mapping) or "correctness" in reward:
        return {}
    return {"accuracy": next(iter(reward))} if len(reward) == 1 else {"accuracy": None, "metric": "reward"}


def _template(settings: Settings | None, tokenizer: Any) -> str:
    """`chat` if the tokenizer of the model has a chat template, else `plain`."""
    if tokenizer is None:
        section = apply_settings(read_recipe(RECIPE), settings or ()).get("model", {})
        path = section.get("path") if isinstance(section, Mapping) else None
        if path is None:
            return "plain"
        with load_errors(path, where="model.path"):
            tokenizer = load_tokenizer(local_or_hub(path, revision=section.get("revision")))
    return "chat" if getattr(tokenizer, "chat_template", None) else "plain"
