"""Robustness: accuracy on perturbed questions, compared with accuracy on the same questions unperturbed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flatpeak.evaluation.config import Perturbation
from flatpeak.evaluation.estimates import Estimate, estimate, interval_of_differences, mean_of
from flatpeak.functional.estimators import PairedDifference
from flatpeak.types import Example, Prompt


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Verdicts on the answers to some questions, by question."""

    correct: Sequence[float | None]
    """Whether the answer was right, or the share of samples that were right; None if the grader failed."""
    extraction_failed: Sequence[float]
    rows: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Robustness:
    """Accuracy under one kind of perturbation, paired with accuracy on the unperturbed questions."""

    kind: Perturbation
    asked: int
    """The number of questions to perturb."""
    clean: Sequence[float | None]
    """For each question that could be perturbed: whether the unperturbed question is answered correctly."""
    perturbed: Sequence[float | None]
    """For the same questions, perturbed: whether they are answered correctly."""
    extraction_failed: Sequence[float]
    rows: Sequence[Mapping[str, Any]]
    """For each perturbed question: id, kind, question, gold, and the answer."""

    @cached_property
    def pairs(self) -> list[tuple[float, float]]:
        """(clean, perturbed) for questions that have both verdicts."""
        both = zip(self.clean, self.perturbed, strict=True)
        return [(before, after) for before, after in both if before is not None and after is not None]

    @cached_property
    def estimate(self) -> Estimate:
        """Accuracy on the perturbed questions that have both verdicts."""
        return estimate([after for _, after in self.pairs], metric="accuracy")

    @cached_property
    def clean_estimate(self) -> Estimate:
        """Accuracy on the same questions, unperturbed."""
        return estimate([before for before, _ in self.pairs], metric="accuracy")

    @cached_property
    def difference(self) -> PairedDifference | None:
        """The perturbed minus the clean accuracy; None for fewer than two questions."""
        if len(self.pairs) < 2:
            return None
        low, high = interval_of_differences(self.pairs, metric="accuracy")
        return PairedDifference(difference=mean_of([b - a for a, b in self.pairs]), low=low, high=high)

    @property
    def failed_share(self) -> float:
        """The share of perturbed questions without an extracted answer; NaN if no question is perturbed."""
        return estimate(self.extraction_failed, metric="extraction_failed").mean

    def as_dict(self) -> dict[str, Any]:
        """The estimates, for summaries and `--json`."""
        change = self.difference
        return {
            "asked": self.asked,
            "covered": len(self.clean),
            "counted": len(self.pairs),
            "clean": self.clean_estimate.mean,
            "clean_interval": self.clean_estimate.interval,
            "accuracy": self.estimate.mean,
            "interval": self.estimate.interval,
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
    """Perturb the questions of the prompts in every way, make prompts from them, and judge the answers.

    The coverage excludes questions in which a kind has nothing to change or that `prompts_of` omits as too long.
    """
    clean_by_id = {prompt.id: value for prompt, value in zip(prompts, clean, strict=True)}
    robustness: dict[str, Robustness] = {}
    for kind in dict.fromkeys(kinds):
        perturbed = (perturb(prompt.example, kind, seed=seed) for prompt in prompts)
        examples = [example for example in perturbed if example is not None]
        perturbed_prompts = prompts_of(examples) if examples else ()
        judged = ask(perturbed_prompts) if perturbed_prompts else Judged(correct=(), extraction_failed=(), rows=())
        robustness[kind] = Robustness(
            kind=kind,
            asked=len(prompts),
            clean=[clean_by_id[prompt.id] for prompt in perturbed_prompts],
            perturbed=judged.correct,
            extraction_failed=judged.extraction_failed,
            rows=[
                {**row, "perturbation": kind, "question": prompt.example.question}
                for row, prompt in zip(judged.rows, perturbed_prompts, strict=True)
            ],
        )
    return robustness


def perturb(example: Example, kind: Perturbation, *, seed: int) -> Example | None:
    """The perturbed example, with the same id; None if this kind has nothing to change, or cannot do it safely."""
    if example.messages or (kind == "numbers" and example.other_golds):
        return None
    # Imported here because most evaluations do not perturb.
    from flatpeak.evaluation import number_perturbations, text_perturbations

    perturbations: dict[Perturbation, Callable[[Example, random.Random], Example | None]] = {
        "numbers": number_perturbations.other_numbers,
        "distractor": text_perturbations.add_distractor,
        "framing": text_perturbations.add_framing,
        "rename": text_perturbations.rename_people,
        "typos": text_perturbations.add_typos,
    }
    return perturbations[kind](example, random.Random(f"{seed}/{kind}/{example.id}"))
