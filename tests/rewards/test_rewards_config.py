"""Every built-in reward has a configuration, a place in the union of them, a shipped recipe and a place in the docs."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import flatpeak.rewards
from flatpeak.config.load import load_recipe, shipped_recipes
from flatpeak.rewards.base import Rule, Scorer
from flatpeak.rewards.config import FormatConfig, RewardConfig
from flatpeak.utils.schema import StrictConfig

ROOT = Path(__file__).parents[2]
PACKAGE = Path(flatpeak.rewards.__file__).parent
WITHOUT_RECIPE = {
    "environment": "the reward of a class of the user's own (docs/agents.md)",
    "length": "a component beside others, whose target depends on the model",
}


def members() -> tuple[Any, ...]:
    return get_args(get_args(RewardConfig)[0])


def defined(base: type) -> list[type]:
    """Concrete subclasses of a class that the package's modules define."""
    classes: dict[str, type] = {}
    for module in pkgutil.walk_packages(flatpeak.rewards.__path__, "flatpeak.rewards."):
        for cls in vars(importlib.import_module(module.name)).values():
            if inspect.isclass(cls) and issubclass(cls, base) and cls.__module__ == module.name:
                classes[cls.__qualname__] = cls
    return [cls for cls in classes.values() if not inspect.isabstract(cls) and cls is not base]


def in_recipes() -> set[str]:
    recipes = [load_recipe(name) for name in shipped_recipes()]
    return {reward["type"] for recipe in recipes for reward in recipe.get("rewards", {}).values()}


def missing(configs: list[type], scorers: list[type], *, recipes: set[str], docs: str) -> list[str]:
    """One line for everything that a built-in reward lacks."""
    lines = []
    for config in configs:
        kind = config.model_fields["type"].default  # type: ignore[attr-defined]
        if config not in members():
            lines.append(f"{config.__name__} is no member of RewardConfig in rewards/config.py")
        if kind not in recipes and kind not in WITHOUT_RECIPE:
            lines.append(f"no shipped recipe has a reward of type {kind}: add one to recipes/")
        if f"`{kind}`" not in docs:
            lines.append(f"the row `rewards` of docs/recipes.md does not name `{kind}`")
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    for scorer in scorers:
        if not re.search(rf"(?<!class )\b{scorer.__name__}\(", sources):
            lines.append(f"{scorer.__name__} is built by no configuration in rewards/config.py")
    return lines


def reward_configs() -> list[type]:
    fields = {"type", "weight"}
    return [config for config in defined(StrictConfig) if fields <= config.model_fields.keys()]  # type: ignore[attr-defined]


def test_nothing_is_missing_for_the_built_in_rewards() -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    docs = next(line for line in page.splitlines() if line.startswith("| `rewards`"))
    assert set(members()) <= set(reward_configs())
    lacking = missing(reward_configs(), defined(Scorer), recipes=in_recipes(), docs=docs)
    assert not lacking, "\n".join(lacking)


def test_what_is_missing_for_a_reward_is_named() -> None:
    class NovelConfig(FormatConfig):
        type: Any = "novel"

    class NovelReward(Rule):
        def __call__(self, completion: Any, prompt: Any) -> float:
            return 0.0

    assert missing([NovelConfig], [NovelReward], recipes=set(), docs="") == [
        "NovelConfig is no member of RewardConfig in rewards/config.py",
        "no shipped recipe has a reward of type novel: add one to recipes/",
        "the row `rewards` of docs/recipes.md does not name `novel`",
        "NovelReward is built by no configuration in rewards/config.py",
    ]


@pytest.mark.parametrize("config", members(), ids=lambda config: config.__name__)
def test_each_configuration_builds_its_scorer(config: Any) -> None:
    assert list(inspect.signature(config.build).parameters) == ["self", "name"]


def test_reading_configurations_loads_no_grader_and_no_torch() -> None:
    code = (
        "import sys, flatpeak.rewards.config\n"
        "heavy = {'torch', 'asyncio', 'flatpeak.rewards.numeric_answer', 'flatpeak.rewards.math.syntax_tree'}\n"
        "assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
