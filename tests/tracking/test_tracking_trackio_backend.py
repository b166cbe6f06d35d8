"""trackio's store: two evaluations of one step are both kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatpeak.tracking.backend import MetricRow, RunFacts, Table
from flatpeak.tracking.config import TrackioConfig
from support.tracked_runs import read_trackio

pytest.importorskip("trackio", reason="pip install -e '.[dev]'")


def test_an_evaluation_of_more_questions_after_the_goal_is_kept_beside_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trackio.sqlite_storage
    import trackio.utils

    from flatpeak.tracking.trackio_backend import TrackioBackend

    for module in (trackio.utils, trackio.sqlite_storage):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    facts = RunFacts(name="r", directory=tmp_path, recipe={}, start={}, group=None, tags={})
    backend = TrackioBackend(TrackioConfig(project="twice"), facts, None)
    training = MetricRow(step=5, metrics={"reward/mean": 0.25, "time/step": 1.0})
    few = MetricRow(step=5, metrics={"eval/sums/accuracy": 1.0, "time/eval": 0.5})
    many = MetricRow(step=5, metrics={"eval/sums/accuracy": 0.875, "time/eval": 4.0})
    backend.log_rows([training, few])
    backend.log_rows([many])
    answers = [
        Table(name="completions", step=5, columns=("step", "text"), rows=rows) for rows in ([(5, "a")], [(5, "b")])
    ]
    for table in answers:
        backend.log_table(table)
    stored = read_trackio("twice")
    assert [point for point in stored.points if not point[0].startswith("time/")] == [
        ("reward/mean", 5, 0.25),
        ("eval/sums/accuracy", 5, 1.0),
        ("eval/sums/accuracy", 5, 0.875),
    ]
    assert stored.completions == [[5, "a"], [5, "b"]]
