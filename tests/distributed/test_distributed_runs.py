"""Whole runs on two ranks: what they draw, save and log, how they are resumed, and how they end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flatpeak.runs.checkpoints import verify_checkpoint
from support.distributed_runs import (
    OWN,
    StopsAtStep3,
    completions,
    effects,
    files,
    largest_gap,
    recipe,
    rows,
    train,
    train_unlike,
    train_unlike_judged,
    train_with_own_sampler,
    train_without_space,
    trainer_tensors,
    weights,
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def alone(directory: Path) -> Path:
    """The run of one process."""
    assert train(recipe(directory, "alone"))["code"] == 0
    return directory / "alone"


@pytest.fixture(scope="module")
def shared(directory: Path, ranks) -> dict[str, Path]:
    """The run of two ranks, by strategy."""
    for strategy in ("ddp", "fsdp2"):
        done = ranks(train, recipe(directory, strategy, processes=2, strategy=strategy))
        assert [one.get("code") for one in done] == [0, 0], done
    return {strategy: directory / strategy for strategy in ("ddp", "fsdp2")}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_draw_and_learn_what_one_process_does(alone, shared, strategy):
    run = shared[strategy]
    assert completions(run) == completions(alone)
    assert len(completions(run)) == 4 * 5 * 4
    assert largest_gap(weights(run), weights(alone)) < 1e-5
    assert largest_gap(trainer_tensors(run), trainer_tensors(alone)) < 1e-5
    for own, expected in zip(rows(run), rows(alone), strict=True):
        assert own == pytest.approx(expected, abs=1e-4, nan_ok=True)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_loss_and_an_advantage_of_the_users_see_the_step_that_one_process_sees(directory, ranks, strategy):
    (directory / "own.py").write_text(OWN)
    sections = {
        "objective": {"loss": f"{directory}/own.py:spo", "arguments": {"epsilon": 0.2}},
        "advantage": {"function": f"{directory}/own.py:of_the_step"},
        "training": {"steps": 3, "minibatches": 2},
    }
    assert train(recipe(directory, f"own_alone_{strategy}", **sections))["code"] == 0
    done = ranks(train, recipe(directory, f"own_{strategy}", processes=2, strategy=strategy, **sections))
    assert [one.get("code") for one in done] == [0, 0], done
    run, expected = directory / f"own_{strategy}", directory / f"own_alone_{strategy}"
    assert largest_gap(weights(run), weights(expected)) < 1e-5
    assert largest_gap(weights(run), weights(run, "sft/last")) > 1e-3
    for own, other in zip(rows(run), rows(expected), strict=True):
        assert own == pytest.approx(other, abs=1e-4, nan_ok=True)


def test_small_batches_of_sft_leave_the_bits_of_one_process(alone, shared):
    assert largest_gap(weights(shared["ddp"], "sft/last"), weights(alone, "sft/last")) == 0
    assert largest_gap(trainer_tensors(shared["ddp"], "sft/last"), trainer_tensors(alone, "sft/last")) == 0


def test_small_batches_of_sft_leave_the_bits_of_one_process_in_shards_that_fill_vectors(alone, shared):
    own, expected = (weights(run, "sft/last") for run in (shared["fsdp2"], alone))
    # The processor rounds what fills no vector another way: biases of eight elements, four on each rank.
    matrices, biases = ({name for name in own if (own[name].ndim > 1) is is_one} for is_one in (True, False))
    assert largest_gap({n: own[n] for n in matrices}, {n: expected[n] for n in matrices}) == 0
    assert largest_gap({n: own[n] for n in biases}, {n: expected[n] for n in biases}) < 1e-9
    losses = [[row["sft/loss"] for row in rows(run) if row["stage"] == "sft"] for run in (shared["fsdp2"], alone)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_the_run_directory_is_that_of_one_process(alone, shared, strategy):
    assert files(shared[strategy]) == files(alone)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (shared[strategy], alone)]
    assert [one["status"] for one in summaries] == ["done", "done"]
    assert summaries[0]["checkpoints"] == summaries[1]["checkpoints"]
    evaluations = [(run / "evaluations" / "train_000004.jsonl").read_text() for run in (shared[strategy], alone)]
    assert [json.loads(line)["text"] for line in evaluations[0].splitlines()] == [
        json.loads(line)["text"] for line in evaluations[1].splitlines()
    ]


def test_a_run_goes_on_with_another_number_of_ranks(directory, shared, alone, ranks):
    half = {"training": {"steps": 2}}
    for name, strategy in (("half", "ddp"), ("half_sharded", "fsdp2")):
        ranks(train, recipe(directory, name, processes=2, strategy=strategy, **half))
    assert train(recipe(directory, "half_sharded"), resume=True)["code"] == 0  # by one process
    assert largest_gap(weights(directory / "half_sharded"), weights(alone)) < 1e-5
    done = ranks(train, recipe(directory, "half", processes=2), resume=True)
    assert [one["code"] for one in done] == [0, 0]
    assert largest_gap(weights(directory / "half"), weights(shared["ddp"])) == 0  # by as many: bit for bit
    assert largest_gap(trainer_tensors(directory / "half"), trainer_tensors(shared["ddp"])) == 0


def test_what_one_process_has_saved_is_resumed_on_shards(directory, shared, alone, ranks):
    assert train(recipe(directory, "begun_alone", training={"steps": 2}))["code"] == 0
    done = ranks(train, recipe(directory, "begun_alone", processes=2, strategy="fsdp2"), resume=True)
    assert [one.get("code") for one in done] == [0, 0], done
    assert largest_gap(weights(directory / "begun_alone"), weights(alone)) < 1e-5


def test_resampled_groups_of_a_curriculum_are_those_of_one_process_also_when_it_goes_on(directory, ranks):
    sections = {
        "curriculum": {"task": {"type": "arithmetic", "max_value": 4, "train_size": 10, "test_size": 3}, "steps": 2},
        "rollout": {"group_size": 2},  # of two equal rewards a group has no signal
        "training": {"dynamic_sampling": {"max_resamples": 2}},
    }
    assert train(recipe(directory, "drawn_alone", **sections))["code"] == 0
    half = {**sections, "training": {**sections["training"], "steps": 3}}
    ranks(train, recipe(directory, "drawn", processes=2, **half))
    assert train(recipe(directory, "drawn", **sections), resume=True)["code"] == 0
    assert completions(directory / "drawn") == completions(directory / "drawn_alone")
    assert any(row["groups/drawn"] > 5 for row in rows(directory / "drawn") if row["stage"] == "train")
    # Adam moves an entry whose gradient is hardly more than rounding as far as any other.
    moved = largest_gap(weights(directory / "drawn_alone"), weights(directory / "drawn_alone", "sft/last"))
    assert largest_gap(weights(directory / "drawn"), weights(directory / "drawn_alone")) < 1e-3 * moved


def test_a_signal_to_one_rank_stops_all_after_the_same_step(directory, ranks):
    done = ranks(train, recipe(directory, "stopped", processes=2), fault="signal")
    # The launcher ends what is left once a process ends with another code than 0: only the first rank's counts.
    assert [(one["code"], one["rank"]) for one in done] == [(143, 1), (0, 1)]
    run = directory / "stopped"
    assert json.loads((run / "summary.json").read_text())["status"] == "stopped"
    assert (run / "checkpoints" / "last").resolve().name == "step_000002"  # the third step is not waited for
    verify_checkpoint(run / "checkpoints" / "last")
    assert not list(run.glob("**/.tmp*"))


@pytest.mark.parametrize("hook", ["step", "evaluation"])
def test_a_callback_stops_all_ranks_after_the_same_step(directory, ranks, hook):
    wanted = recipe(directory, f"stopped_in_{hook}", processes=2, evaluation={"every": 1})
    done = ranks(train, wanted, callbacks=[StopsAtStep3(hook)], timeout=60)
    assert [(one["code"], one["signal"]) for one in done] == [(0, None), (0, None)]
    run = directory / f"stopped_in_{hook}"
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["status"], summary["last_step"]) == ("stopped", 3)
    assert summary["ended_by"] == f"StopsAtStep3.on_{hook}: it called run.stop()"
    verify_checkpoint(run / "checkpoints" / "last")


def test_an_error_in_a_callback_of_the_first_rank_ends_all_with_a_checkpoint(directory, ranks):
    wanted = recipe(directory, "callback_failed", processes=2, strategy="fsdp2")
    first, second = ranks(train, wanted, callbacks=[StopsAtStep3("step", fails=True)], timeout=60)
    assert first["error"] == "RunError"
    assert first["text"].startswith("callback StopsAtStep3.on_step: ZeroDivisionError: a fault of a callback (")
    assert second["error"] == "ReportedElsewhereError"
    assert (directory / "callback_failed" / "checkpoints" / "last").resolve().name == "step_000003"


def test_an_error_of_one_rank_is_known_to_all_and_raised_once(directory, ranks):
    first, second = ranks(train, recipe(directory, "failed", processes=2), fault="engine")
    assert second == {"error": "ZeroDivisionError", "text": "a fault of this rank"}
    assert first == {"error": "ReportedElsewhereError", "text": "rank 1: ZeroDivisionError: a fault of this rank"}
    run = directory / "failed"
    assert json.loads((run / "summary.json").read_text())["status"] == "failed"
    assert (run / "checkpoints" / "last").resolve().name == "step_000002"
    assert "a fault of this rank" in (run / "errors.log").read_text()


def test_an_error_that_all_ranks_raise_alike_leaves_the_last_step_as_in_one_process(directory, ranks):
    done = ranks(train, recipe(directory, "alike", processes=2), fault="alike")
    assert sorted(one["error"] for one in done) == ["ReportedElsewhereError", "RunError"]
    run = directory / "alike"
    assert (run / "checkpoints" / "last").resolve().name == "step_000003"
    verify_checkpoint(run / "checkpoints" / "last")


def test_no_rank_waits_to_save_a_step_after_a_checkpoint_that_could_not_be_written(directory, ranks):
    first, second = ranks(train_without_space, recipe(directory, "full", processes=2), timeout=60)
    assert first["error"] == "CheckpointError"
    assert second == {"error": "ReportedElsewhereError", "text": "rank 0: CheckpointError: no space left"}
    assert (directory / "full" / "checkpoints" / "last").resolve().name == "step_000000"


def test_no_rank_saves_a_step_whose_weights_another_finds_diverged(directory, ranks):
    done = ranks(train, recipe(directory, "diverged", processes=2), fault="diverged", timeout=60)
    assert [one["error"] for one in done] == ["ReportedElsewhereError", "DivergedError"]
    assert done[1]["text"] == "logits that are NaN (checkpoints: step_000000, step_000002)"
    assert (directory / "diverged" / "checkpoints" / "last").resolve().name == "step_000002"


@pytest.mark.parametrize("what", ["weights", "training prompts"])
def test_ranks_that_would_train_on_other_weights_or_data_are_refused(directory, ranks, what):
    done = ranks(train_unlike, recipe(directory, "unlike", processes=2), what)
    assert sorted(one["error"] for one in done) == ["ReportedElsewhereError", "UserError"]
    assert all(f"rank 1 has other {what} than rank 0" in one["text"] for one in done)
    assert not (directory / "unlike").exists()


def test_the_first_rank_decides_which_step_is_best_and_when_sft_is_over(directory, ranks):
    sft = {"steps": 3, "batch_size": 6, "stop_at": 0.5, "check_every": 1, "check_size": 2}
    wanted = recipe(directory, "judged", processes=2, sft=sft, evaluation={"every": 1}, training={"steps": 3})
    assert [one.get("code") for one in ranks(train_unlike_judged, wanted, timeout=60)] == [0, 0]
    assert (directory / "judged" / "checkpoints" / "best").resolve().name == "step_000000"


def test_a_sampler_is_never_asked_for_a_share_without_prompts(directory, ranks):
    wanted = recipe(directory, "few", processes=2, rollout={"prompts_per_step": 1}, training={"steps": 1})
    assert [one.get("code") for one in ranks(train_with_own_sampler, wanted)] == [0, 0]


def test_the_first_rank_alone_has_a_directory_tracks_and_logs(directory, ranks):
    first, second = ranks(effects, recipe(directory, "effects", processes=2))
    many = {name: first[name] for name in ("answers", "rows")}
    assert first == {"directories": 1, "trackers": 1, "rollouts": 4, "summaries": 2, **many}
    assert min(many.values()) > 3
    assert set(second.values()) == {0}


def test_a_name_that_is_taken_is_refused_on_every_rank(directory, shared, ranks):
    first, second = ranks(train, recipe(directory, "ddp", processes=2))
    assert first["error"] == "UserError"
    assert "exists: continue it with resume=True" in first["text"]
    assert second["error"] == "ReportedElsewhereError"
