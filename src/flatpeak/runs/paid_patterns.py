"""Patterns that a reward pays for in any prompt: they earn more within their own groups.

A good answer is its prompt's, so its words pay in one group. What pays alike in many groups is a habit: a format that
the reward wants, or a way around it. Each group compares its completions with the pattern with those without it, so
that easy prompts do not count for the habits of their answers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, Final

from flatpeak.runs.directory import RunPaths
from flatpeak.runs.manifest import fork_step, read_starts
from flatpeak.runs.rollout_log import logged_steps, read_rollouts

Row = dict[str, Any]
Group = tuple[int, str]
"""The step and the id of a group."""

LONGEST: Final = 4
"""Words (characters, in texts without spaces) of the longest pattern."""
FEWEST_PROMPTS: Final = 5
LEVEL: Final = 0.05
ALIKE, MORE = 0.9, 1.25
"""A pattern of which this share comes with one that pays more in all belongs to it, unless it pays so much more."""
MANY: Final = 2.0
"""Spreads from which on a pattern pays more than answers usually differ by."""
MOST_PIECES: Final = 200_000
"""Words or characters that are read: of long completions their beginnings and ends."""
FEWEST_PIECES: Final = 20
"""Those that are read at each end of a completion in any case."""
MOST_ROWS: Final = 2_000
"""Completions that steps are pooled for: more need no pooling."""
POOLED: Final = 5
"""Logged steps whose groups count together, because a rare pattern is in few groups of a step."""
_READ: Final = ("group", "prompt", "finish_reason", "reward")
"""The columns that are kept of a row, beside its text and length: others, such as log-probabilities, are large."""
SPREADS: Final = "patterns/spreads"
"""The metric for `training.stop_when`: the most spreads that any pattern pays, 0 where none pays beyond chance."""
_LONGER, _CUT, _REPEATS = "longer than its group's median", "cut by a limit", "repeats phrases of three words"
_MARKS: Final = (
    "\u0300-\u036f\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u0900-\u0963\u0966-\u0dff"
    "\u0e31-\u0e4e\u102b-\u103e\u17b4-\u17d3"
)
"""Combining marks, which `\\w` leaves out: of Latin, Hebrew and Arabic, of India's scripts, Thai, Burmese and Khmer."""
_WORDS: Final = re.compile(rf"[\w{_MARKS}]+|[^\w\s{_MARKS}]")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A pattern that pays in many groups."""

    name: str
    share: float
    """Of the completions of these steps."""
    share_at_first: float
    """Of those of the first logged step."""
    gain: float
    """The reward with it less the reward without it in the same group, averaged over groups and then over prompts."""
    spreads: float
    """The gain in standard deviations of the rewards within groups: from 2 on, more than answers usually differ by."""
    error: float
    """The standard error of the gain."""
    prompts: int
    """Those with a group that has completions with and without it."""
    example: str


def paid_patterns(rows: Sequence[Row], first: Sequence[Row], *, most: int = 10) -> list[Pattern]:
    """The patterns that pay in the groups of these rows beyond chance, by what they pay in all; those of MANY first.

    `first`: the rows of the first logged step. Of patterns that come together and pay alike only one is named.
    """
    return _named([_answer(row) for row in rows], [_answer(row) for row in first], most=most)


def _named(rows: Sequence[Row], first: Sequence[Row], *, most: int = 10) -> list[Pattern]:
    """Name the patterns, as `paid_patterns`, of answers that are read already."""
    paid = _paid(rows)
    at_first = _having(first, by_characters=paid.by_characters, half=paid.half)
    chosen: list[str] = []
    for name in sorted(paid.gains, key=paid.order):
        if not any(paid.is_of(name, other) for other in chosen):
            chosen.append(name)
    return [
        Pattern(
            name=name,
            share=len(paid.having[name]) / len(paid.rows),
            share_at_first=len(at_first.get(name, ())) / max(1, len(first)),
            gain=paid.gains[name].mean,
            spreads=paid.gains[name].mean / paid.spread,
            error=paid.gains[name].error,
            prompts=paid.gains[name].prompts,
            example=max((paid.rows[index] for index in paid.having[name]), key=lambda row: row["reward"])["text"],
        )
        for name in chosen[:most]
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Paid:
    """All patterns of some rows that pay beyond chance."""

    rows: Sequence[Row]
    by_characters: bool
    half: int
    """The pieces that are read at each end of a text."""
    having: dict[str, set[int]]
    """By pattern, the indices of the rows that have it."""
    spread: float
    """The standard deviation of the rewards within groups."""
    gains: dict[str, _Gains]

    def order(self, name: str) -> tuple[bool, float, int, str]:
        """The key that sorts patterns: by what they pay in all, those of MANY spreads first."""
        gain = self.gains[name].mean
        return gain < MANY * self.spread, -round(gain * len(self.having[name]), 6), -len(name), name

    def is_of(self, name: str, other: str) -> bool:
        """Whether a pattern contains another, is contained, or comes with it, and pays no more."""
        joint = "" if self.by_characters else " "
        one, two = (f"{joint}{text[1:-1]}{joint}" for text in (name, other))
        contained = name[0] == other[0] == "'" and (one in two or two in one)
        comes_with = len(self.having[name] & self.having[other]) >= ALIKE * len(self.having[name])
        related = contained or comes_with
        return related and self.gains[name].mean <= MORE * self.gains[other].mean


def _paid(rows: Sequence[Row]) -> _Paid:
    """The patterns by one-sided t tests over prompts, p below 0.05 after Bonferroni."""
    rows = [row for row in rows if row["reward"] is not None]
    by_characters = sum(" " in row["text"].strip() for row in rows) * 2 < len(rows)
    half = max(FEWEST_PIECES, MOST_PIECES // (2 * len(rows) + 1))
    having = _having(rows, by_characters=by_characters, half=half)
    totals = _totals(rows)
    squares = sum(row["reward"] ** 2 for row in rows) - sum(total**2 / count for total, count in totals.values())
    spread = math.sqrt(max(squares / max(1, len(rows)), 0.0)) or 1.0
    tried = {
        name: gains
        for name, members in having.items()
        if len(members) >= FEWEST_PROMPTS and (gains := _gains(rows, totals, members, spread=spread)).prompts
    }
    paying = {name: one for name, one in tried.items() if one.chance * len(tried) < LEVEL}
    return _Paid(rows=rows, by_characters=by_characters, half=half, having=having, spread=spread, gains=paying)


def _having(rows: Sequence[Row], *, by_characters: bool, half: int) -> dict[str, set[int]]:
    """By pattern, the indices of the rows that have it."""
    lengths: dict[Group, list[int]] = {}
    for row in rows:
        lengths.setdefault(_group(row), []).append(row["length"])
    having: dict[str, set[int]] = {}
    for index, row in enumerate(rows):
        pieces = list(row["text"].strip()) if by_characters else _WORDS.findall(row["text"])
        ends = [pieces] if len(pieces) <= 2 * half else [pieces[:half], pieces[-half:]]
        names = {name for end in ends for name in _runs_of(end, "" if by_characters else " ")}
        if row["length"] > median(lengths[_group(row)]):
            names.add(_LONGER)
        if row["finish_reason"] == "length":
            names.add(_CUT)
        triples = [tuple(end[at : at + 3]) for end in ends for at in range(len(end) - 2)]
        if len(triples) - len(set(triples)) >= 2 and not by_characters:
            names.add(_REPEATS)
        for name in names:
            having.setdefault(name, set()).add(index)
    return having


def _runs_of(pieces: Sequence[str], joint: str) -> Iterator[str]:
    """Every run of up to LONGEST pieces, in quotes."""
    for length in range(1, LONGEST + 1):
        for at in range(len(pieces) - length + 1):
            yield f"'{joint.join(pieces[at : at + length])}'"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gains:
    """The gain of a pattern: the mean over prompts, and its standard error."""

    mean: float = 0.0
    error: float = 1.0
    prompts: int = 0

    @property
    def chance(self) -> float:
        """The one-sided p of Student's t test that the mean is above 0, by Wallace's approximation (1959)."""
        if self.mean <= 0 or not self.error:
            return float(self.mean <= 0)
        t, freedom = self.mean / self.error, self.prompts - 1
        z = math.sqrt(freedom * math.log1p(t * t / freedom)) * (8 * freedom + 1) / (8 * freedom + 3)
        return math.erfc(z / math.sqrt(2)) / 2


def _gains(
    rows: Sequence[Row], totals: dict[Group, tuple[float, int]], members: Iterable[int], *, spread: float
) -> _Gains:
    """The mean reward with a pattern less that without it, over the groups of a prompt that have both, then prompts.

    Its error is at least what the spread of rewards within groups makes it: equal gains of a few prompts are no proof,
    and rewards of 0 and 1 often give equal gains.
    """
    having: dict[Group, list[float]] = {}
    prompts: dict[Group, str] = {}
    for index in sorted(members):
        row = rows[index]
        having.setdefault(_group(row), []).append(row["reward"])
        prompts[_group(row)] = row["prompt"]
    by_prompt: dict[str, list[tuple[float, float]]] = {}
    for group, rewards in having.items():
        total, count = totals[group]
        if len(rewards) < count:
            others = (total - sum(rewards)) / (count - len(rewards))
            share = 1 / len(rewards) + 1 / (count - len(rewards))
            by_prompt.setdefault(prompts[group], []).append((fmean(rewards) - others, share))
    number = len(by_prompt)
    if number < FEWEST_PROMPTS:
        return _Gains()
    gains = [fmean(gain for gain, _ in of_prompt) for of_prompt in by_prompt.values()]
    within = sum(sum(share for _, share in of_prompt) / len(of_prompt) ** 2 for of_prompt in by_prompt.values())
    error = max(stdev(gains) / math.sqrt(number), spread * math.sqrt(within) / number)
    return _Gains(mean=fmean(gains), error=error, prompts=number)


def _totals(rows: Sequence[Row]) -> dict[Group, tuple[float, int]]:
    """The sum of the rewards of each group, and their number."""
    totals: dict[Group, tuple[float, int]] = {}
    for row in rows:
        total, count = totals.get(_group(row), (0.0, 0))
        totals[_group(row)] = (total + row["reward"], count + 1)
    return totals


def _group(row: Row) -> Group:
    return row.get("step", 0), row["group"]  # a prompt that is drawn again has another group


def _answer(row: Row) -> Row:
    """Keep of a logged row what is read; of an episode the policy's turns, because answers often say what they paid."""
    own = {"text": row["text"], "length": len(row["token_ids"])}
    if "turns" in row:
        own = {"text": "\n".join(turn["text"] for turn in row["turns"]), "length": sum(row["trained"])}
    return {key: row[key] for key in _READ} | own


def logged_patterns(run: RunPaths, step: int) -> tuple[list[int], list[Pattern]]:
    """The last logged steps up to one, whose groups are read, and their patterns; there must be one.

    The steps before a fork, and those after it, are not read together: another reward may have paid for them.
    """
    logged = _logged(run, step)
    steps, rows = _pooled(logged, step)
    return steps, _named(rows, _answers(logged, min(logged)))


def unequal_groups(run: RunPaths, step: int) -> int:
    """The groups of these steps whose rewards differ: only they say what pays."""
    rewards: dict[Group, set[float | None]] = {}
    for row in _pooled(_logged(run, step), step)[1]:
        rewards.setdefault(_group(row), set()).add(row["reward"])
    return sum(len(values - {None}) > 1 for values in rewards.values())


def most_spreads(run: RunPaths, step: int) -> dict[str, float]:
    """The metric SPREADS of a step; none where it is not logged, as on a full disk. UserError for a damaged log."""
    logged = _logged(run, step)
    if step not in logged:
        return {}
    paid = _paid(_pooled(logged, step)[1])
    return {SPREADS: max((gains.mean for gains in paid.gains.values()), default=0.0) / paid.spread}


def _logged(run: RunPaths, step: int) -> dict[int, Path]:
    """The logged steps on the same side of a fork as a step."""
    fork = fork_step(read_starts(run.manifest))
    return {one: path for one, path in logged_steps(run.rollouts).items() if (one > fork) == (step > fork)}


def _pooled(logged: Mapping[int, Path], step: int) -> tuple[list[int], list[Row]]:
    """The last POOLED of the logged steps up to one, and their answers.

    No more steps than for MOST_ROWS completions are read, unless they have too few prompts to compare.
    """
    steps: list[int] = []
    rows: list[Row] = []
    for one in reversed([one for one in logged if one <= step][-POOLED:]):
        enough = len({row["prompt"] for row in rows}) >= FEWEST_PROMPTS
        if enough and len(rows) + logged[one].read_bytes().count(b"\n") > MOST_ROWS:
            break
        steps, rows = [one, *steps], _answers(logged, one) + rows
    return steps, rows


def _answers(logged: Mapping[int, Path], step: int) -> list[Row]:
    return [_answer(row) | {"step": step} for row in read_rollouts(logged[step])]
