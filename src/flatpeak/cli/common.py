"""Code that commands share: arguments, the display of a run, its last line and its exit code."""

from __future__ import annotations

import json
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from flatpeak.distributed.launch import job_rank, launch, needs_launch
from flatpeak.pipeline.progress import MetricsLine, PlainProgress, early_end, first_line
from flatpeak.runs.signals import signal_name

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from flatpeak.config.run_config import RunConfig
    from flatpeak.pipeline.run_result import RunResult
    from flatpeak.runs.directory import RunPaths
    from flatpeak.runs.summary import EvaluationStage, RunSummary


def _settings_that_begin(incomplete: str) -> list[str]:
    """The keys of settings for the completion of a shell; a longer key only after its section."""
    from flatpeak.config.settings_reference import settings_reference

    keys = {setting.key for section in settings_reference() for setting in section.settings}
    following = {incomplete + key[len(incomplete) :].partition(".")[0] for key in keys if key.startswith(incomplete)}
    return sorted(key if key in keys else f"{key}." for key in following)


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE", help="A YAML file, or a shipped recipe, flatpeak:NAME; `flatpeak recipes` lists them."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        autocompletion=_settings_that_begin,
        help="Settings to change, such as optimizer.learning_rate=1e-5; `flatpeak settings` explains them.",
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue from the newest valid checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="First delete the run with this name.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the whole recipe with defaults, and stop.")]

_WIDE = 110
"""Columns of a terminal from which on the times beside a bar are named."""
_SLOW_SECONDS = 1.0
"""Completions that take longer have a bar the next time; for quicker ones it would flicker."""
ANSWER_WIDTH = 100
"""The most characters of a question or an answer that a command prints."""


def read_config(recipe: str, overrides: Sequence[str] | None) -> RunConfig:
    """The checked recipe; does not import torch."""
    from flatpeak.config.load import load_recipe, parse_config

    return parse_config(load_recipe(recipe, overrides or ()))


def print_config(config: RunConfig) -> None:
    """Print the whole recipe as YAML, without secrets."""
    import yaml

    from flatpeak.utils.redaction import redact

    typer.echo(yaml.safe_dump(redact(config.model_dump(mode="json")), sort_keys=False, allow_unicode=True), nl=False)


def check_start(config: RunConfig, *, resume: bool, overwrite: bool) -> None:
    """UserError if the run cannot be started under its name; ignores model and task, and does not import torch.

    If there are several processes, only the first checks: it may already have taken the name when the others start.
    """
    from flatpeak.runs import directory

    if job_rank():
        return
    directory.check_start(config.run, config.model_dump(mode="json"), resume=resume, overwrite=overwrite)
    if resume:
        _announce_resume(directory.RunPaths(Path(config.run.directory) / config.run.name), steps=config.training.steps)


def _announce_resume(run: RunPaths, *, steps: int) -> None:
    """Say where a run that is resumed does not exist, or has nothing left to do."""
    from flatpeak.runs.directory import run_hint
    from flatpeak.runs.summary import read_summary

    if not run.is_run():
        typer.echo(f"--resume: there is no run {run.path}, so a new one begins{run_hint(run.path)}", err=True)
    elif run.summary.is_file():
        summary = read_summary(run.summary)
        if summary.status == "done" and summary.last_step == steps:
            more = f"flatpeak fork {run.path} {steps} --name NEW training.steps={2 * steps}"
            typer.echo(f"--resume: {run.path} is done; to train on: {more}", err=True)


def start_processes(config: RunConfig) -> None:
    """Run the command in the processes that the recipe asks for and exit, unless this is one of them."""
    if needs_launch(config.distributed):
        say = partial(typer.echo, err=True)
        raise typer.Exit(launch(sys.argv[1:], config.distributed, say=lambda text: say(f"error: {text}")))


def command_line() -> list[str]:
    """The command as typed, for the run's manifest."""
    return ["flatpeak", *sys.argv[1:]]


@dataclass(frozen=True, kw_only=True)
class RunOutput:
    """The output of a command that trains: progress while it runs, its outcome, and its exit code."""

    label: str
    """The name of the command, with which its last line begins."""
    as_json: bool = False
    resumed_by: Sequence[str] | None = None
    """The arguments that resume the run, without options; None: `train` with the run's own config.yaml."""
    trains_policy: bool = True
    """Whether the run trains a policy, which the next commands can ask questions."""

    @contextmanager
    def progress(self, config: RunConfig) -> Iterator[PlainProgress | LiveProgress]:
        """The display of a run and its first line; on standard error if standard output is for the JSON object.

        The line is printed before torch is imported, which takes seconds.
        """
        stream = sys.stderr if self.as_json else sys.stdout
        try:
            # What a reward function prints in this process does not belong to the object that --json prints.
            with redirect_stdout(stream), open_progress(stream, metric=config.evaluation.metric) as progress:
                if not job_rank():
                    progress.say(first_line(config))
                yield progress
        except KeyboardInterrupt:
            if self.resumed_by is not None and not job_rank():
                typer.echo(
                    f"{self.label}: interrupted; resume it with\n{_resume_command(self.resumed_by)}", err=self.as_json
                )
            raise

    def finish(self, result: RunResult, last_line: str) -> None:
        """Print the outcome: `last_line`, or the command that resumes the run if a signal stopped it.

        A signal's exit code is 128 + its number. Of several processes, only the first prints.
        """
        if job_rank():
            return
        summary = result.summary
        if self.as_json:
            from flatpeak.runs.summary import finite

            content = {"path": str(result.path), "report": str(result.report), **asdict(summary)}
            typer.echo(json.dumps(finite(content), allow_nan=False))
        elif summary.signal is None:
            ended = [f"{self.label}: {summary.ended_by}"] if summary.ended_by else []
            following = [_next_line(result)] if self.trains_policy else []
            typer.echo("\n".join([*_answers(result), *ended, last_line, *following]))
        if summary.signal is not None:
            by = signal_name(summary.signal)
            if result.stopped_rank is not None:
                by += f" to rank {result.stopped_rank}"
            command = _resume_command(self.resumed_by or ["train", str(result.path / "config.yaml")])
            stopped = f"{self.label}: stopped by {by} after step {summary.last_step}"
            typer.echo(f"{stopped}; resume it with\n{command}", err=self.as_json)
        if result.exit_code:
            raise typer.Exit(result.exit_code)


def _answers(result: RunResult) -> list[str]:
    """The first held-out questions, with the greedy answers before the first step, after SFT, and after the last."""
    from flatpeak.runs.rollout_log import answers_over_run

    evaluations, after_sft = result.summary.evaluations, result.summary.evaluation("sft")
    if len(evaluations) < 2:
        return []
    labelled = [("before", evaluations[0]), ("after", evaluations[-1])]
    if after_sft is not None and after_sft is not evaluations[-1]:
        labelled.insert(1, ("after SFT", after_sft))
    names = [f"{evaluation.stage}_{evaluation.step:06d}" for _, evaluation in labelled]
    questions = answers_over_run(result.path / "evaluations", names)
    lines = ["held-out questions, with the answers before and after:"] if questions else []
    width = max(len(label) for label, _ in labelled)
    for rows in questions:
        lines.append(f"  {_on_one_line(rows[0]['question'])}")
        answers = zip(labelled, rows, strict=True)
        lines += [f"    {label:<{width}} {_on_one_line(row['text'])}" for (label, _), row in answers]
    return lines


def _next_line(result: RunResult) -> str:
    """The commands that go on from a finished run, on one line."""
    from flatpeak.report.story import next_commands
    from flatpeak.runs.rollout_log import logged_steps

    rollouts = bool(logged_steps(result.path / "rollouts"))
    commands = [command for command, _ in next_commands(result.path, result.summary, rollouts=rollouts)]
    return f"next: {' · '.join(commands[:2])} · open {shlex.quote(str(result.report))}"


def _on_one_line(text: str) -> str:
    """The beginning of a text, with control characters escaped so that the terminal does not obey them."""
    line = textwrap.shorten(text, ANSWER_WIDTH, placeholder=" ...")
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in line)


def _resume_command(arguments: Sequence[str]) -> str:
    """The command line that resumes a run, ready to paste into a shell."""
    return shlex.join(["flatpeak", *arguments, "--resume"])


def last_line(label: str, summary: RunSummary, *, since: EvaluationStage, report: Path) -> str:
    """`demo: held-out accuracy 0.41 -> 0.97 in 118 s, report: runs/demo/report.html`.

    The first number is from stage `since` (from the start, if the run had no such stage), the second from the last
    evaluation. Without an accuracy, it is the metric that chooses checkpoints.
    """
    first = summary.evaluation(since) or summary.evaluation("start")
    last = summary.evaluations[-1] if summary.evaluations else None
    name = "accuracy" if last is None or "accuracy" in last.metrics else summary.metric
    before, after = (format_metric(evaluation.metrics if evaluation else {}, name) for evaluation in (first, last))
    return f"{label}: held-out {name} {before} -> {after} in {summary.wall_seconds:.0f} s, report: {report}"


def format_metric(metrics: Mapping[str, float | None], name: str) -> str:
    """The metric with two decimals; `unknown` if it is missing."""
    value = metrics.get(name)
    return "unknown" if value is None else f"{value:.2f}"


@contextmanager
def open_progress(stream: TextIO, *, metric: str | None = None) -> Iterator[PlainProgress | LiveProgress]:
    """A display on `stream`, closed at the end even if the run fails: bars on a terminal, else lines.

    `metric` is the metric that chooses checkpoints; it is shown for evaluations without an accuracy.
    """
    if job_rank() or not stream.isatty():
        yield PlainProgress(stream, metric=metric)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    def unwrapped() -> Column:
        return Column(no_wrap=True)

    console = Console(file=stream)
    named = [name if console.width >= _WIDE else "" for name in ("elapsed", "left")]
    columns = (
        TextColumn("{task.description}", table_column=unwrapped()),
        BarColumn(bar_width=12, table_column=unwrapped()),
        MofNCompleteColumn(table_column=unwrapped()),
        TextColumn(named[0], table_column=unwrapped()),
        TimeElapsedColumn(table_column=unwrapped()),
        TextColumn(named[1], table_column=unwrapped()),
        TimeRemainingColumn(table_column=unwrapped()),
        # The only column that shrinks on a narrow terminal: it continues on a second line.
        TextColumn("{task.fields[metrics]}", table_column=Column()),
    )
    with Progress(*columns, console=console) as bars:
        yield LiveProgress(bars, metric=metric)


class LiveProgress:
    """A progress bar per stage, with its latest metrics beside it."""

    def __init__(self, bars: Bars, *, metric: str | None = None) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._line = MetricsLine(metric=metric)
        self._completions: TaskID | None = None
        self._are_slow = True
        self._stage = ""
        self._metrics: Mapping[str, float] = {}
        self._said: set[str] = set()

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Advance the stage's bar; an evaluation adds to the metrics of the stage it interrupts."""
        if stage == "eval":
            text = self._line.update({**self._metrics, **metrics})
            if self._stage:
                self._bars.update(self._tasks[self._stage], metrics=text)
            return
        if self._stage and stage != self._stage:
            self._end_stage()
        self._stage, self._metrics = stage, metrics
        text = self._line.update(metrics)
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, metrics=text)
        self._bars.update(self._tasks[stage], completed=step, total=total, metrics=text)

    def _end_stage(self) -> None:
        """Stop the clock of a stage that another follows, and fill its bar if it ended before its last step."""
        task = self._bars.tasks[self._tasks[self._stage]]
        line = early_end(self._stage, step=task.completed, total=task.total or 0)
        if line is not None:
            self.say(line)
        self._bars.update(task.id, total=task.completed)
        self._bars.stop_task(task.id)

    def sampled(self, completions: int, total: int) -> None:
        """Show the completions of a step or an evaluation in a bar of their own, until all are sampled."""
        if self._completions is None:
            self._completions = self._bars.add_task("completions", total=total, metrics="")
        elif completions == 0:
            self._bars.reset(self._completions, total=total)
        if completions == total:
            self._are_slow = (self._bars.tasks[self._completions].elapsed or 0) > _SLOW_SECONDS
        self._bars.update(self._completions, completed=completions, visible=self._are_slow and completions < total)

    def notice(self, text: str) -> None:
        """Print the notice above the bars."""
        self._bars.console.print(text, markup=False, highlight=False)

    def say(self, text: str) -> None:
        """Print a line about the run above the bars, once."""
        if text not in self._said:
            self._said.add(text)
            self.notice(text)
