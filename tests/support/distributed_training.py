"""The same steps of training in one process and on several ranks, from fixed rollouts; run on every rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from flatpeak.distributed.config import DistributedConfig
from flatpeak.distributed.ranks import ALONE, Ranks
from flatpeak.distributed.sharding import Replica, shard
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.shards import full_tensor, reshard
from flatpeak.policy.loading import cast_weights
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import training_layers
from flatpeak.policy.reference import snapshot
from flatpeak.rewards.reward_set import CallersReward
from flatpeak.rollout.config import RolloutConfig
from flatpeak.training.config import OptimizerConfig, TrainingConfig
from flatpeak.training.curriculum import Phase, Stream
from flatpeak.training.learner import seeded
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig
from flatpeak.training.regularized import build_learner
from flatpeak.training.trainer import Trainer, TrainerConfig
from flatpeak.training.user_functions import make_advantages, make_objective
from flatpeak.types import Group, Prompt, Scores
from support.models import letter_tokenizer, tiny_model
from support.training import FixedReward, FixedSampler, NoRecorder, completion, prompt

LIMIT = 14
LENGTHS = {"a": (3, 14, 1, 8), "b": (2, 2, 5, 3), "c": (14, 13, 12, 14), "d": (1, 1, 2, 1), "e": (6, 9, 4, 7)}
"""Tokens of the completions of each prompt."""
PROMPT_LENGTHS = {"a": 4, "b": 11, "c": 2, "d": 1, "e": 7}
SCORES: dict[str, tuple[float, ...]] = {
    "a": (1, 0, 0, 1), "b": (0, 0, 0, 0), "c": (0, 1, 1, 0), "d": (1, 1, 0, 1), "e": (0.5, 0, 1, 0)
}  # fmt: skip
ONE_COMPLETION: dict[str, tuple[float, ...]] = dict.fromkeys(SCORES, (0, 0, 0, 0)) | {"c": (0, 1, 0, 0)}
"""Rewards of which, without a baseline, one completion has a gradient: one rank alone has anything to do."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run of some steps."""

    strategy: Literal["ddp", "fsdp2", "hsdp"] = "ddp"
    double: bool = False
    lora: bool = False
    steps: int = 5
    regularization: Mapping[str, Any] = field(default_factory=dict)
    training: Mapping[str, Any] = field(default_factory=dict)
    objective: Mapping[str, Any] = field(default_factory=dict)
    advantage: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    kl: dict[str, Any] = field(default_factory=dict)
    scores: Literal["usual", "one"] = "usual"
    sampler_gap: float = 0.0
    """Nats by which the sampler's log-probabilities are lower than in the other cases."""
    recompute: bool = False
    dtype: str = "float32"
    start: int = 0
    """The seed of last digits by which the weights begin elsewhere; 0 for none."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Sizes of the model that differ from those of `tiny_model`."""


REGULARIZED: dict[str, Any] = {"regularization": {"strength": 0.05, "check_every": 0}}
EXACT: dict[str, Any] = {"regularization": {"strength": 0.05, "difference": "exact"}}
TWICE: dict[str, Any] = {"training": {"epochs_per_rollout": 2, "minibatches": 2}}
ONE: dict[str, Any] = {"scores": "one", "advantage": {"baseline": "none", "scale": "none"}}
MATRIX: dict[str, dict[str, Any]] = {
    "plain": {},
    "mu2": TWICE,
    "gr": REGULARIZED,
    "lora": {"lora": True},
    "lora_gr": {"lora": True, **REGULARIZED},
    "one": ONE,
    "one_gr": {**ONE, **REGULARIZED},
    "kl": {"kl": {"coefficient": 0.1}},
    "corrected_gr": {
        **TWICE,
        **REGULARIZED,
        "objective": {"sampler_correction": {"type": "truncate", "cap": 1.5}},
        "sampler_gap": 0.8,
        "optimizer": {"learning_rate": 1e-3},
    },
    "mu2_gr": {**TWICE, "regularization": {**REGULARIZED["regularization"], "group_fraction": 0.5}},
}
"""The cases that tests compare, each with the whole model and with shares of it, in two precisions."""


def rollouts(sampler_gap: float = 0.0) -> list[Group]:
    generator = torch.Generator().manual_seed(3)

    def drawn(count: int) -> list[int]:
        return torch.randint(3, 24, (count,), generator=generator).tolist()

    return [
        Group(
            prompt=prompt(name, drawn(PROMPT_LENGTHS[name])),
            completions=tuple(
                completion(
                    drawn(n), limit=LIMIT, logprobs=(-torch.rand(n, generator=generator) - 2 - sampler_gap).tolist()
                )
                for n in lengths
            ),
        )
        for name, lengths in LENGTHS.items()
    ]


class SameGroups(FixedSampler):
    """The same completions in every pass over the prompts, whose ids count the passes."""

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Group]:  # type: ignore[override]
        return [replace(self.groups[prompt.example.id], prompt=prompt) for prompt in prompts]


class SameScores(FixedReward):
    """The scores of each example's completions."""

    def __call__(self, groups: Sequence[Group]) -> Scores:
        total = [list(self.scores[group.prompt.example.id]) for group in groups]
        return Scores(total=total, parts={"correctness": total})


def policy_of(case: Case) -> Policy:
    model = tiny_model("gpt2", seed=1).double() if case.double else tiny_model(seed=1, **case.sizes)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["c_attn", "c_proj"] if case.double else ["q_proj", "down_proj"]
        with torch.random.fork_rng():
            torch.manual_seed(5)
            model = get_peft_model(model, LoraConfig(r=3, target_modules=targets, lora_dropout=0.0))
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.data = parameter.data.to(torch.float64 if case.double else torch.float32)
                    if "lora_B" in name:
                        torch.nn.init.normal_(parameter, std=0.2)
    if case.dtype != "float32":
        adapters = {name: p.data for name, p in model.named_parameters() if "lora_" in name}
        cast_weights(model, getattr(torch, case.dtype))
        for name, weight in adapters.items():  # which are float32 whatever the base is
            model.get_parameter(name).data = weight
    if case.start:
        generator = torch.Generator().manual_seed(case.start)
        for parameter in model.parameters():
            digits = torch.randint(-1, 2, parameter.shape, generator=generator)
            parameter.data = parameter.data * (1 + digits * torch.finfo(parameter.dtype).eps)
    return Policy(model, letter_tokenizer())


def make_trainer(case: Case, ranks: Ranks) -> Trainer:
    policy = policy_of(case)
    reference = snapshot(policy) if case.kl else None
    if ranks.size > 1 and case.strategy != "ddp":
        size = 2 if case.strategy == "hsdp" else None
        config = DistributedConfig(processes=ranks.size, strategy=case.strategy, shard_size=size)
        shard(policy, Replica(policy), config, ranks)
    training = TrainingConfig(**{"steps": case.steps, "micro_batch_tokens": 40, **case.training})
    learner = build_learner(
        policy,
        make_objective(ObjectiveConfig(**case.objective), KLConfig(**case.kl)),
        OptimizerConfig(**{"learning_rate": 1e-2, "max_grad_norm": 0.5, **case.optimizer}),
        GradientRegularizationConfig(**case.regularization),
        temperature=1.0,
        micro_batch_tokens=training.micro_batch_tokens,
        notice=lambda text: None,
        ranks=ranks,
    )
    groups = rollouts(case.sampler_gap)
    scores = dict(SCORES if case.scores == "usual" else ONE_COMPLETION)
    reward = CallersReward(SameScores(scores))
    stream = Stream(items=tuple(group.prompt for group in groups), seed=0)
    return Trainer(
        learner,
        advantages=make_advantages(AdvantageConfig(**case.advantage)),
        sampler=SameGroups(groups),
        phases=(Phase(task="fixed", prompts=stream, reward=reward, accuracy="correctness"),),
        reference=reference,
        config=TrainerConfig(
            seed=0,
            rollout=RolloutConfig(prompts_per_step=len(groups), group_size=4, max_new_tokens=LIMIT),
            training=training,
        ),
        recorder=NoRecorder(),  # type: ignore[arg-type]
    )


def trained(case: Case, ranks: Ranks) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """The weights, whole, after the steps, and the metrics of each."""
    trainer = make_trainer(case, ranks)
    metrics = []
    with training_layers(trainer.learner.policy.causal, recompute=case.recompute, compiled=False):
        for step in range(1, case.steps + 1):
            with seeded(step):
                metrics.append(trainer.train_step(step))
    reshard(trainer.learner.policy.model)
    named = trainer.learner.policy.model.named_parameters()
    return {name: full_tensor(weight).detach().clone() for name, weight in named}, metrics


def chosen_groups(case: Case) -> list[list[tuple[int, ...]]]:
    """The prompts of each subset of an update, on a rank whose random numbers are its own."""
    ranks = Ranks(rank=dist.get_rank(), size=dist.get_world_size())
    trainer = make_trainer(case, ranks)
    rollouts = trainer.collect(1)
    rewards = trainer.reward_tensors(rollouts.groups, rollouts.scores)
    completions = trainer.pack(rollouts.groups, rewards)
    torch.manual_seed(ranks.rank)
    minibatches = trainer.minibatches(1, completions, rewards, trainer.advantages(rewards, completions)[1])
    return [list(batch.prompts) for minibatch in minibatches for batch in trainer.learner.divide(*minibatch)]


def gaps(cases: Mapping[str, Case], *, metrics_too: bool = True) -> dict[str, tuple[float, float]]:
    """By case, the largest difference of weights, and of metrics relative to their size, from one process."""
    ranks = Ranks(rank=dist.get_rank(), size=dist.get_world_size())
    alone: dict[str, Any] = {}
    found = {}
    for name, case in cases.items():
        key = repr(replace(case, strategy="ddp", recompute=False))
        if key not in alone:
            alone[key] = trained(case, ALONE)
        wanted, expected = alone[key]
        weights, metrics = trained(case, ranks)
        assert weights.keys() == wanted.keys()
        weight_gap = max(float((weights[n] - wanted[n]).abs().max()) for n in wanted)
        found[name] = (weight_gap, metric_gap(metrics, expected) if metrics_too else 0.0)
    return found


def metric_gap(left: list[dict[str, float]], right: list[dict[str, float]]) -> float:
    worst = 0.0
    for mine, theirs in zip(left, right, strict=True):
        names = {n for n in theirs if not n.startswith(("time/", "throughput/", "memory/")) and "time" not in n}
        assert names <= mine.keys(), names - mine.keys()
        for name in names:
            a, b = mine[name], theirs[name]
            if a != a and b != b:
                continue
            worst = max(worst, abs(a - b) / max(1.0, abs(b)))
    return worst


def relative_gaps(cases: Mapping[str, Case]) -> dict[str, tuple[float, float]]:
    """By case, the distance of the weights from those of one process over the length of its way, and the difference of
    the first step's loss and norm of the gradient, relative to the norm.

    Weights that a run saves in a lower precision are compared in that.
    """
    ranks = Ranks(rank=dist.get_rank(), size=dist.get_world_size())
    found = {}
    for name, case in cases.items():
        start = {n: weight.detach() for n, weight in policy_of(case).model.named_parameters()}
        wanted, expected = trained(case, ALONE)
        weights, metrics = trained(case, ranks)
        apart = distance(weights, wanted, start)
        first = [(metrics[0][n], expected[0][n]) for n in ("policy/loss", "policy/grad_norm")]
        gap = max(abs(mine - theirs) for mine, theirs in first) / expected[0]["policy/grad_norm"]
        found[name] = (apart / distance(wanted, start, start), gap)
    return found


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor], kinds: Mapping[str, Tensor]) -> float:
    """The distance of two models' weights, each rounded to the type that it has in `kinds`."""
    squares = (
        float((left[n].to(kind.dtype).double() - right[n].to(kind.dtype).double()).square().sum())
        for n, kind in kinds.items()
    )
    return sum(squares) ** 0.5
