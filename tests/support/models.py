"""Tiny random models of any architecture, their tokenizer of letters, and the model of tiny runs."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

EOS = 1
LETTERS = "abcdefghijklmnopqrstu"
SIZES: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
"""The defaults of `tiny_model`; the vocabulary is that of `letter_tokenizer`."""
GPT2_NAMES: dict[str, str | None] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": None,
    "num_key_value_heads": None,
}
"""The names of these settings in GPT-2 and GPT-J; None for those that it does not have."""
RUN_CHARACTERS = "0123456789+-*=#"
"""The vocabulary of `run_model`, beside <pad>, <eos> and <unk>."""
RUN_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


def tiny_model(architecture: str = "qwen2", *, seed: int = 0, scale: float = 8.0, **settings: Any) -> Any:
    """A random causal language model in float32; the same seed and settings give the same weights.

    Matrices are `scale` times as large as transformers makes them, so that attention and the head matter.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    merged = SIZES | settings
    if architecture in ("gpt2", "gptj"):
        named = {GPT2_NAMES.get(name, name): value for name, value in merged.items()}
        merged = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | {k: v for k, v in named.items() if k}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = AutoConfig.for_model(architecture, **merged)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model


def use_torch_norms(model: Any) -> Any:
    """Exchange RMS norms of transformers, which compute in float32 at least, for torch's own, with the same weights."""
    for name, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and not isinstance(module, nn.RMSNorm):
            norm = nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon)
            norm.load_state_dict(module.state_dict())
            model.set_submodule(name, norm)
    return model


@cache
def letter_tokenizer() -> Any:
    """Three special tokens, of which 1 ends a completion, and a token for every letter."""
    from flatpeak.policy.config import TokenizerConfig
    from flatpeak.policy.loading import build_tokenizer

    return build_tokenizer(TokenizerConfig(type="characters"), [LETTERS])


def run_model(*, seed: int = 0, **settings: Any) -> tuple[Any, Any]:
    """The random model of tiny runs as a recipe makes it, and its tokenizer of single characters."""
    from flatpeak.policy.config import NewModelConfig
    from flatpeak.policy.loading import make_model

    config = NewModelConfig(architecture="qwen2", config={**RUN_SIZES, **settings})
    return make_model(config, texts=[RUN_CHARACTERS], seed=seed)


def save_run_model(directory: Path) -> Path:
    """Save that model and its tokenizer, with weights four times as large: its answers differ more."""
    model, tokenizer = run_model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    for component in (model, tokenizer):
        component.save_pretrained(directory)
    return directory
