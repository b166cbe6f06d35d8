"""The log of calls: what was kept is read in its order, whatever a kill or a full disk has cut short."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatpeak.runs.call_log import CallLog


def opened(folder: Path, *, rank: int = 0, step: int = 3, notices: list[str] | None = None) -> CallLog:
    """The log of a start of the run, in a step."""
    log = CallLog(folder / "calls", rank=rank, notice=(notices if notices is not None else []).append)
    log.begin_step("train", step)
    return log


def test_results_of_equal_calls_are_read_once_each_in_their_order(tmp_path: Path) -> None:
    first = opened(tmp_path)
    kept = ((b"\x80\xff", [("7", None), ("error: é\ud800", "raised")], True), 0.1 + 0.2, None)
    assert [first.keep("a", result) for result in kept] == list(kept)
    first.keep("b", "other")
    assert first.take("a") == ()  # a start reads what earlier ones have kept
    second = opened(tmp_path)
    as_lists = [b"\x80\xff", [["7", None], ["error: é\ud800", "raised"]], True]
    assert [second.take("a") for _ in range(4)] == [(as_lists,), (0.1 + 0.2,), (None,), ()]
    second.keep("a", "new")
    third = opened(tmp_path)
    assert [third.take("a") for _ in range(5)] == [(as_lists,), (0.1 + 0.2,), (None,), ("new",), ()]
    assert third.take("b") == ("other",)


def test_a_line_that_a_kill_cut_short_costs_its_own_result_alone(tmp_path: Path) -> None:
    opened(tmp_path).keep("a", 1)
    (path,) = (tmp_path / "calls").iterdir()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole + whole[:length])
        opened(tmp_path).keep("b", 2)
        read = opened(tmp_path)
        assert [read.take(key) for key in "aab"] == [(1,), (), (2,)]


def test_each_rank_writes_its_own_file_and_reads_those_of_all(tmp_path: Path) -> None:
    for rank in (0, 1):
        opened(tmp_path, rank=rank).keep(f"of {rank}", rank)
    assert sorted(path.name for path in (tmp_path / "calls").iterdir()) == [
        "train_000003.0.jsonl",
        "train_000003.1.jsonl",
    ]
    alone = opened(tmp_path)
    assert (alone.take("of 0"), alone.take("of 1")) == ((0,), (1,))


def test_only_what_a_resume_can_need_stays(tmp_path: Path) -> None:
    assert not (tmp_path / "calls").exists()
    run = opened(tmp_path, step=3)
    run.forget(done="train_000003")
    assert not (tmp_path / "calls").exists()
    for step in (3, 4, 5):
        run.begin_step("train", step)
        run.keep("a", step)
    run.forget(done="train_000004")  # a signal has come within step 5
    assert [path.name for path in (tmp_path / "calls").iterdir()] == ["train_000005.0.jsonl"]
    assert opened(tmp_path, step=4).take("a") == ()
    assert opened(tmp_path, step=5).take("a") == (5,)
    again = opened(tmp_path, step=2)
    again.forget(done="train_000002")  # a run that goes on from an earlier step than it had reached
    again.begin_step("train", 5)
    assert again.take("a") == (5,)
    again.forget(done="train_000005")
    assert list((tmp_path / "calls").iterdir()) == []


def test_a_full_disk_is_told_once_and_results_are_returned_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[str] = []
    run = opened(tmp_path, notices=notices)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda *args, **options: (_ for _ in ()).throw(OSError(28, "No space left")))
        assert (run.keep("a", 1), run.keep("b", 2)) == (1, 2)
    assert notices == [f"{tmp_path / 'calls'}: No space left; if the run is killed, it calls tools again"]
    run.keep("c", 3)
    assert opened(tmp_path).take("c") == (3,)
