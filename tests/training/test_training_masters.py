"""Weights in bfloat16 with float32 masters: small updates count, and the masters are all that is stepped and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from flatpeak.errors import UserError
from flatpeak.gradreg.perturbation import Perturbation
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import cast_weights, load_policy, restore_weights
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import snapshot
from flatpeak.rollout.engine import NativeEngine
from flatpeak.training.batch import collate, micro_batches
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.learner import Learner, weighted_sum
from flatpeak.training.objective_config import ObjectiveConfig
from flatpeak.types import Batch, SamplingParams
from support.models import letter_tokenizer, tiny_model
from support.regularized_training import blocks_of, gradient_of, make_learner, off_policy
from support.training import (
    double_policy,
    largest_difference,
    make_batch,
    prompt,
    tiny_policy,
    weights,
    with_advantages,
)

PLAIN = ObjectiveConfig(loss="policy_gradient")
ADAMW = OptimizerConfig(learning_rate=1e-3, max_grad_norm=None)
NEW = {
    "new": {
        "config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 640,
        }
    },
    "device": "cpu",
}
TEXTS = ["the quick brown fox jumps over a lazy dog 0123456789+="]


def coarse_model(*, seed: int = 0) -> Any:
    model = tiny_model(seed=seed)
    cast_weights(model, torch.bfloat16)
    return model


def coarse_policy(*, seed: int = 0) -> Policy:
    """A random Qwen2 in bfloat16."""
    policy = Policy(coarse_model(seed=seed), letter_tokenizer())
    assert policy.native, policy.notice
    return policy


def precise_twin(policy: Policy) -> Policy:
    """The same weights in float32."""
    twin = tiny_policy(seed=9)
    twin.model.load_state_dict(policy.model.state_dict())
    return twin


def some_batch() -> Batch:
    return make_batch([4, 3, 5, 2], prompts=[[3, 7, 12], [20, 5], [8]], prompt_N=[0, 0, 1, 2])


def masters_of(learner: Learner) -> dict[str, Tensor]:
    names = [name for name, parameter in learner.policy.model.named_parameters() if parameter.requires_grad]
    return {name: master.detach().clone() for name, master in zip(names, learner.masters.stepped, strict=True)}


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return torch.stack([(left[name].float() - right[name].float()).square().sum() for name in left]).sum().sqrt().item()


@pytest.mark.slow
def test_updates_that_bfloat16_would_swallow_add_up_to_what_float32_training_does() -> None:
    policy = coarse_policy()
    twin, alone = precise_twin(policy), Policy(coarse_model(), letter_tokenizer())
    start, batch = weights(policy), some_batch()
    settings = OptimizerConfig(name="sgd", learning_rate=2e-6, max_grad_norm=None)
    learner, expected, without = (
        make_learner(one, objective=PLAIN, optimizer=settings) for one in (policy, twin, alone)
    )
    for _ in range(100):
        learner.update(batch, rate=settings.learning_rate)
        expected.update(batch, rate=settings.learning_rate)
        without.accumulate_gradients(batch)
        for parameter in alone.parameters():
            assert parameter.grad is not None
            parameter.data.add_(parameter.grad.bfloat16(), alpha=-settings.learning_rate)
            parameter.grad = None
    gap = distance(masters_of(learner), weights(twin)) / distance(weights(twin), start)
    assert gap < 0.05
    # Entries this large are multiples of 2^-12 or more, and no update is a thirtieth of that.
    large = {name: value.abs() > 0.04 for name, value in start.items()}
    moved, alone_moved = (
        sum(int((after[name] != start[name])[large[name]].sum()) for name in start)
        for after in (weights(policy), weights(alone))
    )
    assert alone_moved == 0
    assert moved > 50


def test_a_step_leaves_the_weights_equal_to_the_rounded_masters_and_where_they_were() -> None:
    policy = coarse_policy()
    held = {name: (parameter, parameter.data_ptr()) for name, parameter in policy.model.named_parameters()}
    learner = make_learner(policy, objective=PLAIN, optimizer=ADAMW)
    for _ in range(3):
        learner.update(some_batch(), rate=1e-3)
    assert largest_difference(weights(policy), {n: m.bfloat16() for n, m in masters_of(learner).items()}) == 0
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters_of(learner).values())
    for name, parameter in policy.model.named_parameters():
        assert (parameter, parameter.data_ptr()) == held[name]
        assert parameter.dtype == torch.bfloat16


def test_gradients_are_summed_over_micro_batches_in_float32_and_clipped_once() -> None:
    policy, batch = coarse_policy(), some_batch()
    learner = make_learner(policy, objective=PLAIN, micro_batch_tokens=6)
    pieces: list[list[Tensor]] = []
    for micro in micro_batches(batch, 6):
        logprobs_T, entropy_T = policy.token_logprobs(micro, temperature=1.0)
        loss = weighted_sum(learner.objective(logprobs_T, entropy_T, micro)[0], micro)
        pieces.append([grad.bfloat16() for grad in torch.autograd.grad(loss, policy.parameters())])
    assert len(pieces) >= 3
    expected = [torch.stack([g.float() for g in grads]).sum(0) for grads in zip(*pieces, strict=True)]
    rounded = [sum(grads[1:], grads[0]) for grads in zip(*pieces, strict=True)]
    learner.accumulate_gradients(batch)
    result = [parameter.grad for parameter in policy.parameters()]
    assert all(grad is not None and grad.dtype == torch.float32 for grad in result)
    for grad, value in zip(result, expected, strict=True):
        torch.testing.assert_close(grad, value, rtol=1e-6, atol=1e-6)
    assert any((value.float() - grad).abs().max() > 1e-3 for value, grad in zip(rounded, expected, strict=True))

    before, norm = masters_of(learner), torch.cat([grad.flatten() for grad in expected]).norm().item()
    learner.config = OptimizerConfig(name="sgd", max_grad_norm=norm / 4)
    statistics = learner.update(batch, rate=1e-3)
    assert statistics.grad_norm == pytest.approx(norm, rel=1e-5)
    assert distance(masters_of(learner), before) == pytest.approx(1e-3 * norm / 4, rel=1e-3)
    assert all(parameter.grad is None for parameter in policy.parameters())


def test_a_gradient_that_is_not_finite_changes_neither_masters_nor_weights() -> None:
    policy = coarse_policy()
    learner = make_learner(policy, objective=PLAIN, optimizer=ADAMW)
    learner.update(some_batch(), rate=1e-3)
    before, masters = weights(policy), masters_of(learner)
    broken = with_advantages(some_batch(), [1.0, float("nan"), 1.0, 1.0])
    assert learner.update(broken, rate=1e-3).skipped
    assert largest_difference(weights(policy), before) == largest_difference(masters_of(learner), masters) == 0
    assert not learner.update(some_batch(), rate=1e-3).skipped
    assert largest_difference(masters_of(learner), masters) > 1e-4


def test_float32_trains_to_the_bits_of_a_loop_by_hand_and_holds_no_second_copy() -> None:
    policy, twin, batch = tiny_policy(), tiny_policy(), some_batch()
    settings = OptimizerConfig(learning_rate=1e-2, weight_decay=0.1)
    learner = make_learner(policy, objective=PLAIN, optimizer=settings, micro_batch_tokens=6)
    by_hand = torch.optim.AdamW(
        twin.parameters(), lr=1e-2, betas=settings.betas, eps=settings.eps, weight_decay=0.1, fused=True
    )
    for _ in range(5):
        learner.update(batch, rate=1e-2)
        by_hand.zero_grad()
        for micro in micro_batches(batch, 6):
            logprobs_T, entropy_T = twin.token_logprobs(micro, temperature=1.0)
            weighted_sum(learner.objective(logprobs_T, entropy_T, micro)[0], micro).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        by_hand.step()
    assert largest_difference(weights(policy), weights(twin)) == 0
    assert largest_difference(weights(policy), weights(tiny_policy())) > 1e-2
    assert all(
        stepped is parameter for stepped, parameter in zip(learner.masters.stepped, policy.parameters(), strict=True)
    )
    assert not any(name.startswith("master.") for name in learner.tensors())


def test_a_checkpoint_goes_on_to_the_bits_of_the_uninterrupted_training(tmp_path: Path) -> None:
    policy, batch = coarse_policy(), some_batch()
    learner = make_learner(policy, objective=PLAIN, optimizer=ADAMW)
    for _ in range(3):
        learner.update(batch, rate=1e-3)
    policy.save(tmp_path)
    save_file({name: tensor.detach().clone() for name, tensor in learner.tensors().items()}, tmp_path / "trainer")
    for _ in range(3):
        learner.update(batch, rate=1e-3)

    again = Policy(AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto"), letter_tokenizer())
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    resumed = make_learner(again, objective=PLAIN, optimizer=ADAMW)
    without_masters = masters_of(resumed)
    resumed.load({}, load_file(tmp_path / "trainer"))
    assert distance(masters_of(resumed), without_masters) > 1e-4
    for _ in range(3):
        resumed.update(batch, rate=1e-3)
    assert largest_difference(masters_of(resumed), masters_of(learner)) == 0
    assert largest_difference(weights(again), weights(policy)) == 0


def test_a_checkpoint_of_another_dtype_is_refused() -> None:
    precise, coarse = (make_learner(one, optimizer=ADAMW) for one in (tiny_policy(), coarse_policy()))
    for learner, other in ((precise, coarse), (coarse, precise)):
        with pytest.raises(UserError, match=r"float32 masters of \d+ weights .* model\.dtype"):
            learner.load({}, other.tensors())


def test_a_second_stage_begins_from_the_weights_that_the_first_one_left() -> None:
    policy = coarse_policy()
    first = make_learner(policy, objective=PLAIN, optimizer=ADAMW)
    for _ in range(3):
        first.update(some_batch(), rate=1e-3)
    assert distance(masters_of(first), weights(policy)) > 1e-4
    second = make_learner(policy, objective=PLAIN, optimizer=ADAMW)
    assert distance(masters_of(second), weights(policy)) == 0
    assert [m.data_ptr() for m in second.masters.stepped] == [m.data_ptr() for m in policy.masters().values()]


def test_regularization_perturbs_the_masters_and_restores_the_weights_bit_for_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = coarse_policy()
    make_learner(policy, objective=PLAIN, optimizer=ADAMW)
    batch, step = off_policy(policy), 2.5e-3
    learner = make_learner(policy, strength=0.1, step=step)
    for weight, master in policy.masters().items():  # as training leaves it: more digits than the weight has
        master.add_(weight.detach().float() * 1e-3)
    before, masters = weights(policy), masters_of(learner)
    g1 = gradient_of_same_masters(policy, batch)
    chosen = list(blocks_of(policy))
    size = torch.cat([masters[name].double().flatten() for name in chosen]).norm()
    h = (step * size / torch.cat([g1[name].double().flatten() for name in chosen]).norm()).item()

    seen: list[dict[str, Tensor]] = []
    move = Perturbation._move

    def watched(self: Perturbation, *args: Any) -> Any:
        kept = move(self, *args)
        seen.append(weights(policy))
        return kept

    monkeypatch.setattr(Perturbation, "_move", watched)
    report = learner.accumulate_gradients(batch).regularization
    assert report is not None
    assert report.kept is not None
    assert 0.7 < report.kept.cosine < 0.999
    assert report.penalty_ratio > 0
    assert len(seen) == 1
    equal, total, of_the_weight = 0, 0, 0
    for name in chosen:
        equal += int((seen[0][name] == (masters[name] + h * g1[name]).bfloat16()).sum())
        of_the_weight += int((seen[0][name] == (before[name].float() + h * g1[name]).bfloat16()).sum())
        total += before[name].numel()
    assert equal > 0.999 * total  # but for entries where h's last digit decides the rounding
    assert of_the_weight < 0.95 * total
    assert largest_difference(weights(policy), before) == largest_difference(masters_of(learner), masters) == 0
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in policy.parameters())
    assert learner.update(batch, rate=1e-3).skipped is False
    assert largest_difference(masters_of(learner), masters) > 0


def gradient_of_same_masters(policy: Policy, batch: Batch) -> dict[str, Tensor]:
    """The plain gradient; a learner of its own would begin new masters, so the old ones are put back."""
    held = {weight: master.clone() for weight, master in policy.masters().items()}
    result = gradient_of(policy, batch)
    for weight, master in policy.masters().items():
        master.copy_(held[weight])
    return result


def test_a_step_that_rounding_swallows_is_still_refused() -> None:
    policy = coarse_policy()
    learner = make_learner(policy, strength=0.1, step=1e-5)
    before = weights(policy)
    with pytest.raises(UserError, match="rounding keeps too little of the perturbation"):
        learner.accumulate_gradients(off_policy(policy))
    assert largest_difference(weights(policy), before) == 0


def test_only_trainable_weights_below_float32_have_masters() -> None:
    double = double_policy()
    assert all(master is weight for weight, master in double.masters().items())
    adapted = get_peft_model(coarse_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    policy = Policy(adapted, letter_tokenizer())
    masters = policy.masters()
    assert {weight.dtype for weight in masters} == {torch.float32}
    assert all(master is weight for weight, master in masters.items())
    learner = make_learner(policy, objective=PLAIN, optimizer=ADAMW)
    start = weights(policy)
    learner.update(some_batch(), rate=1e-3)
    moved = {name for name, value in weights(policy).items() if not torch.equal(value, start[name])}
    assert moved
    assert all("lora_B" in name for name in moved)

    half = coarse_policy()
    half.model.model.embed_tokens.requires_grad_(False)
    assert len(half.masters()) == len(list(half.model.parameters())) - 1


def test_a_callers_model_in_float16_is_refused_with_the_fix() -> None:
    policy = Policy(tiny_model().half(), letter_tokenizer())
    with pytest.raises(
        UserError, match=r"float16 weights: .* use bfloat16 or float32, as with model\.to\(torch\.bfloat16\)"
    ):
        make_learner(policy)


def test_a_new_model_in_bfloat16_is_the_float32_one_rounded_and_its_rotary_tables_are_not() -> None:
    precise, coarse = (
        load_policy(ModelConfig.model_validate({**NEW, "dtype": dtype}), texts=TEXTS, seed=3)
        for dtype in ("float32", "bfloat16")
    )
    assert largest_difference(weights(coarse), {n: w.bfloat16() for n, w in weights(precise).items()}) == 0
    assert {parameter.dtype for parameter in coarse.parameters()} == {torch.bfloat16}
    buffers = dict(coarse.model.named_buffers())
    assert buffers
    assert all(torch.equal(value, buffers[name]) for name, value in precise.model.named_buffers())


def test_a_saved_bfloat16_model_loads_in_its_type_and_an_existing_one_in_the_asked_for(tmp_path: Path) -> None:
    policy = load_policy(ModelConfig.model_validate({**NEW, "dtype": "bfloat16"}), texts=TEXTS)
    policy.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in policy.model.state_dict().items())
    for name in ("float32", "bfloat16"):
        again = load_policy(ModelConfig.model_validate({"path": str(tmp_path), "device": "cpu", "dtype": name}))
        assert {parameter.dtype for parameter in again.parameters()} == {getattr(torch, name)}
        assert largest_difference({n: w.float() for n, w in weights(again).items()}, floats(weights(policy))) == 0


def floats(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.float() for name, value in values.items()}


def test_weights_of_several_types_are_restored_without_losing_digits(tmp_path: Path) -> None:
    def mixed() -> Any:
        model = coarse_model()
        model.model.embed_tokens.float()
        return model

    model = mixed()
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(1e-5)
    model.save_pretrained(tmp_path)
    other = mixed()
    restore_weights(other, tmp_path)
    assert other.model.embed_tokens.weight.dtype == torch.float32
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())


def test_the_reference_of_a_bfloat16_policy_is_in_bfloat16_and_scores_alike() -> None:
    policy, batch = coarse_policy(), some_batch()
    reference = snapshot(policy)
    assert {parameter.dtype for parameter in reference.model.parameters()} == {torch.bfloat16}
    with torch.no_grad():
        assert torch.equal(
            reference.token_logprobs(batch, temperature=1.0)[0], policy.token_logprobs(batch, temperature=1.0)[0]
        )


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@torch.no_grad()
def test_sampler_and_trainer_agree_to_what_bfloat16_resolves(temperature: float) -> None:
    policy = coarse_policy()
    prompts = [prompt("short", (3,)), prompt("long", (5, 9, 14, 20, 3, 7))]
    sampling = SamplingParams(max_new_tokens=56, min_new_tokens=56, temperature=temperature)
    groups = NativeEngine(policy).generate(prompts, group_size=2, sampling=sampling, seed=1)
    batch = collate(groups, torch.ones(2, 2, dtype=torch.bool), device="cpu")
    recomputed_T, entropy_T = policy.token_logprobs(batch, temperature=temperature)
    with policy.plain_attention() as model:
        largest = float(model(input_ids=batch.tokens_T[None, :56]).logits.abs().max())
    assert float(entropy_T.mean()) > 0.1
    gap = float((recomputed_T - batch.sampler_logprobs_T).abs().max())
    # A logit is rounded by up to 2^-9 of itself, and so was everything that it is made of: about ten such steps.
    assert 1e-4 < gap <= 10 * 2**-9 * max(1.0, largest) / temperature
