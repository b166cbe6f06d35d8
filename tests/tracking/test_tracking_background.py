"""The thread of trackers: the order of what they get, the id that a later start has, and how errors stay with it."""

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
from flatpeak.tracking.background import TrackedRun, TrackerThread
from support.workers import wait_for


class Fake:
    """A backend that keeps what it gets; `before` is called at every batch of rows or table, and may raise or block."""

    message: str | None = None
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


def row(step: int, metrics: int = 2) -> MetricRow:
    return MetricRow(step=step, metrics={f"m{n}": 0.5 for n in range(metrics)})


def table(step: int) -> Table:
    return Table(name="t", step=step, columns=(), rows=())


def tracked(opened: Callable[[str | None], Any], path: Path, *, name: str = "fake", **options: Any) -> TrackedRun:
    return TrackedRun(name=name, open_backend=opened, state=path / f"{name}.json", **options)


def start(fake: Fake, path: Path, **options: Any) -> TrackerThread:
    return TrackerThread([tracked(lambda identity: fake, path, **options)])


def finish(thread: TrackerThread, status: str = "done", *, longest: float = 60.0) -> None:
    thread.close(status, longest=longest)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PAUSES", (0.0, 0.01, 0.01))
    monkeypatch.setattr(background, "INTERVAL", 0.01)


def test_contents_arrive_in_their_order_at_every_tracker_and_the_ids_are_kept(tmp_path: Path) -> None:
    fakes = {"one": Fake(), "two": Fake()}
    thread = TrackerThread(
        [tracked(lambda identity, fake=fake: fake, tmp_path, name=name) for name, fake in fakes.items()]  # type: ignore[misc]
    )
    for step in range(50):
        thread.offer(row(step))
        thread.offer(table(100 + step))
    finish(thread, "stopped")
    for name, fake in fakes.items():
        assert fake.steps == [number for step in range(50) for number in (step, 100 + step)]
        assert fake.status == "stopped"
        assert json.loads((tmp_path / f"{name}.json").read_text()) == {"id": "fake", "destination": ""}


def test_a_later_start_goes_on_by_the_id_and_a_new_run_begins_with_earlier_rows(tmp_path: Path) -> None:
    identities: list[str | None] = []
    for destination, wanted in (("here", [1, 2, 3]), ("here", [3]), ("there", [1, 2, 3])):
        fake = Fake()

        def opened(identity: str | None, fake: Fake = fake) -> Any:
            identities.append(identity)
            return fake

        thread = TrackerThread([tracked(opened, tmp_path, destination=destination, earlier=[row(1), row(2)])])
        thread.offer(row(3))
        finish(thread)
        assert fake.steps == wanted
    assert identities == [None, "fake", None]


def test_nothing_is_dropped_while_a_library_is_slow_to_load(tmp_path: Path) -> None:
    fake, loaded = Fake(), threading.Event()
    thread = TrackerThread([tracked(lambda identity: loaded.wait(20) and fake, tmp_path)])
    for step in range(2000):  # steps of milliseconds, sixty metrics each
        thread.offer(row(step, metrics=60))
    loaded.set()
    finish(thread)
    assert fake.steps == list(range(2000))
    assert fake.batches == [2000]
    assert thread.messages() == []


def test_rows_may_overtake_tables_where_that_makes_batches_larger(tmp_path: Path) -> None:
    fakes, loaded = {name: Fake() for name in ("kept", "sorted")}, threading.Event()
    fakes["sorted"].rows_first = True

    def opener(name: str) -> Callable[[str | None], Any]:
        return lambda identity: loaded.wait(20) and fakes[name]

    thread = TrackerThread([tracked(opener(name), tmp_path, name=name) for name in fakes])
    for step in range(4):
        thread.offer(table(10 + step))
        thread.offer(row(step))
    loaded.set()
    finish(thread)
    assert fakes["kept"].steps == [10, 0, 11, 1, 12, 2, 13, 3]
    assert fakes["sorted"].steps == [0, 1, 2, 3, 10, 11, 12, 13]
    assert [fake.batches for fake in fakes.values()] == [[1, 1, 1, 1], [4]]


def test_what_a_slow_tracker_has_no_room_for_is_dropped_with_one_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "ROOM", 3)
    entered, go_on = threading.Event(), threading.Event()

    def before() -> None:
        entered.set()
        go_on.wait(20)

    fake = Fake(before)
    thread = start(fake, tmp_path)
    thread.offer(row(0))
    assert entered.wait(20)
    for step in range(1, 9):
        thread.offer(row(step))
    go_on.set()
    finish(thread)
    assert fake.steps == [0, 1, 2, 3]
    (message,) = thread.messages()
    assert "tracking.fake takes what is recorded too slowly" in message


def test_an_error_is_told_once_and_rows_that_a_retry_sends_are_not_dropped(tmp_path: Path) -> None:
    errors = [ConnectionError("away"), ConnectionError("away")]

    def before() -> None:
        if errors:
            raise errors.pop()

    fake = Fake(before)
    thread = start(fake, tmp_path)
    thread.offer(row(1))
    wait_for(lambda: not errors)
    thread.offer(row(2))
    finish(thread)
    assert fake.steps == [1, 2]
    (message,) = thread.messages()
    assert "tracking.fake failed (ConnectionError: away)" in message


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_stays_refused_is_dropped_and_the_rest_goes_on(error: type[BaseException], tmp_path: Path) -> None:
    def refuse() -> None:
        raise error("no")

    fake, other = Fake(), Fake()
    fake.log_table = lambda table: refuse()  # type: ignore[method-assign]
    thread = TrackerThread(
        [tracked(lambda identity: fake, tmp_path), tracked(lambda identity: other, tmp_path, name="other")]
    )
    for content in (row(1), table(2), row(3)):
        thread.offer(content)
    wait_for(lambda: other.steps == [1, 2, 3])
    finish(thread)
    assert (fake.steps, other.status) == ([1, 3], "done")
    (message,) = thread.messages()
    assert f"tracking.fake failed ({error.__name__}: no)" in message


def test_a_missing_library_is_told_with_what_to_install_and_the_others_go_on(tmp_path: Path) -> None:
    def missing(identity: str | None) -> Any:
        raise ModuleNotFoundError("No module named 'fake'")

    other = Fake()
    thread = TrackerThread([tracked(missing, tmp_path), tracked(lambda identity: other, tmp_path, name="other")])
    thread.offer(row(1))
    finish(thread)
    thread.offer(row(2))
    (message,) = thread.messages()
    assert "pip install 'flatpeak[fake]'" in message
    assert not (tmp_path / "fake.json").exists()
    assert other.steps == [1]


def test_a_tracker_that_hangs_is_left_behind(tmp_path: Path) -> None:
    entered = threading.Event()

    def before() -> None:
        entered.set()
        time.sleep(60)

    thread = start(Fake(before), tmp_path)
    thread.offer(row(1))
    assert entered.wait(20)
    started = time.monotonic()
    finish(thread, longest=0.1)
    assert time.monotonic() - started < 5
    (message,) = thread.messages()
    assert "tracking.fake did not end in time" in message


def test_what_hung_records_nothing_once_it_is_left_behind(tmp_path: Path) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def before() -> None:
        entered.set()
        go_on.wait(20)

    fake = Fake(before)
    thread = start(fake, tmp_path)
    for content in (row(1), table(2)):
        thread.offer(content)
    assert entered.wait(20)
    finish(thread, longest=0.05)
    go_on.set()
    thread._thread.join(20)
    assert (fake.steps, fake.status) == ([1], None)


def test_keys_in_errors_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789secret")

    def before() -> None:
        raise ValueError("bad key 0123456789secret")

    thread = start(Fake(before), tmp_path)
    thread.offer(row(1))
    finish(thread)
    (message,) = thread.messages()
    assert "bad key [redacted]" in message


def test_a_tracker_that_refused_the_earlier_rows_gets_them_at_the_next_start(tmp_path: Path) -> None:
    def refuse() -> None:
        raise OSError("no")

    finish(start(Fake(refuse), tmp_path, earlier=[row(1), row(2)]))
    healthy = Fake()
    finish(start(healthy, tmp_path, earlier=[row(1), row(2)]))
    assert healthy.steps == [1, 2]
    later = Fake()
    finish(start(later, tmp_path, earlier=[row(1), row(2)]))
    assert later.steps == []
