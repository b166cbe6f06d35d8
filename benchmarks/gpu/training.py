"""The parts `train`, `step` and `gr` of the GPU benchmark: flatpeak's own rollouts and updates."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import SHAPES, build_policy, training_flops
from benchmarks.harness.runner import Row
from benchmarks.harness.workloads import FIRST_WORD
from flatpeak.functional.advantages import group_advantages
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import training_layers
from flatpeak.rollout.engine import NativeEngine
from flatpeak.training.batch import collate, minibatches, per_token
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.learner import Learner, score
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.regularized import build_learner
from flatpeak.types import Batch, Completion, Example, Group, Prompt, SamplingParams

RATE = 1e-6
VARIANTS = {
    "plain": {},
    "compiled": {"compiled": True},
    "recomputed": {"recompute": True},
    "compiled and recomputed": {"compiled": True, "recompute": True},
    "prompts not shared": {"shared": False},
}
"""The settings of `train_row`, by name."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes of a GRPO step."""

    size: str
    prompts: int
    group: int
    prompt: int
    """Mean tokens of a prompt."""
    cap: int
    mean: float
    """Mean tokens of a completion without a cap."""
    pack: int
    """Tokens of a micro-batch."""
    steps: int


def full_pack(bench: Bench) -> int:
    """Tokens of a micro-batch of the 1.5B model that fit beside weights, masters, moments, keys and values."""
    return 32_768 if bench.device_memory > 100e9 else 8_192


def step_sizes(bench: Bench) -> Sizes:
    """256 completions of at most 1,024 tokens."""
    if bench.tiny:
        return Sizes(size="tiny", prompts=2, group=4, prompt=12, cap=24, mean=10, pack=64, steps=2)
    return Sizes(size="1.5B", prompts=16, group=16, prompt=256, cap=1024, mean=400, pack=full_pack(bench), steps=2)


def random_prompts(sizes: Sizes, *, step: int) -> list[Prompt]:
    """Different words in every step; lengths within a quarter of the mean."""
    draw = random.Random(f"{sizes} {step}")
    quarter = sizes.prompt // 4
    prompts = []
    for index in range(sizes.prompts):
        length = draw.randint(sizes.prompt - quarter, sizes.prompt + quarter)
        ids = tuple(draw.randrange(FIRST_WORD, SHAPES[sizes.size].vocabulary) for _ in range(length))
        name = f"{step}.{index}"
        prompts.append(Prompt(id=name, token_ids=ids, text="", example=Example(id=name, question="", gold="")))
    return prompts


def packed_groups(tokens: int, *, prompt: int, group: int, vocabulary: int) -> list[Group]:
    """Random groups of `tokens` tokens in total; completions are about as long as prompts, lognormal."""
    draw = random.Random(tokens)
    count = max(1, round(tokens / (prompt * (1 + group))))
    raw = [[draw.lognormvariate(0, 0.6) for _ in range(group)] for _ in range(count)]
    unit = (tokens - count * prompt) / sum(map(sum, raw))

    def words(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST_WORD, vocabulary) for _ in range(length))

    groups = []
    for index, row in enumerate(raw):
        example = Example(id=str(index), question="", gold="")
        lengths = [max(1, int(unit * one)) for one in row]
        completions = tuple(
            Completion(token_ids=words(length), logprobs=(-5.0,) * length, finish_reason="stop") for length in lengths
        )
        asked = Prompt(id=str(index), token_ids=words(prompt), text="", example=example)
        groups.append(Group(prompt=asked, completions=completions))
    return groups


def apart(groups: Sequence[Group]) -> list[Group]:
    """Every completion with its own prompt, so that nothing is shared."""
    return [Group(prompt=group.prompt, completions=(one,)) for group in groups for one in group.completions]


def as_batch(groups: Sequence[Group], device: torch.device, *, seed: int = 0) -> Batch:
    """A minibatch of all completions, with advantages of random sign so that all of them have gradients."""
    valid_PG = torch.ones(len(groups), len(groups[0].completions), dtype=torch.bool)
    completions = collate(groups, valid_PG, device=device)
    rewards_PG = torch.rand(valid_PG.shape, generator=torch.Generator().manual_seed(seed))
    advantages_PG = group_advantages(rewards_PG) if valid_PG.shape[1] > 1 else rewards_PG - 0.5
    (one,) = minibatches(
        completions,
        1,
        advantages_T=per_token(advantages_PG.flatten(), completions),
        old_logprobs_T=completions.sampler_logprobs_T,
        normalization="token_mean",
        max_tokens=1,
        seed=0,
        all_tokens=True,
    )
    return one


def learner(policy: Policy, *, pack: int, **regularization: Any) -> Learner:
    """AdamW, the clipped surrogate, and a micro-batch of `pack` tokens."""
    return build_learner(
        policy,
        Objective(config=ObjectiveConfig(), kl=KLConfig()),
        OptimizerConfig(learning_rate=RATE),
        GradientRegularizationConfig(**regularization),
        temperature=1.0,
        micro_batch_tokens=pack,
        notice=lambda text: None,
    )


def measure_train(bench: Bench) -> None:
    """Measure one micro-batch per update, so that a pack is full."""
    size = "tiny" if bench.tiny else "1.5B"
    held: list[Policy] = []
    for tokens in (128, 256) if bench.tiny else (16_384, 32_768):
        for name, settings in VARIANTS.items():

            def measure(tokens: int = tokens, settings: dict[str, bool] = settings) -> Row:
                if not held:
                    held.append(
                        build_policy(size, device=bench.device, dtype=bench.dtype, mean_length=None, longest=8192)
                    )
                return train_row(bench, held[0], size, tokens, **settings)

            bench.row(f"{size}, {tokens} tokens, {name}", measure)


def train_row(
    bench: Bench,
    policy: Policy,
    size: str,
    tokens: int,
    *,
    shared: bool = True,
    recompute: bool = False,
    compiled: bool = False,
) -> Row:
    """`tokens` counts every prompt once; without sharing, each completion is packed with its own prompt."""
    assert bench.peaks is not None
    shape = SHAPES[size]
    prompt, group = (16, 4) if bench.tiny else (512, 8)
    groups = packed_groups(tokens, prompt=prompt, group=group, vocabulary=shape.vocabulary)
    batch = as_batch(groups if shared else apart(groups), torch.device(bench.device))
    trained = learner(policy, pack=10**9)
    with training_layers(policy.causal, recompute=recompute, compiled=compiled):
        taken = bench.typical(lambda: trained.update(batch, rate=RATE), times=3, warm_ups=2 if compiled else 1)
    lengths = [[len(completion.token_ids) for completion in one.completions] for one in groups]
    flops = training_flops(shape, prompts=[prompt] * len(groups), responses=lengths, shared=shared)
    responses = len(batch.tokens_T)
    packed = responses + sum(map(len, batch.prompts))
    return {
        "packed_tokens": packed,
        "response_tokens": responses,
        "update_seconds": taken,
        "packed_tokens_per_second": packed / taken,
        "response_tokens_per_second": responses / taken,
        "mfu": flops / taken / bench.peaks.flops_per_second,
        **bench.memory(),
    }


def measure_step(bench: Bench) -> None:
    """Measure rollout, advantages and one update a few times, after a warm-up step."""
    sizes = step_sizes(bench)
    state: dict[str, Any] = {}

    def load() -> Row:
        state["policy"] = build_policy(
            sizes.size,
            device=bench.device,
            dtype=bench.dtype,
            mean_length=sizes.mean,
            longest=2 * sizes.prompt + sizes.cap,
        )
        state["learner"] = learner(state["policy"], pack=sizes.pack)
        state["engine"] = NativeEngine(state["policy"], max_rows=sizes.prompts * sizes.group)
        return {"lengths": f"geometric of mean {sizes.mean}, capped at {sizes.cap}, by a bias on the stop logit"}

    bench.row("load", load)
    for step in range(sizes.steps + 1):
        bench.row(
            f"step {step}" if step else "warm-up step",
            lambda step=step: one_step(bench, sizes, state["engine"], state["learner"], step),
        )


def one_step(bench: Bench, sizes: Sizes, engine: NativeEngine, trained: Learner, step: int) -> Row:
    """A step's seconds by phase, and the difference between the sampler's and the trainer's log-probs before the
    update."""
    policy, drawn = trained.policy, []
    sampling = SamplingParams(max_new_tokens=sizes.cap)
    prompts = random_prompts(sizes, step=step)
    rollout = bench.timed(
        lambda: drawn.extend(engine.generate(prompts, group_size=sizes.group, sampling=sampling, seed=step))
    )
    batches: list[Batch] = []
    collating = bench.timed(lambda: batches.append(as_batch(drawn, policy.device, seed=step)))
    batch = batches[0]
    scored: list[torch.Tensor] = []
    scoring = bench.timed(lambda: scored.append(score(policy, batch, temperature=1.0, micro_batch_tokens=sizes.pack)))
    update = bench.timed(lambda: trained.update(batch, rate=RATE))
    gap_T = scored[0] - batch.old_logprobs_T
    tokens, whole = len(batch.tokens_T), rollout + collating + update
    return {
        "completions": len(batch.lengths_N),
        "response_tokens": tokens,
        "length_mean": tokens / len(batch.lengths_N),
        "rollout_seconds": rollout,
        "collate_seconds": collating,
        "update_seconds": update,
        "step_seconds": whole,  # without scoring: flatpeak uses the sampler's log-probs
        "score_seconds": scoring,
        "rollout_tokens_per_second": tokens / rollout,
        "response_tokens_per_second": tokens / whole,
        "logprob_gap_mean": float(gap_T.abs().mean()),
        "logprob_gap_max": float(gap_T.abs().max()),
        "logprob_kl": float((gap_T.exp() - gap_T - 1).mean()),
        **bench.memory(),
    }


def measure_gr(bench: Bench) -> None:
    """Measure the same update with and without the penalty; the ratio is the cost of regularization."""
    for size in ("tiny",) if bench.tiny else ("1.5B", "0.5B"):

        def measure(size: str = size) -> Row:
            policy = build_policy(size, device=bench.device, dtype=bench.dtype, mean_length=None, longest=8192)
            tokens, prompt, group = (256, 16, 4) if bench.tiny else (32_768, 512, 8)
            groups = packed_groups(tokens, prompt=prompt, group=group, vocabulary=SHAPES[size].vocabulary)
            batch = as_batch(groups, torch.device(bench.device))
            # On policy: far from it, most gradients are clipped, and what is left is no gradient to regularize.
            own_T = score(policy, batch, temperature=1.0, micro_batch_tokens=full_pack(bench))
            batch = replace(batch, old_logprobs_T=own_T)
            measured: Row = {}
            for name, fields in {"plain": {}, "regularized": {"strength": "ratio:0.3"}}.items():
                trained = learner(policy, pack=min(tokens // 2, full_pack(bench)), **fields)
                measured[f"{name}_seconds"] = bench.typical(lambda t=trained: t.update(batch, rate=RATE), times=3)
                measured[f"{name}_peak_gb"] = bench.memory()["peak_gb"]
                del trained
                bench.free()
            return {**measured, "ratio": measured["regularized_seconds"] / measured["plain_seconds"]}

        bench.row(size, measure)
