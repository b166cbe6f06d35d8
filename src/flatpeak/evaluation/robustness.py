"""Accuracy on perturbed questions, beside the accuracy on the same questions as they were."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flatpeak.evaluation.config import CURRENT_NAMES, Perturbation
from flatpeak.evaluation.estimates import Figure, figure
from flatpeak.evaluation.number_perturbations import other_numbers
from flatpeak.evaluation.spans import ALIKE, last_sentence, split_question, words
from flatpeak.functional.estimators import PairedDifference, paired_bootstrap
from flatpeak.types import Example, Prompt

DISTRACTORS = (
    "The library across the street closes at six in the evening.",
    "A neighbor has painted the garden fence green.",
    "It had been raining since early in the morning.",
    "The bus that stops at the corner holds 45 passengers.",
    "Last year the town planted 12 new trees along the river.",
    "The clock on the wall is 5 minutes fast.",
    "A cat was asleep on the windowsill the whole time.",
    "The nearest train station was built 80 years ago.",
    "Someone on the radio was talking about the weather.",
    "The building next door has 9 floors and a red roof.",
)
"""Sentences that have nothing to do with any question; some with a number, which draw models off most (Shi et al. 2023,
arXiv 2302.00093)."""
FRAMES = (
    "Here is something to work out. {question}",
    "Consider the following. {question}",
    "Please deal with this one: {question}",
    "Take your time with the next question. {question}",
    "What follows is the task. {question}",
)
"""Wordings around a question. They come before it: what a prompt ends with says how to answer and stays."""
PREAMBLES = (
    "Below you find multiple choice questions with their answers; the subject is {subject}.",
    "These are questions on {subject}, each with lettered options and its answer.",
    "Each of the questions below, on {subject}, has several options, and the answer is given.",
)
_PREAMBLE = re.compile(r"The following are multiple choice questions \(with answers\)(?: about ([^.\n]+?))?\s*\.")
_COUNTS = re.compile(
    r"(?:three|four(?:th)?|five|fifth|sixth|seven(?:th)?|eighth?|nine|ninth|tenth|eleven|twelve|third|zero"
    r"|(?:thir|four|fif|six|seven|eigh|nine)teen|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|hundred|thousand|[mb]illion"
    r"|half|twice|thrice|double|triple|quarters?|dozens?|percent)",
    re.IGNORECASE,
)
"""Numbers in words."""
_TYPO_EVERY = 12
"""One word in so many gets a typo, and at least one."""


def perturb(example: Example, kind: Perturbation, *, seed: int) -> Example | None:
    """The perturbed example, with the same id; None where this kind has nothing to change, or cannot do it safely."""
    return _KINDS[kind](example, random.Random(f"{seed}/{_DRAWN_AS.get(kind, kind)}/{example.id}"))


def _distractor(example: Example, draw: random.Random) -> Example | None:
    """An irrelevant sentence before the last question."""
    label, text, tail = split_question(example.question)
    if next(words(text, at_least=3), None) is None:
        return None
    at = last_sentence(text)
    gap = "" if at == 0 or text[at - 1].isspace() else " "
    return replace(example, question=f"{label}{text[:at]}{gap}{draw.choice(DISTRACTORS)} {text[at:]}{tail}")


def _framing(example: Example, draw: random.Random) -> Example | None:
    """A sentence before the question; where a published preamble introduces it, that in other words."""
    label, text, tail = split_question(example.question)
    framed = draw.choice(FRAMES).format(question="\0").replace("\0", text)
    introduced = draw.choice(PREAMBLES)
    preamble = _PREAMBLE.sub(
        lambda match: introduced.format(subject=(match[1] or "various matters").strip()), example.preamble
    )
    return replace(example, question=f"{label}{framed}{tail}", preamble=preamble)


def _rename(example: Example, draw: random.Random) -> Example | None:
    """Other first names, the same one for the same person. Who has a surname or a title may be somebody known."""
    label, text, tail = split_question(example.question)
    names = list(dict.fromkeys(match[0] for match in words(text, at_least=2) if match[0] in ALIKE))
    if tail:  # Of a multiple-choice question, who is named but once may be a scholar or a saint.
        names = [name for name in names if len(re.findall(rf"\b{name}\b", text)) > 1]
    used = {*re.findall(r"\w+", example.question), *re.findall(r"\w+", example.gold)}
    changes: dict[str, str] = {}
    for name in names:
        free = [other for other in ALIKE[name] if other not in used]
        if _somebody_known(name, text) or name in re.findall(r"\w+", f"{tail} {example.gold}") or not free:
            continue
        changes[name] = draw.choice(free)
        used.add(changes[name])
    if not changes:
        return None
    pattern = re.compile(rf"\b({'|'.join(map(re.escape, changes))})\b(?![_\d])")
    return replace(example, question=f"{label}{pattern.sub(lambda match: changes[match[0]], text)}{tail}")


def _somebody_known(name: str, text: str) -> bool:
    """Whether the name ever stands beside another capitalized word that is neither a name nor begins a sentence."""
    for match in re.finditer(rf"\b{re.escape(name)}\b", text):
        after = re.match(r"(?:\.? )([A-Z][\w.]*)", text[match.end() :])
        if after is not None and text[match.end()] != ".":
            return True
        before = re.search(r"([^\s]+)\s+$", text[: match.start()])
        if before is not None and before[1][0].isupper() and before[1] not in ALIKE:
            begins = re.search(r"(?:^|[.!?][\"')\u201d]*\s+)$", text[: before.start()])
            if begins is None or before[1].endswith("."):
                return True
    return False


def _typos(example: Example, draw: random.Random) -> Example | None:
    """In a few words of four letters or more, two letters swapped or one left out, never the first or the last."""
    label, text, tail = split_question(example.question)
    found = [
        match
        for match in words(text, at_least=4)
        if not match[0].isupper() and match[0] not in ALIKE and not _COUNTS.fullmatch(match[0])
    ]
    if not found:
        return None
    chosen = draw.sample(found, max(1, len(found) // _TYPO_EVERY))
    for match in sorted(chosen, key=lambda match: match.start(), reverse=True):
        text = f"{text[: match.start()]}{_misspelled(match[0], draw)}{text[match.end() :]}"
    return replace(example, question=f"{label}{text}{tail}")


def _misspelled(word: str, draw: random.Random) -> str:
    swaps = [at for at in range(1, len(word) - 2) if word[at] != word[at + 1]]
    if swaps and draw.random() < 0.5:
        at = draw.choice(swaps)
        return f"{word[:at]}{word[at + 1]}{word[at]}{word[at + 2 :]}"
    at = draw.randrange(1, len(word) - 1)
    return word[:at] + word[at + 1 :]


_KINDS: dict[Perturbation, Callable[[Example, random.Random], Example | None]] = {
    "numbers": other_numbers,
    "distractor": _distractor,
    "framing": _framing,
    "paraphrase": _framing,
    "rename": _rename,
    "typos": _typos,
}
_DRAWN_AS: dict[Perturbation, str] = {"framing": "paraphrase"}
"""What a kind was called when its draws were fixed."""


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
