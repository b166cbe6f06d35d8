import io
import os
from pathlib import Path

import pytest

from flatpeak.cli.common import LiveProgress, open_progress
from flatpeak.pipeline.progress import PlainProgress


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


STEP = {
    "reward/mean": 0.5,
    "groups/informative_fraction": 0.84375,
    "rollout/length_mean": 12.34,
    "rollout/truncated_fraction": 0.93,
    "throughput/response_tokens_per_second": 4567.8,
    "policy/loss": 0.0,
}


def test_plain_lines_are_ten_seconds_apart_and_the_last_step_is_always_shown():
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock=clock)
    for step in range(1, 101):
        progress.update("train", step=step, total=100, metrics=STEP)
        clock.now += 0.25
    values = "reward 0.500, informative groups 84%, length 12.3, cut off 93%, tokens/s 4568"
    assert stream.getvalue().splitlines() == [
        f"train 1/100 (0 s): {values}",
        f"train 41/100 (10 s, 15 s left): {values}",
        f"train 81/100 (20 s, 5 s left): {values}",
        f"train 100/100 (25 s): {values}",
    ]


def show(stream):
    progress = PlainProgress(stream)
    progress.notice("first")
    progress.notice("second")
    progress.update("train", step=1, total=1, metrics={"reward/mean": 1.0})


def test_a_display_without_a_reader_ends_neither_the_run_nor_the_program():
    ours, theirs = os.pipe()
    stream = os.fdopen(theirs, "w")
    os.close(ours)
    show(stream)
    assert os.fstat(stream.fileno()).st_rdev == Path(os.devnull).stat().st_rdev
    stream.close()  # as at the end of the program: what is left in the buffer goes nowhere too


def test_a_display_that_is_closed_does_not_end_the_run():
    ours, theirs = os.pipe()
    stream = os.fdopen(theirs, "w")
    stream.buffer.raw.close()
    with pytest.raises(ValueError, match="closed file"):
        stream.write("first")
    show(stream)
    assert os.read(ours, 1) == b""
    os.close(ours)


def test_an_evaluation_is_always_shown_and_its_accuracy_stays_in_sight():
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock=clock)
    progress.update("sft", step=9, total=9, metrics={"sft/loss": 2.5})
    progress.update("eval", step=0, total=0, metrics={"eval/sums/accuracy": 0.25, "eval/sums/accuracy/easy": 0.9})
    progress.notice("notice [bold]")
    clock.now = 30.0
    progress.update("train", step=50, total=80, metrics={"reward/mean": 1.0})
    assert stream.getvalue().splitlines() == [
        "sft 9/9 (0 s): loss 2.500",
        "eval at step 0: accuracy 0.250",
        "notice [bold]",
        "train 50/80 (30 s, 900 s left): accuracy 0.250, reward 1.000",
    ]


def test_the_time_of_a_stage_has_that_of_its_first_step():
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock=clock)
    clock.now = 100.0  # the model is loaded, and the base evaluated
    progress.update("eval", step=0, total=0, metrics={})
    for step in (1, 2):
        clock.now += 20.0
        progress.update("train", step=step, total=10, metrics={})
    assert stream.getvalue().splitlines()[1:] == ["train 1/10 (20 s, 180 s left): ", "train 2/10 (40 s, 160 s left): "]


def test_time_left_is_measured_from_the_first_step_seen_as_after_a_resume():
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock=clock)
    for step in (91, 92):
        progress.update("train", step=step, total=100, metrics={})
        clock.now += 20.0
    assert stream.getvalue().splitlines()[1] == "train 92/100 (20 s, 160 s left): "


def test_a_terminal_gets_a_live_display_and_anything_else_lines():
    terminal = Terminal()
    with open_progress(terminal) as live:
        assert isinstance(live, LiveProgress)
        live.update("train", step=3, total=10, metrics=STEP)
        live.update("eval", step=3, total=3, metrics={"eval/sums/accuracy": 0.75})
        live.notice("mind [bold]this[/bold]")
        live.update("train", step=4, total=10, metrics=STEP)
    text = terminal.getvalue()
    assert "mind [bold]this[/bold]" in text
    assert " 4/10" in text
    assert "accuracy 0.750, reward 0.500," in text
    with open_progress(io.StringIO()) as plain:
        assert isinstance(plain, PlainProgress)


def lines_of(*evaluations: dict[str, float], metric: str | None) -> list[str]:
    stream = io.StringIO()
    progress = PlainProgress(stream, metric=metric, clock=Clock())
    for metrics in evaluations:
        progress.update("eval", step=0, total=0, metrics=metrics)
    progress.update("train", step=1, total=1, metrics={"reward/mean": 1.0})
    return [line.partition(": ")[2] for line in stream.getvalue().splitlines()]


def test_accuracy_is_shown_whatever_chooses_checkpoints():
    both = {"eval/sums/reward": 0.5, "eval/sums/accuracy": 0.25}
    assert lines_of(both, metric="reward") == ["accuracy 0.250", "accuracy 0.250, reward 1.000"]


def test_without_accuracy_what_chooses_checkpoints_is_shown():
    letters = {"eval/letters/reward": 0.5, "eval/letters/preference": -1.25, "time/eval": 3.0}
    assert lines_of(letters, metric="preference") == [
        "held-out preference -1.250",
        "held-out preference -1.250, reward 1.000",
    ]
    sampled = {"eval/sums/sampled/reward": 0.1, "eval/sums/sampled/accuracy": 0.5, "eval/sums/pass@4": 0.75}
    assert lines_of(sampled, metric="pass@4")[0] == "held-out pass@4 0.750"
    assert lines_of(sampled, metric="sampled/accuracy")[0] == "sampled/accuracy 0.500"


def test_where_nothing_is_said_about_the_metric_the_best_there_is_is_shown():
    assert lines_of({"eval/t/reward": 0.5, "eval/t/sampled/accuracy": 0.25}, metric=None)[0] == "sampled/accuracy 0.250"
    assert lines_of({"eval/t/reward": 0.5, "eval/t/sampled/reward": 0.25}, metric=None)[0] == "held-out reward 0.500"
    assert lines_of({"eval/t/other": 0.5}, metric=None) == ["", "reward 1.000"]


def test_a_figure_that_is_missing_is_unknown_and_replaces_the_one_before():
    result = lines_of({"eval/t/accuracy": 0.5}, {"eval/t/accuracy": float("nan")}, metric="accuracy")
    assert result == ["accuracy 0.500", "accuracy unknown", "accuracy unknown, reward 1.000"]


def test_the_live_display_shows_what_chooses_checkpoints_too():
    terminal = Terminal()
    with open_progress(terminal, metric="preference") as live:
        live.update("train", step=3, total=10, metrics={"reward/mean": 0.5})
        live.update("eval", step=3, total=3, metrics={"eval/letters/preference": 1.5})
    assert "held-out preference 1.500" in terminal.getvalue()


def test_a_stage_that_ends_early_stops_its_clock_and_has_a_full_bar():
    terminal = Terminal()
    with open_progress(terminal) as live:
        live.update("sft", step=280, total=2000, metrics={"sft/loss": 0.5})
        live.update("train", step=3, total=10, metrics=STEP)
        bars = live._bars
    sft, train = bars.tasks
    assert (sft.completed, sft.total, sft.finished) == (280, 280, True)
    assert sft.stop_time is not None
    assert (train.completed, train.total, train.stop_time) == (3, 10, None)
    assert "sft: ended after 280 of 2000 steps, because sft.stop_at was reached" in terminal.getvalue()


def test_a_log_says_that_a_stage_ended_early():
    stream = io.StringIO()
    progress = PlainProgress(stream, clock=Clock())
    progress.update("sft", step=280, total=2000, metrics={})
    progress.update("eval", step=280, total=280, metrics={})
    progress.update("train", step=1, total=10, metrics={})
    progress.update("train", step=2, total=10, metrics={})
    early = [line for line in stream.getvalue().splitlines() if "ended" in line]
    assert early == ["sft: ended after 280 of 2000 steps, because sft.stop_at was reached"]


def test_completions_have_a_bar_until_all_are_sampled_and_none_where_sampling_is_quick():
    with open_progress(Terminal()) as live:
        live.sampled(0, 64)
        (bar,) = live._bars.tasks
        live.sampled(16, 64)
        assert (bar.completed, bar.total, bar.visible) == (16, 64, True)
        live.sampled(64, 64)
        assert not bar.visible
        live.sampled(0, 32)  # the request before took less than a second
        live.sampled(8, 32)
        assert (bar.completed, bar.total, bar.visible) == (8, 32, False)
        bar.start_time -= 2
        live.sampled(32, 32)
        live.sampled(0, 32)
        live.sampled(8, 32)
        assert bar.visible


def test_a_log_counts_the_completions_of_a_slow_request_every_half_minute():
    stream, clock = io.StringIO(), Clock()
    progress = PlainProgress(stream, clock=clock)
    for _ in range(2):
        for sampled in range(0, 101, 10):
            progress.sampled(sampled, 100)
            clock.now += 7.0
    counted = ["sampled 50/100 completions"]
    assert stream.getvalue().splitlines() == counted * 2
