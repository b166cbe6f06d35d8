"""A reference in host memory: the same scores and resets, and on the device only while it scores."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from flatpeak.policy.config import LoraConfig as LoraSection
from flatpeak.policy.config import ModelConfig, ReferenceConfig
from flatpeak.policy.loading import cast_weights, load_policy
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import ReferenceResets, renewed, snapshot
from flatpeak.training.config import TrainingConfig
from flatpeak.training.objective_config import KLConfig
from flatpeak.training.trainer import Trainer
from flatpeak.types import Batch
from support.host_memory import SimulatedHost, simulate_host
from support.models import letter_tokenizer, tiny_model
from support.regularized_training import make_learner, make_regularized_trainer
from support.training import largest_difference, make_batch, tiny_policy, weights

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
SEVERAL = TrainingConfig(steps=4, epochs_per_rollout=2, minibatches=2, micro_batch_tokens=12)


def float32_policy() -> Policy:
    return tiny_policy()


def tied_policy() -> Policy:
    return Policy(tiny_model("gpt2"), letter_tokenizer())


def coarse_policy() -> Policy:
    model = tiny_model()
    cast_weights(model, torch.bfloat16)
    return Policy(model, letter_tokenizer())


def adapted_policy() -> Policy:
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return Policy(get_peft_model(tiny_model(), config), letter_tokenizer())


POLICIES = [float32_policy, tied_policy, coarse_policy, adapted_policy]


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SimulatedHost]]:
    """A host for the CPU."""
    return simulate_host(monkeypatch)  # type: ignore[return-value]


def some_batch() -> Batch:
    return make_batch([4, 3, 5, 2], prompts=[[3, 7, 12], [20, 5], [8]], prompt_N=[0, 0, 1, 2])


def own_weights(reference: Policy, policy: Policy) -> list[Tensor]:
    """The reference's weights that are none of the policy's."""
    shared = {id(weight) for weight in policy.model.parameters()}
    return [weight for weight in reference.model.parameters() if id(weight) not in shared]


def watch_passes(reference: Policy, policy: Policy, host: SimulatedHost) -> list[int]:
    """How many copies are on the device in each pass of the reference from now on; every own weight has to be there."""
    seen: list[int] = []
    plain = reference.token_logprobs

    def watched(batch: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        assert not any(host.holds(weight) for weight in own_weights(reference, policy))
        seen.append(host.living)
        return plain(batch, **settings)

    reference.token_logprobs = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("make", POLICIES)
@pytest.mark.parametrize("named", [False, True])
def test_an_offloaded_reference_scores_alike_and_leaves_the_device(
    hosts: list[SimulatedHost], make: Callable[[], Policy], named: bool
) -> None:
    policy, reference = make(), make()
    if not named:
        reference = snapshot(policy)
    held = weights(reference)
    shared = {id(weight): weight.data_ptr() for weight in policy.model.parameters()}
    learner = make_learner(policy, micro_batch_tokens=6)
    expected_T = learner.score(reference, some_batch())
    reference.offload()
    (host,) = hosts
    own = own_weights(reference, policy)
    adapters = make is adapted_policy and not named
    assert len(own) == (8 if adapters else len(list(reference.model.parameters())))
    assert all(host.holds(weight) for weight in own)
    seen = watch_passes(reference, policy, host)
    assert torch.equal(learner.score(reference, some_batch()), expected_T)
    assert len(seen) >= 3
    assert set(seen) == {len(own)}  # copied once for all micro-batches
    assert host.fetched == len(own)
    assert host.living == 0
    assert all(host.holds(weight) for weight in own)
    assert largest_difference(weights(reference), held) == 0
    assert {id(weight): weight.data_ptr() for weight in policy.model.parameters()} == shared


def test_a_quantized_reference_of_its_own_scores_alike(hosts: list[SimulatedHost], tmp_path: Path) -> None:
    for component in (tiny_model(), letter_tokenizer()):
        component.save_pretrained(tmp_path)
    config = ModelConfig(path=str(tmp_path), device="cpu", dtype="bfloat16", quantization="nf4", lora=LoraSection())
    reference, learner = load_policy(config), make_learner(coarse_policy(), micro_batch_tokens=6)
    reference.model.requires_grad_(False)
    expected_T = learner.score(reference, some_batch())
    reference.offload()
    assert torch.equal(learner.score(reference, some_batch()), expected_T)
    assert {weight.dtype for weight in reference.model.parameters()} > {torch.uint8}
    assert all(hosts[0].holds(weight) for weight in reference.model.parameters())
    assert hosts[0].living == 0


def test_weights_leave_the_device_also_after_an_error(hosts: list[SimulatedHost]) -> None:
    reference = snapshot(tiny_policy())
    reference.offload()
    (host,) = hosts
    with pytest.raises(RuntimeError, match="no memory"), reference.on_device(), reference.on_device():
        assert host.living == host.fetched > 0
        raise RuntimeError("no memory")
    assert host.living == 0
    assert all(host.holds(weight) for weight in reference.model.parameters())


def test_a_reset_copies_the_policy_to_the_host(hosts: list[SimulatedHost]) -> None:
    policy = tiny_policy()
    reference = snapshot(policy)
    reference.offload()
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(1.5)
    assert renewed(reference, policy) is reference
    assert largest_difference(weights(reference), weights(policy)) == 0
    assert all(hosts[0].holds(weight) for weight in reference.model.parameters())
    assert hosts[0].living == 0


@pytest.mark.parametrize("offload", [False, True])
def test_a_named_reference_is_replaced_by_a_copy_that_lies_where_it_lay(
    hosts: list[SimulatedHost], offload: bool
) -> None:
    policy, named = tiny_policy(), tiny_policy(seed=1)
    if offload:
        named.offload()
    assert renewed(named, policy).offloaded == offload


def make_trainer(make: Callable[[], Policy], *, offload: bool, rule: ReferenceConfig, **regularization: Any) -> Trainer:
    policy = make()
    reference = snapshot(policy)
    if offload:
        reference.offload()
    kl = KLConfig(coefficient=0.1)
    trainer = make_regularized_trainer(policy, training=SEVERAL, reference=reference, kl=kl, **regularization)
    trainer.resets = ReferenceResets(rule)
    return trainer


def numbers(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that depend on no clock and no allocator."""
    left_out = ("time/", "memory/", "throughput/", "gradreg/time_share")
    return {name: value for name, value in metrics.items() if not name.startswith(left_out)}


@pytest.mark.parametrize("make", POLICIES)
def test_training_with_resets_keeps_its_bits_and_metrics(
    hosts: list[SimulatedHost], make: Callable[[], Policy]
) -> None:
    rule = ReferenceConfig(reset_every=1)
    penalty = {"strength": 0.05, "step": 1e-2} if make is coarse_policy else {"strength": 0.05}
    plain, offloaded = (make_trainer(make, offload=offload, rule=rule, **penalty) for offload in (False, True))
    for step in (1, 2):
        rows = [trainer.train_step(step) for trainer in (plain, offloaded)]
        assert numbers(rows[0]) == pytest.approx(numbers(rows[1]), abs=0, rel=0, nan_ok=True)
        assert largest_difference(weights(plain.learner.policy), weights(offloaded.learner.policy)) == 0
        assert hosts[0].living == 0
    assert rows[1]["reference/resets"] == 2
    saved = plain.resets.tensors(plain.learner.reference)
    ours = offloaded.resets.tensors(offloaded.learner.reference)
    assert saved.keys() == ours.keys()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in saved.items())


def test_a_checkpoint_brings_an_offloaded_reference_back(hosts: list[SimulatedHost]) -> None:
    rule = ReferenceConfig(reset_every=1)
    trainer = make_trainer(float32_policy, offload=True, rule=rule)
    trainer.train_step(1)
    saved = {name: tensor.clone() for name, tensor in trainer.resets.tensors(trainer.learner.reference).items()}
    trainer.train_step(2)
    policy, again = tiny_policy(), ReferenceResets(rule)
    reference = snapshot(policy)
    reference.offload()
    assert again.load(1, saved, reference=reference, policy=policy) is reference
    assert all(torch.equal(value, saved[name]) for name, value in weights(reference).items())
    assert largest_difference(weights(reference), weights(policy)) > 0
    assert all(hosts[-1].holds(weight) for weight in reference.model.parameters())


def test_the_masters_path_copies_the_reference_once_for_all_minibatches(hosts: list[SimulatedHost]) -> None:
    trainer = make_trainer(coarse_policy, offload=True, rule=ReferenceConfig())
    (host,) = hosts
    assert trainer.learner.reference is not None
    seen = watch_passes(trainer.learner.reference, trainer.learner.policy, host)
    own = len(own_weights(trainer.learner.reference, trainer.learner.policy))
    trainer.train_step(1)
    assert len(seen) >= 4  # two epochs of two minibatches
    assert host.fetched == own


def test_on_a_cpu_nothing_is_offloaded() -> None:
    reference = snapshot(tiny_policy())
    where = [weight.data_ptr() for weight in reference.model.parameters()]
    reference.offload()
    assert not reference.offloaded
    assert [weight.data_ptr() for weight in reference.model.parameters()] == where


@needs_cuda
@pytest.mark.parametrize("make", POLICIES)
def test_on_a_gpu_the_reference_lies_pinned_on_the_host_and_scores_alike(make: Callable[[], Policy]) -> None:
    device, policy = torch.device("cuda"), make()
    policy.model.to(device)
    reference, batch = snapshot(policy), on(some_batch(), device)
    learner = make_learner(policy, micro_batch_tokens=6)
    expected_T = learner.score(reference, batch)
    own = own_weights(reference, policy)
    size = sum(weight.nbytes for weight in own)
    gc.collect()
    before = torch.cuda.memory_allocated()
    reference.offload()
    after = torch.cuda.memory_allocated()
    assert before - after >= 0.9 * size > 0
    assert all(weight.is_pinned() for weight in own)
    assert torch.equal(learner.score(reference, batch), expected_T)
    assert torch.cuda.memory_allocated() <= after + 4096  # the scores
    assert all(weight.is_pinned() for weight in own)


def on(batch: Batch, device: torch.device) -> Batch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return replace(batch, **{name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)})
