"""token_logprobs against numbers by hand and against plain autograd over full logits in float64."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from flatpeak.functional import token_logprobs
from flatpeak.functional.logprobs import chunk_tokens

HEADS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "scale": {"logit_scale": 0.25},
    "softcap": {"softcap": 2.0},
    "all": {"softcap": 3.0, "logit_scale": 1.7, "temperature": 1.3},
}


@pytest.mark.parametrize(
    ("vocabulary", "on_cpu", "rows"),
    [(96, True, 43648), (16384, True, 256), (49152, True, 256), (49152, False, 1344), (1 << 21, False, 64)],
)
def test_a_chunk_has_rows_by_its_memory_and_on_a_cpu_256_at_least(vocabulary, on_cpu, rows):
    assert chunk_tokens(vocabulary, on_cpu=on_cpu) == rows


def problem(T=11, D=5, V=17, *, dtype=torch.float64, bias=True):
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    targets_T = torch.randint(0, V, (T,), generator=generator)
    return draw(T, D), draw(V, D), targets_T, draw(V) if bias else None


def reference(hidden_TD, weight_VD, targets_T, bias_V, *, softcap=None, logit_scale=1.0, temperature=1.0):
    logits_TV = logit_scale * (hidden_TD @ weight_VD.T + (0 if bias_V is None else bias_V))
    if softcap is not None:
        logits_TV = softcap * torch.tanh(logits_TV / softcap)
    logprobs_TV = torch.log_softmax(logits_TV / temperature, -1)
    return logprobs_TV.gather(1, targets_T[:, None])[:, 0], -(logprobs_TV.exp() * logprobs_TV).sum(-1)


def weighted(logprobs_T, entropy_T, use):
    """A loss with a different gradient at every token, from one output or both."""
    steps_T = torch.linspace(-1, 2, len(logprobs_T), dtype=logprobs_T.dtype)
    parts = {"logprobs": (steps_T * logprobs_T).sum(), "entropy": (steps_T.flip(0) * entropy_T.square()).sum()}
    return sum(parts[name] for name in use)


class Recorder(TorchDispatchMode):
    """Every operation's name and the size of what it made."""

    def __init__(self):
        super().__init__()
        self.names, self.largest = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        self.names.append(func.name())
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return made


def test_logprobs_and_entropy_of_two_tokens_by_hand():
    # Logits (0, ln 3) and (ln 3, 0): probabilities 1/4 and 3/4.
    hidden_TD = torch.tensor([[1.0], [-1.0]])
    weight_VD = torch.tensor([[-math.log(3) / 2], [math.log(3) / 2]])
    logprobs_T, entropy_T = token_logprobs(hidden_TD, weight_VD, torch.tensor([1, 1]))
    torch.testing.assert_close(logprobs_T, torch.tensor([math.log(3 / 4), math.log(1 / 4)]))
    entropy = math.log(4) - 0.75 * math.log(3)
    torch.testing.assert_close(entropy_T, torch.tensor([entropy, entropy]))


def test_bias_gradients_of_two_tokens_by_hand():
    bias_V = torch.tensor([0.0, math.log(3)], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(1, 1, dtype=torch.float64)
    logprobs_T, entropy_T = token_logprobs(
        zeros, torch.zeros(2, 1, dtype=torch.float64), torch.tensor([0]), bias_V=bias_V
    )
    (grad,) = torch.autograd.grad(logprobs_T.sum(), bias_V, retain_graph=True)
    torch.testing.assert_close(grad, torch.tensor([0.75, -0.75], dtype=torch.float64))
    # dH/dz_v = -p_v (log p_v + H): p (1 - p) times the log-odds, ln 3.
    (grad,) = torch.autograd.grad(entropy_T.sum(), bias_V)
    slope = 3 / 16 * math.log(3)
    torch.testing.assert_close(grad, torch.tensor([slope, -slope], dtype=torch.float64))


def test_equal_logits_have_the_entropy_of_the_vocabulary():
    logprobs_T, entropy_T = token_logprobs(torch.ones(3, 2), torch.zeros(50, 2), torch.tensor([0, 7, 49]))
    torch.testing.assert_close(logprobs_T, torch.full((3,), -math.log(50)))
    torch.testing.assert_close(entropy_T, torch.full((3,), math.log(50)))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk_size", [1, 4, 11, 64, None])
@pytest.mark.parametrize("use", [("logprobs",), ("entropy",), ("logprobs", "entropy")])
def test_values_and_gradients_equal_plain_autograd_in_float64(head, bias, chunk_size, use):
    hidden_TD, weight_VD, targets_T, bias_V = problem(bias=bias)
    sources = [t for t in (hidden_TD, weight_VD, bias_V) if t is not None]
    expected = reference(hidden_TD, weight_VD, targets_T, bias_V, **HEADS[head])
    result = token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, chunk_size=chunk_size, **HEADS[head])
    for ours, theirs in zip(result, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(weighted(*result, use), sources),
        torch.autograd.grad(weighted(*expected, use), sources),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("head", HEADS)
def test_gradients_equal_finite_differences(head):
    hidden_TD, weight_VD, targets_T, bias_V = problem(T=3, D=2, V=4)
    assert torch.autograd.gradcheck(
        lambda h, w, b: token_logprobs(h, w, targets_T, bias_V=b, chunk_size=2, **HEADS[head]),
        (hidden_TD, weight_VD, bias_V),
    )


@pytest.mark.parametrize("chunk_size", [3, None])
def test_no_tokens_have_no_logprobs_and_zero_gradients(chunk_size):
    hidden_TD, weight_VD, targets_T, bias_V = problem(T=0)
    logprobs_T, entropy_T = token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, chunk_size=chunk_size)
    assert logprobs_T.tolist() == entropy_T.tolist() == []
    (logprobs_T.sum() + entropy_T.sum()).backward()
    assert hidden_TD.grad.shape == (0, 5)
    assert not weight_VD.grad.any()
    assert not bias_V.grad.any()


def test_float32_stays_within_rounding_of_float64_numpy():
    hidden_TD, weight_VD, targets_T, bias_V = problem(T=200, D=16, V=300, dtype=torch.float32)
    logits_TV = hidden_TD.detach().numpy().astype(np.float64) @ weight_VD.detach().numpy().astype(np.float64).T
    logits_TV = (logits_TV + bias_V.detach().numpy()) / 0.5
    logprobs_TV = logits_TV - np.log(np.exp(logits_TV - logits_TV.max(1, keepdims=True)).sum(1, keepdims=True))
    logprobs_TV -= logits_TV.max(1, keepdims=True)
    result = token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, temperature=0.5)
    assert result[0].dtype == result[1].dtype == torch.float32
    np.testing.assert_allclose(result[0].detach(), logprobs_TV[np.arange(200), targets_T], atol=2e-5)
    np.testing.assert_allclose(result[1].detach(), -(np.exp(logprobs_TV) * logprobs_TV).sum(1), atol=2e-5)


def test_a_tokens_result_does_not_depend_on_how_many_others_there_are():
    hidden_TD, weight_VD, targets_T, _ = problem(T=700, D=32, V=400, dtype=torch.float32, bias=False)
    whole = token_logprobs(hidden_TD, weight_VD, targets_T, chunk_size=128)
    component = token_logprobs(hidden_TD[300:337], weight_VD, targets_T[300:337], chunk_size=16)
    for w, p in zip(whole, component, strict=True):
        torch.testing.assert_close(w[300:337], p, rtol=0, atol=1e-5)


def test_extreme_logits_stay_finite():
    hidden_TD = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    weight_VD = torch.tensor([[1.0], [-1.0], [0.0]], requires_grad=True)
    logprobs_T, entropy_T = token_logprobs(hidden_TD, weight_VD, torch.tensor([0, 0]))
    assert logprobs_T.tolist() == [0.0, -2e4]
    assert entropy_T.tolist() == [0.0, 0.0]
    (logprobs_T.sum() + entropy_T.sum()).backward()
    # The second token's probability is all on its neighbour: d logp / d h = w_0 - w_1.
    assert hidden_TD.grad.tolist() == [[0.0], [2.0]]
    assert weight_VD.grad.tolist() == [[-1e4], [1e4], [0.0]]


def test_bfloat16_inputs_give_float32_results_from_their_own_logits():
    hidden_TD, weight_VD, targets_T, _ = problem(T=40, D=8, V=30, dtype=torch.bfloat16, bias=False)
    logits_TV = (hidden_TD @ weight_VD.T).detach().double().requires_grad_()
    logprobs_TV = torch.log_softmax(logits_TV, -1)
    logprobs_T, entropy_T = token_logprobs(hidden_TD, weight_VD, targets_T, chunk_size=16)
    assert logprobs_T.dtype == entropy_T.dtype == torch.float32
    expected_T = logprobs_TV.gather(1, targets_T[:, None])[:, 0]
    torch.testing.assert_close(logprobs_T.double(), expected_T, rtol=1e-5, atol=1e-5)

    logprobs_T.sum().backward()
    expected_T.sum().backward()
    assert weight_VD.grad.dtype == hidden_TD.grad.dtype == torch.bfloat16
    expected_VD = logits_TV.grad.T @ hidden_TD.detach().double()
    torch.testing.assert_close(weight_VD.grad.double(), expected_VD, rtol=2e-2, atol=2e-2)


def test_bfloat16_gradients_are_summed_over_chunks_in_float32():
    # 1,024 chunks of 1/2 each: a bfloat16 sum would stand still at 128.
    hidden_TD = torch.ones(1024, 1, dtype=torch.bfloat16)
    weight_VD, bias_V = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((2, 1), 2))
    targets_T = torch.zeros(1024, dtype=torch.int64)
    token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, chunk_size=1)[0].sum().backward()
    assert weight_VD.grad.tolist() == [[512.0], [-512.0]]
    assert bias_V.grad.tolist() == [512.0, -512.0]


def test_autocast_computes_both_passes_in_its_dtype():
    hidden_TD, weight_VD, targets_T, bias_V = problem(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outer = token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, temperature=0.7, chunk_size=4)
        outer_grads = torch.autograd.grad(weighted(*outer, ("logprobs", "entropy")), (hidden_TD, weight_VD, bias_V))
    inputs = [t.detach().bfloat16().requires_grad_() for t in (hidden_TD, weight_VD, bias_V)]
    inner = token_logprobs(*inputs[:2], targets_T, bias_V=inputs[2], temperature=0.7, chunk_size=4)
    inner_grads = torch.autograd.grad(weighted(*inner, ("logprobs", "entropy")), inputs)
    assert not torch.equal(outer[0], token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, temperature=0.7)[0])
    for o, i in zip(outer, inner, strict=True):
        assert torch.equal(o, i)
    for o, i in zip(outer_grads, inner_grads, strict=True):
        assert o.dtype == torch.float32
        assert torch.equal(o, i.float())


def test_a_backward_pass_under_autocast_recomputes_what_the_forward_pass_computed():
    hidden_TD, weight_VD, targets_T, bias_V = problem(dtype=torch.float32)
    result = token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V)
    outside = torch.autograd.grad(result[0].sum(), (hidden_TD, weight_VD, bias_V), retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = torch.autograd.grad(result[0].sum(), (hidden_TD, weight_VD, bias_V))
    assert all(torch.equal(o, i) for o, i in zip(outside, inside, strict=True))


def test_only_what_needs_a_gradient_gets_one():
    expected = {}
    for frozen in itertools.chain.from_iterable(itertools.combinations(range(3), r) for r in range(3)):
        hidden_TD, weight_VD, targets_T, bias_V = problem()
        sources = [hidden_TD, weight_VD, bias_V]
        for index in frozen:
            sources[index].requires_grad_(False)
        result = token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, chunk_size=4)
        loss = weighted(*result, ("logprobs", "entropy"))
        with Recorder() as recorder:
            loss.backward()
        expected = expected or {index: source.grad for index, source in enumerate(sources)}
        for index, source in enumerate(sources):
            assert (source.grad is None) == (index in frozen)
            assert source.grad is None or torch.equal(source.grad, expected[index])
        # Three chunks; each recomputes its logits once and pays one product per gradient of a matrix.
        matrices = [name for name in recorder.names if name.split("::")[1].split(".")[0] in {"mm", "addmm", "addmm_"}]
        assert len(matrices) == 3 * (1 + (0 not in frozen) + (1 not in frozen))


@pytest.mark.parametrize("pays", [True, False])
def test_entropy_costs_the_backward_pass_nothing_where_its_gradient_is_zero(pays):
    hidden_TD, weight_VD, targets_T, bias_V = problem()
    logprobs_T, entropy_T = token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V)
    loss = logprobs_T.sum() + (0.1 if pays else 0.0) * entropy_T.sum()
    with Recorder() as recorder:
        loss.backward()
    assert ("aten::exp.out" in recorder.names) == pays
    with_entropy = hidden_TD.grad.clone()
    hidden_TD.grad = None
    token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V)[0].sum().backward()
    assert torch.equal(with_entropy, hidden_TD.grad) == (not pays)


def test_no_tensor_of_all_logits_ever_exists():
    T, V = 640, 64
    hidden_TD, weight_VD, targets_T, _ = problem(T=T, D=8, V=V, dtype=torch.float32, bias=False)
    with Recorder() as recorder:
        result = token_logprobs(hidden_TD, weight_VD, targets_T, chunk_size=64)
        weighted(*result, ("logprobs", "entropy")).backward()
    assert recorder.names
    assert recorder.largest < T * V / 4


def test_repeated_runs_have_the_same_gradient_bit_for_bit():
    def gradients():
        hidden_TD, weight_VD, targets_T, bias_V = problem(T=300, D=16, V=20, dtype=torch.float32)
        result = token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V, chunk_size=64)
        return torch.autograd.grad(weighted(*result, ("logprobs", "entropy")), (hidden_TD, weight_VD, bias_V))

    first = gradients()
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


@pytest.mark.parametrize("output", [0, 1])
def test_differentiating_twice_raises_instead_of_returning_a_wrong_hessian(output):
    _, weight_VD, targets_T, _ = problem(bias=False)
    body_DD = torch.eye(5, dtype=torch.float64, requires_grad=True)
    inputs_TD = problem()[0].detach()
    # The gradient that arrives is constant, so torch's own once_differentiable would let this pass.
    loss = token_logprobs(torch.tanh(inputs_TD @ body_DD), weight_VD, targets_T)[output].sum()
    (grad,) = torch.autograd.grad(loss, body_DD, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(grad.square().sum(), body_DD)


def test_inputs_that_do_not_fit_are_refused():
    hidden_TD, weight_VD, targets_T, bias_V = problem()
    with pytest.raises(ValueError, match=r"give \[T, D\] and \[V, D\]"):
        token_logprobs(hidden_TD, weight_VD.T, targets_T)
    with pytest.raises(ValueError, match=r"give int64 \[11\]"):
        token_logprobs(hidden_TD, weight_VD, targets_T[:-1])
    with pytest.raises(ValueError, match=r"give int64 \[11\]"):
        token_logprobs(hidden_TD, weight_VD, targets_T.int())
    with pytest.raises(ValueError, match=r"give \[17\]"):
        token_logprobs(hidden_TD, weight_VD, targets_T, bias_V=bias_V[:3])
    with pytest.raises(ValueError, match="cast one of them"):
        token_logprobs(hidden_TD.float(), weight_VD, targets_T)
    with pytest.raises(ValueError, match="above 0"):
        token_logprobs(hidden_TD, weight_VD, targets_T, temperature=0.0)
    with pytest.raises(ValueError, match="above 0"):
        token_logprobs(hidden_TD, weight_VD, targets_T, softcap=0.0)
    with pytest.raises(ValueError, match="at least 1 token"):
        token_logprobs(hidden_TD, weight_VD, targets_T, chunk_size=0)
