"""Training passes by native kernels beside those by torch, and when torch computes in their place."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatpeak.errors import UserError
from flatpeak.kernels.native import build
from flatpeak.kernels.native.build import UnavailableError, library
from flatpeak.policy import native_training, training_attention
from flatpeak.policy.linears import Exchanged
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import training_layers
from flatpeak.policy.native_decoding import SETTING
from flatpeak.policy.reference import Snapshot
from flatpeak.training.batch import collate
from flatpeak.types import Batch, Group, SamplingParams
from support.architectures import COMMON, architecture_model
from support.engines import Tokens, make_policy, prompt, sample
from support.models import tiny_model
from support.native_kernels import no_compiler, random_policy
from support.policies import gradients, largest_gap, tokens_and_weights, uneven_batch

try:
    library()
    MISSING = None
except UnavailableError as unavailable:
    MISSING = str(unavailable)
needs_kernels = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(autouse=True)
def kernels(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice left open, whatever the suite runs with; the same random weights."""
    monkeypatch.delenv(SETTING, raising=False)
    torch.manual_seed(1)


@pytest.fixture
def native_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are called, in order."""
    calls: list[str] = []
    for module, name in (
        (training_attention, "attention"),
        (native_training, "rms_norm"),
        (native_training, "swiglu"),
        (native_training, "gelu"),
    ):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, n=name, k=kernel: (calls.append(n), k(*given))[1])
    return calls


def make(name: str, *, scale: float = 2.0) -> Policy:
    return Policy(architecture_model(name, scale=scale), Tokens())  # type: ignore[arg-type]


def random_batch(rng: random.Random, vocabulary: int) -> Batch:
    """Groups of 0 to 5 completions of 1 to 60 tokens, after prompts of 1 to 70."""
    prompts = [[rng.randrange(vocabulary) for _ in range(rng.choice((1, 2, 17, 33, 70)))] for _ in range(3)]
    prompt_N = [p for p in range(3) for _ in range(rng.choice((0, 1, 5)) if p else 2)]
    lengths_N = torch.tensor([rng.choice((1, 2, 15, 16, 31, 60)) for _ in prompt_N])
    total = int(lengths_N.sum())
    return Batch(
        prompts=tuple(map(tuple, prompts)),
        prompt_N=torch.tensor(prompt_N),
        lengths_N=lengths_N,
        tokens_T=torch.tensor([rng.randrange(vocabulary) for _ in range(total)]),
        sequence_T=torch.arange(len(lengths_N)).repeat_interleave(lengths_N),
        advantages_T=torch.ones(total),
        weights_N=torch.ones(len(lengths_N)),
        old_logprobs_T=torch.zeros(total),
    )


def one_pass(policy: Policy, batch: Batch, kernels: str, **settings: Any) -> tuple[Tensor, list[Tensor]]:
    """The log-probabilities of a pass and its gradient."""
    policy.kernels.setting = kernels  # type: ignore[assignment]
    logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0, **settings)
    return logprobs_T.detach(), gradients(policy, (tokens_and_weights(batch) * logprobs_T).sum())


def assert_alike(policy: Policy, batch: Batch) -> None:
    """Log-probabilities to rounding, gradients to 1e-6 of the largest entry."""
    ours, theirs = (one_pass(policy, batch, kernels) for kernels in ("native", "torch"))
    assert float((ours[0] - theirs[0]).abs().max()) < 5e-6
    assert largest_gap(ours[1], theirs[1]) < 1e-6
    assert not same_bits(ours, theirs)


def same_bits(left: tuple[Tensor, list[Tensor]], right: tuple[Tensor, list[Tensor]]) -> bool:
    return torch.equal(left[0], right[0]) and all(map(torch.equal, left[1], right[1]))


@needs_kernels
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_have_the_gradient_of_torch(seed: int) -> None:
    rng = random.Random(seed)
    policy = random_policy(rng)
    assert_alike(policy, random_batch(rng, policy.vocabulary_size))


@needs_kernels
@pytest.mark.parametrize("name", ["llama with bias and llama3 rope", "gemma", "granite", "olmo2", "phi", "smollm3"])
def test_other_architectures_have_the_gradient_of_torch(name: str) -> None:
    assert_alike(make(name, scale=1.0), uneven_batch())


@needs_kernels
def test_norms_mlps_and_attention_are_all_computed_and_given_back(native_calls: list[str]) -> None:
    policy = make_policy()
    classes = {name: type(module) for name, module in policy.causal.named_modules()}
    one_pass(policy, uneven_batch(), "auto")
    native_calls.clear()
    one_pass(policy, uneven_batch(), "auto")
    assert native_calls == ["rms_norm", "attention", "rms_norm", "swiglu"] * 2 + ["rms_norm"]
    assert sum(isinstance(module, Exchanged) for module in policy.causal.modules()) >= 7
    with policy.plain_attention() as model:
        assert not any(isinstance(module, Exchanged) for module in model.modules())
    one_pass(policy, uneven_batch(), "torch")
    assert {name: type(module) for name, module in policy.causal.named_modules()} == classes
    policy.release()


@needs_kernels
def test_the_gelu_of_gpt2_is_computed_too(native_calls: list[str]) -> None:
    policy = make("gpt2", scale=1.0)
    assert_alike(policy, uneven_batch())
    native_calls.clear()
    one_pass(policy, uneven_batch(), "auto")
    assert native_calls == ["attention", "gelu"] * len(policy.trunk.h)


@needs_kernels
def test_what_a_sampler_stores_is_what_the_trainer_computes() -> None:
    for temperature in (1.0, 0.3):
        policy = make_policy(scale=4.0)
        policy.kernels.setting = "native"
        drawn = sample(policy, (1, 3, 40), sampling=SamplingParams(max_new_tokens=30, temperature=temperature))
        groups = [Group(prompt=prompt(length), completions=completions) for length, completions in drawn.items()]
        batch = collate(groups, torch.ones(len(groups), 4, dtype=torch.bool), device=torch.device("cpu"))
        with torch.no_grad():
            trained_T, _ = policy.token_logprobs(batch, temperature=temperature)
        stored_T = torch.tensor([value for group in groups for one in group.completions for value in one.logprobs])
        with torch.no_grad(), policy.plain_attention() as model:
            largest = float(model(input_ids=torch.tensor([batch.prompts[2]]), use_cache=False).logits.abs().max())
        assert float((trained_T - stored_T).abs().max()) <= 1e-5 * max(1.0, largest) / temperature


@needs_kernels
def test_scoring_and_a_copy_have_the_bits_of_a_training_pass() -> None:
    policy, batch = make_policy(), uneven_batch()
    with torch.no_grad():
        scored_T, _ = policy.token_logprobs(batch, temperature=1.0)
        copied_T, _ = Snapshot(policy).token_logprobs(batch, temperature=1.0)
    trained_T, _ = one_pass(policy, batch, "auto")
    assert torch.equal(scored_T, trained_T)
    assert torch.equal(copied_T, trained_T)


@needs_kernels
def test_two_threads_change_no_bit_of_small_layers() -> None:
    policy, batch = make_policy(), random_batch(random.Random(3), 40)
    one = one_pass(policy, batch, "native")
    torch.set_num_threads(2)
    assert same_bits(one, one_pass(policy, batch, "native"))


@needs_kernels
def test_recomputed_layers_have_the_same_bits() -> None:
    policy, batch = make_policy(), uneven_batch()
    plain = one_pass(policy, batch, "native")
    with training_layers(policy.causal, recompute=True, compiled=False):
        assert same_bits(plain, one_pass(policy, batch, "native"))


@needs_kernels
def test_frozen_embeddings_and_adapters_have_the_gradient_of_torch() -> None:
    from peft import LoraConfig, get_peft_model

    frozen = make_policy()
    frozen.causal.get_input_embeddings().weight.requires_grad_(False)
    assert_alike(frozen, uneven_batch())
    model = get_peft_model(
        tiny_model("qwen2", scale=2.0, **COMMON), LoraConfig(r=3, lora_alpha=6, target_modules="all-linear")
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    assert_alike(Policy(model, Tokens()), uneven_batch())  # type: ignore[arg-type]


@needs_kernels
def test_finite_differences_of_the_gradient_are_as_good_as_by_torch() -> None:
    errors = {}
    for kernels in ("torch", "native"):
        policy, batch = make_policy(), uneven_batch()
        exact = Policy(copy.deepcopy(policy.causal).double(), Tokens())  # type: ignore[arg-type]
        measured = [difference(policy, batch, kernels), difference(exact, batch, "torch")]
        ours, theirs = (torch.cat([each.flatten().double() for each in one]) for one in measured)
        errors[kernels] = float((ours - theirs).norm() / theirs.norm())
    assert errors["native"] < 1.5 * errors["torch"] < 0.1


def difference(policy: Policy, batch: Batch, kernels: str) -> list[Tensor]:
    """(gradient at a step along the gradient - gradient) / step, a step of 3e-5 of the weights' norm."""
    _, first = one_pass(policy, batch, kernels)
    with torch.no_grad():
        norms = [torch.cat([each.flatten() for each in some]).norm() for some in (policy.parameters(), first)]
        step = float(3e-5 * norms[0] / norms[1])
        for parameter, grad in zip(policy.parameters(), first, strict=True):
            parameter.add_(grad, alpha=step)
    _, second = one_pass(policy, batch, kernels)
    return [(b - a) / step for a, b in zip(first, second, strict=True)]


@needs_kernels
def test_passes_that_are_differentiated_twice_go_through_the_plain_model(native_calls: list[str]) -> None:
    policy, batch = make_policy(), uneven_batch()
    one_pass(policy, batch, "native")
    native_calls.clear()
    logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0, twice_differentiable=True)
    weight = policy.trunk.layers[0].mlp.up_proj.weight
    (grad,) = torch.autograd.grad(logprobs_T.square().sum(), weight, create_graph=True)
    assert bool(torch.autograd.grad(grad.square().sum(), weight)[0].any())
    assert native_calls == []


@needs_kernels
@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_windows_and_soft_caps_are_left_to_torch(name: str, native_calls: list[str]) -> None:
    policy, batch = make(name, scale=1.0), uneven_batch()
    one_pass(policy, batch, "auto")
    assert "attention" not in native_calls
    assert ("swiglu" in native_calls) == (name == "mistral")


@needs_kernels
def test_other_types_autocast_and_dropout_are_left_to_torch(native_calls: list[str]) -> None:
    batch = uneven_batch()
    autocast = make_policy()
    one_pass(autocast, batch, "auto")
    native_calls.clear()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        autocast.token_logprobs(batch, temperature=1.0)
    double = Policy(copy.deepcopy(autocast.causal).double(), Tokens())  # type: ignore[arg-type]
    coarse = Policy(copy.deepcopy(autocast.causal).bfloat16(), Tokens())  # type: ignore[arg-type]
    for policy in (double, coarse):
        policy.token_logprobs(batch, temperature=1.0)
    assert native_calls == []
    assert double.computed_with == "torch"
    assert coarse.kernels.notices == [
        "a training pass runs without native kernels, and is slower: they compute in float32 on a CPU"
    ]
    settings = COMMON | {"attention_dropout": 0.3}
    dropping = Policy(tiny_model("qwen2", **settings), Tokens(), dropout=True)  # type: ignore[arg-type]
    dropping.kernels.trains(dropping)
    native_calls.clear()
    dropping.token_logprobs(batch, temperature=1.0)
    assert set(native_calls) == {"rms_norm", "swiglu"}


@needs_kernels
def test_a_training_pass_changes_no_bit_of_a_rollout_by_torch() -> None:
    policy = make_policy()
    policy.trunk.layers[1].register_forward_hook(lambda *given: None)  # which native decoding refuses
    drawn = [sample(policy, (3, 20), sampling=SamplingParams(max_new_tokens=12))]
    one_pass(policy, uneven_batch(), "auto")
    drawn.append(sample(policy, (3, 20), sampling=SamplingParams(max_new_tokens=12)))
    assert policy.decoded_with == "torch"
    assert policy.kernels.trains(policy)
    assert drawn[0] == drawn[1]


@needs_kernels
def test_hooks_are_called() -> None:
    policy, seen = make_policy(), []
    layer = policy.trunk.layers[0]
    for module in (layer.mlp, layer.mlp.act_fn, layer.input_layernorm):
        module.register_forward_hook(lambda module, *given: seen.append(type(module).__name__))
    one_pass(policy, uneven_batch(), "native")
    seen.clear()
    one_pass(policy, uneven_batch(), "native")
    assert len(seen) == 3


@needs_kernels
def test_kernels_that_disagree_are_not_used_and_the_pass_has_the_bits_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy, batch = make_policy(), uneven_batch()
    plain = one_pass(policy, batch, "torch")
    norm = native_training.rms_norm
    monkeypatch.setattr(native_training, "rms_norm", lambda *given: norm(*given) * 1.001)
    assert same_bits(one_pass(policy, batch, "auto"), plain)
    assert policy.kernels.notices == [
        "a training pass runs without native kernels, and is slower: log-probabilities or gradients differ from "
        "torch's on this model and machine"
    ]
    with pytest.raises(UserError, match=r"rollout.kernels=native: .* differ .*; set rollout.kernels=auto or torch"):
        one_pass(make_policy(), batch, "native")


@needs_kernels
def test_a_wrong_gradient_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = native_training.swiglu
    monkeypatch.setattr(native_training, "swiglu", lambda a, b: gate(a, b) + 1e-2 * (b - b.detach()))
    policy = make_policy()
    assert not policy.kernels.trains(policy)


@needs_kernels
def test_the_self_test_leaves_gradients_hooks_weights_modes_and_random_numbers_alone() -> None:
    policy = make_policy()
    policy.model.train()
    called: list[int] = []
    hook = policy.parameters()[1].register_hook(lambda grad: called.append(1))
    before, state = copy.deepcopy(policy.model.state_dict()), torch.get_rng_state()
    assert policy.kernels.trains(policy)
    assert policy.model.training
    assert all(parameter.grad is None for parameter in policy.parameters())
    assert all(torch.equal(value, before[name]) for name, value in policy.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    one_pass(policy, uneven_batch(), "native")
    assert called == [1]
    hook.remove()
    one_pass(policy, uneven_batch(), "native")
    assert called == [1]


@needs_kernels
def test_damaged_weights_are_no_verdict_on_the_kernels() -> None:
    policy = make_policy()
    weight = policy.trunk.layers[1].mlp.down_proj.weight
    before = weight[0, 0].item()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    assert not policy.kernels.trains(policy)
    assert policy.kernels.training_reason == "the model's log-probabilities or its gradient are NaN or infinite"
    with torch.no_grad():
        weight[0, 0] = before
    assert policy.kernels.trains(policy)
    assert policy.kernels.notices == []


def test_without_a_library_torch_computes_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, batch = make_policy(), uneven_batch()
    with no_compiler(tmp_path, monkeypatch):
        result = one_pass(policy, batch, "auto")
    (notice,) = policy.kernels.notices
    assert notice.startswith("a training pass runs without native kernels, and is slower: no C++ compiler was found")
    assert same_bits(result, one_pass(policy, batch, "torch"))


@needs_kernels
def test_the_kernels_of_rollouts_and_passes_are_named_together_where_they_are_the_same() -> None:
    policy, window = make_policy(), make("mistral")
    assert policy.computed_with == policy.decoded_with == build.library_name()
    assert window.computed_with == f"torch in rollouts, {build.library_name()} in training passes"
    policy.kernels.setting = "torch"
    policy.kernels.used = None
    assert policy.computed_with == "torch"


@needs_kernels
def test_a_context_shorter_than_the_self_test_is_enough() -> None:
    policy = make_policy(max_position_embeddings=6)
    assert policy.kernels.trains(policy)
    alone = replace(uneven_batch(), prompts=((2,), (3,), (4,)))
    assert policy.token_logprobs(alone, temperature=1.0)[0].isfinite().all()
