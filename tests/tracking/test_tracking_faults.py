"""Runs whose trackers fail, hang or lose their directory end as they would without, and on time."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from flatpeak.errors import UserError
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.notices import read_notices
from flatpeak.tracking import background, trackers
from flatpeak.tracking.backend import RunFacts
from flatpeak.tracking.config import TrackingConfig
from support.runs import Recipe, Train, Watcher
from support.workers import wait_for

pytestmark = pytest.mark.usefixtures("one_thread")


class Raising:
    """A tracker of which everything but opening fails."""

    identity, message, rows_first = "x", None, False

    def __getattr__(self, name: str) -> Callable[..., None]:
        def fail(*arguments: object) -> None:
            raise RuntimeError("no tracker")

        return fail


class Blocking(Raising):
    """A tracker that takes a minute for a row."""

    def log_rows(self, rows: object) -> None:
        threading.Event().wait(60)


def weights(run: Path) -> dict[str, bytes]:
    tensors = load_file(run / "checkpoints" / "last" / "model.safetensors")
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


@pytest.fixture
def plain(recipe: Recipe, train: Train) -> dict[str, bytes]:
    """The weights of the run without trackers."""
    return weights(train(recipe(run={"name": "plain"}, training={"steps": 3})).path)


def use(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    monkeypatch.setattr(trackers, "_openers", lambda config, facts: {"fake": lambda identity: backend})


@pytest.mark.parametrize("backend", [Raising, Blocking])
def test_a_tracker_that_fails_or_hangs_changes_nothing(
    recipe: Any, train: Any, plain: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    use(monkeypatch, backend())
    monkeypatch.setattr(background, "INTERVAL", 0.01)
    monkeypatch.setattr(trackers, "LONGEST_END", 0.5)
    watcher = Watcher()
    started = time.monotonic()
    result = train(recipe(training={"steps": 3}), progress=watcher)
    assert time.monotonic() - started < 50  # of the minute that a row would take
    assert weights(result.path) == plain
    assert len([text for text in watcher.notices if "tracking.fake" in text]) == 1
    assert len([row for row in read_notices(result.path / "notices.jsonl") if "tracking.fake" in row["text"]]) == 1
    assert [row["step"] for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"] == [1, 2, 3]


def test_a_lost_directory_is_told_once_and_changes_nothing(
    recipe: Any, train: Any, plain: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.setattr(background, "PAUSES", (0.0,))
    monkeypatch.setattr(background, "INTERVAL", 0.01)
    events = tmp_path / "events"

    def lose() -> None:
        wait_for(lambda: list(events.rglob("events*")), within=60)
        shutil.rmtree(events)

    watcher = Watcher({("train", 1): lose})
    config = recipe(training={"steps": 3}, tracking={"tensorboard": {"directory": str(events)}})
    result = train(config, progress=watcher)
    assert weights(result.path) == plain
    (message,) = [text for text in watcher.notices if "tracking." in text]
    assert "tracking.tensorboard failed (FileNotFoundError" in message


def test_runs_of_one_name_have_event_files_of_their_own(recipe: Any, train: Any, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from support.tracked_runs import read_tensorboard

    events = tmp_path / "events"
    tracking = {"tensorboard": {"directory": str(events)}}
    for folder, steps in (("here", 3), ("there", 2)):
        sections = {"run": {"name": "same", "directory": str(tmp_path / folder), "checkpoint_every": 1}}
        train(recipe(**sections, training={"steps": steps}, tracking=tracking))
    train(recipe(**sections, training={"steps": 4}, tracking=tracking), resume=True)
    assert sorted(path.name for path in events.iterdir()) == ["same", "same-2"]
    steps_of = {path.name: sorted(read_tensorboard(path).curves["reward/mean"]) for path in events.iterdir()}
    assert steps_of == {"same": [1, 2, 3], "same-2": [1, 2, 3, 4]}


def test_a_run_of_one_process_is_tracked_whatever_rank_its_surroundings_name(
    recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, Raising())
    monkeypatch.setenv("RANK", "1")
    watcher = Watcher()
    train(recipe(training={"steps": 1}), progress=watcher)
    assert [text for text in watcher.notices if "no tracker" in text]


def test_a_run_that_is_discarded_leaves_nothing(recipe: Any, train: Any) -> None:
    pytest.importorskip("tensorboard")

    def refuse(completions: list[str]) -> list[float]:
        raise UserError("no reward today")

    with pytest.raises(UserError):
        train(recipe(tracking={"tensorboard": {}}), reward=refuse)
    left = [path for path in Path(recipe()["run"]["directory"]).rglob("*") if path.is_file() and path.name != ".lock"]
    assert left == []


def test_the_lock_is_released_after_the_trackers(recipe: Any, train: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    class Watching(Raising):
        def log_rows(self, rows: object) -> None: ...

        def finish(self, status: str) -> None:
            seen.append((status, (Path(recipe()["run"]["directory"]) / "tiny" / ".lock").read_text() != ""))

    use(monkeypatch, Watching())
    train(recipe(training={"steps": 1}))
    assert seen == [("done", True)]


SCRIPT = """
import sys, threading, flatpeak
from flatpeak.tracking import background, trackers
from flatpeak.tracking.backend import RunFacts
from flatpeak.tracking.config import TrackingConfig
from support.runs import tiny_recipe
from pathlib import Path

class Hanging:
    identity, message, rows_first = "x", None, False
    def log_rows(self, rows):
        print("hanging", flush=True)
        threading.Event().wait(60)
    log_table = log_notice = log_report = finish = log_rows

background.INTERVAL = 0.01
trackers._openers = lambda config, facts: {"fake": lambda identity: Hanging()}
recipe = tiny_recipe(Path(sys.argv[1]), training={"steps": 100000}, tracking={"tensorboard": {}})
sys.exit(flatpeak.train(recipe, progress=False).exit_code)
"""


@pytest.mark.slow
def test_an_interrupted_run_with_a_tracker_that_hangs_ends_within_seconds(tmp_path: Path) -> None:
    paths = [str(Path(__file__).parents[1]), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "hanging\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=40) == 130  # of the minute for which it hangs
    finally:
        process.kill()
        process.wait()
    assert (tmp_path / "tiny" / "checkpoints" / "last").exists()


def test_a_tracker_that_a_resumed_run_gets_has_every_step_once_and_another_goes_on(
    recipe: Any, train: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    from flatpeak.tracking.config import TensorBoardConfig
    from flatpeak.tracking.tensorboard_backend import TensorBoardBackend
    from support.tracked_runs import expected, read_tensorboard

    sections = {"run": {"checkpoint_every": 2}}
    first, both = {"tensorboard": {}}, {"tensorboard": {}, "trackio": {}}
    train(recipe(**sections, training={"steps": 3}, tracking=first))
    opened = {}
    original = trackers._openers

    def openers(config: Any, facts: Any) -> Any:
        def added(identity: str | None) -> Any:
            opened["added"] = identity
            return TensorBoardBackend(TensorBoardConfig(directory=str(tmp_path / "added")), facts, identity)

        return {"tensorboard": original(config, facts)["tensorboard"], "trackio": added}

    monkeypatch.setattr(trackers, "_openers", openers)
    result = train(recipe(**sections, training={"steps": 5}, tracking=both), resume=True)
    assert opened == {"added": None}
    wanted = expected(result.path)
    assert sorted(wanted["reward/mean"]) == [1, 2, 3, 4, 5]
    for folder in (result.path / "tracking" / "tensorboard", tmp_path / "added" / "tiny"):
        curves = read_tensorboard(folder).curves
        assert curves["reward/mean"] == pytest.approx(wanted["reward/mean"])
        assert curves["eval/arithmetic/accuracy"] == pytest.approx(wanted["eval/arithmetic/accuracy"])


def test_a_lone_surrogate_reaches_every_tracker_as_its_escape(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    class Storing(Raising):
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda content: seen.append(content)

    use(monkeypatch, Storing())
    facts = RunFacts(name="x", directory=tmp_path, recipe={}, start={}, group=None, tags={})
    opened = trackers.open_trackers(TrackingConfig(), facts, earlier=list, notice=lambda text: None)
    row = {"prompt": "a", "text": "\ud83d b", "reward": 1.0, "rewards": {"length": None}, "advantage": 0.5}
    opened.log_completions([row], step=10)
    results = {"task": "sums", "metrics": {"accuracy": 0.5}, "intervals": {}}
    opened.log_evaluation(results, [{"id": "1", "gold": ["\udc00"], "text": "\ud83d"}], step=10)
    opened.log_notice("\ud83d c")
    opened.close("done")
    completions, estimates, answers, notice, _ = seen
    assert list(completions.rows[0]) == [10, "a", "\\ud83d b", 1.0, None, 0.5]
    assert list(estimates.rows[0]) == [10, "accuracy", 0.5, None, None]
    assert list(answers.rows[0]) == [10, "1", ["\\udc00"], "\\ud83d"]
    assert notice.text == "\\ud83d c"
