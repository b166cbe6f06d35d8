"""notices.jsonl: what is in a row, what a resumed run keeps, and what a full disk costs."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from flatpeak.runs.notices import NoticeLog, RecordedProgress, read_notices, truncate_notices
from support.runs import Watcher


def texts(path: Path) -> list[str]:
    return [row["text"] for row in read_notices(path)]


def places(path: Path) -> list[tuple[str, int, str]]:
    return [(row["stage"], row["step"], row["text"]) for row in read_notices(path)]


def test_a_notice_has_its_time_stage_and_step_and_is_there_at_once(tmp_path: Path) -> None:
    path, log = tmp_path / "notices.jsonl", NoticeLog()
    log.add("from before the directory")
    log.open(path)
    log.begin_step("train", 3)
    log.add("später")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    assert [list(row) for row in rows] == [["time", "stage", "step", "text"]] * 2
    assert places(path) == [("start", 0, "from before the directory"), ("train", 3, "später")]
    assert all(abs(datetime.now(UTC) - datetime.fromisoformat(row["time"])) < timedelta(minutes=5) for row in rows)
    log.close()
    log.add("after the end")
    assert len(read_notices(path)) == 2


def test_secrets_are_left_out_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "correct-horse-battery")
    log = NoticeLog()
    log.add("judge at https://me:hunter2x@host says correct-horse-battery and sk-abcdefghijklmnop1234")
    log.open(tmp_path / "notices.jsonl")
    log.add("hf_abcdefghijklmnop1234")
    content = (tmp_path / "notices.jsonl").read_text()
    assert content.count("[redacted]") == 4
    assert not any(secret in content for secret in ("hunter2x", "horse", "sk-", "hf_"))


def test_secrets_are_left_out_of_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_PASSWORD", "hunter2hunter2")
    shown = Watcher()
    RecordedProgress(shown, NoticeLog()).notice("reward 'f' failed: RuntimeError: hunter2hunter2")
    assert shown.notices == ["reward 'f' failed: RuntimeError: [redacted]"]


def test_a_later_start_repeats_no_text_of_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "notices.jsonl"
    first = NoticeLog()
    for text in ("recipe", "recipe"):
        first.add(text)
    first.open(path)
    first.close()
    second = NoticeLog()
    second.add("recipe")
    second.add("goes on")
    second.open(path, stage="train", step=2)
    second.begin_step("train", 3)
    second.add("recipe")
    second.add("new")
    second.add("new")
    assert places(path) == [
        ("start", 0, "recipe"),
        ("start", 0, "recipe"),
        ("train", 2, "goes on"),
        ("train", 3, "new"),
        ("train", 3, "new"),
    ]


LOGGED = [("start", 0), ("sft", 1), ("sft", 9), ("train", 0), ("train", 1), ("train", 2), ("train", 3)]


@pytest.mark.parametrize(
    ("step", "stage", "kept"), [(2, "train", 6), (0, "train", 4), (9, "sft", 3), (8, "sft", 2), (None, "sft", 0)]
)
def test_what_was_noticed_after_the_resumed_step_is_cut(
    tmp_path: Path, step: int | None, stage: str, kept: int
) -> None:
    path = tmp_path / "notices.jsonl"
    rows = [json.dumps({"stage": place, "step": number, "text": "x"}) + "\n" for place, number in LOGGED]
    path.write_text("".join(rows) + '{"stage": "train", "st')
    truncate_notices(path, step=step, stage=stage)
    assert path.read_text() == "".join(rows[:kept])


def test_runs_without_the_file_have_no_notices(tmp_path: Path) -> None:
    truncate_notices(tmp_path / "notices.jsonl", step=3, stage="train")
    assert not (tmp_path / "notices.jsonl").exists()
    assert read_notices(tmp_path / "notices.jsonl") == []


@pytest.mark.parametrize("place", ["/dev/full", "/nowhere/at/all"])
def test_a_disk_that_takes_no_notice_is_announced_once_and_all_are_still_shown(tmp_path: Path, place: str) -> None:
    (tmp_path / "notices.jsonl").symlink_to(place)
    displayed: list[str] = []

    class Screen:
        def update(self, *args: object, **settings: object) -> None:
            pass

        def notice(self, text: str) -> None:
            displayed.append(text)

    log = NoticeLog(failed=Screen().notice)
    progress = RecordedProgress(Screen(), log)  # type: ignore[arg-type]
    progress.notice("early")
    log.open(tmp_path / "notices.jsonl")
    progress.notice("one")
    progress.notice("two")
    log.close()
    assert [text for text in displayed if "notices are not saved" not in text] == ["early", "one", "two"]
    assert len(displayed) == 4
