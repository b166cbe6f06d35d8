"""GGUF files of tiny models, written as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from support.models import tiny_model

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""transformers' names of a Qwen2's parts, and GGUF's."""
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"


def byte_tokens() -> list[str]:
    """A byte-level vocabulary of 256 symbols and one merge, and two control tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    return [*sorted(ByteLevel.alphabet()), "Ġ1", "<|im_start|>", "<|im_end|>"]


def gguf_model() -> Any:
    """A tiny Qwen2 whose rows are as long as a block of quantized weights."""
    return tiny_model(
        "qwen2", vocab_size=259, hidden_size=32, intermediate_size=64, eos_token_id=258, tie_word_embeddings=False
    )


def write_gguf(path: Path, model: Any, *, kind: str = "F32", architecture: str = "qwen2") -> Path:
    """Write a Qwen2 with a byte-level tokenizer and a chat template; `kind` is the type of its matrices."""
    import gguf

    config, tokens = model.config, byte_tokens()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["Ġ 1"])
    writer.add_eos_token_id(258)
    writer.add_chat_template(TEMPLATE)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, weight in model.state_dict().items():
        for ours, theirs in NAMES.items():
            name = name.replace(ours, theirs)
        values = weight.to(torch.float32).numpy()
        raw = gguf.quants.quantize(values, quantization) if values.ndim == 2 else values
        writer.add_tensor(name, raw, raw_dtype=quantization if values.ndim == 2 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
