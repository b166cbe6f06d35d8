"""The engines that draw rollouts: what builds the recipe's own, and trials of the native one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.kernels.decode_attention import kernel_notices
from flatpeak.policy.kernel_verdicts import remembered
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress, Sampler
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.hf_generate import GenerateEngine
from flatpeak.rollout.vllm.sampler import VLLMSampler
from flatpeak.types import Group, Prompt, SamplingParams


def build_sampler(policy: Policy, config: RunConfig, *, trains: bool = True) -> Sampler:
    """The recipe's servers, else the native engine or `generate`; `trains`: whether log-probabilities are needed."""
    configure_policy(policy, config)
    engine = config.rollout.engine
    if isinstance(engine, VLLMConfig):
        policy.kernels.idle = True
        return served_sampler(policy, config, trains=trains)
    if engine == "native" and not policy.native:
        raise UserError(f"rollout.engine=native: {policy.notice}; use rollout.engine=auto or generate")
    if engine == "generate" or not policy.native:
        return PlainSampler(policy, max_rows=config.rollout.max_rows)
    return NativeEngine(policy, max_rows=config.rollout.max_rows)


def served_sampler(policy: Policy, config: RunConfig, *, trains: bool = True) -> VLLMSampler:
    """The sampler over the recipe's servers; UserError where one is not there, or cannot sample for this policy."""
    assert isinstance(config.rollout.engine, VLLMConfig)
    if config.model.quantization is not None:
        raise UserError(
            f"model.quantization={config.model.quantization} with rollout.engine.type=vllm: servers would sample from "
            "the base as it was before; leave model.quantization out, or use rollout.engine=auto"
        )
    if policy.adapted:
        _check_served_adapter(policy.model.active_peft_config)
    sampling = config.rollout.sampling() if trains else SamplingParams()
    return VLLMSampler(policy, config.rollout.engine, sampling=sampling)


def _check_served_adapter(adapter: Any) -> None:
    """UserError for an adapter that vLLM does not load as it is."""
    for name in ("rank_pattern", "alpha_pattern"):
        if getattr(adapter, name, None):
            raise UserError(
                f"the adapter of model.lora.adapter has a {name}, which vLLM ignores, so that it would scale those "
                "layers otherwise: use another adapter, or rollout.engine=auto"
            )
    for name, value in (("dora", adapter.use_dora), ("modules_to_save", adapter.modules_to_save)):
        if value:
            raise UserError(
                f"model.lora.{name} with rollout.engine.type=vllm: vLLM loads low-rank matrices alone; leave "
                f"model.lora.{name} out, or use rollout.engine=auto"
            )


def configure_policy(policy: Policy, config: RunConfig) -> None:
    """Let a policy decode and train as the recipe says; UserError where it cannot."""
    policy.batch_invariant = config.rollout.batch_invariant
    policy.kernels.choose(config.rollout.kernels, unserved=policy.notice)


class PlainSampler(Sampler):
    """transformers' `generate` on a policy, under the model's own attention."""

    decoder = "generate"

    def __init__(self, policy: Policy, *, max_rows: int) -> None:
        self.policy = policy
        self.engine = GenerateEngine(
            policy.model, policy.tokenizer, eos_token_ids=policy.eos_token_ids, max_rows=max_rows
        )

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order."""
        with self.policy.plain_attention():
            return self.engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)


def announce_decoding(policy: Policy, prompts: Sequence[Prompt], progress: Progress, *, max_new_tokens: int) -> None:
    """Try the native engine on prompts, with notices where the batch decides bits or a kernel is not the fastest."""
    if not policy.native:
        return
    engine, tried = NativeEngine(policy), prompts[:3]
    trial = partial(batch_invariant, engine, tried, max_new_tokens=min(16, max_new_tokens))
    facts = policy.decoded_with, policy.batch_invariant, [len(each.token_ids) for each in tried], trial.keywords
    invariant = remembered(f"invariance {facts}", policy, trial)
    if policy.batch_invariant and not invariant:
        progress.notice(
            "on this machine a completion's log-probabilities depend on the batch in their last bits, so a token may "
            "rarely differ with other batch settings"
        )
    for reason in (*engine.notices, *kernel_notices()):
        progress.notice(reason)


def batch_invariant(
    engine: NativeEngine, prompts: Sequence[Prompt], *, group_size: int = 4, max_new_tokens: int = 16, seed: int = 0
) -> bool:
    """Whether prompts decoded alone and together give the same tokens and bitwise the same log-probs.

    True is evidence and not proof: a matrix product may round differently at a shape that was not tried. Each prompt is
    sampled alone (one row), as a group alone, and among all of them; give prompts of different lengths.
    """
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(temperature=temperature, max_new_tokens=max_new_tokens)
        together = engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        for prompt, group in zip(prompts, together, strict=True):
            for size in (1, group_size):
                (alone,) = engine.generate([prompt], group_size=size, sampling=sampling, seed=seed)
                if alone.completions != group.completions[:size]:
                    return False
    return True
