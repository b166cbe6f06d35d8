"""The KL summed over the vocabulary in an update, against plain passes, however the batch is cut and regularized."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.policy.model import Policy
from flatpeak.policy.reference import snapshot
from flatpeak.training.objective_config import KLConfig
from flatpeak.types import Batch
from support.regularized_training import double_qwen2, make_learner, off_policy, relative_error
from support.resumes import MakeRun, Whole, assert_same
from support.training import gradients

EXACT = KLConfig(coefficient=0.3, estimator="exact")


def moved(policy: Policy, spread: float = 0.05) -> Policy:
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += spread * torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
    return policy


def gradient(policy: Policy, reference: Policy, batch: Batch, *, kl: KLConfig = EXACT, **settings: Any) -> Any:
    learner = make_learner(policy, kl=kl, **settings)
    learner.reference = reference
    policy.model.zero_grad()
    statistics = learner.accumulate_gradients(batch)
    found = gradients(policy)
    policy.model.zero_grad()
    return found, statistics


def logits(policy: Policy, batch: Batch) -> Tensor:
    """The logits at each response token, by one plain pass per completion."""
    rows = []
    with policy.plain_attention() as model:
        for prompt, tokens in zip(batch.prompt_N.tolist(), batch.tokens_T.split(batch.lengths_N.tolist()), strict=True):
            ids = batch.prompts[prompt]
            found = model(input_ids=torch.tensor([[*ids, *tokens.tolist()]]), use_cache=False).logits[0]
            rows.append(found[len(ids) - 1 : -1])
    return torch.cat(rows)


@pytest.fixture
def start() -> tuple[Policy, Policy, Batch]:
    policy = double_qwen2()
    reference = snapshot(policy)
    return moved(policy), reference, off_policy(policy)


def test_the_gradient_is_that_of_the_whole_sum_by_plain_passes(start: tuple[Policy, Policy, Batch]) -> None:
    policy, reference, batch = start
    without, _ = gradient(policy, reference, batch, kl=KLConfig())
    found, statistics = gradient(policy, reference, batch)
    p_TV, q_TV = torch.softmax(logits(policy, batch), -1), torch.softmax(logits(reference, batch), -1)
    kl_T = (p_TV * (p_TV / q_TV).log()).sum(-1)
    (0.3 * batch.weights_N[batch.sequence_T] * kl_T).sum().backward()
    expected = gradients(policy)
    policy.model.zero_grad()
    assert relative_error({name: found[name] - without[name] for name in without}, expected) < 1e-10
    assert sum(float(part.kl) for part in statistics.tokens) == pytest.approx(float(kl_T.sum().detach()), rel=1e-9)


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize(
    "regularization",
    [{}, {"strength": 0.5}, {"strength": 0.5, "kl_in_penalty": False}, {"strength": 0.5, "difference": "exact"}],
    ids=["plain", "regularized", "not in the penalty", "exact curvature"],
)
def test_no_cut_into_micro_batches_changes_the_gradient(
    start: tuple[Policy, Policy, Batch], top_k: int | None, regularization: dict[str, Any]
) -> None:
    policy, reference, batch = start
    settings = {"kl": KLConfig(coefficient=0.3, estimator="exact", top_k=top_k), **regularization}
    whole, _ = gradient(policy, reference, batch, **settings)
    cut, statistics = gradient(policy, reference, batch, micro_batch_tokens=10, **settings)
    assert len(statistics.tokens) > 1
    assert relative_error(cut, whole) < 1e-10
    without, _ = gradient(policy, reference, batch, kl=KLConfig(), **regularization)
    assert relative_error(whole, without) > 1e-3


def test_the_penalty_of_exact_curvature_is_that_of_central_differences_with_the_exact_kl(
    start: tuple[Policy, Policy, Batch],
) -> None:
    policy, reference, batch = start
    settings = {"strength": 0.5, "ratio_mode": "importance_clipped"}
    exact, _ = gradient(policy, reference, batch, difference="exact", **settings)
    central, _ = gradient(policy, reference, batch, difference="central", step=1e-5, **settings)
    assert relative_error(central, exact) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kl_to_a_copy_is_exactly_0_at_every_token(dtype: torch.dtype) -> None:
    policy = double_qwen2()
    policy.model.to(dtype)
    batch = off_policy(policy)
    _, statistics = gradient(policy, snapshot(policy), batch, micro_batch_tokens=10)
    assert [float(part.kl) for part in statistics.tokens if part.kl is not None] == [0.0] * len(statistics.tokens)


SECTIONS: dict[str, dict[str, Any]] = {
    "exact": {"kl": {"coefficient": 0.05, "estimator": "exact"}},
    "average reference": {"kl": {"coefficient": 0.05, "estimator": "exact", "top_k": 4}, "reference": {"ema": 0.8}},
    "bfloat16": {"kl": {"coefficient": 0.05, "estimator": "exact"}, "model": {"dtype": "bfloat16"}},
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "name", [name if name == "exact" else pytest.param(name, marks=pytest.mark.slow) for name in SECTIONS]
)
def test_a_stopped_run_goes_on_bit_for_bit(make_run: MakeRun, whole: Whole, name: str) -> None:
    expected, run = whole(**SECTIONS[name]), make_run(**SECTIONS[name])
    run.stop_at("train", 3)
    assert_same(run.go_on(), expected)
