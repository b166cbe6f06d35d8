"""The task and tools of flatpeak:word_problems_with_tools, and the page of results that has its runs."""

import operator
import re
import runpy
from pathlib import Path

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.recipes.word_problems_with_tools import NAMES, NUMBERS, PROBLEMS, THINGS, TOOLS, problems
from flatpeak.tasks.config import build_task
from flatpeak.types import Example
from flatpeak.utils.user_code import load_object

OPERATORS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul}
RESULTS = Path(__file__).parents[2] / "docs" / "results"
TASK = problems(train_size=600, test_size=150, demonstrations=30)
SHOWN, TRAIN = TASK.train[:30], TASK.train[30:]


def kinds(example: Example) -> set[str]:
    """The kinds of problems that a question may be of, with the tool of each."""
    slots = {"name": r"\w+", "things": r"\w+"}
    patterns = {
        f"{tool}: {kind}": re.sub(r"\\{(\w+)\\}", lambda slot: slots.get(slot[1], r"\d+"), re.escape(kind))
        for tool, own in PROBLEMS.items()
        for kind in own
    }
    return {kind for kind, pattern in patterns.items() if re.fullmatch(pattern, example.question)}


def test_a_gold_answer_is_the_sum_difference_or_product_that_the_question_asks_for() -> None:
    for example in (*TRAIN, *TASK.test):
        (kind,) = kinds(example)
        pattern = re.sub(r"\\{([ab])\\}", r"(?P<\1>\\d+)", re.escape(kind.partition(": ")[2]), count=2)
        found = re.fullmatch(re.sub(r"\\{\w+\\}", r"\\w+", pattern), example.question)
        assert found is not None
        assert example.gold == str(OPERATORS[kind.partition(": ")[0]](int(found["a"]), int(found["b"])))


def test_no_kind_of_problem_number_name_or_thing_is_on_both_sides() -> None:
    trained, held_out = (set().union(*map(kinds, side)) for side in (TRAIN, TASK.test))
    assert (len(trained), len(held_out), trained & held_out) == (18, 6, set())
    for values in (map(str, NUMBERS), NAMES, THINGS):
        words = [set(re.findall(r"\w+", " ".join(one.question for one in side))) for side in (TASK.train, TASK.test)]
        assert not words[0] & words[1] & set(values)


def test_demonstrations_are_of_one_kind_for_each_tool_and_answer_with_a_call_or_without() -> None:
    assert {example.rationale for example in TRAIN} == {None}
    assert set().union(*map(kinds, SHOWN)) == {f"{tool}: {own[1]}" for tool, own in PROBLEMS.items()}
    without = problems(train_size=1, test_size=1, demonstrations=30, calls=False).train[:30]
    for example, bare in zip(SHOWN, without, strict=True):
        tool = kinds(example).pop().partition(": ")[0]
        a, b = re.findall(r"\d+", example.question)
        assert example.rationale == f"<call>{tool}(a={a}, b={b})</call><result>{example.gold}</result>{example.gold}"
        assert (bare.question, bare.rationale) == (example.question, example.gold)


def test_the_recipe_names_the_task_and_its_tools() -> None:
    config = parse_config(load_recipe("flatpeak:word_problems_with_tools"))
    assert sum(example.rationale is not None for example in build_task(config.task).train) == (
        config.sft.steps * config.sft.batch_size
    )
    assert [load_object(str(tool), where="tools") for tool in config.tools] == list(TOOLS.values())


def test_the_page_of_results_has_the_rows_of_its_table() -> None:
    report = runpy.run_path(str(RESULTS / "agents" / "make_report.py"))
    assert report["table"]() in (RESULTS / "agents.md").read_text(encoding="utf-8")
