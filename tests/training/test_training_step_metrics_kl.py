"""The KL over all sampled tokens: by hand, the same whatever the loss leaves out, and without a pass of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from flatpeak.policy.model import Policy
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.step_metrics import kl_metrics
from flatpeak.types import Batch, Group, Score
from support.models import EOS, letter_tokenizer, tiny_model
from support.training import completion, make_batch, make_trainer, plain_logprobs, prompt, scored, tiny_policy

LIMIT = 4
TOKENS = {
    "alive": [(5, 9, EOS), (12, 3, 7, 11), (8, EOS)],  # the second is cut off
    "dead": [(4, 6, EOS), (9, EOS), (15, 3, EOS)],
    "missing": [(7, EOS), (6, 6, 13, EOS), (10, 12, EOS)],
}
SCORES: dict[str, tuple[Score, ...]] = {
    "alive": (1.0, 0.0, 0.0),
    "dead": (0.5, 0.5, 0.5),
    "missing": (1.0, None, 0.0),
}
PROMPTS = {"alive": (3, 7), "dead": (20, 5, 9), "missing": (8,)}
NAMES = ("rollout/kl_reference", "rollout/kl_sequence")
TEMPERATURE = 0.8


def groups(policy: Policy) -> list[Group]:
    made = [
        Group(prompt=prompt(name, PROMPTS[name]), completions=tuple(completion(c, limit=LIMIT) for c in TOKENS[name]))
        for name in TOKENS
    ]
    return scored(policy, made, temperature=TEMPERATURE)


def step(policy: Policy, reference: Policy | None, **settings: Any) -> dict[str, float]:
    trainer = make_trainer(
        policy,
        groups(policy),
        SCORES,
        max_new_tokens=LIMIT,
        reference=reference,
        temperature=TEMPERATURE,
        **settings,
    )
    return trainer.train_step(1)


def expected(policy: Policy, reference: Policy) -> dict[str, float]:
    """Both metrics in float64, by one plain forward pass per completion with a score."""
    tokens, sequences = [], []
    for name, rows in TOKENS.items():
        for token_ids, score in zip(rows, SCORES[name], strict=True):
            if score is None:
                continue
            of_policy, of_reference = (
                plain_logprobs(model, PROMPTS[name], token_ids, temperature=TEMPERATURE).double().numpy()
                for model in (policy, reference)
            )
            d = of_reference - of_policy
            tokens.extend(np.exp(d) - 1 - d)
            sequences.append(-d.sum())
    return dict(zip(NAMES, (np.mean(tokens), np.mean(sequences)), strict=True))


def test_both_metrics_are_those_of_two_completions_by_hand() -> None:
    batch = make_batch([2, 1], prompts=[(3, 9)], prompt_N=[0, 0])
    sampled_T, reference_T = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.0, -1.0, -1.5])
    batch = replace(batch, sampler_logprobs_T=sampled_T, reference_logprobs_T=reference_T)
    found = kl_metrics(batch)
    # d = log ref - log p is 0, 1 and -1: k3 is 0, e - 2 and 1 / e; the completions' sums of -d are -1 and 1.
    assert found["rollout/kl_reference"] == pytest.approx((np.e - 2 + 1 / np.e) / 3, rel=1e-12)
    assert found["rollout/kl_sequence"] == 0.0
    one_sided = replace(batch, reference_logprobs_T=torch.tensor([-1.5, -2.25, -2.5]))
    assert kl_metrics(one_sided)["rollout/kl_sequence"] == pytest.approx((0.75 + 2.0) / 2, rel=1e-12)


def test_without_scores_or_tokens_there_is_no_metric() -> None:
    batch = make_batch([2, 1], prompts=[(3, 9)], prompt_N=[0, 0])
    scores_T = torch.zeros(3)
    assert kl_metrics(replace(batch, sampler_logprobs_T=scores_T, reference_logprobs_T=None)) == {}
    assert kl_metrics(replace(batch, sampler_logprobs_T=None, reference_logprobs_T=scores_T)) == {}
    assert kl_metrics(replace(batch, sampler_logprobs_T=torch.zeros(0), reference_logprobs_T=torch.zeros(0))) == {}


ARMS: dict[str, dict[str, Any]] = {
    "kept": {},
    "in the loss": {"kl": KLConfig(coefficient=0.3)},
    "in the reward": {"kl": KLConfig(coefficient=0.3, placement="reward")},
    "by another estimator": {"kl": KLConfig(coefficient=0.3, estimator="k2")},
    "entropy": {"objective": ObjectiveConfig(entropy_coefficient=0.1)},
    "truncated masked": {"objective": ObjectiveConfig(truncated="mask")},
}


def test_every_completion_with_a_score_counts_the_same_in_arms_with_and_without_a_kl_term() -> None:
    policy, reference = tiny_policy(), tiny_policy(seed=5)
    wanted = expected(policy, reference)
    assert wanted["rollout/kl_sequence"] > 0.1
    of_trained = {}
    for name, settings in ARMS.items():
        metrics = step(tiny_policy(), reference, **settings)
        assert {metric: metrics[metric] for metric in NAMES} == pytest.approx(wanted, rel=1e-4)
        of_trained[name] = metrics["policy/kl_reference"]
    # Which is not so of the tokens that are trained on.
    assert of_trained["kept"] != pytest.approx(of_trained["in the loss"], rel=1e-2)


def test_a_step_that_trains_on_no_token_measures_the_kl_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SCORES, "alive", (0.5, 0.5, 0.5))
    monkeypatch.setitem(SCORES, "missing", (0.0, None, 0.0))
    policy, reference = tiny_policy(), tiny_policy(seed=5)
    wanted = expected(policy, reference)
    metrics = step(policy, reference)
    assert "policy/kl_reference" not in metrics
    assert {metric: metrics[metric] for metric in NAMES} == pytest.approx(wanted, rel=1e-4)


def test_the_metrics_cost_no_pass_of_either_model(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, reference, read = tiny_policy(), tiny_policy(seed=5), {}
    for name, model in (("policy", policy), ("reference", reference)):
        plain, counts = model.token_logprobs, read.setdefault(name, [])

        def counted(batch: Batch, *, plain: Any = plain, counts: list[int] = counts, **settings: Any) -> Any:
            counts.append(len(batch.tokens_T))
            return plain(batch, **settings)

        monkeypatch.setattr(model, "token_logprobs", counted)
    metrics = step(policy, reference)
    assert metrics.keys() >= set(NAMES)
    # 9 tokens of "alive" and the 5 of "missing" that have a score are trained on; the reference reads "dead" too.
    assert read == {"policy": [14], "reference": [22]}


def test_there_are_none_without_a_reference_or_below_float32() -> None:
    assert not step(tiny_policy(), None).keys() & set(NAMES)
    half, reference = (Policy(tiny_model(seed=seed).to(torch.bfloat16), letter_tokenizer()) for seed in (0, 5))
    metrics = step(half, reference, kl=KLConfig(coefficient=0.3))
    assert metrics["policy/kl_reference"] > 0.01
    assert not metrics.keys() & set(NAMES)


def test_the_policy_s_own_snapshot_has_no_kl_but_rounding() -> None:
    metrics = step(tiny_policy(), tiny_policy())
    assert metrics["rollout/kl_reference"] == pytest.approx(0.0, abs=1e-10)
    assert metrics["rollout/kl_sequence"] == pytest.approx(0.0, abs=1e-4)
