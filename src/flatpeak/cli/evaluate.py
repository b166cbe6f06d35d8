"""The commands that measure models and answers: `eval`, `chat` and `grade`."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from flatpeak.errors import RunError, UserError

if TYPE_CHECKING:
    from flatpeak.rewards.base import NumberExtraction

Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL|KEY=VALUE", help="Runs, checkpoints or Hub names, and settings to change."),
]
Correct = bool | None
"""Whether an answer is correct; None if grading failed."""
_OUTCOMES = {True: "correct", False: "wrong", None: "failed"}
_PRINTED_ANSWERS = 20
_GSM8K: tuple[NumberExtraction, ...] = ("gsm8k_strict", "answer_tag", "boxed", "whole")
"""The extractions to try on an answer, in order."""


class _Row(NamedTuple):
    where: str
    """File and line, for messages."""
    answer: str
    gold: str
    question: str


def evaluate(
    models: Models,
    recipe: Annotated[str | None, typer.Option(help="Prompt and grade as in this recipe.")] = None,
    stages: Annotated[
        bool, typer.Option("--stages", help="Compare each run's model before training, after SFT, best and last.")
    ] = False,
    rows: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write every answer to this file, one JSON object per line.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON object.")] = False,
) -> None:
    """Evaluate a model, or compare several on the same questions."""
    paths, overrides = split_arguments(models)
    if not paths:
        raise UserError("eval needs a model: a run, a checkpoint directory or a Hub name")
    if rows is not None:
        _check_writable(rows)
    from rich.console import Console

    from flatpeak.apps.compare import compare_checkpoints
    from flatpeak.cli.common import open_progress
    from flatpeak.runs.files import write_atomic
    from flatpeak.runs.summary import finite

    # What a reward function prints in this process does not belong to the result.
    with redirect_stdout(sys.stderr), open_progress(sys.stderr) as progress:
        comparison = compare_checkpoints(paths, overrides, recipe=recipe, stages=stages, progress=progress)
    if as_json:
        typer.echo(json.dumps(finite(comparison.as_dict()), allow_nan=False))
    else:
        console = Console()
        typer.echo(comparison.render(width=console.width if console.is_terminal else None))
    if rows is not None:
        try:
            write_atomic(Path(rows), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in comparison.rows()))
        except OSError as error:
            raise RunError(
                f"--rows {rows}: not written ({error.strerror}); free space, or choose another file"
            ) from error


def _check_writable(rows: str) -> None:
    """UserError if the file of `--rows` cannot be written, before any model is asked."""
    folder = Path(rows).absolute().parent
    if not folder.is_dir():
        raise UserError(f"--rows {rows}: no directory {Path(rows).parent}; make it first, or choose another")
    if Path(rows).exists() and not Path(rows).is_file():
        # Renaming a file would replace /dev/stdout.
        raise UserError(f"--rows {rows} is not a regular file: name one")
    if not os.access(folder, os.W_OK):
        raise UserError(f"--rows {rows}: {Path(rows).parent} cannot be written; choose another directory")


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Models and overrides: an argument with `=` is an override unless a file or directory has that name."""
    overrides = [argument for argument in arguments if "=" in argument and not Path(argument).exists()]
    return [argument for argument in arguments if argument not in overrides], overrides


def chat(
    path: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a checkpoint directory or a Hub name.")],
    recipe: Annotated[str | None, typer.Option(help="Prompt as in this recipe.")] = None,
    template: Annotated[
        str | None,
        typer.Option(help="The template of questions: plain, r1_zero, question_only, chat or a file with {question}."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message, for models with a chat template.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0, help="0 always takes the likeliest token. Default: as in a run's evaluations, else 1."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer. Default: as in a run's evaluations, else 256.")
    ] = None,
) -> None:
    """Ask a model questions, until an empty line or Ctrl-D.

    A run, or a checkpoint in it, is asked as in its training. Answers go to standard output, everything else to
    standard error.
    """
    from flatpeak.apps.chat import Console, chat_loop

    chat_loop(
        path,
        recipe=recipe,
        template=template,
        system=system,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        console=Console(read=_read, write=typer.echo, note=lambda text: typer.echo(text, err=True)),
    )


def _read(prompt: str) -> str:
    """The next line of input, after a prompt if both input and output are a terminal."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        return input()
    try:
        return input(prompt)
    except EOFError:
        typer.echo()
        raise


def grade(
    file: Annotated[str, typer.Argument(metavar="FILE.jsonl", help="Rows with `answer` (a model's text) and `gold`.")],
    task: Annotated[str, typer.Option(help="The rules of grading: math, or gsm8k (numbers only).")] = "math",
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdicts as one JSON object.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for one answer that the rules leave to math-verify.")] = 2.0,
    evaluated: Annotated[
        bool,
        typer.Option(
            "--evaluated",
            help="Count answers as wrong that leave operations which the gold answer lacks, or that are copied from "
            "the row's `question`, if it has one.",
        ),
    ] = False,
) -> None:
    """Grade answers against gold answers; failed (out of time or memory) answers never count as wrong."""
    graders = {"math": _grade_math, "gsm8k": _grade_numbers}
    if task not in graders:
        raise UserError(f"--task {task}: choose one of {', '.join(graders)}")
    if not 0 < timeout < math.inf:
        raise UserError(f"--timeout {timeout}: give seconds, more than 0")
    rows = _read_rows(file)
    verdicts = graders[task](rows, timeout, evaluated)
    if as_json:
        outcomes = ["failed" if verdict is None else verdict for verdict in verdicts]
        counts = {"correct": verdicts.count(True), "failed": verdicts.count(None), "total": len(verdicts)}
        typer.echo(json.dumps({"verdicts": outcomes, **counts}))
    else:
        typer.echo(_table(rows, verdicts))


def _read_rows(file: str) -> list[_Row]:
    """The rows of a file; a UserError names the line of a bad row."""
    from flatpeak.tasks.data_files import read_jsonl
    from flatpeak.tasks.rows import cell_text

    path = Path(file).expanduser()
    if not path.is_file():
        raise UserError(f"{file} is not a file: give JSON lines with `answer` and `gold`")
    rows = []
    for row in read_jsonl(path):
        values: list[str] = []
        for column in ("answer", "gold"):
            value = row.values.get(column)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise UserError(f"{row.where}: no text in column {column!r}; rows have `answer` and `gold`")
            values.append(cell_text(value, where=f"{row.where}: column {column!r}") if column == "gold" else str(value))
        if not values[1]:
            raise UserError(f"{row.where}: the gold answer is empty; repair or remove the row")
        question = row.values.get("question")
        rows.append(_Row(row.where, values[0], values[1], question if isinstance(question, str) else ""))
    if not rows:
        raise UserError(f"{file} has no rows: give JSON lines with `answer` and `gold`")
    return rows


def _grade_math(rows: Sequence[_Row], timeout: float, evaluated: bool) -> list[Correct]:
    from flatpeak.rewards.math import MathGrader

    questions = [row.question for row in rows] if evaluated else None
    with MathGrader(extraction="any", timeout=timeout) as grader:
        return grader.grade([(row.answer, row.gold) for row in rows], questions=questions)


def _grade_numbers(rows: Sequence[_Row], timeout: float, evaluated: bool) -> list[Correct]:
    from flatpeak.rewards.numeric_answer import extract_answer, leaves_work, parse_number

    verdicts: list[Correct] = []
    for where, answer, gold, question in rows:
        expected = parse_number(gold)
        if expected is None:
            expected = extract_answer(gold, "gsm8k_strict")
        if expected is None:
            raise UserError(
                f"{where}: the gold {gold[:60]!r} is not a number and has none after `####`; use --task math"
            )
        candidates = ((extract_answer(answer, extraction), extraction) for extraction in _GSM8K)
        number, extraction = next((one for one in candidates if one[0] is not None), (None, _GSM8K[0]))
        unfinished = evaluated and leaves_work(answer, extraction, gold=str(expected), question=question)
        verdicts.append(number == expected and not unfinished)
    return verdicts


def _table(rows: Sequence[_Row], verdicts: Sequence[Correct]) -> str:
    correct, failed, total = verdicts.count(True), verdicts.count(None), len(verdicts)
    lines = [f"{correct} of {total} correct ({correct / total:.1%}), {total - correct - failed} wrong, {failed} failed"]
    not_correct = [(row, verdict) for row, verdict in zip(rows, verdicts, strict=True) if verdict is not True]
    for (where, answer, gold, _), verdict in not_correct[:_PRINTED_ANSWERS]:
        lines.append(f"{_OUTCOMES[verdict]:8} {where}: {_short(answer)} for {_short(gold)}")
    if len(not_correct) > _PRINTED_ANSWERS:
        lines.append(f"and {len(not_correct) - _PRINTED_ANSWERS} more; --json has every verdict")
    return "\n".join(lines)


def _short(text: str) -> str:
    """The last 50 characters of a text, which usually contain the answer."""
    line = " ".join(text.split())
    return line if len(line) <= 50 else f"...{line[-47:]}"
