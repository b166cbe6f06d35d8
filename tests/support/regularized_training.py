"""Setups for gradient regularization in training: a policy in float64, an off-policy batch, a learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatpeak.functional import completion_weights
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.policy.model import Policy
from flatpeak.training.config import OptimizerConfig, TrainingConfig
from flatpeak.training.learner import Learner
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.regularized import build_learner
from flatpeak.training.trainer import Trainer
from flatpeak.training.user_functions import make_objective
from flatpeak.types import Batch, Group
from support.models import EOS, letter_tokenizer, tiny_model, use_torch_norms
from support.training import (
    SGD,
    FixedSampler,
    completion,
    gradients,
    make_batch,
    make_trainer,
    prompt,
    scored,
)

Gradient = dict[str, Tensor]
WHOLE = 10_000
"""A budget of tokens that leaves a minibatch in one piece."""


def double_qwen2(*, seed: int = 0, dropout: float = 0.0) -> Policy:
    """A random Qwen2 in float64 throughout: the norms it comes with go through float32."""
    model = tiny_model(seed=seed)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = dropout
    policy = Policy(use_torch_norms(model).double(), letter_tokenizer(), dropout=dropout > 0)
    assert policy.native, policy.notice
    return policy


PROMPTS = ((3, 7, 12), (20, 5, 9, 14, 8), (8,), (11, 4))
LENGTHS = ((4, 3, 5), (4, 2, 5), (3, 6, 4), (2, 5, 3))
ADVANTAGES = ((1.2, -0.4, -0.8), (0.7, 0.7, -1.4), (-1.1, 0.2, 0.9), (0.5, -1.0, 0.5))
GROUP_TOKENS = (12, 11, 13, 10)
"""Response tokens of each group, all different."""


def off_policy(policy: Policy, *, groups: int = 3, spread: float = 0.3) -> Batch:
    """Groups of three whose old log-probabilities are `spread` away from the policy's, the reference's twice that."""
    template = make_batch(
        [length for lengths in LENGTHS[:groups] for length in lengths],
        prompts=PROMPTS[:groups],
        prompt_N=[group for group in range(groups) for _ in range(3)],
    )
    with torch.no_grad():
        logprobs_T = policy.token_logprobs(template, temperature=1.0)[0]
    generator = torch.Generator().manual_seed(1)
    noise_T, more_T = torch.randn(2, len(logprobs_T), generator=generator, dtype=logprobs_T.dtype)
    return replace(
        template,
        advantages_T=torch.tensor(ADVANTAGES[:groups], dtype=logprobs_T.dtype).flatten()[template.sequence_T],
        weights_N=completion_weights(template.lengths_N, "sequence_mean").to(logprobs_T.dtype),
        old_logprobs_T=logprobs_T + spread * noise_T,
        reference_logprobs_T=logprobs_T + 2 * spread * more_T,
    )


def with_sampler(batch: Batch) -> Batch:
    """The batch with a sampler whose log-probabilities are about 0.2 away from the old ones."""
    assert batch.old_logprobs_T is not None
    noise_T = torch.randn(len(batch.tokens_T), generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    return replace(batch, sampler_logprobs_T=batch.old_logprobs_T + 0.2 * noise_T)


def make_learner(
    policy: Policy,
    *,
    objective: ObjectiveConfig | None = None,
    kl: KLConfig | None = None,
    optimizer: OptimizerConfig = SGD,
    micro_batch_tokens: int = WHOLE,
    temperature: float = 1.0,
    notice: Callable[[str], None] = print,
    **regularization: Any,
) -> Learner:
    """The learner of a run: the plain one where `regularization` has no strength."""
    return build_learner(
        policy,
        make_objective(objective or ObjectiveConfig(), kl or KLConfig()),
        optimizer,
        GradientRegularizationConfig(**{"check_every": 0} | regularization),  # whose extra pass has tests of its own
        temperature=temperature,
        micro_batch_tokens=micro_batch_tokens,
        notice=notice,
    )


def gradient_of(policy: Policy, *batches: Batch, **settings: Any) -> Gradient:
    """Accumulate once with a new learner and return `.grad`."""
    policy.model.zero_grad()
    make_learner(policy, **settings).accumulate_gradients(*batches)
    result = gradients(policy)
    policy.model.zero_grad()
    return result


def penalty_of(policy: Policy, batch: Batch, *, plain: Gradient | None = None, **settings: Any) -> Gradient:
    """The penalty's gradient at strength 1: what regularization adds to the plain gradient."""
    own = {name: value for name, value in settings.items() if name in GradientRegularizationConfig.model_fields}
    others = {name: value for name, value in settings.items() if name not in own}
    plain = plain or gradient_of(policy, batch, **others)
    regularized = gradient_of(policy, batch, strength=1.0, **settings)
    return {name: regularized[name] - plain[name] for name in plain}


def norm(gradient: Gradient) -> float:
    return torch.stack([tensor.double().square().sum() for tensor in gradient.values()]).sum().sqrt().item()


def relative_error(result: Gradient, expected: Gradient) -> float:
    """||result - expected|| / ||expected||."""
    assert result.keys() == expected.keys()
    return norm({name: result[name] - expected[name] for name in result}) / norm(expected)


def blocks_of(policy: Policy) -> dict[str, nn.Parameter]:
    """The parameters of the repeated blocks, by name: what is perturbed unless a recipe says otherwise."""
    return {name: parameter for name, parameter in policy.model.named_parameters() if ".layers." in name}


def plain_rows(policy: Policy, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of each token by one plain forward pass per completion, twice differentiable."""
    logprobs, entropies = [], []
    with policy.plain_attention() as model, sdpa_kernel(SDPBackend.MATH):
        tokens_N = batch.tokens_T.split(batch.lengths_N.tolist())
        for prompt, tokens in zip(batch.prompt_N.tolist(), tokens_N, strict=True):
            ids = batch.prompts[prompt]
            logits = model(input_ids=torch.tensor([[*ids, *tokens.tolist()]]), use_cache=False).logits[0]
            logprobs_LV = torch.log_softmax(logits[len(ids) - 1 : -1], -1)
            logprobs.append(logprobs_LV.gather(1, tokens[:, None])[:, 0])
            entropies.append(-(logprobs_LV.exp() * logprobs_LV).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def count_backward_tokens(policy: Policy) -> list[int]:
    """Count the response tokens of each pass with gradients from now on."""
    counts: list[int] = []
    plain = policy.token_logprobs

    def counted(batch: Batch, **settings: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled():
            counts.append(len(batch.tokens_T))
        return plain(batch, **settings)

    policy.token_logprobs = counted  # type: ignore[method-assign]
    return counts


TOKENS = {
    "a": [(5, 9, EOS), (12, 3, 7, EOS), (8, EOS)],
    "b": [(4, 6, 11, EOS), (9, EOS), (15, 3, EOS)],
    "c": [(7, EOS), (6, 6, 13, 4, EOS), (10, 12, EOS)],
}
REWARDS: dict[str, tuple[float, ...]] = {"a": (1.0, 0.0, 0.0), "b": (0.0, 1.0, 1.0), "c": (0.5, 0.0, 1.0)}


class Repeated(dict[str, Group]):
    """The same groups in every pass over the data, where prompts are called a@1, a@2 and so on."""

    def __missing__(self, name: str) -> Group:
        return self[name.split("@")[0]]


def make_regularized_trainer(
    policy: Policy,
    *,
    training: TrainingConfig | None = None,
    objective: ObjectiveConfig | None = None,
    kl: KLConfig | None = None,
    optimizer: OptimizerConfig = SGD,
    reference: Policy | None = None,
    **regularization: Any,
) -> Trainer:
    """A trainer of three groups by hand, whose learner is the one a run would have."""
    training = training or TrainingConfig(steps=1)
    groups = [
        Group(
            prompt=prompt(name, (3, 7 + index)),
            completions=tuple(completion(tokens, limit=5) for tokens in TOKENS[name]),
        )
        for index, name in enumerate(TOKENS)
    ]
    shared: dict[str, Any] = {"objective": objective, "kl": kl, "optimizer": optimizer}
    trainer = make_trainer(policy, groups, REWARDS, max_new_tokens=5, training=training, reference=reference, **shared)
    trainer.sampler = FixedSampler(())
    trainer.sampler.groups = Repeated(zip(TOKENS, scored(policy, groups), strict=True))
    trainer.learner = make_learner(policy, micro_batch_tokens=training.micro_batch_tokens, **shared, **regularization)
    trainer.learner.reference = reference
    return trainer
