from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.kernels import block_attention
from flatpeak.kernels.block_attention import BLOCK, AttentionRule, attend_in_blocks, cut_blocks
from flatpeak.policy.model import Policy
from flatpeak.types import Batch
from support.architectures import ARCHITECTURES, COMMON
from support.models import tiny_model
from support.policies import Tokenizer, gradients, largest_gap, plain_logprobs, tokens_and_weights


@dataclass(frozen=True, kw_only=True)
class Case:
    """Responses (the longest first), the prompt of each, and the prompts' lengths; the last prompt has no response."""

    lengths: tuple[int, ...] = (2 * BLOCK + 22, 2 * BLOCK + 1, BLOCK + 1, BLOCK, BLOCK - 1, 1)
    prompt_N: tuple[int, ...] = (1, 0, 0, 2, 1, 0)
    prompt_lengths: tuple[int, ...] = (1, 70, 9, 4)
    kv_heads: int = 2
    repeats: int = 2
    value_dim: int = 8
    window: int | None = None
    softcap: float | None = None

    @property
    def rule(self) -> AttentionRule:
        return AttentionRule(scale=0.9, window=self.window, softcap=self.softcap)


CASES = {
    "one head": Case(kv_heads=1, repeats=1),
    "heads that share keys": Case(),
    "four heads on one key": Case(kv_heads=1, repeats=4),
    "a window within a block": Case(window=5),
    "a window of one": Case(window=1),
    "a window over blocks and into the prompts": Case(window=BLOCK + 16),
    "softcap": Case(softcap=0.7),
    "softcap and window": Case(softcap=0.7, window=20),
    "short values": Case(value_dim=4),
    "one token": Case(lengths=(1,), prompt_N=(0,), prompt_lengths=(3,)),
    "two whole blocks": Case(lengths=(2 * BLOCK, 2 * BLOCK, BLOCK), prompt_N=(0, 0, 1), prompt_lengths=(2, 33)),
}
FUSED = [name for name, case in CASES.items() if case.softcap is None and case.value_dim == 8]


@dataclass(frozen=True, kw_only=True)
class States:
    """queries [N, Hq, L, D]; prompts' keys and values [P, Hkv, Lp, D]; own ones [N, Hkv, L, D]. Zero in the padding."""

    tensors: list[Tensor]
    present: list[Tensor]
    """bool, where each of the five has a token."""


def states(case: Case, dtype: torch.dtype = torch.float32) -> States:
    generator = torch.Generator().manual_seed(sum(case.lengths) + case.repeats)
    longest, longest_prompt = case.lengths[0], max(case.prompt_lengths)
    own = torch.arange(longest) < torch.tensor(case.lengths)[:, None]
    prompt = torch.arange(longest_prompt) < torch.tensor(case.prompt_lengths)[:, None]
    heads = case.kv_heads * case.repeats
    columns = [(own, heads, 8), (prompt, case.kv_heads, 8), (prompt, case.kv_heads, case.value_dim)]
    columns += [(own, case.kv_heads, 8), (own, case.kv_heads, case.value_dim)]
    present = [mask[:, None, :, None].expand(len(mask), count, -1, dim) for mask, count, dim in columns]
    tensors = [torch.randn(mask.shape, generator=generator).to(dtype) * mask for mask in present]
    return States(tensors=tensors, present=present)


def attend(case: Case, tensors: list[Tensor], rule: AttentionRule | None = None) -> Tensor:
    prompt_N = torch.tensor(case.prompt_N)
    prompt_lengths_N = torch.tensor(case.prompt_lengths)[prompt_N]
    cut = cut_blocks(torch.tensor(case.lengths), prompt_lengths_N, max(case.prompt_lengths), case.window)
    queries, prompt_keys, prompt_values, own_keys, own_values = tensors
    return attend_in_blocks(
        rule or case.rule, queries, (prompt_keys, prompt_values), (own_keys, own_values), prompt_N, cut
    )


def response_by_response(case: Case, tensors: list[Tensor]) -> Tensor:
    """The definition, one unpadded response at a time: keys are the prompt's and its own, by position."""
    queries, prompt_keys, prompt_values, own_keys, own_values = tensors
    rows = []
    for n, (length, p) in enumerate(zip(case.lengths, case.prompt_N, strict=True)):
        before = case.prompt_lengths[p]
        keys = torch.cat([prompt_keys[p, :, :before], own_keys[n, :, :length]], 1).repeat_interleave(case.repeats, 0)
        values = torch.cat([prompt_values[p, :, :before], own_values[n, :, :length]], 1)
        scores = case.rule.scale * queries[n, :, :length] @ keys.transpose(1, 2)
        if case.softcap is not None:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        distance = before + torch.arange(length)[:, None] - torch.arange(before + length)
        hidden = (distance < 0) | (distance >= (case.window or 10**9))
        weights = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        row = weights @ values.repeat_interleave(case.repeats, 0)
        rows.append(torch.nn.functional.pad(row, (0, 0, 0, case.lengths[0] - length)))
    return torch.stack(rows)


def real_part(case: Case, output: Tensor) -> Tensor:
    """Without the positions past a response's end."""
    return torch.cat([output[n, :, :length].flatten() for n, length in enumerate(case.lengths)])


def with_gradients(function: Any, case: Case, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = real_part(case, function(case, leaves))
    weights = torch.linspace(-1, 2, len(output), dtype=output.dtype).sin()
    return output.detach(), list(torch.autograd.grad((output * weights).sum(), leaves))


@pytest.fixture
def fused_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry per use of torch's fused kernel."""
    calls: list[int] = []
    apply = block_attention._FusedBlocks.apply

    def spy(*args: Any) -> Any:
        calls.append(1)
        return apply(*args)

    monkeypatch.setattr(block_attention._FusedBlocks, "apply", spy)
    return calls


@pytest.mark.parametrize("name", CASES)
def test_values_and_all_gradients_are_those_of_plain_attention(name: str, fused_calls: list) -> None:
    case = CASES[name]
    given = states(case).tensors
    output, grads = with_gradients(attend, case, given)
    exact, exact_grads = with_gradients(response_by_response, case, [tensor.double() for tensor in given])
    torch.testing.assert_close(output.double(), exact, atol=3e-6, rtol=0)
    for result, wanted in zip(grads, exact_grads, strict=True):
        scale = max(1.0, float(wanted.abs().max()))
        torch.testing.assert_close(result.double() / scale, wanted / scale, atol=5e-6, rtol=0)
    assert len(fused_calls) == (name in FUSED)


@pytest.mark.parametrize("name", FUSED)
def test_the_fused_and_the_generic_path_agree(name: str) -> None:
    case = CASES[name]
    given = states(case).tensors
    fused, fused_grads = with_gradients(attend, case, given)
    with_dim = replace(case, value_dim=9)  # values of another width take the generic path
    widened = [*given[:2], pad_last(given[2]), given[3], pad_last(given[4])]
    output, grads = with_gradients(lambda *args: attend(*args)[..., :8], with_dim, widened)
    torch.testing.assert_close(fused, output, atol=3e-6, rtol=0)
    for result, wanted in zip(fused_grads, grads, strict=True):
        torch.testing.assert_close(result, wanted[..., :8], atol=3e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["heads that share keys", "a window over blocks and into the prompts"])
def test_a_few_responses_at_a_time_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    given = states(case).tensors
    together = with_gradients(attend, case, given)
    monkeypatch.setattr(block_attention, "MOST_KEYS", 2 * (70 + BLOCK))
    few = with_gradients(attend, case, given)
    assert torch.equal(few[0], together[0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(few[1], together[1], strict=True))


def pad_last(tensor: Tensor) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, 1))


@pytest.mark.parametrize("window", [None, 4])
def test_gradients_are_the_finite_differences_for_blocks_of_any_size(
    window: int | None, monkeypatch: pytest.MonkeyPatch, fused_calls: list
) -> None:
    monkeypatch.setattr(block_attention, "BLOCK", 3)
    case = Case(lengths=(7, 6, 2), prompt_N=(1, 0, 1), prompt_lengths=(1, 3), window=window)
    leaves = [tensor.requires_grad_() for tensor in states(case, torch.float64).tensors]
    assert torch.autograd.gradcheck(
        lambda *tensors: real_part(case, attend(case, list(tensors))), leaves, fast_mode=True
    )
    assert fused_calls


@pytest.mark.parametrize("name", ["heads that share keys", "a window over blocks and into the prompts", "softcap"])
def test_what_stands_in_the_padding_changes_no_bit(name: str) -> None:
    case = CASES[name]
    clean = states(case)
    junk = [torch.where(mask, tensor, 3.0) for tensor, mask in zip(clean.tensors, clean.present, strict=True)]
    output, grads = with_gradients(attend, case, clean.tensors)
    other, other_grads = with_gradients(attend, case, junk)
    assert torch.equal(output, other)
    for result, wanted, mask in zip(other_grads, grads, clean.present, strict=True):
        assert torch.equal(result[mask], wanted[mask])
        assert torch.equal(result[~mask], torch.zeros_like(result[~mask]))


def test_keys_past_the_last_block_that_a_response_reaches_are_never_read() -> None:
    case = CASES["heads that share keys"]
    clean = states(case)
    poisoned = [tensor.clone() for tensor in clean.tensors]
    for n, length in enumerate(case.lengths):
        end = -(-length // BLOCK) * BLOCK
        for tensor in (poisoned[0], poisoned[3], poisoned[4]):
            tensor[n, :, end:] = torch.nan
    assert sum(int(tensor.isnan().any()) for tensor in poisoned) == 3
    output, grads = with_gradients(attend, case, clean.tensors)
    other, other_grads = with_gradients(attend, case, poisoned)
    assert torch.equal(output, other)
    assert all(torch.equal(result, wanted) for result, wanted in zip(other_grads, grads, strict=True))


def test_a_query_in_the_padding_that_is_not_a_number_reaches_no_other() -> None:
    case = CASES["heads that share keys"]
    clean = states(case)
    poisoned = [torch.where(clean.present[0], clean.tensors[0], torch.nan), *clean.tensors[1:]]
    assert torch.equal(real_part(case, attend(case, poisoned)), real_part(case, attend(case, clean.tensors)))


def test_positions_that_no_block_covers_are_zero() -> None:
    case = Case(lengths=(BLOCK + 1, 3), prompt_N=(0, 0), prompt_lengths=(2,))
    for rule in (case.rule, replace(case.rule, softcap=1.0)):
        output = attend(case, states(case).tensors, rule)
        assert torch.equal(output[1, :, BLOCK:], torch.zeros_like(output[1, :, BLOCK:]))


def test_only_what_needs_a_gradient_has_one() -> None:
    case = CASES["heads that share keys"]
    given = states(case).tensors
    _, wanted = with_gradients(attend, case, given)
    leaf = given[3].clone().requires_grad_()
    output = real_part(case, attend(case, [*given[:3], leaf, given[4]]))
    weights = torch.linspace(-1, 2, len(output)).sin()
    (output * weights).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, wanted[3])
    assert all(tensor.grad is None for tensor in given)
    assert not attend(case, given).requires_grad


def test_differentiating_twice_raises_instead_of_returning_a_wrong_hessian() -> None:
    case = Case(lengths=(3,), prompt_N=(0,), prompt_lengths=(2,))
    leaves = [tensor.requires_grad_() for tensor in states(case).tensors]
    first = torch.autograd.grad(attend(case, leaves).square().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative|twice"):
        torch.autograd.grad(first[0].square().sum(), leaves)


def test_dropout_drops_weights_and_keeps_their_mean(fused_calls: list) -> None:
    case = Case(lengths=(BLOCK + 40, BLOCK), prompt_N=(0, 1), prompt_lengths=(30, 3))
    given = states(case)
    ones = [*given.tensors[:2], torch.ones_like(given.tensors[2]), given.tensors[3], torch.ones_like(given.tensors[4])]
    torch.testing.assert_close(real_part(case, attend(case, ones)), torch.ones(4 * 8 * (2 * BLOCK + 40)))
    fused_calls.clear()
    rule = replace(case.rule, dropout=0.4)
    torch.manual_seed(0)
    dropped = torch.stack([real_part(case, attend(case, ones, rule)) for _ in range(30)])
    assert not fused_calls
    assert float(dropped.std()) > 0.1
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.01)
    torch.manual_seed(0)
    assert torch.equal(real_part(case, attend(case, ones, rule)), dropped[0])


def all_tokens(case: Case) -> Iterator[tuple[int, int]]:
    yield from ((n, j) for n, length in enumerate(case.lengths) for j in range(length))


@pytest.mark.parametrize("most", [{}, {"MOST_KEYS": 40}, {"MOST_SCORES": 40}])
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("size", [1, 3, 4, 1000])
def test_blocks_hold_every_token_once_and_see_what_a_causal_window_shows(
    window: int | None, size: int, most: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_attention, "BLOCK", size)
    for name, value in most.items():
        monkeypatch.setattr(block_attention, name, value)
    case = Case(lengths=(9, 8, 4, 1), prompt_N=(0, 1, 1, 2), prompt_lengths=(12, 1, 5))
    before_N = torch.tensor(case.prompt_lengths)[list(case.prompt_N)]
    seen: set[tuple[int, int]] = set()
    for block in cut_blocks(torch.tensor(case.lengths), before_N, 12, window):
        assert block.end - block.start <= size
        assert block.mask.shape == (block.count, 1, block.end - block.start, 12 + block.end)
        assert block.count == 1 or block.count * (12 + block.end) <= most.get("MOST_KEYS", 10**9)
        assert block.count == 1 or block.mask.numel() <= most.get("MOST_SCORES", 10**9)
        for n in range(block.first, block.first + block.count):
            for j in range(block.start, min(block.end, case.lengths[n])):
                assert (n, j) not in seen
                seen.add((n, j))
                position = int(before_N[n]) + j
                visible = range(max(0, position + 1 - (window or 10**9)), position + 1)
                columns = [p if p < before_N[n] else 12 + p - int(before_N[n]) for p in visible]
                assert block.mask[n - block.first, 0, j - block.start].nonzero()[:, 0].tolist() == columns
    assert seen == set(all_tokens(case))


def long_batch(*, seed: int = 0) -> Batch:
    """Prompts of 1, 90 and 5 tokens; responses of up to more than two blocks, not in the order of their lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompts = tuple(tuple(torch.randint(2, 40, (n,), generator=generator).tolist()) for n in (1, 90, 5))
    lengths_N = torch.tensor([3, 2 * BLOCK + 9, BLOCK, 1, BLOCK + 1, 2 * BLOCK])
    total = int(lengths_N.sum())
    return Batch(
        prompts=prompts,
        prompt_N=torch.tensor([0, 0, 1, 1, 2, 2]),
        lengths_N=lengths_N,
        tokens_T=torch.randint(2, 40, (total,), generator=generator),
        sequence_T=torch.arange(6).repeat_interleave(lengths_N),
        advantages_T=torch.ones(total),
        weights_N=torch.ones(6),
        old_logprobs_T=torch.zeros(total),
    )


@pytest.mark.parametrize("layout", ["llama", "gpt2", "mistral", "gemma2", "qwen2 windowed"])
def test_a_policy_scores_responses_of_several_blocks_as_the_plain_model_does(layout: str) -> None:
    kind, settings = ARCHITECTURES[layout]
    policy = Policy(tiny_model(kind, scale=5.0, **settings).eval(), Tokenizer())
    assert policy.native, policy.notice
    batch = long_batch()
    weights_T = tokens_and_weights(batch)
    packed_T, _ = policy.token_logprobs(batch, temperature=0.8)
    packed = gradients(policy, (weights_T * packed_T).sum())
    plain_T = plain_logprobs(policy, batch, 0.8)
    plain = gradients(policy, (weights_T * plain_T).sum())
    torch.testing.assert_close(packed_T, plain_T, atol=2e-5, rtol=1e-5)
    assert largest_gap(packed, plain) < 2e-5


def test_a_policy_with_dropout_draws_it_with_gradients_only_and_from_torchs_seed() -> None:
    model = tiny_model("llama", scale=5.0, **COMMON | {"num_hidden_layers": 2, "attention_dropout": 0.3}).eval()
    policy = Policy(model, Tokenizer(), dropout=True)
    assert policy.native, policy.notice
    batch = long_batch()
    with torch.no_grad():
        still_T, _ = policy.token_logprobs(batch, temperature=1.0)
        policy.model.eval()
        torch.testing.assert_close(still_T, plain_logprobs(policy, batch, 1.0), atol=2e-5, rtol=1e-5)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        logprobs_T, _ = policy.token_logprobs(batch, temperature=1.0)
        grads = gradients(policy, logprobs_T.sum())
        assert all(bool(grad.isfinite().all()) for grad in grads)
        drawn.append((logprobs_T.detach(), grads))
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(drawn[0][1], drawn[1][1], strict=True))
    assert float((drawn[0][0] - drawn[2][0]).abs().max()) > 0.01
    assert float((drawn[0][0] - still_T).abs().max()) > 0.01
