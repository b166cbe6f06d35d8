"""Architectures that the native engine claims to serve, each with the settings of a tiny model."""

from __future__ import annotations

from typing import Any

from support.models import tiny_model

VOCABULARY = 40
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
WINDOWED = {"sliding_window": 5}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", COMMON),
    "llama with bias and llama3 rope": (
        "llama",
        {
            **COMMON,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "qwen2": ("qwen2", {**COMMON, "tie_word_embeddings": True}),
    "qwen2 windowed": (
        "qwen2",
        {**COMMON, **WINDOWED, "use_sliding_window": True, "layer_types": ALTERNATING},
    ),
    "qwen3": ("qwen3", {**COMMON, "head_dim": 16}),
    "gemma": ("gemma", {**COMMON, "head_dim": 16}),
    "gemma2": (
        "gemma2",
        {
            **COMMON,
            **WINDOWED,
            "head_dim": 16,
            "layer_types": ALTERNATING,
            "attn_logit_softcapping": 0.5,
            "final_logit_softcapping": 1.0,
        },
    ),
    "gemma3": ("gemma3_text", {**COMMON, **WINDOWED, "head_dim": 16, "layer_types": ALTERNATING}),
    "mistral": ("mistral", {**COMMON, **WINDOWED}),
    "phi": ("phi", {**COMMON, "num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "phi3": ("phi3", {**COMMON, **WINDOWED}),
    "olmo2": ("olmo2", COMMON),
    "gpt2": ("gpt2", COMMON),
    "gpt2 scaled by layer": ("gpt2", {**COMMON, "scale_attn_by_inverse_layer_idx": True}),
    "granite": (
        "granite",
        {**COMMON, "logits_scaling": 4.0, "attention_multiplier": 0.2, "embedding_multiplier": 3.0},
    ),
    "smollm3": ("smollm3", {**COMMON, "no_rope_layers": [1, 0, 1]}),
    "starcoder2": ("starcoder2", {**COMMON, **WINDOWED}),
}


def architecture_model(name: str, *, seed: int = 0, scale: float = 8.0) -> Any:
    """A random model of one of these, not in training."""
    architecture, settings = ARCHITECTURES[name]
    return tiny_model(architecture, seed=seed, scale=scale, **settings).eval()
