"""Reading what trackers have stored, each by its own library: {metric: {step: value}} and tables of text."""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatpeak.runs.metrics import read_metrics
from flatpeak.tracking.trackers import Steps

Curves = dict[str, dict[int, float]]
_BLOCK = 32768
"""Bytes of a block of a .wandb file, which is a log as LevelDB writes it."""


@dataclass
class Stored:
    """The content of one tracker's store."""

    points: list[tuple[str, int, float]] = field(default_factory=list)
    """(metric, step, value), as often as each is stored."""
    completions: list[list[Any]] = field(default_factory=list)
    texts: str = ""
    """Notices, recipe, versions: whatever else is stored, to be searched."""

    @property
    def curves(self) -> Curves:
        """The points by metric and step; an error where a step has two."""
        curves: Curves = defaultdict(dict)
        for name, step, value in self.points:
            assert step not in curves[name], f"{name} has step {step} twice"
            curves[name][step] = value
        return dict(curves)


def expected(run: Path) -> Curves:
    """The curves that metrics.jsonl of a run has, its steps numbered through."""
    curves: Curves = defaultdict(dict)
    steps = Steps()
    for row in read_metrics(run / "metrics.jsonl"):
        number = steps.number(row["stage"], row["step"])
        for name, value in row.items():
            if name not in ("step", "stage") and value is not None:
                curves[name][number] = value
    return dict(curves)


def read_tensorboard(directory: Path) -> Stored:
    """The event files of a run."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    stored = Stored()
    for file in sorted(directory.iterdir()):
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    stored.points.append((value.tag, event.step, value.simple_value))
                    continue
                text = value.tensor.string_val[0].decode()
                stored.texts += f"{value.tag}: {text}\n"
                if value.tag == "completions":
                    lines = [line.strip("| ").split(" | ") for line in text.splitlines()[2:]]
                    stored.completions += [[int(step), *rest] for step, *rest in lines]
    return stored


def read_trackio(project: str) -> Stored:
    """All runs of a project in trackio's store."""
    from trackio.sqlite_storage import SQLiteStorage

    stored = Stored()
    for run in SQLiteStorage.get_runs(project):
        stored.texts += f"{run} {SQLiteStorage.get_run_config(project, run)}\n"
        stored.texts += f"{SQLiteStorage.get_alerts(project, run)} {SQLiteStorage.list_artifacts(project)}\n"
        for row in SQLiteStorage.get_logs(project, run):
            for name, value in row.items():
                if name in ("timestamp", "step"):
                    continue
                if isinstance(value, Mapping):
                    rows = [list(one.values()) for one in value["_value"]]
                    stored.completions += rows if name == "completions" else []
                    stored.texts += f"{name}: {rows}\n"
                else:
                    stored.points.append((name, row["step"], value))
    return stored


def read_mlflow(uri: str) -> Stored:
    """All runs of the experiment `flatpeak`."""
    import json

    from mlflow.tracking import MlflowClient

    client, stored = MlflowClient(tracking_uri=uri), Stored()
    experiment = client.get_experiment_by_name("flatpeak")
    for run in client.search_runs([experiment.experiment_id]):
        id_ = run.info.run_id
        stored.texts += f"{run.info.run_name} {run.info.status} {run.data.params} {run.data.tags}\n"
        for name in run.data.metrics:
            for point in client.get_metric_history(id_, name):
                stored.points.append((name.replace("_at_", "@"), point.step, point.value))
        folder = Path(run.info.artifact_uri.removeprefix("file://"))
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            text = path.read_text()
            stored.texts += f"{path.relative_to(folder)}: {text}\n"
            if path.parent.name == "completions":
                stored.completions += json.loads(text)["data"]
    return stored


def read_wandb(directory: Path) -> Stored:
    """The offline files of all starts of a run, as `wandb sync` would send them."""
    import json

    from wandb.proto import wandb_internal_pb2

    stored, merged = Stored(), dict[int, dict[str, Any]]()
    for part in sorted(directory.glob("offline-run-*")):
        for data in _records(next(part.glob("*.wandb")).read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            stored.texts += str(record)
            if record.WhichOneof("record_type") != "history":
                continue
            items: dict[str, Any] = defaultdict(dict)
            for item in record.history.item:
                if len(item.nested_key) > 1:  # a table, which lies in a file
                    items[item.nested_key[0]][item.nested_key[1]] = json.loads(item.value_json)
                else:
                    items[item.key or item.nested_key[0]] = json.loads(item.value_json)
            step = record.history.step.num
            for name, value in items.items():
                if name.startswith("_"):
                    continue
                # Parts of one step come one after the other, and the service merges them.
                assert name not in merged.setdefault(step, {}), f"{name} has step {step} twice"
                merged[step][name] = value
                if isinstance(value, dict):
                    table = json.loads((part / "files" / value["path"]).read_text())
                    stored.completions += table["data"] if name == "completions" else []
                else:
                    stored.points.append((name, step, value))
    return stored


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format: pieces with a header of checksum, length and kind, in blocks."""
    assert data[:4] == b":W&B"
    place, record = 7, b""
    while place + 7 <= len(data):
        if _BLOCK - place % _BLOCK < 7:
            place += _BLOCK - place % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        place += 7
        if kind == 0:
            return
        record += data[place : place + length]
        place += length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""
