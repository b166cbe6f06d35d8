"""What `train`, `sft`, `demo` and `reward-model` share: recipe in, run, last line, exit code."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from flatpeak.pipeline.progress import Figures, PlainProgress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from flatpeak.config.run_config import RunConfig
    from flatpeak.pipeline.lifecycle import RunResult
    from flatpeak.protocols import Progress
    from flatpeak.runs.summary import EvaluationStage, RunSummary


@contextmanager
def open_progress(stream: TextIO, *, metric: str | None = None) -> Iterator[Progress]:
    """A display on `stream`, closed at the end also when the run fails.

    `metric` is what chooses checkpoints, shown of evaluations that have no accuracy.
    """
    if not stream.isatty():
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

    def whole() -> Column:
        return Column(no_wrap=True)

    columns = (
        TextColumn("{task.description}", table_column=whole()),
        BarColumn(bar_width=12, table_column=whole()),
        MofNCompleteColumn(table_column=whole()),
        TimeElapsedColumn(table_column=whole()),
        TimeRemainingColumn(table_column=whole()),
        # The only column that gives way on a narrow terminal: it goes on in a second line.
        TextColumn("{task.fields[figures]}", table_column=Column()),
    )
    with Progress(*columns, console=Console(file=stream)) as bars:
        yield LiveProgress(bars, metric=metric)


class LiveProgress:
    """One bar per stage, with its latest figures beside it."""

    def __init__(self, bars: Bars, *, metric: str | None = None) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}
        self._figures = Figures(metric=metric)
        self._stage = ""
        self._metrics: Mapping[str, float] = {}

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Advance the stage's bar; an evaluation adds to the figures of the stage it interrupts."""
        if stage == "eval":
            text = self._figures.update({**self._metrics, **metrics})
            if self._stage:
                self._bars.update(self._tasks[self._stage], figures=text)
            return
        self._stage, self._metrics = stage, metrics
        text = self._figures.update(metrics)
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total, figures=text)
        self._bars.update(self._tasks[stage], completed=step, total=total, figures=text)

    def notice(self, text: str) -> None:
        """Print above the bars."""
        self._bars.console.print(text, markup=False, highlight=False)


Recipe = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file, or a shipped recipe: flatpeak:NAME.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to change, such as optimizer.learning_rate=1e-5."),
]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest valid checkpoint.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Delete the run of that name first.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the whole recipe, defaults included; stop.")]


_SIGNALS = {int(signal.SIGINT): "Ctrl-C", int(signal.SIGTERM): "SIGTERM"}


def resume_command(arguments: Sequence[str]) -> str:
    """The command line that resumes a run, ready to be pasted into a shell."""
    return shlex.join(["flatpeak", *arguments, "--resume"])


def read_config(recipe: str, overrides: Sequence[str] | None) -> RunConfig:
    """The checked recipe; imports no torch."""
    from flatpeak.config.load import load_recipe, parse_config

    return parse_config(load_recipe(recipe, overrides or ()))


def print_config(config: RunConfig) -> None:
    """The whole recipe as YAML."""
    import yaml

    typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True), nl=False)


def run_and_tell(
    stage: Literal["train", "sft", "train_reward_model"],
    config: RunConfig,
    *,
    resume: bool,
    overwrite: bool,
    as_json: bool = False,
    label: str,
    line: Callable[..., str],
    again: Sequence[str],
) -> None:
    """Run the recipe and print the outcome, `line(summary, report=)` where it came to its end.

    `again` is the command's arguments, without options, that would resume the run. Exits with 130 or 143 where a
    signal stopped it.
    """
    import flatpeak
    from flatpeak.runs.directory import check_start

    # Before torch is imported: none of what is refused here depends on the model or the task.
    resolved, chosen = config.model_dump(mode="json"), config.model_dump(mode="json", exclude_defaults=True)
    check_start(config.run, resolved, resume=resume, overwrite=overwrite, chosen=chosen)

    def start(progress: Progress) -> RunResult:
        command = ["flatpeak", *sys.argv[1:]]
        result: RunResult = getattr(flatpeak, stage)(
            config, progress=progress, resume=resume, overwrite=overwrite, command=command
        )
        return result

    show_run(start, metric=config.evaluation.metric, as_json=as_json, label=label, line=line, again=again)


def show_run(
    start: Callable[[Progress], RunResult],
    *,
    metric: str,
    as_json: bool,
    label: str,
    line: Callable[..., str],
    again: Sequence[str] | None = None,
) -> None:
    """Run, show it meanwhile, and print the outcome as `run_and_tell` does; without `again`, the run is resumed by its
    own config.yaml."""

    stream = sys.stderr if as_json else sys.stdout
    try:
        # What a reward function prints in this process is no part of the object that --json prints.
        with redirect_stdout(stream), open_progress(stream, metric=metric) as progress:
            result = start(progress)
    except KeyboardInterrupt:
        if again is not None:
            typer.echo(f"{label}: interrupted; resume it with\n{resume_command(again)}", err=as_json)
        raise
    summary = result.summary
    if as_json:
        typer.echo(json.dumps({"path": str(result.path), "report": str(result.report), **asdict(summary)}))
    elif summary.signal is None:
        typer.echo(line(summary, report=result.report))
    if summary.signal is not None:
        by = _SIGNALS.get(summary.signal, f"signal {summary.signal}")
        command = resume_command(again or ["train", str(result.path / "config.yaml")])
        typer.echo(f"{label}: stopped by {by} after step {summary.last_step}; resume it with\n{command}", err=as_json)
    if result.exit_code:
        raise typer.Exit(result.exit_code)


def last_line(label: str, summary: RunSummary, *, since: EvaluationStage, report: Path) -> str:
    """`demo: held-out accuracy 0.41 -> 0.97 in 118 s, report: runs/demo/report.html`.

    The first figure is of stage `since` (of the start, where the run had no such stage), the second of the last
    evaluation there is. Where nothing says which answers are right it is the metric that chooses checkpoints.
    """
    first = summary.evaluation(since) or summary.evaluation("start")
    last = summary.evaluations[-1] if summary.evaluations else None
    name = "accuracy" if last is None or "accuracy" in last.metrics else summary.metric
    before, after = (_figure(found.metrics.get(name) if found else None) for found in (first, last))
    return f"{label}: held-out {name} {before} -> {after} in {summary.wall_seconds:.0f} s, report: {report}"


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f}"
