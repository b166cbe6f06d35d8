"""Episodes in training: gradients, log-probabilities and randomness are those of their turns, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from flatpeak.functional.weights import completion_weights
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import snapshot
from flatpeak.rollout.engine import NativeEngine
from flatpeak.training.batch import collate
from flatpeak.training.learner import score
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.types import Batch, Completion, Group
from support.episodes import TOKENIZER, LocalHost, asked, draw, sampler_of
from support.models import tiny_model, use_torch_norms
from support.regularized_training import make_learner, relative_error
from support.training import gradients

SIZES: dict[str, Any] = {"max_position_embeddings": 256}
ADVANTAGES = (0.7, -1.2, 0.4)


def game_policy(dtype: torch.dtype = torch.float32) -> Policy:
    model = tiny_model("qwen2", scale=4.0, vocab_size=len(TOKENIZER), eos_token_id=TOKENIZER.eos_token_id, **SIZES)
    # Qwen2's own norms go through float32.
    return Policy((use_torch_norms(model) if dtype == torch.float64 else model).to(dtype), TOKENIZER)


def played(policy: Policy, *, rows: int = 512, names: str = "abc", **settings: Any) -> list[Group]:
    """Games of up to four turns of up to 12 tokens."""
    host = LocalHost(lambda call: f"{len(call.name)} seen", game=True)
    sampler = sampler_of(NativeEngine(policy, max_rows=rows), host, max_turns=4, max_tokens=12)
    prompts = [asked(name, text) for name, text in zip(names, ("2+2=", "what is up?", "go:"), strict=False)]
    return draw(sampler, prompts, **{"group_size": 3, "max_new_tokens": 90, **settings})


def test_episodes_do_not_depend_on_how_many_are_drawn_at_once() -> None:
    policy = game_policy()
    many, one, alone = played(policy), played(policy, rows=1), played(policy, names="a")
    assert many == one
    assert alone == many[:1]
    assert len({completion.token_ids for group in many for completion in group.completions}) == 9
    assert max(len(completion.turns) for group in many for completion in group.completions) == 3
    assert played(policy, seed=1) != many


@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.9, "temperature": 0.8}])
def test_the_sampler_s_log_probabilities_are_the_trainer_s_in_every_turn(sampling: dict[str, Any]) -> None:
    policy = game_policy()
    groups = played(policy, **sampling)
    batch = collate(groups, torch.ones(3, 3, dtype=torch.bool), device=policy.device)
    assert batch.trained_T is not None
    assert batch.sampler_logprobs_T is not None
    own_T = score(policy, batch, temperature=sampling.get("temperature", 1.0), micro_batch_tokens=4096)
    gap_T = (own_T - batch.sampler_logprobs_T).abs()[batch.trained_T]
    assert float(gap_T.max()) < 1e-5
    turns = [turn for group in groups for completion in group.completions for turn in completion.turns]
    assert len(gap_T) == sum(turn.sampled for turn in turns)


def as_turns(group: Group) -> list[Group]:
    """Every turn as a prompt of its own with its answer."""
    groups = []
    for index, completion in enumerate(group.completions):
        read = group.prompt.token_ids
        start = 0
        for number, turn in enumerate(completion.turns):
            stop = start + turn.sampled
            prompt = replace(group.prompt, id=f"{index}.{number}", token_ids=read)
            part = Completion(
                token_ids=completion.token_ids[start:stop],
                logprobs=completion.logprobs[start:stop],
                finish_reason="stop",
            )
            groups.append(Group(prompt=prompt, completions=(part,)))
            start = stop + turn.added
            read = (*group.prompt.token_ids, *completion.token_ids[:start])
    return groups


def batch_of(policy: Policy, groups: list[Group], reference: Policy) -> Any:
    valid = torch.ones(len(groups), len(groups[0].completions), dtype=torch.bool)
    packed = collate(groups, valid, device=policy.device)
    own_T = score(policy, packed, temperature=1.0, micro_batch_tokens=4096)
    drift_T = 0.2 * torch.sin(own_T * 7)  # a function of the token alone, in either batch
    return replace(packed, reference_logprobs_T=score(reference, packed, temperature=1.0, micro_batch_tokens=4096)), (
        own_T + drift_T
    )


@pytest.mark.parametrize("normalization", ["sequence_mean", "token_mean", "constant", "longest", "sequence_sum"])
@pytest.mark.parametrize(
    ("loss", "kl"),
    [
        ("clipped_surrogate", {}),
        ("clipped_surrogate", {"coefficient": 0.2, "estimator": "k3"}),
        ("clipped_surrogate", {"coefficient": 0.2, "estimator": "exact"}),
        ("truncated_policy_gradient", {}),
        ("policy_gradient", {"coefficient": 0.2, "estimator": "k2"}),
        ("sapo", {}),
        ("dppo_tv", {}),
    ],
)
def test_the_gradient_of_an_episode_is_the_sum_of_those_of_its_turns(
    loss: str, kl: dict[str, Any], normalization: Any
) -> None:
    policy = game_policy(torch.float64)
    (group,) = played(policy, names="a")
    reference = snapshot(policy)
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.02 * torch.sin(weight * 50)
    advantages_N = torch.tensor(ADVANTAGES, dtype=torch.float64)
    sampled_N = torch.tensor([len(completion.sampled_ids) for completion in group.completions])
    weights_N = completion_weights(sampled_N, normalization, max_tokens=90).double()
    objective = ObjectiveConfig(loss=loss, entropy_coefficient=0.05)

    def gradient(groups: list[Group], owner_N: torch.Tensor) -> tuple[Any, Batch]:
        packed, old_T = batch_of(policy, groups, reference)
        batch = packed.to_batch(
            advantages_T=advantages_N[owner_N][packed.sequence_T],
            weights_N=weights_N[owner_N],
            old_logprobs_T=old_T,
        )
        learner = make_learner(policy, objective=objective, kl=KLConfig(**kl))
        learner.reference = reference
        policy.model.zero_grad()
        learner.accumulate_gradients(batch)
        return gradients(policy), batch

    owners = torch.tensor([index for index, one in enumerate(group.completions) for _ in one.turns])
    assert len(owners) > 3
    whole, batch = gradient([group], torch.arange(3))
    parts, _ = gradient(as_turns(group), owners)
    assert relative_error(whole, parts) < 1e-9
    assert bool((~batch.trained_T).any())  # type: ignore[operator]


def test_added_tokens_are_context_and_never_targets() -> None:
    policy = game_policy(torch.float64)
    (group,) = played(policy, names="a")
    packed, old_T = batch_of(policy, [group], snapshot(policy))
    advantages_N = torch.tensor(ADVANTAGES, dtype=torch.float64)
    batch = packed.to_batch(
        advantages_T=advantages_N[packed.sequence_T],
        weights_N=torch.full((3,), 0.1, dtype=torch.float64),
        old_logprobs_T=old_T,
    )

    def gradient(batch: Batch) -> Any:
        policy.model.zero_grad()
        statistics = make_learner(policy).accumulate_gradients(batch)
        return gradients(policy), sum(part.tokens for part in statistics.tokens)

    found, tokens = gradient(batch)
    assert tokens == int(batch.trained_T.sum())  # type: ignore[union-attr]
    added_T = ~batch.trained_T  # type: ignore[operator]
    noisy = replace(
        batch,
        advantages_T=batch.advantages_T.masked_fill(added_T, 9.0),
        old_logprobs_T=old_T.masked_fill(added_T, -30.0),
    )
    again, _ = gradient(noisy)
    assert all(torch.equal(found[name], again[name]) for name in found)
    other_T = torch.where(added_T, (batch.tokens_T + 1) % 40 + 3, batch.tokens_T)
    changed, _ = gradient(replace(batch, tokens_T=other_T))
    assert relative_error(changed, found) > 1e-3
