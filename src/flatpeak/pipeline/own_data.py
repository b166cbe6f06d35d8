"""The arguments of `flatpeak.train` for a caller without a recipe: the name of a model, a data set and a reward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flatpeak.config.load import Settings, apply_settings, read_recipe
from flatpeak.errors import UserError
from flatpeak.pipeline.request import RecipeSource, with_settings
from flatpeak.protocols import Task
from flatpeak.tasks.dataset import task_of
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
    if recipe is None:
        recipe = {"extends": RECIPE, "prompt": {"template": _template(settings, tokenizer)}}
    return OwnData(recipe=recipe, model=model, task=task if dataset is None else task_of(dataset), settings=settings)


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
