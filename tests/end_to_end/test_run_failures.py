"""Whatever ends a run, no completed step is lost, and the run says how it ended."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flatpeak.pipeline.stages
import flatpeak.pipeline.train
from flatpeak.cli import main
from flatpeak.errors import DivergedError, RunError, StoppedError, UserError, explain
from flatpeak.pipeline.build import Components
from flatpeak.runs.checkpoints import CheckpointError, checkpoint_steps
from flatpeak.runs.summary import read_summary
from flatpeak.training import recorder
from flatpeak.training.learner import Learner
from flatpeak.types import Scores
from support.resumes import assert_same, diverge, outcome
from support.runs import Finished, Recipe, Train, Watch

pytestmark = pytest.mark.usefixtures("one_thread")


class Odd:
    """Rewards that differ within most groups; calls an action at the n-th step's, or the n-th evaluation's, grading."""

    def __init__(self, *, at_step: int = 0, at_evaluation: int = 0, act: Callable[[], None] = lambda: None) -> None:
        self.steps, self.evaluations = 0, 0
        self.at_step, self.at_evaluation, self.act = at_step, at_evaluation, act

    def __call__(self, groups: Any) -> Scores:
        if len(groups[0].completions) > 1:
            self.steps += 1
            due = self.steps == self.at_step
        else:
            self.evaluations += 1
            due = self.evaluations == self.at_evaluation
        if due:
            self.act()
        scores = [[float(sum(c.token_ids) % 2) for c in group.completions] for group in groups]
        return Scores(total=scores, parts={"correctness": scores})


def odd_groups(groups: Any) -> Scores:
    return Odd()(groups)


def raising(error: BaseException) -> Callable[[], None]:
    def act() -> None:
        raise error

    return act


def stopping(send: Any) -> Callable[[], None]:
    """What a judge does when a signal comes while it waits."""

    def act() -> None:
        send(signal.SIGTERM)()
        raise StoppedError("the judge was not waited for")

    return act


def settings(make: Callable[..., Any], name: str, *given: Any, **sections: Any) -> Any:
    """What `recipe` or `finished` make of the sections of these tests."""
    run = {"name": name, "checkpoint_every": 0}
    return make(*given, **{"training": {"steps": 4}, "evaluation": {"every": 2}, **sections}, run=run)


def steps_at_hand(path: Path) -> list[int]:
    return checkpoint_steps(path / "checkpoints")


ERRORS = {
    "foreign": ConnectionError("the reward server went away"),
    "memory": MemoryError("no more"),
    "value": ValueError("a reward is NaN"),
    "user": UserError("the judge is down"),
    "interrupt": KeyboardInterrupt(),
    "stop": StoppedError("a signal"),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("place", [{"at_evaluation": 2}, {"at_step": 3}], ids=["evaluation", "step"])
def test_an_error_after_a_step_leaves_it_saved_and_the_run_goes_on_to_the_same_end(
    recipe: Recipe, train: Train, finished: Finished, send: Any, tmp_path: Path, kind: str, place: dict[str, int]
) -> None:
    whole = settings(finished, "whole", odd_groups)
    config, path = settings(recipe, "broken"), tmp_path / "runs" / "broken"
    reward = Odd(**place, act=stopping(send) if kind == "stop" else raising(ERRORS[kind]))
    if kind == "stop":
        assert train(config, reward=reward).exit_code == 143
    else:
        expected = RunError if kind == "user" else type(ERRORS[kind])
        with pytest.raises(expected) as caught:
            train(config, reward=reward)
        assert str(ERRORS[kind]) in str(caught.value)
    assert steps_at_hand(path) == [0, 2]
    status = "stopped" if kind in ("stop", "interrupt") else "failed"
    assert read_summary(path / "summary.json").status == status
    assert (path / "errors.log").exists() == (kind in ("foreign", "memory", "value"))
    again = train(config, reward=Odd(), resume=True)
    assert again.summary.status == "done"
    result, wanted = outcome(path), outcome(whole)
    assert_same(result | {"summary": wanted["summary"]}, wanted)
    assert [(e.stage, e.step, e.metrics) for e in again.summary.evaluations] == [
        (e.stage, e.step, e.metrics) for e in read_summary(whole / "summary.json").evaluations
    ]


@pytest.mark.parametrize("error", [UserError("the judge is down"), ConnectionError("gone"), None], ids=str)
def test_an_error_in_a_check_of_sft_leaves_its_steps_saved(
    recipe: Recipe, train: Train, finished: Finished, send: Any, tmp_path: Path, error: Exception | None
) -> None:
    sft = {"steps": 4, "batch_size": 4, "stop_at": 0.99, "check_every": 2, "check_size": 4}
    whole = settings(finished, "whole", odd_groups, sft=sft, training={"steps": 1})
    config, path = settings(recipe, "broken", sft=sft, training={"steps": 1}), tmp_path / "runs" / "broken"
    reward = Odd(at_evaluation=2, act=stopping(send) if error is None else raising(error))
    if error is None:
        assert train(config, reward=reward).exit_code == 143
    else:
        with pytest.raises(type(error)):
            train(config, reward=reward)
    assert checkpoint_steps(path / "checkpoints" / "sft") == [2]
    train(config, reward=Odd(), resume=True)
    result, wanted = outcome(path), outcome(whole)
    assert_same(result | {"summary": wanted["summary"]}, wanted)


def test_a_second_interrupt_in_the_middle_of_an_update_saves_nothing_that_may_be_half_done(
    recipe: Recipe, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, calls = Learner.accumulate_gradients, []

    def interrupted(self: Learner, minibatch: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, minibatch)

    monkeypatch.setattr(Learner, "accumulate_gradients", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(settings(recipe, "twice", evaluation={"every": 0}), reward=Odd())
    assert steps_at_hand(tmp_path / "runs" / "twice") == [0]
    assert read_summary(tmp_path / "runs" / "twice" / "summary.json").status == "stopped"


@pytest.mark.parametrize(("call", "saved"), [(3, [0, 1]), (4, [0])], ids=["first update", "second update"])
def test_memory_that_runs_out_in_a_step_leaves_the_step_before_if_no_weight_had_changed(
    recipe: Recipe, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, saved: list[int]
) -> None:
    plain, calls = Learner.accumulate_gradients, []

    def limited(self: Learner, minibatch: Any) -> Any:
        calls.append(1)
        if len(calls) >= call:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return plain(self, minibatch)

    monkeypatch.setattr(Learner, "accumulate_gradients", limited)
    config = settings(recipe, "small", training={"steps": 4, "minibatches": 2}, evaluation={"every": 0})
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(config, reward=Odd())
    path = tmp_path / "runs" / "small"
    assert steps_at_hand(path) == saved
    assert read_summary(path / "summary.json").status == "failed"
    (note,) = caught.value.__notes__
    assert f"flatpeak plan {path / 'config.yaml'} says what would make it fit" in note
    assert "lower training.micro_batch_tokens" in note
    assert "optimizer.offload=true" in note
    assert f"step {saved[-1]} is saved" in note
    assert "OutOfMemoryError: CUDA out of memory" in (path / "errors.log").read_text()


def test_the_command_gives_one_line_and_code_1_where_the_traceback_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ConnectionError("gone")
    explain(error, "the run failed: ConnectionError: gone")
    monkeypatch.setattr(main, "app", lambda **kwargs: raising(error)())
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: the run failed: ConnectionError: gone\n"


def test_after_a_signal_the_evaluation_that_is_due_is_left_to_the_resumed_run(
    recipe: Recipe, train: Train, watch: Watch, send: Any
) -> None:
    reward = Odd()
    config = settings(recipe, "stopped")
    stopped = train(config, reward=reward, progress=watch({("train", 2): send(signal.SIGTERM)}))
    assert (stopped.exit_code, stopped.summary.last_step, reward.evaluations) == (143, 2, 1)
    watcher = watch()
    train(config, reward=Odd(), resume=True, progress=watcher)
    assert [(stage, step) for stage, step, _ in watcher.rows] == [
        ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)
    ]  # fmt: skip


def test_weights_that_are_not_finite_are_never_saved(
    recipe: Recipe, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diverge(monkeypatch, lambda weights: weights[0].fill_(torch.inf))
    config = recipe(training={"steps": 6}, run={"checkpoint_every": 1, "name": "exploded", "keep_checkpoints": 9})
    with pytest.raises(DivergedError, match=r"after step 3 .*flatpeak fork .*step_000000, step_000001, step_000002\)"):
        train(config, reward=Odd())
    path = tmp_path / "runs" / "exploded"
    assert (path / "checkpoints" / "last").readlink() == Path("step_000002")
    for step in (0, 1, 2):
        weights = load_file(path / "checkpoints" / f"step_{step:06d}" / "model.safetensors")
        assert all(bool(weight.isfinite().all()) for weight in weights.values())
    assert read_summary(path / "summary.json").status == "failed"


def test_a_policy_whose_logits_are_nan_is_not_saved_either(
    recipe: Recipe, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Finite, but nothing that is computed with them is.
    diverge(monkeypatch, lambda weights: [weight.mul_(1e30) for weight in weights])
    with pytest.raises(DivergedError, match="flatpeak fork"):
        train(settings(recipe, "exploded", evaluation={"every": 0}), reward=Odd())
    assert steps_at_hand(tmp_path / "runs" / "exploded") == [0]


@pytest.fixture
def nan_gradients(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], bool]], None]:
    """`nan_gradients(rule)`: the losses of those updates are NaN whose number (1, 2, ...) the rule is true for."""

    def patch(rule: Callable[[int], bool]) -> None:
        plain, calls = Learner.losses, []

        def losses(self: Learner, *args: Any) -> Any:
            calls.append(1)
            factor = torch.nan if rule(len(calls)) else 1.0
            for loss in plain(self, *args):
                yield loss * factor

        monkeypatch.setattr(Learner, "losses", losses)

    return patch


@pytest.mark.parametrize("stage", ["sft", "train"])
def test_a_run_all_of_whose_updates_are_skipped_fails_with_its_weights_unchanged(
    recipe: Recipe, train: Train, watch: Watch, tmp_path: Path, nan_gradients: Any, stage: str
) -> None:
    nan_gradients(lambda update: True)
    sft = {"steps": 3, "batch_size": 4} if stage == "sft" else {"steps": 0}
    watcher = watch()
    with pytest.raises(RunError, match=r"all 3 updates .* skipped.*learning_rate"):
        train(settings(recipe, "nan", sft=sft, training={"steps": 3}), reward=Odd(), progress=watcher)
    path = tmp_path / "runs" / "nan"
    assert read_summary(path / "summary.json").status == "failed"
    assert watcher.values("optimizer/skipped", stage=stage) == [1.0, 1.0, 1.0]
    assert [notice for notice in watcher.notices if "skipped" in notice] == [
        f"{stage} step 1: 1 of 1 updates so far skipped, because the gradient was NaN or infinite; the weights are "
        "left as they were"
    ]
    if stage == "train":
        first, last = (load_file(path / "checkpoints" / f"step_00000{step}" / "model.safetensors") for step in (0, 3))
        assert all(torch.equal(first[name], last[name]) for name in first)


def test_skipped_updates_are_told_at_powers_of_ten_and_end_the_run_at_so_many_in_a_row(
    recipe: Recipe, train: Train, watch: Watch, nan_gradients: Any
) -> None:
    nan_gradients(lambda update: update not in (1, 5))
    training = {"steps": 40, "max_skipped_updates": 8}
    config = recipe(training=training, run={"checkpoint_every": 0}, advantage={"baseline": "none", "scale": "none"})
    watcher = watch()
    with pytest.raises(RunError, match=r"last 8 updates were skipped.*max_skipped_updates=8"):
        train(config, reward=Odd(), progress=watcher)
    assert watcher.steps("train") == list(range(1, 14))
    assert [notice.split(" so far")[0] for notice in watcher.notices if "skipped" in notice] == [
        "train step 2: 1 of 2 updates", "train step 12: 10 of 12 updates"
    ]  # fmt: skip


@pytest.mark.parametrize("when", ["before", "first step"])
def test_a_run_that_failed_before_its_first_step_was_done_does_not_block_the_corrected_recipe(
    recipe: Recipe, train: Train, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    wrong = recipe(optimizer={"learning_rate": 0.5})
    with monkeypatch.context() as patched:
        if when == "before":
            patched.setattr(
                flatpeak.pipeline.stages, "build_learner", lambda *args, **kwargs: raising(ValueError("bad betas"))()
            )
        reward = Odd(at_step=1 if when == "first step" else 0, act=raising(ValueError("nonsense")))
        with pytest.raises(ValueError, match=r"bad betas|nonsense"):
            train(wrong, reward=reward)
    right = train(recipe(), reward=Odd())
    assert right.summary.status == "done"
    assert json.loads((right.path / "manifest.json").read_text()).get("resumed") is None
    with pytest.raises(UserError, match="exists"):
        train(recipe(), reward=Odd())


def test_overwriting_keeps_the_old_run_until_the_rewards_are_ready(
    recipe: Recipe, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = train(recipe(), reward=Odd())
    before = {path: path.read_bytes() for path in old.path.rglob("*.*") if path.is_file()}
    monkeypatch.setattr(Components, "prepare", lambda self: raising(UserError("the judge is not there"))())
    with pytest.raises(UserError, match="not there"):
        train(recipe(), reward=Odd(), overwrite=True)
    assert {path: path.read_bytes() for path in old.path.rglob("*.*") if path.is_file()} == before


def test_sft_without_steps_is_refused(recipe: Recipe) -> None:
    with pytest.raises(UserError, match=r"sft\.steps=0: .*set sft\.steps"):
        flatpeak.pipeline.train.sft(recipe())


def test_the_best_checkpoint_is_chosen_by_the_same_questions_at_every_step(
    recipe: Recipe, train: Train, tmp_path: Path
) -> None:
    class ByQuestion(Odd):
        """In evaluations the first two questions are right at step 1, the others always."""

        def __call__(self, groups: Any) -> Scores:
            scores = super().__call__(groups)
            if len(groups[0].completions) > 1:
                return scores
            values = [[float(index >= 2 or self.evaluations == 2)] for index in range(len(groups))]
            return Scores(total=values, parts={"correctness": values})

    evaluation = {"every": 1, "size": 6, "final_size": 2, "metric": "reward"}
    result = train(recipe(evaluation=evaluation, training={"steps": 3}), reward=ByQuestion())
    assert [e.size for e in result.summary.evaluations] == [2, 6, 6, 2]
    assert result.summary.best_step == 1
    state = json.loads((tmp_path / "runs" / "tiny" / "checkpoints" / "last" / "trainer" / "state.json").read_text())
    assert [row["choice"] for row in state["history"]["evaluations"]] == [0.0, 1.0, 0.0, 0.0]


def test_a_goal_that_the_model_reaches_before_training_ends_the_run_at_step_0(
    recipe: Recipe, train: Train, watch: Watch
) -> None:
    def right(completion_ids: list[list[int]]) -> list[float]:
        return [1.0 for _ in completion_ids]

    watcher = watch()
    result = train(recipe(training={"steps": 7, "stop_at": 0.5}), reward=right, progress=watcher)
    assert (result.summary.status, result.exit_code, watcher.steps("train")) == ("done", 0, [])
    assert result.best.resolve().name == "step_000000"
    assert [notice for notice in watcher.notices if notice.startswith("no step is taken")] == [
        "no step is taken: training.stop_at=0.5 is reached by the model that RL would begin with (accuracy 1)"
    ]


def test_the_summary_names_no_step_whose_checkpoint_was_not_written(
    recipe: Recipe, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = recorder.write_checkpoint

    def full_disk(parent: Path, step: int, **parts: Any) -> Path:
        if step:
            raise CheckpointError(f"{parent}/step_{step:06d}: not written (No space left on device)")
        return written(parent, step, **parts)

    monkeypatch.setattr(recorder, "write_checkpoint", full_disk)
    config = settings(recipe, "full")
    with pytest.raises(CheckpointError):
        train(config, reward=Odd())
    summary = read_summary(Path(config["run"]["directory"]) / "full" / "summary.json")
    assert (summary.status, summary.last_step, summary.checkpoints) == ("failed", 0, ("step_000000",))
