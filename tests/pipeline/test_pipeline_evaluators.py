"""The loss of sampled groups against one written by hand, and the top eigenvalue against its explicit Hessian."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatpeak.functional import top_eigenvalue
from flatpeak.gradreg.directions import exact_curvature
from flatpeak.pipeline.evaluators import SampledLoss
from flatpeak.policy.model import Policy
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig
from flatpeak.training.reward_tensors import Advantages
from flatpeak.types import Group, Score, Scores
from support.models import EOS, letter_tokenizer, tiny_model
from support.training import completion, double_policy, prompt

LIMIT = 5
TOKENS = {"a": ([3, 4], [[5, 6, EOS], [7, EOS]]), "b": ([8], [[9, 10, 4, 5, 6], [3, EOS]]), "c": ([4], [[EOS], [5]])}
REWARDS: list[list[Score]] = [[1.0, 0.0], [0.2, 0.6], [0.5, 0.5]]
"""Advantages without a scale: +-0.5, -+0.2, and none."""


def groups() -> list[Group]:
    return [
        Group(prompt=prompt(name, ids), completions=tuple(completion(row, limit=LIMIT) for row in rows))
        for name, (ids, rows) in TOKENS.items()
    ]


def scores(total: list[list[Score]] = REWARDS) -> Scores:
    return Scores(total=total, parts={"correctness": total})


def sampled_loss(policy: Policy, **objective: object) -> SampledLoss:
    config = ObjectiveConfig(**{"loss": "unclipped_surrogate", "normalization": "constant", **objective})  # type: ignore[arg-type]
    return SampledLoss(
        policy=policy,
        objective=Objective(config=config, kl=KLConfig(coefficient=0.5)),
        advantages=Advantages(config=AdvantageConfig(scale="none")),
        temperature=1.0,
        max_new_tokens=LIMIT,
        micro_batch_tokens=12,
    )


def by_hand(policy: Policy) -> Tensor:
    """-(1 / (N L)) sum_i A_i sum_t p_it / p_it,old with N = 6 completions and L = 5, each row by itself."""
    total = torch.zeros((), dtype=torch.float64)
    advantages = {("a", 0): 0.5, ("a", 1): -0.5, ("b", 0): -0.2, ("b", 1): 0.2}
    with policy.plain_attention() as model, sdpa_kernel(SDPBackend.MATH):
        for (name, index), advantage in advantages.items():
            ids, rows = TOKENS[name]
            tokens = rows[index]
            logits = model(input_ids=torch.tensor([[*ids, *tokens]])).logits[0]
            positions = torch.arange(len(tokens)) + len(ids) - 1
            logprobs = torch.log_softmax(logits[positions], -1)[torch.arange(len(tokens)), tokens]
            total = total - advantage * torch.exp(logprobs - logprobs.detach()).sum() / (6 * LIMIT)
    return total


def explicit_hessian(loss: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Row by row, by autograd of each element of the gradient."""
    grads = torch.autograd.grad(loss, parameters, create_graph=True)
    flat = torch.cat([grad.flatten() for grad in grads])
    rows = [torch.autograd.grad(element, parameters, retain_graph=True, materialize_grads=True) for element in flat]
    return torch.stack([torch.cat([part.flatten() for part in row]) for row in rows])


def test_value_and_gradient_are_those_by_hand_without_kl() -> None:
    policy = double_policy()
    parameters = policy.parameters()
    losses = sampled_loss(policy)(groups(), scores())
    assert losses is not None
    drawn = list(losses())
    assert len(drawn) > 1
    total = torch.stack(drawn).sum()
    expected = by_hand(policy)
    # sum_i A_i len_i / (N L): 3 * 0.5 - 2 * 0.5 - 5 * 0.2 + 2 * 0.2 = -0.1.
    assert float(total.detach()) == pytest.approx(0.1 / 30, rel=1e-6)
    assert float(expected.detach()) == pytest.approx(0.1 / 30, rel=1e-6)
    ours, theirs = (torch.autograd.grad(loss, parameters, materialize_grads=True) for loss in (total, expected))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("layer", [0, 1])
def test_the_top_eigenvalue_of_a_transformer_is_that_of_its_explicit_hessian(layer: int) -> None:
    policy = double_policy()
    block = policy.model.transformer.h[layer]
    parameters = [block.ln_2.weight, block.ln_1.bias, block.attn.c_proj.bias]
    losses = sampled_loss(policy)(groups(), scores())
    assert losses is not None
    hessian = explicit_hessian(by_hand(policy), parameters)
    assert hessian.shape == (48, 48)
    found = top_eigenvalue(
        lambda v: list(exact_curvature(losses, parameters, dict(zip(parameters, v, strict=True))).values()),
        parameters,
        iterations=200,
        tolerance=1e-5,
    )
    assert found.converged
    eigenvalues = torch.linalg.eigvalsh(hessian)
    assert float(eigenvalues[0]) < 0 < float(eigenvalues[-1])
    assert found.value == pytest.approx(float(eigenvalues[-1]), rel=1e-4)


def test_capped_losses_have_the_curvature_of_the_surrogate() -> None:
    # CISPO detaches its ratio; at ratio 1, below the cap, its curvature is the surrogate's.
    policy = double_policy()
    parameters = [policy.model.transformer.h[0].ln_1.weight]
    vector = {parameters[0]: torch.ones_like(parameters[0])}
    products = []
    for name in ("unclipped_surrogate", "clipped_surrogate", "truncated_policy_gradient"):
        losses = sampled_loss(policy, loss=name)(groups(), scores())
        assert losses is not None
        products.append(exact_curvature(losses, parameters, vector)[parameters[0]])
    torch.testing.assert_close(products[1], products[0])
    torch.testing.assert_close(products[2], products[0])


def test_equal_and_missing_rewards_leave_no_loss() -> None:
    policy = double_policy()
    make = sampled_loss(policy)
    assert make(groups(), scores([[1.0, 1.0], [0.0, 0.0], [None, 1.0]])) is None
    missing = make.batch(groups(), scores([[None, 1.0], [0.2, 0.6], [None, None]]))
    # Only group b counts: two completions in the denominator.
    assert missing.weights_N.tolist() == pytest.approx([1 / (2 * LIMIT)] * 2)
    assert missing.advantages_T[missing.lengths_N.cumsum(0) - 1].tolist() == pytest.approx([-0.2, 0.2])


def test_truncated_completions_are_masked_as_in_training() -> None:
    batch = sampled_loss(double_policy(), truncated="mask").batch(groups(), scores())
    # The first of b has 5 tokens and no end; the five others share the denominator.
    assert batch.lengths_N.tolist() == [3, 2, 2]
    assert batch.weights_N.tolist() == pytest.approx([1 / (5 * LIMIT)] * 3)


def test_dropout_is_off_while_the_loss_is_computed_and_back_after() -> None:
    model = tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).double()
    policy = Policy(model, letter_tokenizer(), dropout=True)
    losses = sampled_loss(policy)(groups(), scores())
    assert losses is not None
    state = torch.get_rng_state()
    parameters = policy.parameters()
    first, second = (torch.autograd.grad(torch.stack(list(losses())).sum(), parameters) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    expected = torch.autograd.grad(by_hand_in_evaluation(policy), parameters)
    for one, other in zip(first, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-8)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.transformer.drop.p == 0.5
    assert model.transformer.h[0].attn.attn_dropout.p == 0.5


def by_hand_in_evaluation(policy: Policy) -> Tensor:
    policy.model.eval()
    return by_hand(policy)
