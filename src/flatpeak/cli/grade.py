"""`flatpeak grade`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flatpeak.errors import UserError

if TYPE_CHECKING:
    from flatpeak.rewards.config import Extraction

Verdict = bool | None
_SHOWN = 20
_GSM8K: tuple[Extraction, ...] = ("gsm8k_strict", "answer_tag", "boxed", "whole")
_WORDS = {True: "correct", False: "wrong", None: "failed"}


class _Row(NamedTuple):
    where: str
    answer: str
    gold: str
    question: str


def grade(
    file: Annotated[str, typer.Argument(metavar="FILE.jsonl", help="Rows with `answer` (a model's text) and `gold`.")],
    task: Annotated[str, typer.Option(help="Whose rules: math, or gsm8k (numbers only).")] = "math",
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as one JSON object.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer that the rules leave to math-verify.")] = 2.0,
    evaluated: Annotated[
        bool,
        typer.Option(
            "--evaluated",
            help="Count answers as wrong that leave operations which the gold does not have, or are copied from the "
            "row's `question`, where it has one.",
        ),
    ] = False,
) -> None:
    """Grade answers against gold answers; failed (out of time or memory) is never wrong."""
    graders = {"math": _grade_math, "gsm8k": _grade_numbers}
    if task not in graders:
        raise UserError(f"--task {task}: choose one of {', '.join(graders)}")
    if not 0 < timeout < math.inf:
        raise UserError(f"--timeout {timeout}: give seconds, more than 0")
    rows = _read(file)
    verdicts = graders[task](rows, timeout, evaluated)
    if as_json:
        spelled = ["failed" if verdict is None else verdict for verdict in verdicts]
        counts = {"correct": verdicts.count(True), "failed": verdicts.count(None), "total": len(verdicts)}
        typer.echo(json.dumps({"verdicts": spelled, **counts}))
    else:
        typer.echo(_table(rows, verdicts))


def _read(file: str) -> list[_Row]:
    """Each row; a UserError that names the line of a bad one."""
    from flatpeak.tasks.data_files import read_jsonl

    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"{file} is no file: give JSON lines with `answer` and `gold`")
    rows = []
    for row in read_jsonl(path):
        values: list[str] = []
        for column in ("answer", "gold"):
            value = row.values.get(column)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise UserError(f"{row.where}: no text in column {column!r}; rows have `answer` and `gold`")
            values.append(str(value))
        question = row.values.get("question")
        rows.append(_Row(row.where, values[0], values[1], question if isinstance(question, str) else ""))
    if not rows:
        raise UserError(f"{file} has no rows: give JSON lines with `answer` and `gold`")
    return rows


def _grade_math(rows: Sequence[_Row], timeout: float, evaluated: bool) -> list[Verdict]:
    from flatpeak.rewards.math.evaluated import only_evaluated
    from flatpeak.rewards.math.grader import MathGrader, extracted

    pairs = [(extracted(row.answer, "any"), row.gold) for row in rows]
    if evaluated:
        pairs = only_evaluated(pairs, [row.question for row in rows])
    with MathGrader(timeout=timeout) as grader:
        return [outcome if isinstance(outcome, bool) else None for outcome in grader.compare(pairs)]


def _grade_numbers(rows: Sequence[_Row], timeout: float, evaluated: bool) -> list[Verdict]:
    from flatpeak.rewards.number import extract_answer, leaves_work, parse_number

    verdicts: list[Verdict] = []
    for where, answer, gold, question in rows:
        expected = parse_number(gold)
        if expected is None:
            expected = extract_answer(gold, "gsm8k_strict")
        if expected is None:
            raise UserError(f"{where}: the gold {gold[:60]!r} is no number and has none after `####`; use --task math")
        found = ((extract_answer(answer, how), how) for how in _GSM8K)
        number, how = next((each for each in found if each[0] is not None), (None, _GSM8K[0]))
        left = evaluated and leaves_work(answer, how, gold=str(expected), question=question)
        verdicts.append(number == expected and not left)
    return verdicts


def _table(rows: Sequence[_Row], verdicts: Sequence[Verdict]) -> str:
    correct, failed, total = verdicts.count(True), verdicts.count(None), len(verdicts)
    lines = [f"{correct} of {total} correct ({correct / total:.1%}), {total - correct - failed} wrong, {failed} failed"]
    others = [(row, verdict) for row, verdict in zip(rows, verdicts, strict=True) if verdict is not True]
    for (where, answer, gold, _), verdict in others[:_SHOWN]:
        lines.append(f"{_WORDS[verdict]:8} {where}: {_short(answer)} for {_short(gold)}")
    if len(others) > _SHOWN:
        lines.append(f"and {len(others) - _SHOWN} more; --json has every verdict")
    return "\n".join(lines)


def _short(text: str) -> str:
    """The end of a text, where answers stand."""
    line = " ".join(text.split())
    return line if len(line) <= 50 else f"...{line[-47:]}"
