"""The arguments of `flatpeak.train` for a caller without a recipe: the name of a model, a data set and a reward."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from flatpeak.config.load import Settings, apply_settings, read_recipe
from flatpeak.errors import UserError
from flatpeak.pipeline.request import CallerObjects, RunRequest, with_settings
from flatpeak.tasks.dataset import GOLDS, task_of
from flatpeak.utils.huggingface import load_errors, load_tokenizer, local_or_hub

OWN_DATA: Final = "flatpeak:own_data"
"""The recipe of a call that gives none."""


def with_own_data(request: RunRequest, objects: CallerObjects, dataset: Any) -> tuple[RunRequest, CallerObjects]:
    """The request and the objects of a run on a caller's data set, with a task made of it; None: of another's data.

    A model given by its name moves into the settings. The recipe `flatpeak:own_data` is worded by the tokenizer's chat
    template if it has one. UserError if no data are given for it.
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
    if dataset is not None:
        objects = replace(objects, task=task_of(dataset))
        check_golds(objects, built_in=without_recipe)
    if without_recipe:
        recipe = {
            "extends": OWN_DATA,
            "prompt": {"template": _template(request.settings, objects.tokenizer)},
            "evaluation": accuracy_settings(objects.reward),
        }
        request = replace(request, recipe=recipe)
    return request, objects


def check_golds(objects: CallerObjects, *, built_in: bool) -> None:
    """UserError if no row has a gold answer, and the reward asks for it: an empty one is part of every text.

    `built_in` says that the recipe's own reward grades where the caller gives none.
    """
    reward = objects.reward
    if objects.task is None or any(example.gold for example in (*objects.task.train, *objects.task.test)):
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
