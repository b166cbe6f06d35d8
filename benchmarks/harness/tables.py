"""Markdown tables of the benchmarks' measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.statistics import Measurement, Spread, Target, column, first_reaching, rates, ratio, spread
from benchmarks.harness.targets import (
    adapters_target,
    engine_target,
    memory_target,
    mixed_lengths_target,
    real_model_target,
    share_target,
    step_target,
    time_target,
    training_pass_target,
    two_threads_target,
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
TRACKER_HEAD = ("Workload", "Recorded by", "CPU-s per step", "Share of the step", "Aim", "", "Once in a run, CPU-s")
TIME_HEAD = ("Start", "Contender", "Steps", "CPU-s", "s", "Peak, MiB", "Ratio", "Must / aim", "")
TRACKER_SHARE = 0.02
"""The share of a step's CPU time that a tracker may take."""

PROCESS_HEAD = (
    "Workload",
    "Contender",
    "s",
    "CPU-s",
    "Peak, MiB",
    "Ratio",
    "Sent, MiB",
    "Computed, MiB",
    "Values, KiB",
)
ENGINE_HEAD = (
    "Workload",
    "Engine",
    "Tokens per CPU-s",
    "Tokens per s",
    "CPU-s",
    "s",
    "Weight update, CPU-s",
    "s",
    "Native over it",
)
PART_HEAD = (
    "Part",
    "Contender",
    "GFLOP per CPU-s",
    "GFLOP per s",
    "Of the product",
    "Must / aim",
    "",
    "Over one thread",
    "Must / aim",
    "",
)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The title and the table of one benchmark."""

    title: str
    table: Callable[[Sequence[Mapping[str, Any]]], str]
    threads: str = "one thread for each contender"


def speeds(rows: Sequence[Mapping[str, Any]], *, ours: str, wanted: Wanted) -> str:
    """Tokens per second of every contender; the ratio is ours over theirs in tokens per CPU-second."""
    return _table(
        RATE_HEAD, _rate_lines(rows, ours=ours, wanted=wanted, compared=lambda measurements: rates(measurements, "cpu"))
    )


def paces(rows: Sequence[Mapping[str, Any]], *, ours: str, wanted: Wanted) -> str:
    """Tokens per second of every contender; the ratio is ours over theirs in tokens per second of wall time."""
    pace = lambda measurements: rates(measurements, "wall")  # noqa: E731
    return _table(RATE_HEAD, _rate_lines(rows, ours=ours, wanted=wanted, compared=pace))


def peaks(rows: Sequence[Mapping[str, Any]], *, ours: str, wanted: Wanted) -> str:
    """Tokens per second of every contender; the ratio is ours over theirs in peak memory."""
    peak = lambda measurements: column(measurements, "peak_mib")  # noqa: E731
    return _table(RATE_HEAD, _rate_lines(rows, ours=ours, wanted=wanted, compared=peak))


def tracker_costs(rows: Sequence[Mapping[str, Any]]) -> str:
    """CPU time per step of each tracker, and of the step."""
    return _table(TRACKER_HEAD, _tracker_lines(rows))


def times(rows: Sequence[Mapping[str, Any]], *, ours: str, wanted: Wanted) -> str:
    """Time until the goal; the ratio is of CPU time. The last line has the medians over the starts."""
    return _table(TIME_HEAD, _time_lines(rows, ours=ours, wanted=wanted))


def engines(rows: Sequence[Mapping[str, Any]], *, ours: str) -> str:
    """Tokens per second of every engine, and separate times of weight updates."""
    return _table(ENGINE_HEAD, _engine_lines(rows, ours=ours))


def processes(rows: Sequence[Mapping[str, Any]], *, ours: str) -> str:
    """Seconds per step of every contender, ours over theirs in tokens per second, and the payloads of collectives."""
    return _table(PROCESS_HEAD, _process_lines(rows, ours=ours))


def real_model(rows: Sequence[Mapping[str, Any]]) -> str:
    """The parts of a step relative to a large product, then rollouts and whole steps of all libraries."""
    parts = [row for row in rows if row["name"] == "parts"]
    others = [row for row in rows if row["name"] != "parts"]
    tables = [_table(PART_HEAD, _part_lines(row)) for row in parts]
    if others:
        tables.append(speeds(others, ours="flatpeak", wanted=real_model_target))
    return "\n\n".join(tables)


def _part_lines(row: Mapping[str, Any]) -> Iterator[list[str]]:
    """Shares of the product: of CPU time on one thread, and of wall time on two, because threads may wait."""
    contenders: Mapping[str, Sequence[Measurement]] = row["contenders"]
    one = contenders.get("1 thread")
    for part in row["parts"]:
        for name, turns in contenders.items():
            clock = "cpu" if turns is one else "wall"
            rate, product = column(turns, f"{part} {clock}"), column(turns, f"product {clock}")
            share, wanted = ratio(rate, product), share_target(part)
            faster = ratio(column(turns, f"{part} wall"), column(one, f"{part} wall")) if one else None
            yield [
                part,
                name,
                format_spread(spread(column(turns, f"{part} cpu"))),
                format_number(spread(column(turns, f"{part} wall")).middle),
                *((format_spread(share), "", "") if wanted is None else _judged_share(share, wanted)),
                *_judged(faster, two_threads_target(part), turns is not one),
            ]
    for name, reason in row.get("failures", {}).items():
        yield ["", name, f"failed: {last_line(reason)}", *[""] * 7]


def _process_lines(rows: Sequence[Mapping[str, Any]], *, ours: str) -> Iterator[list[str]]:
    for row in rows:
        contenders: Mapping[str, Sequence[Measurement]] = row["contenders"]
        mine = contenders.get(ours)
        for name, measurements in contenders.items():
            relative = ratio(rates(mine, "wall"), rates(measurements, "wall")) if mine and name != ours else None
            last = measurements[-1]
            payloads = [("sent", 2**20), ("computed", 2**20), ("values", 2**10)]
            yield [
                row["name"],
                name,
                format_spread(spread(column(measurements, "wall"))),
                *(format_number(spread(column(measurements, what)).middle) for what in ("cpu", "peak_mib")),
                format_spread(relative) if relative else "",
                *(format_number(last[what] / unit) if last.get("sent") else "" for what, unit in payloads),
            ]
        for name, reason in row.get("failures", {}).items():
            yield [row["name"], name, f"failed: {last_line(reason)}", *[""] * 6]


def _engine_lines(rows: Sequence[Mapping[str, Any]], *, ours: str) -> Iterator[list[str]]:
    for row in rows:
        contenders: Mapping[str, Sequence[Measurement]] = row["contenders"]
        mine = contenders.get(ours)
        for name, measurements in contenders.items():
            relative = ratio(rates(mine, "cpu"), rates(measurements, "cpu")) if mine and name != ours else None
            yield [
                row["name"],
                name,
                format_spread(spread(rates(measurements, "cpu"))),
                format_number(spread(rates(measurements, "wall")).middle),
                *(
                    format_number(spread(column(measurements, what)).middle)
                    for what in ("cpu", "wall", "update_cpu", "update_wall")
                ),
                format_spread(relative) if relative else "",
            ]
        for name, reason in row.get("failures", {}).items():
            yield [row["name"], name, f"failed: {last_line(reason)}", *[""] * 6]


def _rate_lines(
    rows: Sequence[Mapping[str, Any]],
    *,
    ours: str,
    wanted: Wanted,
    compared: Callable[[Sequence[Measurement]], list[float]],
) -> Iterator[list[str]]:
    for row in rows:
        contenders: Mapping[str, Sequence[Measurement]] = row["contenders"]
        mine = contenders.get(ours)
        for name, measurements in contenders.items():
            relative = ratio(compared(mine), compared(measurements)) if mine else None
            yield [
                row["name"],
                name,
                format_spread(spread(rates(measurements, "cpu"))),
                format_number(spread(rates(measurements, "wall")).middle),
                format_number(spread(column(measurements, "cpu")).middle),
                format_number(spread(column(measurements, "wall")).middle),
                format_number(spread(column(measurements, "peak_mib")).middle),
                *_judged(relative, wanted(row["name"], name), name != ours),
            ]
        for name, reason in row.get("failures", {}).items():
            yield [row["name"], name, f"failed: {last_line(reason)}", *[""] * 7]


def _time_lines(rows: Sequence[Mapping[str, Any]], *, ours: str, wanted: Wanted) -> Iterator[list[str]]:
    reached: dict[str, list[Measurement | None]] = {}
    for row in rows:
        firsts = {name: first_reaching(measurements, row["goal"]) for name, measurements in row["contenders"].items()}
        for name, there in firsts.items():
            reached.setdefault(name, []).append(there)
            mine = firsts[ours]
            compared = ratio([mine["cpu"]], [there["cpu"]]) if mine and there else None
            if there is None:
                cells = [f"not within {row['limit']}", "", "", ""]
            else:
                peak = max(column(row["contenders"][name], "peak_mib"))
                cells = [
                    format_number(there["step"]),
                    format_number(there["cpu"]),
                    format_number(there["wall"]),
                    format_number(peak),
                ]
            yield [row["name"], name, *cells, *_judged(compared, wanted(row["name"], name), name != ours)]
    whole = {name: [there for there in all_ if there] for name, all_ in reached.items()}
    if len(rows) > 1 and all(len(ends) == len(rows) for ends in whole.values()):
        for name, ends in whole.items():
            cells = [format_number(spread(column(ends, what)).middle) for what in ("step", "cpu", "wall")]
            compared = ratio(column(whole[ours], "cpu"), column(ends, "cpu"))
            yield ["median", name, *cells, "", *_judged(compared, wanted("median", name), name != ours)]


def _tracker_lines(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    for row in rows:
        step = column(row["contenders"]["step"], "cpu")
        yield [row["name"], "none: the step itself", format_spread(spread(step)), *[""] * 4]
        for name, measurements in row["contenders"].items():
            if name == "step":
                continue
            share = ratio(column(measurements, "cpu"), step)
            percent = Spread(middle=100 * share.middle, low=100 * share.low, high=100 * share.high)
            yield [
                row["name"],
                f"{name} {row['versions'][name]}",
                format_spread(spread(column(measurements, "cpu"))),
                f"{format_spread(percent)} %",
                f"{100 * TRACKER_SHARE:g} %",
                "aim reached" if share.middle <= TRACKER_SHARE else "**misses**",
                format_number(row["once"][name]),
            ]


def _judged(relative: Spread | None, target: Target | None, other: bool) -> list[str]:
    """Ratio, target, and verdict; empty for flatpeak itself."""
    if not other:
        return ["", "", ""]
    if relative is None:
        return ["none", f"{target.must:g} / {target.aim:g}" if target else "", ""]
    if target is None:
        return [format_spread(relative), "", "**loses**" if relative.middle < 1 else ""]
    return [format_spread(relative), f"{target.must:g} / {target.aim:g}", target.verdict(relative.middle)]


def _judged_share(share: Spread, target: Target) -> tuple[str, str, str]:
    return format_spread(share), f"{target.must:g} / {target.aim:g}", target.verdict_on_share(share.middle)


def format_spread(values: Spread) -> str:
    """Median and range, or a single value alone."""
    if values.low == values.high:
        return format_number(values.middle)
    return f"{format_number(values.middle)} ({format_number(values.low)} to {format_number(values.high)})"


def format_number(value: float) -> str:
    """Three digits, or a whole number from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def last_line(text: str) -> str:
    """The last line of an error, for a table cell."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1].replace("|", "/")[:120] if lines else "no word"


def _table(head: Sequence[str], lines: Iterator[list[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


BENCHMARKS = {
    "engine": Benchmark(
        title="Rollouts: flatpeak's engine, vLLM and transformers",
        table=lambda rows: speeds(rows, ours="flatpeak", wanted=engine_target),
    ),
    "engines": Benchmark(
        title="Rollouts by each engine, with separate weight updates",
        table=lambda rows: engines(rows, ours="native"),
    ),
    "step": Benchmark(
        title="Whole GRPO steps: flatpeak and TRL",
        table=lambda rows: speeds(rows, ours="flatpeak", wanted=step_target),
    ),
    "training_pass": Benchmark(
        title="The training pass: shared prompts, packing and padding",
        table=lambda rows: speeds(rows, ours="shared", wanted=training_pass_target),
    ),
    "mixed_lengths": Benchmark(
        title="One long prompt among short ones",
        table=lambda rows: speeds(rows, ours="together", wanted=mixed_lengths_target),
    ),
    "memory": Benchmark(
        title="Peak memory of a whole step: flatpeak and TRL",
        table=lambda rows: peaks(rows, ours="flatpeak", wanted=memory_target),
    ),
    "adapters": Benchmark(
        title="Adapters and memory savers, full training and TRL",
        table=lambda rows: speeds(rows, ours="flatpeak LoRA", wanted=adapters_target),
    ),
    "trackers": Benchmark(title="The cost of trackers", table=tracker_costs),
    "ahead": Benchmark(
        title="Rollouts ahead and synchronous steps",
        table=lambda rows: paces(rows, ours="ahead", wanted=lambda row, name: None),
    ),
    "distributed": Benchmark(
        title="Two processes, and one with two threads",
        table=lambda rows: processes(rows, ours="2 processes"),
        threads="the named number of threads",
    ),
    "real_model": Benchmark(
        title="A real model: parts of a step, rollouts and whole steps",
        table=real_model,
        threads="one thread unless a number is named",
    ),
    "time_to_accuracy": Benchmark(
        title="Time to an accuracy of 0.9: flatpeak and TRL",
        table=lambda rows: times(rows, ours="flatpeak", wanted=time_target),
    ),
}
