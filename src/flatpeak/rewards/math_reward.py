"""The mathematical reward of a recipe, and the r1_zero and question_only rewards of a single response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatpeak.rewards.base import ComponentScores, MathExtraction, Scorer, by_group
from flatpeak.rewards.math.extract import extract_answer, gold_answer
from flatpeak.rewards.math.grader import MathGrader, Outcome, UnscorableError, score_of
from flatpeak.rewards.math.rule_grader import normalized
from flatpeak.rewards.math.unevaluated import is_evaluated, only_evaluated
from flatpeak.rewards.workers.pool import WorkerError
from flatpeak.utils.answers import is_blank, judged_text

if TYPE_CHECKING:
    from flatpeak.rewards.base import GradingBudget
    from flatpeak.types import Completion, Group, Prompt, Score


def r1_zero_answer(response: str) -> str | None:
    """The answer in the last answer block of a response in the r1_zero form; None in another form, or if blank."""
    return _unless_blank(extract_answer(response, "r1_zero"))


def question_only_answer(response: str) -> str | None:
    """The content of the last box after the thinking of a response; None without a complete box, or if blank."""
    return _unless_blank(extract_answer(response, "boxed"))


def r1_zero_reward(
    response: str, gold: str, *, grader: MathGrader | None = None, evaluated: bool = False, question: str = ""
) -> dict[str, Score]:
    """format_reward, answer_reward and reward, each 0 or 1; the last two are None if the gold answer is to blame.

    `grader` keeps its workers and its cache over many calls; without it, each call that needs a worker starts one.
    `evaluated` rejects answers with operations left to do (see `flatpeak.rewards.math.unevaluated`) and copies from the
    `question`.
    """
    return _rewards(r1_zero_answer(response), gold, grader, question if evaluated else None)


def question_only_reward(
    response: str, gold: str, *, grader: MathGrader | None = None, evaluated: bool = False, question: str = ""
) -> dict[str, Score]:
    """The rewards of `r1_zero_reward` for an answer in a box."""
    return _rewards(question_only_answer(response), gold, grader, question if evaluated else None)


def _unless_blank(answer: str | None) -> str | None:
    return None if answer is None or is_blank(answer) else answer


def _rewards(answer: str | None, gold: str, grader: MathGrader | None, question: str | None) -> dict[str, Score]:
    if grader is None:
        with MathGrader(workers=1) as temporary:
            return _rewards(answer, gold, temporary, question)
    pairs = [(answer, gold)]
    right = score_of(grader.compare(pairs if question is None else only_evaluated(pairs, [question]))[0])
    return {"format_reward": float(answer is not None), "answer_reward": right, "reward": right}


def _best(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of an answer over several golds: right by one of them, else not decided by one, else wrong."""
    return max(outcomes, key=lambda outcome: (score_of(outcome) == 1, score_of(outcome) is None, outcome is not False))


class MathReward(Scorer):
    """1 if the answer in a completion is equal to a gold answer of the row, else 0.

    An answer that runs out of time or memory is not shown to be right, and so scores 0. The score is missing if the
    answer is not to blame: the gold answer also exceeds the grader's limits, or a worker died. The grader owns worker
    processes. Failures concern single texts, so they are tolerated.
    """

    def __init__(
        self,
        extraction: MathExtraction = "auto",
        *,
        timeout: float = 2.0,
        workers: int = 2,
        evaluated: bool = False,
    ) -> None:
        """`timeout` is in seconds, for an answer that the rules leave to the `workers`; `evaluated` as in a recipe."""
        self._extraction = extraction
        self._evaluated = evaluated
        self._grader = MathGrader(timeout=timeout, workers=workers)

    def score(self, groups: Sequence[Group]) -> ComponentScores:
        """The scores of all groups, with the first error."""
        return self.score_within(groups, None)

    def score_within(self, groups: Sequence[Group], budget: GradingBudget | None) -> ComponentScores:
        """The scores of all groups; completions beyond the budget have run out of time."""
        asked = [
            (extract_answer(judged_text(completion, group.prompt), self._extraction), group.prompt.example)
            for group in groups
            for completion in group.completions
        ]
        pairs = [(answer, gold) for answer, example in asked for gold in example.golds]
        if self._evaluated:
            pairs = only_evaluated(pairs, [example.question for _, example in asked for _ in example.golds])
        compared = iter(self._grader.compare(pairs, budget=budget))
        outcomes = [_best([next(compared) for _ in example.golds]) for _, example in asked]
        errors = [outcome for outcome in outcomes if isinstance(outcome, WorkerError)]
        errors.sort(key=lambda error: isinstance(error, UnscorableError))  # failures first
        scores = [score_of(outcome) for outcome in outcomes]
        return ComponentScores(
            scores=by_group(scores, groups),
            timed_out=by_group((isinstance(outcome, UnscorableError) for outcome in outcomes), groups),
            failed=scores.count(None),
            ungraded=sum(error.reason == "budget" for error in errors),
            first_error=errors[0] if errors else None,
            tolerated=True,
        )

    def answer(self, completion: Completion, prompt: Prompt) -> str | None:
        """The extracted answer in one spelling for majority votes, or None."""
        answer = extract_answer(judged_text(completion, prompt), self._extraction)
        if answer is None or not answer.strip():
            return None
        example = prompt.example
        if self._evaluated and not is_evaluated(answer, gold_answer(example.gold), example.question):
            return "".join(answer.split())[:256]  # separate from the vote of its value, which may be right
        return normalized(answer)

    def close(self) -> None:
        """Stop the grader's workers."""
        self._grader.close()
