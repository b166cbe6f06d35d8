"""The display of a command: live on a terminal, an occasional line elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from flatpeak.pipeline.progress import Figures, PlainProgress

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID

    from flatpeak.protocols import Progress


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
