import json
import math

import pytest
import torch

from flatpeak.runs.metrics import MetricsWriter, missing_steps, read_metrics, truncate_metrics


def test_a_row_is_one_line_and_is_there_before_the_writer_is_closed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, "train", {"reward/mean": 0.5, "groups/drawn": 3})
    assert path.read_text() == '{"step": 1, "stage": "train", "reward/mean": 0.5, "groups/drawn": 3}\n'
    writer.write(2, "eval", {"eval/sums/accuracy": 1.0})
    assert path.read_text().splitlines()[1] == '{"step": 2, "stage": "eval", "eval/sums/accuracy": 1.0}'
    writer.close()


def test_what_is_not_finite_is_written_as_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(1, "train", {"a": math.nan, "b": math.inf, "c": -math.inf, "d": torch.tensor(0.25), "e": True})
    assert json.loads(path.read_text()) == {
        "step": 1,
        "stage": "train",
        "a": None,
        "b": None,
        "c": None,
        "d": 0.25,
        "e": 1,
    }


def test_a_reopened_file_is_appended_to(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for step in (1, 2):
        with MetricsWriter(path) as writer:
            writer.write(step, "train", {"x": float(step)})
    assert [row["x"] for row in read_metrics(path)] == [1.0, 2.0]


def test_steps_without_a_row_are_missing_whatever_other_stages_have(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert missing_steps(path, step=2, stage="train") == [1, 2]
    with MetricsWriter(path) as writer:
        for stage, step in (("sft", 2), ("eval", 3), ("train", 1), ("train", 4)):
            writer.write(step, stage, {})
    assert missing_steps(path, step=4, stage="train") == [2, 3]
    assert missing_steps(path, step=1, stage="train") == []


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    messages: list[str] = []
    with MetricsWriter(tmp_path / "metrics.jsonl", notice=messages.append) as writer:
        for step in range(3):
            writer.write(step, "train", {"x": 0.0})
    assert len(messages) == 1
    assert "No space left on device" in messages[0]


def test_rows_after_a_torn_one_are_whole(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path, notice=lambda text: None) as writer:
        writer.write(1, "train", {"x": 1.0})
        whole = writer._lines._file
        writer._lines._file = HalfWriter(whole)
        writer.write(2, "train", {"x": 2.0})
        writer._lines._file = whole
        writer.write(3, "train", {"x": 3.0})
    assert [row["step"] for row in read_metrics(path)] == [1, 3]


class HalfWriter:
    """A disk that fills up in the middle of a line."""

    def __init__(self, file) -> None:
        self.file = file

    def write(self, data: bytes) -> int:
        return self.file.write(data[: len(data) // 2])


def test_a_torn_last_line_is_not_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "stage": "train"}\n{"step": 2, "sta')
    assert read_metrics(path) == [{"step": 1, "stage": "train"}]
    assert read_metrics(tmp_path / "absent.jsonl") == []


def rows(*pairs: tuple[str, int]) -> str:
    return "".join(json.dumps({"step": step, "stage": stage}) + "\n" for stage, step in pairs)


START = [("eval", 0), ("sft", 1), ("sft", 2), ("sft", 3), ("eval", 3), ("train", 1), ("train", 2), ("eval", 2)]


@pytest.mark.parametrize(
    ("step", "stage", "kept"),
    [
        (2, "train", 8),  # step 2 with its evaluation
        (1, "train", 6),
        (0, "train", 5),  # all of SFT, whose steps have higher numbers
        (2, "sft", 3),
        (3, "sft", 5),  # RL begins anew
        (9, "train", 11),
        (None, "train", 0),
    ],
)
def test_what_was_logged_after_the_resumed_step_is_cut(tmp_path, step, stage, kept):
    path = tmp_path / "metrics.jsonl"
    logged = [*START, ("train", 3), ("train", 4), ("eval", 4)]
    path.write_text(rows(*logged) + '{"step": 5, "stage": "tr')
    truncate_metrics(path, step=step, stage=stage)
    assert path.read_text() == rows(*logged[:kept])


def test_cutting_a_file_that_is_not_there_is_harmless(tmp_path):
    truncate_metrics(tmp_path / "metrics.jsonl", step=3, stage="train")
    assert not (tmp_path / "metrics.jsonl").exists()
