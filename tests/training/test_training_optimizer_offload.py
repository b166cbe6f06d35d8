"""Optimizer states in host memory between updates: the same bits, and one bucket on the device at a time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from flatpeak.policy.loading import cast_weights
from flatpeak.policy.model import Policy
from flatpeak.training import optimizer as optimizer_module
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.learner import Learner, PolicyStatistics
from flatpeak.training.objective_config import ObjectiveConfig
from flatpeak.training.optimizer import step_in_buckets
from flatpeak.types import Batch
from support.host_memory import SimulatedHost, simulate_host
from support.models import letter_tokenizer, tiny_model
from support.regularized_training import make_learner
from support.training import largest_difference, make_batch, weights, with_advantages

WIDE = {"hidden_size": 64, "intermediate_size": 96}
"""Matrices of 4,096 elements and more, whose moments are offloaded and are large enough for 8 bits."""
BUCKET = 10_000
RATE = 1e-3
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def make_policy(kind: str = "float32") -> Policy:
    """A model in float32, in bfloat16 with masters, or with adapters."""
    model: Any = tiny_model(scale=2.0, **WIDE)
    if kind == "bfloat16":
        cast_weights(model, torch.bfloat16)
    if kind == "adapters":
        torch.manual_seed(0)
        config = LoraConfig(r=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    policy = Policy(model, letter_tokenizer())
    assert policy.native, policy.notice
    return policy


def learner_of(policy: Policy, *, offload: bool, name: str = "adamw", **regularization: Any) -> Learner:
    optimizer = OptimizerConfig.model_validate(
        {"name": name, "learning_rate": RATE, "weight_decay": 0.1, "offload": offload}
    )
    return make_learner(
        policy, objective=ObjectiveConfig(loss="policy_gradient"), optimizer=optimizer, **regularization
    )


def some_batch(seed: int = 0) -> Batch:
    return make_batch([4, 3, 5, 2], prompts=[[3, 7, 12], [20, 5], [8]], prompt_N=[0, 0, 1, 2], seed=seed)


def train(learner: Learner, steps: range = range(4)) -> Learner:
    for step in steps:
        assert not learner.update(some_batch(step), rate=RATE).skipped
    return learner


def assert_equal(left: Learner, right: Learner) -> None:
    """Equal weights, states and masters, to the bit."""
    assert largest_difference(weights(left.policy), weights(right.policy)) == 0
    ours, theirs = left.tensors(), right.tensors()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
        assert tensor.dtype == theirs[name].dtype


def large_states(learner: Learner) -> list[Tensor]:
    """The moments and masters of 4 KiB and more."""
    states = [value for state in learner.optimizer.state.values() for value in state.values()]
    masters = [master for _, master in learner.masters.pairs.values()]
    return [*masters, *(value for value in states if isinstance(value, Tensor) and value.nbytes >= 4096)]


def simulated(learner: Learner) -> SimulatedHost:
    assert isinstance(learner.host, SimulatedHost)
    return learner.host


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimulatedHost]]:
    """A host for the CPU, and buckets of 10,000 weights."""
    monkeypatch.setattr(optimizer_module, "step_in_buckets", partial(step_in_buckets, size=BUCKET))
    return simulate_host(monkeypatch)  # type: ignore[return-value]


PENALTY = {"strength": 0.1, "step": 5e-3}


@pytest.mark.parametrize(
    ("kind", "name", "regularization"),
    [
        ("float32", "adamw", {}),
        ("float32", "adamw", {"strength": 0.1}),
        ("float32", "adamw_8bit", {}),
        ("float32", "sgd", {}),
        ("bfloat16", "adamw", {}),
        ("bfloat16", "adamw", PENALTY),
        ("bfloat16", "adamw_8bit", PENALTY),
        ("bfloat16", "sgd", {}),
        ("adapters", "adamw", {"strength": 0.1, "perturbed": "adapters"}),
        ("adapters", "adamw_8bit", {}),
    ],
)
def test_offloaded_states_train_to_the_same_bits(
    hosts: list[SimulatedHost], kind: str, name: str, regularization: dict[str, Any]
) -> None:
    plain = train(learner_of(make_policy(kind), offload=False, name=name, **regularization))
    offloaded = train(learner_of(make_policy(kind), offload=True, name=name, **regularization))
    assert_equal(offloaded, plain)
    assert largest_difference(weights(plain.policy), weights(make_policy(kind))) > 1e-4
    if (kind, name) != ("float32", "sgd"):  # which has no state at all
        assert large_states(offloaded)
        assert simulated(offloaded).fetched > 0


def watch_steps(learner: Learner) -> list[int]:
    """The bytes of moments and masters on the device in each step of the optimizer from now on."""
    found: list[int] = []
    step = learner.optimizer.step

    def watched() -> None:
        step()
        stepped = {id(parameter) for parameter in learner.optimizer.param_groups[0]["params"]}
        for parameter, state in learner.optimizer.state.items():
            large = [value for value in state.values() if value.nbytes >= 4096]
            # Made by this step or fetched for it, and else on the host.
            assert all(simulated(learner).holds(value) == (id(parameter) not in stepped) for value in large)
        found.append(sum(t.nbytes for t in large_states(learner) if not simulated(learner).holds(t)))

    learner.optimizer.step = watched  # type: ignore[method-assign,assignment]
    return found


@pytest.mark.parametrize(("kind", "bytes_per_weight"), [("float32", 8), ("bfloat16", 12)])
def test_the_device_holds_one_bucket_in_a_step_and_nothing_between(
    hosts: list[SimulatedHost], kind: str, bytes_per_weight: int
) -> None:
    policy = make_policy(kind)
    learner = learner_of(policy, offload=True)
    found, stored = watch_steps(learner), 0
    for step in range(2):
        train(learner, range(step, step + 1))
        assert all(simulated(learner).holds(tensor) for tensor in large_states(learner))
        assert simulated(learner).living == 0
        stored = len(simulated(learner).tensors) if step == 0 else stored
    assert len(simulated(learner).tensors) == stored == len(large_states(learner))
    sizes = [parameter.numel() for parameter in policy.parameters()]
    assert max(sizes) < BUCKET < sum(sizes) / 4
    assert len(found) >= 2 * sum(sizes) / BUCKET
    assert 0 < max(found) <= bytes_per_weight * BUCKET
    assert found[: len(found) // 2] == found[len(found) // 2 :]
    # The last step of an update leaves nothing behind that the first one of the next would add to.
    total = sum(size for size in sizes if 4 * size >= 4096)
    assert sum(found) == 2 * (8 * total + (bytes_per_weight - 8) * sum(sizes))


def test_a_weight_larger_than_a_bucket_is_stepped_alone(hosts: list[SimulatedHost]) -> None:
    learner = learner_of(make_policy(), offload=True)
    stepped: list[list[int]] = []
    step = learner.optimizer.step

    def watched() -> None:
        stepped.append([parameter.numel() for parameter in learner.optimizer.param_groups[0]["params"]])
        step()

    learner.optimizer.step = watched  # type: ignore[method-assign,assignment]
    learner.accumulate_gradients(some_batch())
    assert learner.host is not None
    step_in_buckets(learner.optimizer, learner.masters, learner.host, size=5_000)
    sizes = [parameter.numel() for parameter in learner.policy.parameters()]
    assert [size for bucket in stepped for size in bucket] == sizes
    assert all(sum(bucket) <= 5_000 for bucket in stepped if len(bucket) > 1)
    assert sorted(bucket[0] for bucket in stepped if bucket[0] > 5_000) == sorted(n for n in sizes if n > 5_000)
    assert learner.optimizer.param_groups[0]["params"] == learner.masters.stepped


def test_weights_without_a_gradient_are_neither_moved_nor_stepped(hosts: list[SimulatedHost]) -> None:
    learner = train(learner_of(make_policy(), offload=True), range(1))
    before = weights(learner.policy)
    learner.zero_grad()
    head = learner.policy.head.linear.weight
    head.grad = torch.ones_like(head)
    fetched = simulated(learner).fetched
    assert learner.host is not None
    step_in_buckets(learner.optimizer, learner.masters, learner.host)
    moved = {name for name, value in weights(learner.policy).items() if not torch.equal(value, before[name])}
    assert moved == {"lm_head.weight"}
    assert simulated(learner).fetched == fetched + 2  # its two moments


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_a_skipped_update_moves_nothing(hosts: list[SimulatedHost], kind: str) -> None:
    learner = train(learner_of(make_policy(kind), offload=True), range(2))
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    held, fetched = weights(learner.policy), simulated(learner).fetched
    broken = with_advantages(some_batch(), [1.0, float("nan"), 1.0, 1.0])
    assert learner.update(broken, rate=RATE).skipped
    assert simulated(learner).fetched == fetched
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.tensors().items())
    assert largest_difference(weights(learner.policy), held) == 0
    plain = train(learner_of(make_policy(kind), offload=False), range(2))
    assert_equal(train(learner, range(2, 4)), train(plain, range(2, 4)))


def test_a_reset_of_the_optimizer_begins_new_states_on_the_host(hosts: list[SimulatedHost]) -> None:
    ends = []
    for offload in (False, True):
        learner = train(learner_of(make_policy(), offload=offload), range(2))
        learner.optimizer.state.clear()
        ends.append(train(learner, range(2, 4)))
    assert_equal(*ends)
    assert float(ends[1].tensors()["0.step"]) == 2
    assert all(simulated(ends[1]).holds(tensor) for tensor in large_states(ends[1]))


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize(("kind", "name"), [("float32", "adamw"), ("bfloat16", "adamw"), ("bfloat16", "adamw_8bit")])
def test_a_checkpoint_serves_with_and_without_offloading(
    hosts: list[SimulatedHost], kind: str, name: str, before: bool, after: bool
) -> None:
    whole = train(learner_of(make_policy(kind), offload=False, name=name))
    first = train(learner_of(make_policy(kind), offload=before, name=name), range(2))
    saved = {key: tensor.detach().clone() for key, tensor in first.tensors().items()}
    policy = make_policy(kind)
    policy.model.load_state_dict(first.policy.model.state_dict())
    resumed = learner_of(policy, offload=after, name=name)
    resumed.load(first.state(), saved)
    assert all(torch.equal(tensor, saved[key]) for key, tensor in resumed.tensors().items())
    if after:
        assert large_states(resumed)
        assert all(simulated(resumed).holds(tensor) for tensor in large_states(resumed))
    assert_equal(train(resumed, range(2, 4)), whole)


@pytest.mark.parametrize(("first", "second"), [(True, True), (True, False), (False, True)])
def test_a_second_stage_takes_the_masters_over_from_the_first(
    hosts: list[SimulatedHost], first: bool, second: bool
) -> None:
    ends = []
    for stages in ((False, False), (first, second)):
        policy = make_policy("bfloat16")
        for offload in stages:
            learner = train(learner_of(policy, offload=offload), range(2))
        ends.append(learner)
    assert_equal(*ends)


def test_an_error_in_a_step_leaves_the_optimizer_all_of_its_weights(hosts: list[SimulatedHost]) -> None:
    learner = train(learner_of(make_policy(), offload=True), range(1))
    learner.optimizer.step = failing  # type: ignore[method-assign]
    updates = learner.updates
    with pytest.raises(RuntimeError, match="no memory"):
        learner.update(some_batch(), rate=RATE)
    assert learner.optimizer.param_groups[0]["params"] == learner.masters.stepped
    assert learner.updates == updates + 1  # so that no checkpoint takes it for a completed step


def failing() -> None:
    raise RuntimeError("no memory")


def test_on_a_cpu_nothing_is_offloaded() -> None:
    learner = train(learner_of(make_policy("bfloat16"), offload=True))
    assert learner.host is None
    assert_equal(learner, train(learner_of(make_policy("bfloat16"), offload=False)))


@needs_cuda
@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "adapters"])
def test_on_a_gpu_states_lie_pinned_on_the_host_and_training_keeps_its_bits(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.setattr(optimizer_module, "step_in_buckets", partial(step_in_buckets, size=BUCKET))
    plain, offloaded = (learner_on_gpu(kind, offload=offload, name=name) for offload in (False, True))
    for learner in (plain, offloaded):
        update_with_noise(learner, range(3))
    assert_equal_on_the_host(plain, offloaded)
    assert all(tensor.is_pinned() for tensor in large_states(offloaded))
    assert all(tensor.is_cuda for tensor in large_states(plain))
    saved = {key: tensor.detach().cpu().clone() for key, tensor in offloaded.tensors().items()}
    offloaded.load(offloaded.state(), saved)
    for learner in (plain, offloaded):
        update_with_noise(learner, range(3, 5))
    assert_equal_on_the_host(plain, offloaded)


@needs_cuda
def test_on_a_gpu_the_memory_of_the_states_is_free_between_updates() -> None:
    allocated = []
    for offload in (False, True):
        learner = learner_on_gpu("bfloat16", offload=offload, name="adamw")
        update_with_noise(learner, range(2))
        learner.zero_grad()
        allocated.append(torch.cuda.memory_allocated())
        states = sum(tensor.nbytes for tensor in large_states(learner))
        del learner
        gc.collect()
    assert allocated[0] - allocated[1] >= 0.9 * states > 0


def learner_on_gpu(kind: str, *, offload: bool, name: str) -> Learner:
    policy = make_policy(kind)
    policy.model.to("cuda")
    return learner_of(policy, offload=offload, name=name)


def update_with_noise(learner: Learner, steps: range) -> None:
    """Updates with gradients drawn on the CPU: those of a GPU's passes differ in their last bits from run to run."""

    def accumulate(*_: Any) -> PolicyStatistics:
        for weight in learner.masters.weights:
            noise = torch.randn(weight.shape, generator=generator)
            weight.grad = noise.to(device=weight.device)
        return PolicyStatistics()

    learner.accumulate_gradients = accumulate  # type: ignore[method-assign]
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        assert not learner.update(some_batch(), rate=RATE).skipped


def assert_equal_on_the_host(left: Learner, right: Learner) -> None:
    assert largest_difference(weights(left.policy), weights(right.policy)) == 0
    theirs = right.tensors()
    assert all(torch.equal(tensor.cpu(), theirs[name].cpu()) for name, tensor in left.tensors().items())


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_updates_with_given_gradients_are_equal_too(hosts: list[SimulatedHost], kind: str) -> None:
    ends = [learner_of(make_policy(kind), offload=offload) for offload in (False, True)]
    for learner in ends:
        update_with_noise(learner, range(3))
    assert_equal_on_the_host(*ends)
