"""Memory that runs out halves what is computed at once: the run goes on, and ends as it would have with enough."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import flatpeak.training.regularized
from flatpeak.policy.model import Policy
from flatpeak.rollout.slots import CompletionBuffer, DecodeSlots
from flatpeak.runs.notices import read_notices
from flatpeak.training.learner import Learner
from flatpeak.utils.out_of_memory import Halvings, MemoryBound, is_out_of_memory
from support.regularized_training import double_qwen2, make_learner, off_policy
from support.runs import Recipe, Train

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS, ROWS = "training.micro_batch_tokens", "rollout.max_rows"
ERRORS = {
    "torch": torch.OutOfMemoryError("CUDA out of memory"),
    "the allocator of a CPU": RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    "Python": MemoryError(),
}


def fail(
    monkeypatch: pytest.MonkeyPatch,
    owner: Any,
    name: str,
    *calls: int,
    when: Callable[[], bool] = lambda: True,
    error: Exception = ERRORS["torch"],
) -> list[int]:
    """Raise an error at these calls of a function, of those that count; returns the numbers of all of them."""
    plain, seen = getattr(owner, name), []

    def limited(*args: Any, **kwargs: Any) -> Any:
        if when():
            seen.append(len(seen) + 1)
            if len(seen) in calls:
                raise error
        return plain(*args, **kwargs)

    monkeypatch.setattr(owner, name, limited)
    return seen


class Outcome:
    """What a run leaves behind."""

    def __init__(self, path: Path) -> None:
        last = path / "checkpoints" / "last"
        self.weights = load_file(last / "model.safetensors")
        self.state = json.loads((last / "trainer" / "state.json").read_text())
        self.rollouts = {file.name: file.read_bytes() for file in (path / "rollouts").iterdir()}
        self.halved = [row["text"] for row in read_notices(path / "notices.jsonl") if "memory ran out" in row["text"]]

    def differs(self, other: Outcome) -> float:
        return max(float((self.weights[name] - other.weights[name]).abs().max()) for name in self.weights)


@pytest.fixture
def run(recipe: Recipe, train: Train, tmp_path: Path) -> Callable[..., Outcome]:
    """`run(name, **sections)`: the outcome of a run whose minibatches take several micro-batches, with dropout."""

    def start(name: str, *, resume: bool = False, **sections: Any) -> Outcome:
        from flatpeak.config.load import merge

        base = {
            "run": {"name": name, "grading_workers": 0},
            "model": {"new": {"config": {"attention_dropout": 0.0}}},
            "kl": {"coefficient": 0.05},
            "optimizer": {"name": "sgd", "learning_rate": 0.1},
            "training": {"steps": 2, "minibatches": 2, "micro_batch_tokens": 200},
        }
        train(recipe(**merge(base, sections)), reward=even, resume=resume, progress=False)
        return Outcome(tmp_path / "runs" / name)

    return start


def even(group: Any) -> list[float]:
    return [float(completion.token_ids[0] % 2) for completion in group.completions]


def test_every_kind_of_error_is_known_and_no_other() -> None:
    assert all(is_out_of_memory(error) for error in ERRORS.values())
    assert not is_out_of_memory(RuntimeError("shapes differ"))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("calls", [(2,), (2, 3)], ids=["once", "twice"])
def test_an_update_that_does_not_fit_is_computed_again_in_smaller_micro_batches(
    run: Callable[..., Outcome], error: str, calls: tuple[int, ...]
) -> None:
    expected = run("whole")
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, Policy, "token_logprobs", *calls, when=torch.is_grad_enabled, error=ERRORS[error])
        actual = run("halved")
    assert actual.differs(expected) < 1e-6
    assert tokens_of(actual) == tokens_of(expected)
    assert len(actual.halved) == len(calls)
    value = actual.state["halved"][TOKENS]
    assert value < 200
    assert f"{TOKENS} is {value} from here on" in actual.halved[-1]
    assert f"write {TOKENS}={value} into the recipe" in actual.halved[-1]
    assert actual.state.keys() - expected.state.keys() == {"halved"}


def test_scoring_that_does_not_fit_is_repeated_in_smaller_micro_batches(run: Callable[..., Outcome]) -> None:
    expected = run("whole")
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, Policy, "token_logprobs", 1, when=lambda: not torch.is_grad_enabled())
        actual = run("halved")
    assert actual.differs(expected) < 1e-6
    assert [TOKENS in text for text in actual.halved] == [True]


@pytest.mark.parametrize("call", [1, 3])
def test_a_second_pass_of_regularization_that_does_not_fit_leaves_weights_and_schedule_as_they_were(
    run: Callable[..., Outcome], call: int
) -> None:
    sections = {
        "gradient_regularization": {"strength": 0.1, "check_every": 0},
        "training": {"micro_batch_tokens": 30},
    }
    expected = run("whole", **sections)
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, flatpeak.training.regularized, "second_pass_loss", call)
        actual = run("halved", **sections)
    assert actual.differs(expected) < 1e-6
    assert len(actual.halved) == 1
    same = {name: value for name, value in expected.state["learner"].items() if not isinstance(value, float)}
    assert {name: actual.state["learner"][name] for name in same} == same


def test_dropout_draws_the_same_numbers_when_an_update_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = []
    for budget, failing in ((20, ()), (10_000, (1,))):
        policy = double_qwen2(dropout=0.2)
        learner = make_learner(policy, micro_batch_tokens=budget)
        Halvings(notice=lambda text: None).apply(learner.bound)
        with monkeypatch.context() as patch:
            # The error comes after a pass, once dropout has drawn.
            fail(patch, Learner, "joined", *failing)
            torch.manual_seed(3)
            learner.update(off_policy(policy), rate=0.0)
        gradients.append([parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None])
        batch_tokens = learner.micro_batch_tokens
    smaller = make_learner(policy, micro_batch_tokens=batch_tokens)
    torch.manual_seed(3)
    smaller.update(off_policy(policy), rate=0.0)
    expected = [parameter.grad for parameter in policy.parameters() if parameter.grad is not None]
    assert batch_tokens < 10_000
    assert all(torch.equal(one, other) for one, other in zip(gradients[1], expected, strict=True))


@pytest.mark.parametrize(
    ("engine", "owner", "name"), [("native", DecodeSlots, "step"), ("generate", CompletionBuffer, "draw")]
)
@pytest.mark.parametrize("calls", [(2,), (3, 5)], ids=["once", "twice"])
def test_groups_that_are_not_complete_are_drawn_again_in_fewer_rows(
    run: Callable[..., Outcome], engine: str, owner: type, name: str, calls: tuple[int, ...]
) -> None:
    sections = {"rollout": {"engine": engine, "max_rows": 12}}
    expected = run("whole", **sections)
    with pytest.MonkeyPatch.context() as patch:
        # The first calls are those of the evaluation before the first step.
        before = fail(patch, owner, name)
        run("counted", **sections, training={"steps": 0})
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, owner, name, *(len(before) + call for call in calls))
        actual = run("halved", **sections)
    assert actual.rollouts.keys() == expected.rollouts.keys()
    assert tokens_of(actual) == tokens_of(expected)
    assert actual.differs(expected) < 1e-6
    assert len(actual.halved) == len(calls)
    value = actual.state["halved"][ROWS]
    assert f"{ROWS} is {value} from here on" in actual.halved[-1]


def tokens_of(outcome: Outcome) -> list[list[int]]:
    rows = [json.loads(line) for name in sorted(outcome.rollouts) for line in outcome.rollouts[name].splitlines()]
    return [row["token_ids"] for row in rows]


def test_a_resumed_run_starts_with_the_halved_values_unless_the_recipe_has_lower_ones(
    run: Callable[..., Outcome],
) -> None:
    seen: list[int] = []
    plain = Learner.accumulate_gradients

    def noted(self: Learner, *batches: Any) -> Any:
        seen.append(self.micro_batch_tokens)
        return plain(self, *batches)

    with pytest.MonkeyPatch.context() as patch:
        fail(patch, Policy, "token_logprobs", 2, when=torch.is_grad_enabled)
        halved = run("halved", training={"steps": 1}).state["halved"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Learner, "accumulate_gradients", noted)
        resumed = run("halved", resume=True, training={"steps": 2})
        assert set(seen) == {halved[TOKENS]}
        assert resumed.state["halved"] == halved
        run("halved", resume=True, training={"steps": 3, "micro_batch_tokens": 3})
        assert seen[-1] == 3


def test_the_error_ends_the_run_where_each_micro_batch_is_one_completion(run: Callable[..., Outcome]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fail(patch, Policy, "token_logprobs", *range(2, 99), when=torch.is_grad_enabled)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            run("tiny")
    assert "flatpeak plan" in caught.value.__notes__[0]


def test_without_a_run_and_in_several_processes_nothing_is_halved() -> None:
    bound = MemoryBound(TOKENS, 8)
    Halvings(values={TOKENS: 4}).apply(bound)
    with pytest.raises(MemoryError):
        for attempt in bound.attempts(lambda tokens: 8 // tokens):
            with attempt:
                raise MemoryError
    assert bound.value == 4


def test_a_value_is_halved_until_the_work_is_divided_further() -> None:
    notices: list[str] = []
    bound, tried = MemoryBound(TOKENS, 4096), []
    Halvings(notices.append).apply(bound)
    for attempt in bound.attempts(lambda tokens: -(-100 // tokens)):
        with attempt:
            tried.append(bound.value)
            if bound.value > 40:
                raise MemoryError
    assert tried == [4096, 64, 32]
    assert len(notices) == 2
