"""Markdown tables of what the parts measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.statistics import Round, Spread, Target, column, first_reaching, rates, ratio, spread
from benchmarks.harness.targets import (
    engine_target,
    memory_target,
    mixed_lengths_target,
    step_target,
    time_target,
    training_pass_target,
)

Wanted = Callable[[str, str], Target | None]
RATE_HEAD = (
    "Workload",
    "Contender",
    "Tokens per CPU-s",
    "Tokens per s",
    "CPU-s",
    "s",
    "Peak, MiB",
    "Ratio",
    "Must / aim",
    "",
)
TIME_HEAD = ("Start", "Contender", "Steps", "CPU-s", "s", "Peak, MiB", "Ratio", "Must / aim", "")


@dataclass(frozen=True, kw_only=True)
class Part:
    """How one part is shown."""

    title: str
    table: Callable[[Sequence[Mapping[str, Any]]], str]


def speeds(rows: Sequence[Mapping[str, Any]], *, ours: str, wanted: Wanted) -> str:
    """Tokens per second of every contender, and ours over theirs per CPU-second."""
    return _table(RATE_HEAD, _rate_lines(rows, ours=ours, wanted=wanted, compared=lambda rounds: rates(rounds, "cpu")))


def peaks(rows: Sequence[Mapping[str, Any]], *, ours: str, wanted: Wanted) -> str:
    """The same columns, but the ratio is that of peak memory."""
    peak = lambda rounds: column(rounds, "peak_mib")  # noqa: E731
    return _table(RATE_HEAD, _rate_lines(rows, ours=ours, wanted=wanted, compared=peak))


def times(rows: Sequence[Mapping[str, Any]], *, ours: str, wanted: Wanted) -> str:
    """Time until the goal; the ratio is that of CPU time. A last line has the medians over the starts."""
    return _table(TIME_HEAD, _time_lines(rows, ours=ours, wanted=wanted))


def _rate_lines(
    rows: Sequence[Mapping[str, Any]],
    *,
    ours: str,
    wanted: Wanted,
    compared: Callable[[Sequence[Round]], list[float]],
) -> Iterator[list[str]]:
    for row in rows:
        contenders: Mapping[str, Sequence[Round]] = row["contenders"]
        mine = contenders.get(ours)
        for name, rounds in contenders.items():
            found = ratio(compared(mine), compared(rounds)) if mine else None
            yield [
                row["name"],
                name,
                shown(spread(rates(rounds, "cpu"))),
                number(spread(rates(rounds, "wall")).middle),
                number(spread(column(rounds, "cpu")).middle),
                number(spread(column(rounds, "wall")).middle),
                number(spread(column(rounds, "peak_mib")).middle),
                *_judged(found, wanted(row["name"], name), name != ours),
            ]
        for name, reason in row.get("failures", {}).items():
            yield [row["name"], name, f"failed: {last_line(reason)}", *[""] * 7]


def _time_lines(rows: Sequence[Mapping[str, Any]], *, ours: str, wanted: Wanted) -> Iterator[list[str]]:
    reached: dict[str, list[Round | None]] = {}
    for row in rows:
        found = {name: first_reaching(rounds, row["goal"]) for name, rounds in row["contenders"].items()}
        for name, there in found.items():
            reached.setdefault(name, []).append(there)
            mine = found[ours]
            compared = ratio([mine["cpu"]], [there["cpu"]]) if mine and there else None
            if there is None:
                figures = [f"not within {row['limit']}", "", "", ""]
            else:
                peak = max(column(row["contenders"][name], "peak_mib"))
                figures = [number(there["step"]), number(there["cpu"]), number(there["wall"]), number(peak)]
            yield [row["name"], name, *figures, *_judged(compared, wanted(row["name"], name), name != ours)]
    whole = {name: [there for there in all_ if there] for name, all_ in reached.items()}
    if len(rows) > 1 and all(len(ends) == len(rows) for ends in whole.values()):
        for name, ends in whole.items():
            figures = [number(spread(column(ends, what)).middle) for what in ("step", "cpu", "wall")]
            compared = ratio(column(whole[ours], "cpu"), column(ends, "cpu"))
            yield ["median", name, *figures, "", *_judged(compared, wanted("median", name), name != ours)]


def _judged(found: Spread | None, target: Target | None, other: bool) -> list[str]:
    """Ratio, what is wanted, and the verdict; nothing for flatpeak beside itself."""
    if not other:
        return ["", "", ""]
    if found is None:
        return ["none", f"{target.must:g} / {target.aim:g}" if target else "", ""]
    if target is None:
        return [shown(found), "", "**loses**" if found.middle < 1 else ""]
    return [shown(found), f"{target.must:g} / {target.aim:g}", target.verdict(found.middle)]


def shown(found: Spread) -> str:
    """Median and range; a single value alone."""
    if found.low == found.high:
        return number(found.middle)
    return f"{number(found.middle)} ({number(found.low)} to {number(found.high)})"


def number(value: float) -> str:
    """Three digits, and whole numbers from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def last_line(text: str) -> str:
    """What an error says, in one cell."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].replace("|", "/")[:120] if lines else "no word"


def _table(head: Sequence[str], lines: Iterator[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


PARTS = {
    "engine": Part(
        title="Rollouts: flatpeak's engine beside vLLM and transformers",
        table=lambda rows: speeds(rows, ours="flatpeak", wanted=engine_target),
    ),
    "step": Part(
        title="Whole GRPO steps beside TRL",
        table=lambda rows: speeds(rows, ours="flatpeak", wanted=step_target),
    ),
    "training_pass": Part(
        title="The training pass: shared prompts beside packing and padding",
        table=lambda rows: speeds(rows, ours="shared", wanted=training_pass_target),
    ),
    "mixed_lengths": Part(
        title="One long prompt among short ones",
        table=lambda rows: speeds(rows, ours="together", wanted=mixed_lengths_target),
    ),
    "memory": Part(
        title="Peak memory of a whole step beside TRL",
        table=lambda rows: peaks(rows, ours="flatpeak", wanted=memory_target),
    ),
    "time_to_accuracy": Part(
        title="Time to an accuracy of 0.9 beside TRL",
        table=lambda rows: times(rows, ours="flatpeak", wanted=time_target),
    ),
}
