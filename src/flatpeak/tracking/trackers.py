"""The trackers of a run together: numbering of steps, tables, and the start and end of all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from flatpeak.tracking.backend import Backend, MetricRow, NoticeRow, Report, RunFacts, Table
from flatpeak.tracking.background import LONGEST_END, BackgroundTracker, Entry
from flatpeak.tracking.config import MlflowConfig, TensorBoardConfig, TrackingConfig, TrackioConfig, WandbConfig
from flatpeak.utils.redaction import redact
from flatpeak.utils.schema import StrictConfig

FOLDER = "tracking"
"""The folder of a run that holds the state of its trackers and, unless a recipe says otherwise, their files."""
INTERRUPTED_END = 5.0
"""Seconds that a run which was stopped waits for its trackers in all."""
SENDING_END = 300.0
"""Seconds that a start with nothing left to train, which only sends what is missing, waits for its trackers in all."""
COMPLETIONS, METRICS, EVALUATION = 0, 1, 2
"""The order of what belongs to one step."""


class Steps:
    """The numbering of steps over a whole run: those of RL follow those of SFT."""

    def __init__(self) -> None:
        self._sft = 0
        self._offset = 0

    def number(self, stage: str, step: int) -> int:
        """The step of a row of metrics.jsonl, given all rows before it; an evaluation belongs to the stage it is in."""
        if stage == "sft":
            self._sft, self._offset = step, 0
        elif stage == "train":
            self._offset = self._sft
        return self._offset + step


class Trackers:
    """All trackers of a run; a run without any has an empty one, which does nothing."""

    def __init__(
        self,
        config: TrackingConfig,
        trackers: Sequence[BackgroundTracker] = (),
        *,
        steps: Steps | None = None,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._config = config
        self.parts = tuple(trackers)
        """Each tracker behind its own queue."""
        self._steps = steps or Steps()
        self._notice = notice
        self._step = 0
        self._trained = False
        self._closed = False

    def log(self, metrics: Mapping[str, float], *, step: int, stage: str) -> None:
        """Record a row of metrics.jsonl."""
        if not self.parts:
            return
        self._trained = True
        self._step = self._steps.number(stage, step)
        self._offer(_metric_entry(metrics, step=self._step, stage=stage))
        self._give_notices()

    def wants_completions(self, step: int) -> bool:
        """Whether this step of RL gets a table of completions."""
        every = self._config.completions_every
        return bool(self.parts and every and step % every == 0)

    def log_completions(self, rows: Iterable[Mapping[str, Any]], *, step: int) -> None:
        """Record a table of the first completions of a step of RL, rows as in the rollouts' files."""
        number = self._steps.number("train", step)
        chosen = list(islice(rows, self._config.completions))
        components = list(chosen[0]["rewards"]) if chosen else []
        parts = [f"reward/{component}" for component in components]
        rewards = [(row["reward"], *map(row["rewards"].get, components)) for row in chosen]
        table = Table(
            name="completions",
            step=number,
            columns=("step", "question", "text", "reward", *parts, "advantage"),
            rows=_encodable(
                [
                    (number, row["prompt"], row["text"], *scores, row["advantage"])
                    for row, scores in zip(chosen, rewards, strict=True)
                ]
            ),
        )
        self._offer(Entry(content=table, position=(number, COMPLETIONS)))

    def log_evaluation(self, results: Mapping[str, Any], answers: Sequence[Mapping[str, Any]], *, step: int) -> None:
        """Record an evaluation's table of results, as the summary has them, and the first answers."""
        if not self.parts:
            return
        number = self._steps.number("eval", step)
        intervals = results["intervals"]
        estimates = [
            (number, metric, value, *intervals.get(metric, (None, None)))
            for metric, value in results["metrics"].items()
        ]
        first_answers = [
            (number, row.get("id"), row.get("gold"), row.get("text"))
            for row in islice(answers, self._config.completions)
        ]
        tables = (
            (f"evaluation/{results['task']}", ("step", "metric", "value", "low", "high"), estimates),
            (f"answers/{results['task']}", ("step", "id", "gold", "text"), redact(first_answers, prose=True)),
        )
        for name, columns, rows in tables:
            table = Table(name=name, step=number, columns=columns, rows=_encodable(rows))
            self._offer(Entry(content=table, position=(number, EVALUATION)))

    def log_notice(self, text: str) -> None:
        """Record a notice that the run has given."""
        self._offer(Entry(content=NoticeRow(step=self._step, text=_encodable(text))))

    def log_report(self, path: Path) -> None:
        """Record the report page."""
        if path.is_file():
            self._offer(Entry(content=Report(path=path)))

    def close(self, status: str) -> None:
        """Let every tracker write what it has, all at the same time, and give their last notices."""
        if self._closed:
            return
        self._closed = True
        only_sends = status == "done" and not self._trained
        longest = INTERRUPTED_END if status == "stopped" else SENDING_END if only_sends else LONGEST_END
        for tracker in self.parts:
            tracker.begin_closing(status)
        started = time.monotonic()
        for tracker in self.parts:
            left = max(0.0, longest - (time.monotonic() - started))
            tracker.wait_closed(longest=left, opening=left if only_sends else None)
        self._give_notices()

    def _offer(self, entry: Entry) -> None:
        for tracker in self.parts:
            tracker.offer(entry)

    def _give_notices(self) -> None:
        for tracker in self.parts:
            for text in tracker.messages():
                self._notice(text)


def open_trackers(
    config: TrackingConfig,
    facts: RunFacts,
    *,
    earlier: Callable[[], Sequence[Mapping[str, Any]]],
    notice: Callable[[str], None],
) -> Trackers:
    """Start the trackers of a recipe; `earlier` reads the rows that metrics.jsonl has."""
    openers = _openers(config, facts)
    if not openers:
        return Trackers(config)
    steps = Steps()
    entries = []
    for row in earlier():
        metrics = {name: value for name, value in row.items() if name not in ("step", "stage") and value is not None}
        entries.append(_metric_entry(metrics, step=steps.number(row["stage"], row["step"]), stage=row["stage"]))
    folder = facts.directory / FOLDER
    destinations = {name: _destination(section) for name, section in config if isinstance(section, StrictConfig)}
    trackers = [
        BackgroundTracker(
            name, opener, state=folder / f"{name}.json", destination=destinations.get(name, ""), earlier=entries
        )
        for name, opener in openers.items()
    ]
    return Trackers(config, trackers, steps=steps, notice=notice)


def _destination(section: StrictConfig) -> str:
    """A digest of where a tracker records: an address may hold a password. The mode of a run says nothing of that."""
    return blake2b(section.model_dump_json(exclude={"mode"}).encode(), digest_size=8).hexdigest()


def _metric_entry(metrics: Mapping[str, float], *, step: int, stage: str) -> Entry:
    """The finite metrics of a row: what is null in metrics.jsonl is left out."""
    finite = {name: number for name, value in metrics.items() if math.isfinite(number := float(value))}
    return Entry(
        content=MetricRow(step=step, metrics=finite), position=(step, EVALUATION if stage == "eval" else METRICS)
    )


def _encodable(value: Any) -> Any:
    """A text, or any nesting of sequences, with lone surrogates escaped: trackio and MLflow refuse them."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_encodable(item) for item in value]
    return value


def _openers(config: TrackingConfig, facts: RunFacts) -> dict[str, Callable[[str | None], Backend]]:
    openers: dict[str, Callable[[str | None], Backend]] = {}
    if config.wandb is not None:
        openers["wandb"] = partial(_open_wandb, config.wandb, facts)
    if config.tensorboard is not None:
        openers["tensorboard"] = partial(_open_tensorboard, config.tensorboard, facts)
    if config.trackio is not None:
        openers["trackio"] = partial(_open_trackio, config.trackio, facts)
    if config.mlflow is not None:
        openers["mlflow"] = partial(_open_mlflow, config.mlflow, facts)
    return openers


# Each is called in its tracker's thread, so that the seconds of an import are not the run's.
def _open_wandb(config: WandbConfig, facts: RunFacts, identity: str | None) -> Backend:
    from flatpeak.tracking.wandb_backend import WandbBackend

    return WandbBackend(config, facts, identity, folder=facts.directory / FOLDER)


def _open_tensorboard(config: TensorBoardConfig, facts: RunFacts, identity: str | None) -> Backend:
    from flatpeak.tracking.tensorboard_backend import TensorBoardBackend

    return TensorBoardBackend(config, facts, identity, folder=facts.directory / FOLDER)


def _open_trackio(config: TrackioConfig, facts: RunFacts, identity: str | None) -> Backend:
    from flatpeak.tracking.trackio_backend import TrackioBackend

    return TrackioBackend(config, facts, identity)


def _open_mlflow(config: MlflowConfig, facts: RunFacts, identity: str | None) -> Backend:
    from flatpeak.tracking.mlflow_backend import MlflowBackend

    return MlflowBackend(config, facts, identity)
