"""Logits of the native kernels beside the plain model's, and their bits beside their own in other company."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from flatpeak.kernels.native.build import UnavailableError, library
from flatpeak.kernels.native.decode import Affine, ModelWeights, NativeCache, PackedModel
from flatpeak.policy.model import Policy
from flatpeak.policy.native_weights import read_weights
from support.architectures import architecture_model
from support.engines import Tokens, make_policy
from support.native_kernels import compare_random_shapes, random_policy, random_prompts

try:
    library()
except UnavailableError as unavailable:
    pytest.skip(str(unavailable), allow_module_level=True)


@pytest.fixture(autouse=True)
def threads() -> Iterator[Callable[[int], None]]:
    """One thread, or as many as are set, for the length of a test."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("seed", range(3))
def test_logits_of_random_shapes_are_the_plain_models(seed: int) -> None:
    assert compare_random_shapes(8, seed=seed) < 5e-6


def test_terms_after_a_huge_one_are_not_rounded_at_its_size() -> None:
    hidden, generator = 1152, torch.Generator().manual_seed(0)
    embedding = torch.randn(40, hidden, generator=generator) * 1e-3
    embedding[:, 0] = 1.0
    head, one = torch.randn(300, hidden, generator=generator), Affine(torch.ones(hidden))
    shapes = {"qkv": (24, hidden), "out": (hidden, 8), "up": (32, hidden), "down": (hidden, 16)}
    weights = ModelWeights(
        embedding=embedding,
        positions=None,
        rope=lambda positions: (torch.ones(positions, 4), torch.zeros(positions, 4)),
        last=one,
        head=Affine(head),
        layers=[{"before": one, "between": one} | {name: Affine(torch.zeros(shape)) for name, shape in shapes.items()}],
        heads=1,
        kv_heads=1,
        epsilon=0.0,
        scale=1.0,
    )
    cache = NativeCache(PackedModel(weights), slots=1, longest_prompt=1, new_tokens=1)
    logits = cache.prefill([[token] for token in range(40)], range(40))
    exact = torch.nn.functional.rms_norm(embedding.double(), (hidden,), eps=1e-30) @ head.double().t()
    error = float((logits - exact).square().mean().sqrt())
    # The huge term is sqrt(hidden) times the head's; a single chain of sums has an error of 15 of these units.
    assert error < 9 * hidden**0.5 * 2**-24


@torch.inference_mode()
def decoded(model: PackedModel, prompts: list[list[int]], of_slot: list[int], steps: int) -> list[Tensor]:
    """Logits [steps + 1, V] of each slot, all fed the same tokens."""
    cache = NativeCache(model, slots=len(of_slot), longest_prompt=max(map(len, prompts)), new_tokens=steps)
    first = cache.prefill(prompts, range(len(prompts)))
    cache.admit(range(len(of_slot)), of_slot)
    logits = [first[of_slot], *(cache.decode(torch.full((len(of_slot),), 3 + step)) for step in range(steps))]
    return list(torch.stack([each.clone() for each in logits], 1))


@pytest.mark.parametrize("seed", range(4))
def test_no_bit_depends_on_other_rows_or_threads(seed: int, threads: Callable[[int], None]) -> None:
    rng = random.Random(seed)
    policy = random_policy(rng)
    model = PackedModel(read_weights(policy))
    prompts = random_prompts(rng, 20, [40, 1, 129, 16])
    together = decoded(model, prompts, [0, 0, 0, 0, 0, 1, 2, 2, 3, 0], 20)
    (alone,) = decoded(model, prompts[2:3], [0], 20)
    assert torch.equal(together[6], alone)
    others = decoded(model, [prompts[3], prompts[0]], [1, 0, 1], 20)
    assert torch.equal(others[0], together[0])
    assert torch.equal(others[1], together[8])
    threads(2)
    for one, two in zip(together, decoded(model, prompts, [0, 0, 0, 0, 0, 1, 2, 2, 3, 0], 20), strict=True):
        assert torch.equal(one, two)


def test_a_slot_without_use_gives_zeros_and_a_prompt_that_is_replaced_frees_its_slots() -> None:
    model = PackedModel(read_weights(make_policy()))
    cache = NativeCache(model, slots=3, longest_prompt=4, new_tokens=2)
    cache.prefill([[2, 3], [4, 5, 6]], [0, 1])
    cache.admit([0, 2], [0, 1])
    with torch.inference_mode():
        logits = cache.decode(torch.tensor([7, 7, 7]))
        assert [bool(row.any()) for row in logits] == [True, False, True]
        cache.prefill([[9]], [1])
        logits = cache.decode(torch.tensor([7, 7, 7]))
    assert [bool(row.any()) for row in logits] == [True, False, False]


def test_tokens_and_positions_that_the_model_has_none_of_are_refused_and_not_read() -> None:
    model = PackedModel(read_weights(make_policy()))
    cache = NativeCache(model, slots=1, longest_prompt=3, new_tokens=1)
    for token in (model.vocabulary, -1, 1 << 40):
        with pytest.raises(IndexError, match=f"token {token} of a prompt is outside the model's vocabulary"):
            cache.prefill([[2, token]], [0])
    gpt2 = Policy(architecture_model("gpt2").eval(), Tokens())  # type: ignore[arg-type]
    longest = gpt2.causal.config.max_position_embeddings
    packed = PackedModel(read_weights(gpt2))
    NativeCache(packed, slots=1, longest_prompt=longest - 1, new_tokens=1)
    with pytest.raises(IndexError, match=f"{longest + 1} positions are requested, but the model has {longest}"):
        NativeCache(packed, slots=1, longest_prompt=longest, new_tokens=1)


def test_logits_that_are_not_numbers_stay_so() -> None:
    policy = make_policy()
    with torch.no_grad():
        policy.trunk.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    cache = NativeCache(PackedModel(read_weights(policy)), slots=1, longest_prompt=3, new_tokens=1)
    assert bool(cache.prefill([[2, 3, 4]], [0]).isnan().all())
