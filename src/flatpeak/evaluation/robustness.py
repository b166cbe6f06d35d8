"""Accuracy on perturbed questions, beside the accuracy on the same questions as they were."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flatpeak.evaluation.config import CURRENT_NAMES, Perturbation
from flatpeak.evaluation.figures import Figure, figure
from flatpeak.evaluation.perturb import perturb
from flatpeak.functional.estimators import PairedDifference, paired_bootstrap
from flatpeak.types import Example, Prompt


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What came of asking some questions once, by question."""

    correct: Sequence[float | None]
    """Whether the answer was right, or the share of samples that were; None where the grader failed."""
    extraction_failed: Sequence[float]
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """What one kind of perturbation did."""

    kind: Perturbation
    asked: int
    """How many questions were to be perturbed."""
    clean: Sequence[float | None]
    """Of the questions that could be: whether they were answered right as they are."""
    perturbed: Sequence[float | None]
    """The same, perturbed."""
    extraction_failed: Sequence[float]
    rows: Sequence[Mapping[str, Any]]
    """Of the perturbed questions: id, kind, question, gold, and what was answered."""

    @cached_property
    def pairs(self) -> list[tuple[float, float]]:
        """(clean, perturbed) where neither verdict is missing."""
        both = zip(self.clean, self.perturbed, strict=True)
        return [(before, after) for before, after in both if before is not None and after is not None]

    @cached_property
    def figure(self) -> Figure:
        """Accuracy on the perturbed questions that have both verdicts."""
        return figure([after for _, after in self.pairs], metric="accuracy")

    @cached_property
    def clean_figure(self) -> Figure:
        """Accuracy on the same questions as they were."""
        return figure([before for before, _ in self.pairs], metric="accuracy")

    @cached_property
    def difference(self) -> PairedDifference | None:
        """Perturbed less clean; None for fewer than two questions."""
        if len(self.pairs) < 2:
            return None
        return paired_bootstrap([before for before, _ in self.pairs], [after for _, after in self.pairs])

    @property
    def failed_share(self) -> float:
        """How often no answer was found in what was said to a perturbed question; NaN where there was none."""
        return figure(self.extraction_failed, metric="extraction_failed").mean

    def as_dict(self) -> dict[str, Any]:
        """For summaries and `--json`."""
        change = self.difference
        return {
            "asked": self.asked,
            "covered": len(self.clean),
            "counted": len(self.pairs),
            "clean": self.clean_figure.mean,
            "clean_interval": self.clean_figure.interval,
            "accuracy": self.figure.mean,
            "interval": self.figure.interval,
            "difference": None if change is None else change.difference,
            "difference_interval": None if change is None else [change.low, change.high],
            "extraction_failed": self.failed_share,
        }


def measure(
    kinds: Sequence[Perturbation],
    prompts: Sequence[Prompt],
    clean: Sequence[float | None],
    *,
    seed: int,
    prompts_of: Callable[[Sequence[Example]], Sequence[Prompt]],
    ask: Callable[[Sequence[Prompt]], Judged],
) -> dict[str, Robustness]:
    """Perturb the prompts' questions in every way, word them anew, and ask.

    A question that a kind has nothing to change in, or that `prompts_of` leaves out as too long, is not covered.
    """
    known = {prompt.id: value for prompt, value in zip(prompts, clean, strict=True)}
    found: dict[str, Robustness] = {}
    for kind in dict.fromkeys(CURRENT_NAMES.get(kind, kind) for kind in kinds):
        changed = (perturb(prompt.example, kind, seed=seed) for prompt in prompts)
        examples = [example for example in changed if example is not None]
        worded = prompts_of(examples) if examples else ()
        judged = ask(worded) if worded else Judged(correct=(), extraction_failed=(), rows=())
        found[kind] = Robustness(
            kind=kind,
            asked=len(prompts),
            clean=[known[prompt.id] for prompt in worded],
            perturbed=judged.correct,
            extraction_failed=judged.extraction_failed,
            rows=[
                {**row, "perturbation": kind, "question": prompt.example.question}
                for row, prompt in zip(judged.rows, worded, strict=True)
            ],
        )
    return found
