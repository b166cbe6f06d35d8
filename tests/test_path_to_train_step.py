"""From the command to the train step: docs/architecture.md lists the calls, each found by "go to definition"."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
HEADING = "## From the command to the train step"
MOST_HOPS = 15
LONGEST_TRAIN_STEP = 18
LINK = re.compile(r"\d+\. \[`(?P<name>[\w.]+)`\]\((?P<path>[\w./]+)\)")


def listed() -> list[tuple[str, Path]]:
    """The dotted name and the file of every line of the list, in order."""
    section = PAGE.read_text(encoding="utf-8").partition(f"{HEADING}\n")[2].partition("\n## ")[0]
    return [(match["name"], (PAGE.parent / match["path"]).resolve()) for match in LINK.finditer(section)]


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


def test_the_list_leads_from_the_command_to_the_train_step():
    hops = listed()
    assert hops[0][0] == "cli.train.train"
    assert hops[-1][0] == "training.trainer.Trainer.train_step"
    assert len(hops) <= MOST_HOPS


def test_every_function_of_the_list_calls_the_next():
    hops = listed()
    functions = [definition(name, path) for name, path in hops]
    for (name, _), function, following in zip(hops, functions, functions[1:], strict=False):
        assert following.name in called(function), f"{name} does not call {following.name}"


def test_the_train_step_reads_as_an_algorithm_box():
    step = definition(*listed()[-1])
    assert step.end_lineno is not None
    assert step.end_lineno - step.lineno < LONGEST_TRAIN_STEP
