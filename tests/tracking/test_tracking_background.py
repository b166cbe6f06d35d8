"""A tracker's queue: what it holds, what it drops, and how its errors stay with it."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from flatpeak.tracking import background
from flatpeak.tracking.backend import MetricRow, NoticeRow, Table
from flatpeak.tracking.background import BackgroundTracker, Entry


class Fake:
    """A backend that keeps what it gets; `before` is called at every row or table, and may raise or block."""

    message: str | None = None
    interval = 0.01
    rows_first = False

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        self.identity = "fake"
        self.before = before
        self.steps: list[int] = []
        self.batches: list[int] = []
        self.status: str | None = None

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        self.before()
        self.steps += [row.step for row in rows]
        self.batches.append(len(rows))

    def log_table(self, table: Table) -> None:
        self.before()
        self.steps.append(table.step)

    def log_notice(self, notice: NoticeRow) -> None:
        self.steps.append(notice.step)

    def log_report(self, path: Path) -> None: ...

    def finish(self, status: str) -> None:
        self.status = status


def row(step: int, metrics: int = 2) -> Entry:
    return Entry(content=MetricRow(step=step, metrics={f"m{n}": 0.5 for n in range(metrics)}), position=(step, 1))


def start(fake: Any, path: Path, **options: Any) -> BackgroundTracker:
    return BackgroundTracker("fake", lambda identity: fake, state=path / "fake.json", **options)


def finish(tracker: BackgroundTracker, status: str = "done") -> None:
    tracker.begin_closing(status)
    tracker.wait_closed()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES", (0.0, 0.01, 0.01))


def test_entries_arrive_in_their_order_and_the_state_says_how_far(tmp_path: Path) -> None:
    fake = Fake()
    tracker = start(fake, tmp_path)
    for step in range(50):
        tracker.offer(row(step))
    finish(tracker, "stopped")
    assert fake.steps == list(range(50))
    assert fake.status == "stopped"
    assert json.loads((tmp_path / "fake.json").read_text()) == {
        "id": "fake",
        "sent": [49, 1],
        "unsent": [],
        "dropped": 0,
        "destination": "",
    }


def test_a_later_start_skips_what_is_sent_and_begins_with_earlier_rows(tmp_path: Path) -> None:
    (tmp_path / "fake.json").write_text(json.dumps({"id": "x", "sent": [3, 1], "dropped": 2, "destination": ""}))
    fake, ids = Fake(), []
    tracker = BackgroundTracker(
        "fake",
        lambda identity: ids.append(identity) or fake,  # type: ignore[func-returns-value]
        state=tmp_path / "fake.json",
        earlier=[row(step) for step in range(1, 6)],
    )
    for step in (3, 6):
        tracker.offer(row(step))
    finish(tracker)
    assert ids == ["x"]
    assert fake.steps == [4, 5, 6]
    assert tracker.dropped == 2


def test_nothing_is_dropped_while_a_library_is_slow_to_load(tmp_path: Path) -> None:
    fake, loaded = Fake(), threading.Event()
    tracker = BackgroundTracker("fake", lambda identity: loaded.wait(20) and fake, state=tmp_path / "fake.json")  # type: ignore[arg-type,return-value]
    for step in range(2000):  # steps of milliseconds, sixty metrics each
        tracker.offer(row(step, metrics=60))
    loaded.set()
    finish(tracker)
    assert len(fake.steps) == 2000
    assert max(fake.batches) == 16  # 960 metrics, of at most 1000
    assert tracker.dropped == 0


def test_rows_may_overtake_tables_where_that_makes_batches_larger(tmp_path: Path) -> None:
    loaded = threading.Event()
    ends = []
    for rows_first in (False, True):
        fake = Fake()
        fake.rows_first = rows_first
        tracker = BackgroundTracker(
            "fake",
            lambda identity, fake=fake: loaded.wait(20) and fake,  # type: ignore[misc]
            state=tmp_path / f"{rows_first}.json",
        )
        for step in range(4):
            tracker.offer(Entry(content=Table(name="t", step=10 + step, columns=(), rows=()), position=(step, 0)))
            tracker.offer(row(step))
        ends.append((fake, tracker))
    loaded.set()
    for _, tracker in ends:
        finish(tracker)
    assert [fake.steps for fake, _ in ends] == [[10, 0, 11, 1, 12, 2, 13, 3], [0, 1, 2, 3, 10, 11, 12, 13]]
    assert [fake.batches for fake, _ in ends] == [[1, 1, 1, 1], [4]]


def test_a_full_queue_drops_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "ROOM", 3 * row(0).size)
    entered, go_on = threading.Event(), threading.Event()

    def before() -> None:
        entered.set()
        go_on.wait(20)

    fake = Fake(before)
    tracker = start(fake, tmp_path)
    tracker.offer(row(0))
    assert entered.wait(20)
    for step in range(1, 9):
        tracker.offer(row(step))
    go_on.set()
    finish(tracker)
    assert fake.steps == [0, 1, 2, 3]
    (message,) = tracker.messages()
    assert "too slowly" in message
    assert tracker.dropped == 0
    assert json.loads((tmp_path / "fake.json").read_text())["unsent"] == [[step, 1] for step in range(4, 9)]
    later = Fake()
    finish(start(later, tmp_path, earlier=[row(step) for step in range(9)]))
    assert later.steps == [4, 5, 6, 7, 8]


def test_rows_of_an_outage_in_the_middle_are_sent_by_a_later_start_once(tmp_path: Path) -> None:
    class Away(Fake):
        def log_rows(self, rows: Sequence[MetricRow]) -> None:
            if rows[0].step == 3:
                raise ConnectionError("away")
            super().log_rows(rows)

    fake = Away()
    tracker = start(fake, tmp_path)
    for step in range(1, 7):
        tracker.offer(row(step))
        deadline = time.monotonic() + 20
        while len(fake.steps) + len(tracker._unsent) < step and time.monotonic() < deadline:
            time.sleep(0.001)
    finish(tracker)
    assert fake.steps == [1, 2, 4, 5, 6]
    (message,) = tracker.messages()
    assert "--resume sends the metrics that are missing then" in message
    for wanted in ([3, 7], []):
        later = Fake()
        finish(start(later, tmp_path, earlier=[row(step) for step in range(1, 8)]))
        assert later.steps == wanted
    assert tracker.dropped == 0


def test_an_error_is_told_once_and_rows_that_a_retry_sends_are_not_dropped(tmp_path: Path) -> None:
    errors = [ConnectionError("away"), ConnectionError("away")]

    def before() -> None:
        if errors:
            raise errors.pop()

    fake = Fake(before)
    tracker = start(fake, tmp_path)
    tracker.offer(row(1))
    while errors:
        time.sleep(0.001)
    tracker.offer(row(2))
    finish(tracker)
    assert fake.steps == [1, 2]
    assert tracker.dropped == 0
    (message,) = tracker.messages()
    assert "tracking.fake failed (ConnectionError: away)" in message


def test_what_stays_refused_is_dropped_and_the_rest_goes_on(tmp_path: Path) -> None:
    def refuse() -> None:
        raise ValueError("no")

    fake = Fake()
    fake.log_table = lambda table: refuse()  # type: ignore[method-assign]
    tracker = start(fake, tmp_path)
    tracker.offer(row(1))
    tracker.offer(Entry(content=Table(name="t", step=2, columns=(), rows=()), position=(2, 0)))
    tracker.offer(row(2))
    deadline = time.monotonic() + 20
    while fake.steps != [1, 2] and time.monotonic() < deadline:
        time.sleep(0.001)
    finish(tracker)
    assert fake.steps == [1, 2]
    assert tracker.dropped == 1
    assert json.loads((tmp_path / "fake.json").read_text())["dropped"] == 1


def test_a_missing_library_is_told_with_what_to_install(tmp_path: Path) -> None:
    def missing(identity: str | None) -> Any:
        raise ModuleNotFoundError("No module named 'fake'")

    tracker = BackgroundTracker("fake", missing, state=tmp_path / "fake.json")
    tracker.offer(row(1))
    finish(tracker)
    tracker.offer(row(2))
    (message,) = tracker.messages()
    assert "pip install 'flatpeak[fake]'" in message
    assert not (tmp_path / "fake.json").exists()


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PATIENCE", 0.1)
    entered = threading.Event()

    def before() -> None:
        entered.set()
        time.sleep(60)

    tracker = start(Fake(before), tmp_path)
    tracker.offer(row(1))
    assert entered.wait(20)
    started = time.monotonic()
    finish(tracker)
    assert time.monotonic() - started < 5
    (message,) = tracker.messages()
    assert "did not end in time" in message


def test_keys_in_errors_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789secret")

    def before() -> None:
        raise ValueError("bad key 0123456789secret")

    tracker = start(Fake(before), tmp_path)
    tracker.offer(row(1))
    finish(tracker)
    (message,) = tracker.messages()
    assert "bad key [redacted]" in message


def test_in_another_place_a_run_begins_anew_with_all_its_rows(tmp_path: Path) -> None:
    identities: list[str | None] = []
    for destination, wanted in (("here", [1, 2]), ("here", []), ("there", [1, 2])):
        fake = Fake()

        def opened(identity: str | None, fake: Fake = fake) -> Any:
            identities.append(identity)
            return fake

        tracker = BackgroundTracker(
            "fake", opened, state=tmp_path / "fake.json", destination=destination, earlier=[row(1), row(2)]
        )
        finish(tracker)
        assert fake.steps == wanted
    assert identities == [None, "fake", None]
