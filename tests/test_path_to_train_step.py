"""The lists of calls in docs/architecture.md, each found by "go to definition": to the train step, and through it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
TO_THE_STEP = "## From the command to the train step"
THROUGH_THE_STEP = "### The way of one step"
MOST_HOPS = 15
LONGEST_TRAIN_STEP = 18
MOST_FUNCTIONS, MOST_FILES = 17, 9
"""Of the way of one step."""
LINK = re.compile(r"\d+\. \[`(?P<name>[\w.]+)`\]\((?P<path>[\w./]+)\)")
LEAF = re.compile(r"`(?:\w+\.)?(\w+)`")


def section(heading: str) -> str:
    """The text under a heading, up to the next one."""
    return re.split(r"\n#+ ", PAGE.read_text(encoding="utf-8").partition(f"{heading}\n")[2])[0]


def listed(heading: str) -> list[tuple[str, Path]]:
    """The dotted name and the file of every line of a list, in order."""
    return [(match["name"], (PAGE.parent / match["path"]).resolve()) for match in LINK.finditer(section(heading))]


def definition(name: str, path: Path) -> ast.FunctionDef:
    """The function `module.function` or method `module.Class.method`, looked up in the file."""
    module = ".".join(path.relative_to(ROOT / "src" / "flatpeak").with_suffix("").parts)
    assert name.startswith(f"{module}."), f"{name} does not lie in {path}"
    body: list[ast.stmt] = ast.parse(path.read_text(encoding="utf-8")).body
    for component in name.removeprefix(f"{module}.").split("."):
        [node] = [one for one in body if isinstance(one, ast.FunctionDef | ast.ClassDef) and one.name == component]
        body = node.body
    assert isinstance(node, ast.FunctionDef)
    return node


def called(function: ast.FunctionDef) -> set[str]:
    """The names that a function calls: `f` of `f(...)` and of `x.f(...)`."""
    calls = [node.func for node in ast.walk(function) if isinstance(node, ast.Call)]
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}


def name_in_calls(name: str) -> str:
    """The name that a call of the function has: an object that is called is named as its class."""
    *_, owner, function = name.split(".")
    return owner.lower() if function == "__call__" else function


def test_the_list_leads_from_the_command_to_the_train_step():
    hops = listed(TO_THE_STEP)
    assert hops[0][0] == "cli.train.train"
    assert hops[-1][0] == "training.trainer.Trainer.train_step"
    assert len(hops) <= MOST_HOPS


def test_every_function_of_the_list_calls_the_next():
    hops = listed(TO_THE_STEP)
    functions = [definition(name, path) for name, path in hops]
    for (name, _), function, following in zip(hops, functions, functions[1:], strict=False):
        assert following.name in called(function), f"{name} does not call {following.name}"


def test_the_train_step_reads_as_an_algorithm_box():
    step = definition(*listed(TO_THE_STEP)[-1])
    assert step.end_lineno is not None
    assert step.end_lineno - step.lineno < LONGEST_TRAIN_STEP


def test_the_way_of_one_step_is_that_of_the_calls():
    """Depth first: each function is called by the one above it, or by one that led there."""
    (first, path), *others = listed(THROUGH_THE_STEP)
    assert first == "training.trainer.Trainer.train_step"
    open_calls = [definition(first, path)]
    for name, path in others:
        while open_calls and name_in_calls(name) not in called(open_calls[-1]):
            open_calls.pop()
        assert open_calls, f"nothing on the way calls {name}"
        open_calls.append(definition(name, path))


def test_the_way_of_one_step_is_short():
    names, paths = zip(*listed(THROUGH_THE_STEP), strict=True)
    assert len(names) == len(set(names)) <= MOST_FUNCTIONS
    assert len(set(paths)) <= MOST_FILES


@pytest.mark.parametrize("landmark", ["update", "losses", "step_metrics"])
def test_the_way_of_one_step_leads_to_the_optimizer_and_back(landmark):
    assert landmark in [name.rpartition(".")[2] for name, _ in listed(THROUGH_THE_STEP)]


def test_the_update_of_the_way_steps_the_optimizer_and_its_losses_go_backward():
    hops = {name.rpartition(".")[2]: definition(name, path) for name, path in listed(THROUGH_THE_STEP)}
    assert "step" in called(hops["update"])
    assert "backward" in called(hops["accumulate_gradients"])


def test_the_leaves_that_are_not_counted_are_called_on_the_way():
    intro = section(THROUGH_THE_STEP).partition("lay tensors out: ")[2].partition("\n\n")[0]
    leaves = {"group_advantages" if leaf == "__call__" else leaf for leaf in LEAF.findall(intro)}
    assert {"policy_loss", "collate"} <= leaves
    calls = set().union(*(called(definition(name, path)) for name, path in listed(THROUGH_THE_STEP)))
    assert leaves <= calls
