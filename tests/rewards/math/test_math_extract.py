"""Where a text says its answer, and where a gold column does."""

from __future__ import annotations

import gc
import time

import pytest

from flatpeak.rewards.math.extract import block_answer, extract_answer, gold_answer
from flatpeak.rewards.math.syntax_tree import MAX_BOXES
from support.tables import read_tables

TABLES = read_tables(__file__)


@pytest.mark.parametrize(("text", "answer"), TABLES["last"])
def test_the_last_box_or_block_after_the_thinking_decides(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(("text", "answer"), [*TABLES["any"], ("5" * 257, None), ("5" * 256, "5" * 256)])
def test_any_also_takes_what_follows_the_mark_and_short_texts_as_a_whole(text: str, answer: str | None) -> None:
    assert extract_answer(text, "any") == answer


@pytest.mark.parametrize(("text", "answer"), TABLES["changed_in_print"])
def test_a_box_is_read_with_what_changes_it_in_print(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(("text", "answer"), TABLES["joined"])
def test_boxes_that_a_comma_and_or_or_joins_are_one_list(text: str, answer: str) -> None:
    assert extract_answer(text) == answer
    assert gold_answer(text) == answer


def test_boxed_takes_no_answer_block() -> None:
    assert extract_answer("<answer>5</answer>", "boxed") is None
    assert extract_answer(r"\boxed{4} <answer>5</answer>", "boxed") == "4"


def test_a_block_is_read_on_its_own() -> None:
    assert block_answer(r"\boxed{3} <answer>4</answer> \boxed{5}") == "4"
    assert block_answer(r"<answer>it is \boxed{4}.</answer>") == "4"
    assert block_answer(r"\boxed{3}") is None


@pytest.mark.parametrize(("column", "gold"), TABLES["gold_columns"])
def test_a_gold_column_may_be_bare_boxed_a_solution_or_gsm8k_style(column: str, gold: str) -> None:
    assert gold_answer(column) == gold


def test_a_text_with_more_boxes_than_the_limit_has_no_answer() -> None:
    assert extract_answer(r"\boxed{7}" * MAX_BOXES) == "7"
    many = r"\boxed{7}" * (MAX_BOXES + 1)
    assert extract_answer(many) is extract_answer(f"<answer>7</answer> {many}") is None
    assert block_answer(f"<answer>{many}</answer>") is None
    assert gold_answer(f"{many}\n#### 8") == "8"


@pytest.mark.parametrize(
    "unit",
    [
        r"\boxed",
        "{",
        "}",
        "\\",
        "<answer>",
        "</think>",
        r"\boxed{}",
        "<think>",
        "boxed{",
        r"\boxed{7}, ",
        r"-\boxed{7}^2 and ",
    ],
)
def test_extraction_is_linear_in_the_text(unit: str) -> None:
    def seconds(characters: int) -> float:
        gc.disable()  # its passes cost by what else the process holds
        started = time.process_time()
        extract_answer(unit * (characters // len(unit)), "any")
        taken = time.process_time() - started
        gc.enable()
        return taken

    # Ten times the text: 10 times as long if linear, 100 times if quadratic.
    assert seconds(1_000_000) < 40 * max(seconds(100_000), 0.01)
