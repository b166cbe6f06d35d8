"""The two reward functions of "GRPO from Scratch", by the protocol of the Dr. GRPO graders (Liu et al. 2025).

Both pay only for a right answer in the right form, and report form and answer apart. `r1_zero` asks for
`</think> <answer>` and `</answer>` in the response, whose prompt ends with `<think>`; `question_only` asks for a box.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatpeak.rewards.math.evaluated import only_evaluated
from flatpeak.rewards.math.extract import block_answer, extract_answer
from flatpeak.rewards.math.grader import MathGrader, score_of
from flatpeak.rewards.math.limits import OverLimitError

if TYPE_CHECKING:
    from flatpeak.types import Score


def r1_zero_answer(response: str) -> str | None:
    """What is in the last answer block of a response in the r1_zero form; None if it is not in that form, or blank."""
    if "</think> <answer>" not in response or "</answer>" not in response:
        return None
    try:
        return _unless_blank(block_answer(response))
    except OverLimitError:
        return None


def question_only_answer(response: str) -> str | None:
    """What is in the last box of a response after its thinking; None if no box is complete, or it is blank."""
    try:
        return _unless_blank(extract_answer(response, "boxed"))
    except OverLimitError:
        return None


def r1_zero_reward(
    response: str, gold: str, *, grader: MathGrader | None = None, evaluated: bool = False, question: str = ""
) -> dict[str, Score]:
    """format_reward, answer_reward and reward, each 0 or 1; the last two are None where the gold answer is to blame.

    `grader` keeps its workers and its cache over many calls; without one, each call that needs a worker starts one.
    `evaluated` refuses answers that are not worked out (see `flatpeak.rewards.math.evaluated`), also those that are
    copied from the `question`.
    """
    return _rewards(r1_zero_answer(response), gold, grader, question if evaluated else None)


def question_only_reward(
    response: str, gold: str, *, grader: MathGrader | None = None, evaluated: bool = False, question: str = ""
) -> dict[str, Score]:
    """The same for an answer in a box."""
    return _rewards(question_only_answer(response), gold, grader, question if evaluated else None)


def _unless_blank(answer: str | None) -> str | None:
    return None if answer is None or not answer.strip() else answer


def _rewards(answer: str | None, gold: str, grader: MathGrader | None, question: str | None) -> dict[str, Score]:
    if grader is None:
        with MathGrader(workers=1) as own:
            return _rewards(answer, gold, own, question)
    pairs = [(answer, gold)]
    right = score_of(grader.compare(pairs if question is None else only_evaluated(pairs, [question]))[0])
    return {"format_reward": float(answer is not None), "answer_reward": right, "reward": right}
