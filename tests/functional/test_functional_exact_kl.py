"""The KL that is summed over the vocabulary, against plain autograd over full logits and against enumeration."""

import math

import pytest
import torch

from flatpeak.functional.exact_kl import ExactKL, chunked_exact_kl, exact_kl
from flatpeak.functional.kept_tokens import KeptTokens
from flatpeak.functional.logprobs import Head

HEADS = {
    "plain": {},
    "all": {"softcap": 3.0, "logit_scale": 1.7, "temperature": 1.3},
}
KEPT = [[0, 3, 5, 6], [1, 2], [-1, 4], list(range(9)), [2], [0, 1, 2], [8, 7]]


def chunked_kl(hidden_TD, weight_VD, targets_T, kl, *, bias_V=None, kept_T=None, chunk_size=None, **head):
    """The KL from hidden states, by a head with these values."""
    values = {"softcap": None, "logit_scale": 1.0, "temperature": 1.0, "kept_T": kept_T, "chunk_size": chunk_size or 64}
    return chunked_exact_kl(hidden_TD, weight_VD, targets_T, kl, bias_V=bias_V, head=Head(**values | head))


def problem(T=7, D=5, V=9, *, dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets_T = torch.tensor([5, 1, 0, 8, 2, 0, 7])[:T]
    return draw(T, D), draw(V, D), targets_T, draw(V) if bias else None, draw(T, V).detach()


def full_logits(hidden_TD, weight_VD, bias_V, *, softcap=None, logit_scale=1.0, temperature=1.0):
    logits_TV = logit_scale * (hidden_TD @ weight_VD.T + (0 if bias_V is None else bias_V))
    return (logits_TV if softcap is None else softcap * torch.tanh(logits_TV / softcap)) / temperature


def expected_kl(logits_T, reference_T, *, kept=None):
    """Token by token: the sum over the tokens of the set, of softmax over them."""
    values = []
    for t, (logits_V, reference_V) in enumerate(zip(logits_T, reference_T, strict=True)):
        tokens = list(range(len(logits_V))) if kept is None else kept[t]
        if tokens[0] == -1:
            tokens = [v for v in range(len(logits_V)) if v not in tokens[1:]]
        p, q = torch.softmax(logits_V[tokens], -1), torch.softmax(reference_V[tokens], -1)
        values.append((p * (p / q).log()).sum())
    return torch.stack(values)


def test_the_kl_of_one_token_by_hand():
    # p = (1/4, 3/4), ref = (1/2, 1/2).
    kl_T = exact_kl(
        torch.tensor([[0.0, math.log(3)]]), torch.tensor([0]), ExactKL(reference=torch.zeros(1, 2).__getitem__)
    )
    assert kl_T.item() == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), rel=1e-6)


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 3, None])
@pytest.mark.parametrize("kept", [None, KEPT], ids=["all", "kept"])
def test_values_and_gradients_equal_plain_autograd_in_float64(head, bias, chunk_size, kept):
    hidden_TD, weight_VD, targets_T, bias_V, reference_TV = problem(bias=bias)
    sources = [t for t in (hidden_TD, weight_VD, bias_V) if t is not None]
    expected_T = expected_kl(full_logits(hidden_TD, weight_VD, bias_V, **HEADS[head]), reference_TV, kept=kept)
    kl = ExactKL(reference=reference_TV.__getitem__)
    settings = {"chunk_size": chunk_size, **HEADS[head]}
    kept_T = None if kept is None else KeptTokens.of(kept, device="cpu")
    found_T = chunked_kl(hidden_TD, weight_VD, targets_T, kl, bias_V=bias_V, kept_T=kept_T, **settings)
    torch.testing.assert_close(found_T, expected_T, rtol=1e-9, atol=1e-12)
    weights_T = torch.linspace(-1, 2, len(targets_T), dtype=torch.float64)
    found = torch.autograd.grad((weights_T * found_T).sum(), sources)
    for ours, theirs in zip(found, torch.autograd.grad((weights_T * expected_T).sum(), sources), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kept", [None, KEPT], ids=["all", "kept"])
@pytest.mark.parametrize("top_k", [None, 2, 9, 100])
def test_full_logits_and_chunks_agree(top_k, kept):
    hidden_TD, weight_VD, targets_T, bias_V, reference_TV = problem()
    kl = ExactKL(reference=reference_TV.__getitem__, top_k=top_k)
    kept_T = None if kept is None else KeptTokens.of(kept, device="cpu")
    chunked_T = chunked_kl(hidden_TD, weight_VD, targets_T, kl, bias_V=bias_V, kept_T=kept_T, chunk_size=2)
    full_T = exact_kl(full_logits(hidden_TD, weight_VD, bias_V), targets_T, kl, kept_T=kept_T)
    torch.testing.assert_close(chunked_T, full_T, rtol=1e-9, atol=1e-12)
    sources = (hidden_TD, weight_VD, bias_V)
    pairs = zip(
        torch.autograd.grad(chunked_T.square().sum(), sources),
        torch.autograd.grad(full_T.square().sum(), sources),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("top_k", [1, 3, 6])
def test_the_largest_k_and_the_sampled_rest_have_the_mean_of_the_whole_sum_and_of_its_gradient(top_k):
    hidden_1D, weight_VD, _, bias_V, reference_TV = problem(T=1)
    logits_1V = full_logits(hidden_1D, weight_VD, bias_V)
    exact = expected_kl(logits_1V, reference_TV[:1]).sum()
    sources = (hidden_1D, weight_VD, bias_V)
    p_V = torch.softmax(logits_1V, -1)[0].detach()
    mean, means = torch.zeros((), dtype=torch.float64), [torch.zeros_like(source) for source in sources]
    for token in range(len(weight_VD)):
        kl = ExactKL(reference=reference_TV.__getitem__, top_k=top_k)
        kl_T = chunked_kl(hidden_1D, weight_VD, torch.tensor([token]), kl, bias_V=bias_V)
        mean = mean + p_V[token] * kl_T.detach().sum()
        for total, grad in zip(means, torch.autograd.grad(kl_T.sum(), sources), strict=True):
            total += p_V[token] * grad
    torch.testing.assert_close(mean, exact.detach(), rtol=1e-12, atol=0)
    for found, expected in zip(means, torch.autograd.grad(exact, sources), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def test_the_kl_to_the_same_outputs_is_exactly_0_and_so_is_its_gradient():
    hidden_TD, weight_VD, targets_T, bias_V, _ = problem(dtype=torch.float32)
    with torch.no_grad():
        same_TV = hidden_TD @ weight_VD.T + bias_V
    zeros_TD, shown_VD = torch.zeros_like(hidden_TD).requires_grad_(), torch.zeros_like(weight_VD)
    for top_k in (None, 2):
        kl = ExactKL(reference=torch.zeros_like(same_TV).__getitem__, top_k=top_k)
        kl_T = chunked_kl(zeros_TD, shown_VD, targets_T, kl)
        assert kl_T.tolist() == [0.0] * len(targets_T)
        if top_k is None:
            assert not torch.autograd.grad(kl_T.sum(), zeros_TD)[0].any()


def test_a_second_derivative_of_chunks_is_refused_and_that_of_full_logits_is_right():
    hidden_TD, weight_VD, targets_T, bias_V, reference_TV = problem()
    kl = ExactKL(reference=reference_TV.__getitem__)
    (grad,) = torch.autograd.grad(
        chunked_kl(hidden_TD, weight_VD, targets_T, kl, bias_V=bias_V).sum(), hidden_TD, create_graph=True
    )
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(grad.sum(), hidden_TD)
    scores_TV = full_logits(hidden_TD, weight_VD, bias_V).detach().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda scores: exact_kl(scores, targets_T, kl), (scores_TV,))


def test_a_batch_without_tokens_has_no_kl_and_no_gradient():
    hidden_TD, weight_VD, _, bias_V, reference_TV = problem()
    none = torch.zeros(0, dtype=torch.int64)
    kl_T = chunked_kl(hidden_TD[:0], weight_VD, none, ExactKL(reference=reference_TV.__getitem__), bias_V=bias_V)
    assert kl_T.shape == (0,)
    assert not torch.autograd.grad(kl_T.sum(), weight_VD)[0].any()
