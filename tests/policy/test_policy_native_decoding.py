"""Rollouts by native kernels beside those by torch, and when torch decodes in their place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.kernels.native.build import UnavailableError, library
from flatpeak.kernels.native.decode import Affine, NativeCache, PackedModel
from flatpeak.policy import native_decoding
from flatpeak.policy.model import Policy
from flatpeak.policy.native_decoding import SETTING, KernelChoice, largest_gap
from flatpeak.policy.native_weights import read_weights
from flatpeak.training.batch import collate
from flatpeak.types import Group, SamplingParams
from support.architectures import COMMON, architecture_model
from support.engines import Tokens, make_policy, prompt, sample
from support.models import tiny_model
from support.native_kernels import no_compiler
from support.policies import uneven_batch

try:
    library()
    MISSING = None
except UnavailableError as unavailable:
    MISSING = str(unavailable)
needs_kernels = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))
LENGTHS = (1, 3, 40, 100, 9)
SAMPLINGS = {
    "plain": SamplingParams(max_new_tokens=24),
    "cold": SamplingParams(max_new_tokens=24, temperature=0.3),
    "greedy": SamplingParams(max_new_tokens=24, temperature=0.0),
    "top-k": SamplingParams(max_new_tokens=24, top_k=5),
    "top-p": SamplingParams(max_new_tokens=24, top_p=0.8),
    "all filters, a minimum and stop strings": SamplingParams(
        max_new_tokens=24, top_k=9, top_p=0.9, min_new_tokens=4, stop=("7 ", "12 13")
    ),
    "stop strings": SamplingParams(max_new_tokens=24, stop=("7 ", "12 13")),
    "one token": SamplingParams(max_new_tokens=1),
}


@pytest.fixture(autouse=True)
def kernels(one_thread: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The choice left open, whatever the suite runs with."""
    monkeypatch.delenv(SETTING, raising=False)
    yield


def make(name: str) -> Policy:
    return Policy(architecture_model(name, scale=2.0).eval(), Tokens())  # type: ignore[arg-type]


def both(policy: Policy, **settings: Any) -> Iterator[dict[int, Any]]:
    """Completions by native kernels, and then by torch."""
    for kernels in ("native", "torch"):
        policy.kernels.setting = kernels  # type: ignore[assignment]
        yield sample(policy, LENGTHS, seed=5, **settings)


def assert_alike(policy: Policy, **settings: Any) -> None:
    """The same tokens, texts and ends; log-probabilities to rounding."""
    ours, theirs = both(policy, **settings)
    for length in LENGTHS:
        for one, other in zip(ours[length], theirs[length], strict=True):
            assert (one.token_ids, one.text, one.finish_reason) == (other.token_ids, other.text, other.finish_reason)
            assert one.logprobs == pytest.approx(other.logprobs, abs=5e-6)
            assert (one.filtered_logprobs is None) == (other.filtered_logprobs is None)
            if one.filtered_logprobs is not None:
                assert one.filtered_logprobs == pytest.approx(other.filtered_logprobs, abs=5e-6)


@needs_kernels
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("engine", [{}, {"max_rows": 3, "read_every": 4}], ids=["at once", "refilled"])
def test_tokens_are_those_of_torch_under_every_sampling_setting(sampling: SamplingParams, engine: Any) -> None:
    policy = make_policy()
    policy.eos_token_ids = frozenset({1, 9, 30})
    assert_alike(policy, sampling=sampling, **engine)


@needs_kernels
@pytest.mark.parametrize("name", ["llama with bias and llama3 rope", "qwen2", "qwen3", "gpt2"])
def test_tokens_are_those_of_torch_in_every_kind_of_model(name: str) -> None:
    policy = make(name)
    assert_alike(policy, sampling=SAMPLINGS["plain"])
    assert policy.kernels.name(policy) == "torch"
    policy.kernels.setting = "auto"
    with policy.decoding():
        pass
    assert policy.kernels.name(policy).startswith("kernels-")


@needs_kernels
def test_adapters_are_merged_and_the_trainer_agrees() -> None:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny_model("qwen2", scale=2.0, **COMMON), LoraConfig(r=3, lora_alpha=6, target_modules="all-linear")
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2)
    policy = Policy(model.eval(), Tokens())  # type: ignore[arg-type]
    assert_alike(policy, sampling=SAMPLINGS["plain"])
    policy.kernels.setting = "native"
    drawn = sample(policy, LENGTHS, sampling=SAMPLINGS["plain"])
    groups = [Group(prompt=prompt(length), completions=completions) for length, completions in drawn.items()]
    batch = collate(groups, torch.ones(len(groups), 4, dtype=torch.bool), device=torch.device("cpu"))
    with torch.no_grad():
        trained, _ = policy.token_logprobs(batch, temperature=1.0)
    stored = torch.tensor([value for group in groups for one in group.completions for value in one.logprobs])
    assert float((trained - stored).abs().max()) < 1e-5
    with model.disable_adapter(), pytest.raises(UserError, match="they do not support AdaptedLinear as a linear layer"):
        sample(policy, LENGTHS, sampling=SAMPLINGS["plain"])


def test_what_the_kernels_do_not_serve_is_decoded_by_torch_and_said() -> None:
    hooked = make_policy()
    hooked.trunk.layers[0].mlp.register_forward_hook(lambda *given: None)
    cases = {
        "they do not support gemma": make("gemma"),
        "they do not support mistral with a window": make("mistral"),
        "they support only the usual variant": make("gpt2 scaled by layer"),
        "a Qwen2MLP has a hook": hooked,
    }
    for reason, policy in cases.items():
        sample(policy, (3,), sampling=SAMPLINGS["one token"])
        (notice,) = policy.kernels.notices
        assert notice.startswith(f"decoding runs without native kernels, and is slower: {reason}")
        assert policy.decoded_with == "torch"
        policy.kernels.setting = "native"
        with pytest.raises(UserError, match=f"rollout.kernels=native: {reason}.*set rollout.kernels=auto or torch"):
            sample(policy, (3,), sampling=SAMPLINGS["one token"])
        policy.kernels.setting = "torch"
        sample(policy, (3,), sampling=SAMPLINGS["one token"])
        assert policy.kernels.notices == []


@needs_kernels
def test_kernels_that_disagree_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = NativeCache.decode
    monkeypatch.setattr(NativeCache, "decode", lambda cache, tokens_R: decode(cache, tokens_R) * 1.001)
    policy = make_policy()
    sample(policy, (3,), sampling=SAMPLINGS["plain"])
    assert policy.decoded_with == "torch"
    assert "their log-probabilities differ from torch's" in policy.kernels.notices[0]


@needs_kernels
@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_an_error_of_two_percent_in_any_weight_of_any_layer_is_noticed(name: str) -> None:
    policy = make(name)
    weights = read_weights(policy)
    assert largest_gap(policy, PackedModel(weights)) < 0.2
    layers = list(read_weights(policy).layers)
    for number, layer in enumerate(layers):
        for component, (weight, bias) in layer.items():
            damaged = {**layer, component: Affine(weight * 1.02, bias)}
            packed = PackedModel(replace(weights, layers=[*layers[:number], damaged, *layers[number + 1 :]]))
            assert largest_gap(policy, packed) > 1, (number, component)
    head = Affine(weights.head.weight.index_fill(0, torch.arange(3), 0.0), weights.head.bias)
    assert largest_gap(policy, PackedModel(replace(weights, layers=layers, head=head))) > 1


@needs_kernels
def test_damaged_weights_are_no_verdict_on_the_kernels() -> None:
    policy = make_policy()
    weight = policy.trunk.layers[1].mlp.down_proj.weight
    before = weight[0, 0].item()
    for damage in (float("nan"), float("inf")):
        with torch.no_grad():
            weight[0, 0] = damage
        assert policy.kernels.pack(policy) is None
        assert policy.kernels.reason == "the model's logits are NaN or infinite"
    with torch.no_grad():
        weight[0, 0] = before
    assert policy.kernels.pack(policy) is not None


@needs_kernels
@pytest.mark.parametrize("options", [{"use_rslora": True}, {"use_dora": True}, {"lora_bias": True}], ids=str)
def test_variants_of_lora_are_merged_right_or_left_to_torch(options: dict[str, bool]) -> None:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj", "v_proj", "down_proj"], **options)
    model = get_peft_model(tiny_model("qwen2", scale=2.0, **COMMON), config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "magnitude" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    policy = Policy(model.eval(), Tokens())  # type: ignore[arg-type]
    policy.kernels.setting = "auto"
    drawn = sample(policy, (3, 20), sampling=SAMPLINGS["plain"])
    assert (policy.decoded_with == "torch") == ("use_rslora" not in options)
    policy.kernels.setting = "torch"
    plain = sample(policy, (3, 20), sampling=SAMPLINGS["plain"])
    assert all(one.token_ids == two.token_ids for n in drawn for one, two in zip(drawn[n], plain[n], strict=True))


@needs_kernels
def test_weights_are_packed_once_until_they_change_or_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, packed = make_policy(), []
    monkeypatch.setattr(native_decoding, "PackedModel", lambda weights: packed.append(1) or PackedModel(weights))
    batch = uneven_batch()

    def packs(change: Callable[[], Any]) -> int:
        change()
        packed.clear()
        for _ in range(2):
            with policy.decoding():
                pass
        return len(packed)

    @torch.no_grad()
    def halve() -> None:
        policy.trunk.layers[1].mlp.down_proj.weight.mul_(0.5)

    def replace_norm() -> None:
        policy.trunk.norm.weight = torch.nn.Parameter(policy.trunk.norm.weight.detach().clone())

    def assign() -> None:
        policy.trunk.norm.weight.data = policy.trunk.norm.weight.data * 0.5

    def step() -> None:
        weight = policy.trunk.layers[1].mlp.down_proj.weight
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=1e-6, fused=True).step()  # which torch counts as no change

    @torch.no_grad()
    def score() -> None:
        policy.token_logprobs(batch, temperature=1.0)

    changes: tuple[Callable[[], Any], ...] = (
        lambda: None,
        halve,
        replace_norm,
        assign,
        step,
        lambda: policy.token_logprobs(batch, temperature=1.0),
    )
    assert [packs(change) for change in (*changes, score)] == [1, 1, 1, 1, 1, 1, 0]


@needs_kernels
@torch.inference_mode()
def test_weights_made_in_inference_mode_are_packed() -> None:
    policy = make_policy()
    policy.kernels.setting = "native"
    assert sample(policy, (3,), sampling=SAMPLINGS["one token"])


@needs_kernels
def test_a_refused_model_is_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    monkeypatch.setattr(native_decoding, "PackedModel", lambda weights: packed.append(1) or PackedModel(weights))
    monkeypatch.setattr(native_decoding, "largest_gap", lambda policy, packed: 2.0)
    policy = make_policy()
    for _ in range(3):
        assert policy.kernels.pack(policy) is None
    assert len(packed) == 1


@needs_kernels
def test_weights_that_change_between_requests_are_read_anew() -> None:
    policy = make_policy()
    assert_alike(policy, sampling=SAMPLINGS["plain"])
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.3)
    assert_alike(policy, sampling=SAMPLINGS["plain"])


def test_double_precision_is_left_to_torch_for_what_it_is() -> None:
    policy = Policy(copy.deepcopy(make_policy().causal).double(), Tokens())  # type: ignore[arg-type]
    with pytest.raises(UnavailableError, match="they compute in float32 on a CPU"):
        read_weights(policy)


@needs_kernels
def test_the_self_test_is_made_once_and_on_a_few_hundred_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    decode = NativeCache.decode

    def count(cache: NativeCache, tokens_R: torch.Tensor) -> torch.Tensor:
        seen.append(len(tokens_R))
        return decode(cache, tokens_R)

    monkeypatch.setattr(NativeCache, "decode", count)
    policy = make_policy()
    for _ in range(2):
        with policy.decoding():
            pass
    assert (sum(seen), policy.kernels.notices) == (240, [])


def test_without_a_fitting_library_and_a_compiler_torch_decodes_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prebuilt").mkdir()
    (tmp_path / "prebuilt" / "kernels-x86-64-v4-of-another-version.so").touch()
    policy = make_policy()
    with no_compiler(tmp_path, monkeypatch):
        drawn = sample(policy, (3,), sampling=SAMPLINGS["plain"])
    (notice,) = policy.kernels.notices
    assert notice.startswith("decoding runs without native kernels, and is slower: no C++ compiler was found")
    assert notice.endswith("and no compiled kernels fit")
    policy.kernels.setting = "torch"
    assert sample(policy, (3,), sampling=SAMPLINGS["plain"]) == drawn


def test_the_environment_sets_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, setting in (("torch", "torch"), ("", "auto")):
        monkeypatch.setenv(SETTING, value)
        assert KernelChoice().setting == setting
    monkeypatch.setenv(SETTING, "cpp")
    with pytest.raises(UserError, match="FLATPEAK_KERNELS=cpp: set auto, torch or native"):
        KernelChoice()
    monkeypatch.setenv(SETTING, "native")
    # A recipe that says auto would change nothing.
    with pytest.raises(UserError, match=r"^FLATPEAK_KERNELS=native: .* gemma; set FLATPEAK_KERNELS=auto or torch"):
        sample(make("gemma"), (3,), sampling=SAMPLINGS["one token"])
