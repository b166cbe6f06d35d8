"""Sharpness in whole runs: it measures the policy that is trained, and training never knows of it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak.apps.compare import compare_checkpoints
from flatpeak.errors import UserError
from flatpeak.evaluation.config import SharpnessConfig
from flatpeak.evaluation.sharpness import SharpnessProbe
from flatpeak.gradreg.parameters import perturbed_parameters
from flatpeak.gradreg.perturbation import Perturbation
from flatpeak.gradreg.weight_noise import relative_noise
from flatpeak.policy.model import Policy
from flatpeak.rewards.base import ComponentScores, Scorer
from flatpeak.rewards.reward_set import CallersReward
from flatpeak.rollout.engine import NativeEngine
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.summary import read_summary
from flatpeak.types import Group, SamplingParams, Scores
from support.models import letter_tokenizer, tiny_model
from support.resumes import Judge, MakeRun, Whole, assert_same
from support.training import plain_logprobs, prompt, tiny_policy

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
SHARPNESS = {"radii": [0.2, 0.5], "draws": 2, "size": 3, "samples": 2, "eigenvalue": True, "iterations": 3}
MEASURED = {"evaluation": {"sharpness": SHARPNESS}}


def without_sharpness(result: dict[str, Any]) -> dict[str, Any]:
    """An outcome without the metrics of sharpness, wherever a run writes them."""

    def plain(metrics: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in metrics.items() if "sharpness/" not in name}

    history = result["state"]["history"]
    evaluations = [
        {key: plain(value) if isinstance(value, dict) else value for key, value in row.items()}
        for row in history["evaluations"]
    ]
    status, best, last, _, stopped = result["summary"]
    return {
        **result,
        "metrics": [plain(row) for row in result["metrics"]],
        "state": {**result["state"], "history": {**history, "evaluations": evaluations}},
        "summary": (status, best, last, stopped),
    }


@pytest.fixture
def measured(whole: Whole) -> dict[str, Any]:
    """The outcome of the uninterrupted run with sharpness."""
    return whole(**MEASURED)


def test_a_run_ends_the_same_with_and_without(measured: dict[str, Any], uninterrupted: dict[str, Any]) -> None:
    rows = [row for row in measured["metrics"] if row["stage"] == "eval"]
    assert len(rows) == 5
    for row in rows:
        assert row["eval/arithmetic/sharpness/perturbation_kept"] == pytest.approx(1.0)
        assert row["eval/arithmetic/sharpness/weight_norm"] > 0
        assert "eval/arithmetic/sharpness/fall_0.5" in row
    assert max(row.get("eval/arithmetic/sharpness/top_eigenvalue", 0.0) for row in rows) > 0
    assert_same(without_sharpness(measured), without_sharpness(uninterrupted))


def test_a_resumed_run_measures_the_same(make_run: MakeRun, measured: dict[str, Any]) -> None:
    run = make_run("stopped", **MEASURED)
    run.stop_at("train", 3)
    assert_same(run.go_on(), measured)


class Interrupting(Judge):
    """Is interrupted while it scores completions of perturbed weights, in the evaluation after a step."""

    def __init__(self, interrupt: Callable[[], None], *, after: int = 4) -> None:
        super().__init__()
        self.calls, self.interrupt, self.after = 0, interrupt, after

    def __call__(self, group: Any) -> list[float]:
        if self.step == self.after and len(group.completions) == SHARPNESS["samples"]:
            self.calls += 1
            # The first three are of the weights as they are.
            if self.calls == 5:
                self.interrupt()
        return super().__call__(group)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_under_perturbed_weights_leaves_a_checkpoint_of_the_step(
    make_run: MakeRun, measured: dict[str, Any]
) -> None:
    run = make_run("interrupted", **MEASURED)
    judge = Interrupting(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.start(judge=judge)
    assert judge.calls == 5
    assert (run.path / "checkpoints" / "last").readlink() == Path("step_000004")
    assert_same(run.finish(resume=True, judge=judge), measured)


@pytest.mark.parametrize("after", [0, 4])
def test_a_signal_does_not_wait_for_the_rest_of_the_perturbed_weights(
    make_run: MakeRun, send: Any, measured: dict[str, Any], after: int
) -> None:
    run = make_run("signalled", **MEASURED)
    judge = Interrupting(send(signal.SIGTERM), after=after)
    assert run.start(judge=judge).exit_code == 143
    assert judge.calls == 5  # in the middle of the three questions of one draw at one radius, of four such
    assert read_summary(run.path / "summary.json").last_step == after
    assert_same(run.finish(resume=True, judge=judge), measured)


def test_half_precision_weights_move_and_come_back_with_their_masters(whole: Whole) -> None:
    coarse = {"model": {"dtype": "bfloat16"}, "optimizer": {"learning_rate": 1e-3}}
    regularized = {"gradient_regularization": {"strength": "ratio:0.3", "step": 5e-3}}
    plain, measured = whole(**coarse, **regularized), whole(**coarse, **regularized, **MEASURED)
    assert_same(without_sharpness(measured), without_sharpness(plain))
    rows = [row for row in measured["metrics"] if row["stage"] == "eval"]
    assert all(0.999 < row["eval/arithmetic/sharpness/perturbation_kept"] < 1.0 for row in rows)


@pytest.mark.parametrize("engine", ["native", "generate"])
def test_flatpeak_eval_measures_what_the_run_did(recipe: Any, train: Any, engine: str) -> None:
    config = recipe(
        rewards={
            "correctness": {"type": "number"},
            "brief": {"type": "length", "target": 0, "limit": 12, "weight": 0.5},
        },
        rollout={"engine": engine, "max_new_tokens": 12},
        # The random model's blocks hardly matter: it takes a large radius to change a completion.
        evaluation={"sharpness": {**SHARPNESS, "radii": [0.2, 40.0], "samples": 4}},
    )
    result = train(config)
    last = read_summary(result.path / "summary.json").evaluations[-1]
    measured = {name: value for name, value in last.metrics.items() if name.startswith("sharpness/")}
    assert abs(measured["sharpness/fall_40/brief"]) > 0
    (again,) = compare_checkpoints([str(result.path / "checkpoints" / "last")]).evaluations
    assert {name: value for name, value in again.metrics().items() if name.startswith("sharpness/")} == measured
    (other,) = compare_checkpoints([str(result.path)], ["evaluation.sharpness=null"]).evaluations
    assert not [name for name in other.metrics() if "sharpness" in name]


class Remembered:
    """Keeps the groups of every call and scores them by their length."""

    def __init__(self) -> None:
        self.calls: list[Sequence[Group]] = []

    def __call__(self, groups: Sequence[Group]) -> Scores:
        self.calls.append(groups)
        total = [[float(len(c.token_ids)) for c in group.completions] for group in groups]
        return Scores(total=total, parts={})


def test_completions_come_from_the_perturbed_weights_through_the_decoder_of_training() -> None:
    policy, remembered = tiny_policy(), Remembered()
    parameters = [p for p in perturbed_parameters(policy.model, "blocks", section="here") if p.ndim >= 2]
    held = Perturbation(policy.model, parameters)
    probe = SharpnessProbe(
        config=SharpnessConfig(radii=(0.4,), draws=2, size=2, samples=3),
        perturbation=held,
        make_losses=lambda groups, scores: None,
    )
    prompts = [prompt("a", [3, 4, 5]), prompt("b", [6])]
    before = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    result = probe.measure(
        prompts,
        sampler=NativeEngine(policy),
        reward=CallersReward(remembered),
        sampling=SamplingParams(temperature=1.0, max_new_tokens=6),
        seed=4,
    )
    assert all(torch.equal(weight, before[name]) for name, weight in policy.model.state_dict().items())
    lengths = [[len(c.token_ids) for group in groups for c in group.completions] for groups in remembered.calls]
    assert result.falls[0.4][""] == pytest.approx(
        [sum(lengths[0][i : i + 3]) / 3 - sum(sum(row[i : i + 3]) for row in lengths[1:]) / 6 for i in (0, 3)]
    )
    for draw in range(2):
        noise = relative_noise(held, seed=4, draw=draw)
        moved = Policy(tiny_model(seed=0), letter_tokenizer())
        names = {p: name for name, p in policy.model.named_parameters()}
        with torch.no_grad():
            for parameter, z in noise.items():
                moved.model.get_parameter(names[parameter]).add_(z, alpha=0.4)
        for group in remembered.calls[1 + draw]:
            for c in group.completions:
                expected = plain_logprobs(moved, group.prompt.token_ids, c.token_ids, temperature=1.0)
                torch.testing.assert_close(torch.tensor(c.logprobs), expected, rtol=1e-4, atol=1e-5)


class Opinion(Scorer):
    """A caller's own judge."""

    is_judge = True

    def score(self, groups: Sequence[Group]) -> ComponentScores:
        return ComponentScores(scores=[[float(len(c.token_ids)) for c in group.completions] for group in groups])


def test_a_callers_judge_is_asked_only_where_the_recipe_allows_it(recipe: Any, train: Any) -> None:
    own = {"accuracy": None, "metric": "reward", "sharpness": {"radii": [0.5], "draws": 1, "size": 2, "samples": 3}}
    with pytest.raises(UserError, match=r"would ask rewards.opinion about 12 completions .*judges=true") as caught:
        train(recipe(evaluation=own), reward={"opinion": Opinion()})
    assert "\n" not in str(caught.value)
    allowed = {**own, "sharpness": {**own["sharpness"], "judges": True}}
    result = train(recipe(evaluation=allowed), reward={"opinion": Opinion()})
    assert "sharpness/fall_0.5/opinion" in read_summary(result.path / "summary.json").evaluations[-1].metrics


def test_sft_checks_leave_sharpness_out(make_run: MakeRun) -> None:
    checked = {"stop_at": 1.0, "check_every": 1, "check_size": 2}
    run = make_run("checked", sft=checked, evaluation={"sharpness": SHARPNESS})
    assert run.start().exit_code == 0
    rows = read_metrics(run.path / "metrics.jsonl")
    assert sum("eval/arithmetic/sharpness/clean" in row for row in rows) == 5
