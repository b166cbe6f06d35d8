"""A tiny Qwen2 served by the native engine, prompts of any length for it, and what the plain model says of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Completion, Example, Prompt, SamplingParams
from support.models import EOS, tiny_model

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
LIBRARIES_SERVE = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 1}
"""Layers large enough that oneDNN serves them, and four query heads to a key head."""


class Tokens:
    """Names the end-of-sequence token, and writes token 7 as "7 "."""

    eos_token_id = EOS
    chat_template = None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f"{token} " for token in token_ids)

    def batch_decode(self, rows: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row) for row in rows]


def make_policy(*, scale: float = 3.0, seed: int = 0, **settings: Any) -> Policy:
    """Random weights, `scale` times as large as transformers makes them, so that attention matters."""
    policy = Policy(tiny_model(seed=seed, scale=scale, **SIZES | settings).eval(), Tokens())  # type: ignore[arg-type]
    assert policy.native, policy.notice
    return policy


def prompt(length: int) -> Prompt:
    """The one prompt of this length."""
    token_ids = torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    name = f"p{length}"
    return Prompt(id=name, token_ids=tuple(token_ids), text="", example=Example(id=name, question="", gold=""))


def sample(
    policy: Policy,
    lengths: Sequence[int],
    *,
    group_size: int = 4,
    seed: int = 0,
    sampling: SamplingParams,
    **engine: Any,
) -> dict[int, tuple[Completion, ...]]:
    """Completions by the length of their prompt."""
    groups = NativeEngine(policy, **engine).generate(
        [prompt(length) for length in lengths], group_size=group_size, sampling=sampling, seed=seed
    )
    return {len(group.prompt.token_ids): group.completions for group in groups}


@torch.no_grad()
def plain_logits(policy: Policy, token_ids: Sequence[int]) -> Tensor:
    """float32 [len, V] of the unmodified transformers model with its own attention, on this one text."""
    with policy.plain_attention() as model:
        model.eval()
        logits: Tensor = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0].float()
    return logits
