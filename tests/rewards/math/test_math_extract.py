"""Where a text says its answer, and where a gold column does."""

from __future__ import annotations

import gc
import time

import pytest

from flatpeak.rewards.math.extract import block_answer, extract_answer, gold_answer
from flatpeak.rewards.math.syntax_tree import MAX_BOXES


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{42}", "42"),
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"so \fbox{42}", "42"),
        (r"so $\boxed 5$", "5"),
        (r"\boxed{\boxed 5}", "5"),
        (r"\\boxed{6} twice escaped", "6"),
        (r"so \boxed 42.", "42"),
        (r"First \boxed{3}, corrected: \boxed{4}", "4"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{\boxed{7}}", "7"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{3}, but \boxed{}", ""),
        (r"<think>\boxed{1}</think> it is \boxed{2}", "2"),
        (r"<think>\boxed{1}</think> nothing", None),
        (r"<think>\boxed{1}", None),
        ("<answer>5</answer>", "5"),
        (r"<answer>\boxed{5}</answer>", "5"),
        (r"\boxed{4} <answer>5</answer>", "5"),
        (r"<answer>5</answer> \boxed{4}", "4"),
        ("<answer>5", None),
        ("the answer is 5", None),
        ("5", None),
        ("#### 5", None),
    ],
)
def test_the_last_box_or_block_after_the_thinking_decides(text: str, answer: str | None) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("5", "5"),
        (" (1,2] \n", "(1,2]"),
        ("It takes 18.\n#### 18", "18"),
        ("#### 7\n#### 18\n", "18"),
        (r"\boxed{5} #### 6", "5"),
        (r"it is \boxed{5", None),
        ("<answer>5", None),
        ("<think>5", ""),
        ("<think>x</think> 5", "5"),
        ("5" * 257, None),
        ("5" * 256, "5" * 256),
    ],
)
def test_any_also_takes_what_follows_the_mark_and_short_texts_as_a_whole(text: str, answer: str | None) -> None:
    assert extract_answer(text, "any") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"$x = -\boxed{5}$", "-5"),
        (r"-\boxed{5}", "-5"),
        ("it is \u2212\\boxed{5}.", "-5"),
        (r"$f(x) = -\boxed{x-3}$", "-(x-3)"),
        (r"$\boxed{5}\sqrt2$.", r"5\sqrt2"),
        (r"$\boxed{5}^2$", "5^2"),
        (r"$\boxed{x+1}^{2}$", "(x+1)^{2}"),
        (r"\boxed{3}\frac12", r"3\frac12"),
        (r"\boxed{5}.25", "5.25"),
        (r"\boxed{5},000", "5,000"),
        (r"\boxed{204}_5", "204_5"),
        (r"$\boxed{3}+4i$", "3+4i"),
        (r"$\boxed{12}\,\pi$", r"12\,\pi"),
        (r"\(\boxed{3}/4\)", "3/4"),
        (r"$- \boxed{5}$", "-5"),
        (r"x = - \boxed{5}", "-5"),
        (r"\[ -\,\boxed{5} \]", "-5"),
        (r"**Answer:** -\boxed{5}", "-5"),
        (r"so we get -\boxed{5}.", "-5"),
        (r"$x = \pm\boxed{5}$", r"\pm5"),
        ("x = \u00b1\\boxed{5}", "\u00b15"),
        (r"$\boxed{5} / 2$", "5 / 2"),
        (r"$\boxed{5}\div 2$", r"5\div 2"),
        (r"$\boxed{5} - 2$", "5 - 2"),
        ("\\boxed{5}\u00bd", "5\u00bd"),
        ("\\boxed{5}\u00b2", "5\u00b2"),
        # What does not change it.
        (r"The $x$ - \boxed{5}", "5"),
        (r"\boxed{5} - 2 of them are red", "5"),
        (r"$\boxed{4} + 3 = 7$", "4"),
        (r"$\boxed{4} \cdot 3 = 12$", "4"),
        (r"- \boxed{5}", "5"),
        (r"Ans:-\boxed{5}", "5"),
        (r"20 -\boxed{5}", "5"),
        (r"\boxed{60}^\circ", "60"),
        (r"\boxed{3}^{th}", "3"),
        (r"\boxed{5}!", "5"),
        (r"\boxed{50}\%", "50"),
        (r"\boxed{5}\text{ cm}^2", "5"),
        (r"$\boxed{5}$ $\sqrt2$", "5"),
        ("\\boxed{5}\n2. Next", "5"),
    ],
)
def test_a_box_is_read_with_what_changes_it_in_print(text: str, answer: str) -> None:
    assert extract_answer(text) == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"$\boxed{2}$ and $\boxed{3}$", "2, 3"),
        (r"$x=\boxed{2}$ or $x=\boxed{3}$", "x=2, x=3"),
        (r"$x=\boxed{2}$, $y=\boxed{2}$", "x=2, y=2"),
        (r"\boxed{1}, \boxed{2}, and \boxed{3}.", "1, 2, 3"),
        (r"\boxed{2}\text{ or }-\boxed{2}", "2, -2"),
        (r"**\boxed{A}** or **\boxed{B}**", "A, B"),
        (r"\boxed{5} and \boxed{5}", "5"),
        (r"$\boxed{2}\textbf{ or }\boxed{3}$", "2, 3"),
        (r"\boxed{2}~OR~\boxed{3}", "2, 3"),
        (r"\boxed{2} and/or \boxed{3}", "2, 3"),
        (r"$\boxed{2}\lor\boxed{3}$", "2, 3"),
        ("\\boxed{2}\u3001\\boxed{3}", "2, 3"),
        ("\\boxed{2} \u6216 \\boxed{3}", "2, 3"),
        (r"$\boxed{2}\text{ cm}$ or $\boxed{3}\text{ cm}$", "2, 3"),
        (r"$\boxed{2}^\circ, \boxed{3}^\circ$", "2, 3"),
        (r"\boxed{2}\% or \boxed{3}\%", "2, 3"),
        (r"\boxed{3}\text{ is wrong}, \boxed{4}", "4"),
        (r"\boxed{\frac12}, or \boxed{0.5}", "0.5"),
        (r"\boxed{3}, no: \boxed{4}", "4"),
        ("Step 1: \\boxed{3}.\nStep 2: \\boxed{4}", "4"),
        (r"\boxed{3}" + "," * 100 + r"\boxed{4}", "4"),
        (r"\boxed{}, \boxed{3}", "3"),
        (r"\boxed{3}, \boxed{}", ""),
    ],
)
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


@pytest.mark.parametrize(
    ("column", "gold"),
    [
        (r"\frac12", r"\frac12"),
        (r" $42$ ", "$42$"),
        (r"\boxed{42}", "42"),
        (r"We add. Thus $x = \boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        ("She has 2 + 3 = <<2+3=5>>5.\n#### 5", "5"),
        ("#### 1,000\n", "1,000"),
        ("", ""),
    ],
)
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
