"""Random models and word tokenizers of workloads, saved for transformers, TRL and vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from benchmarks.harness.workloads import EOS, FIRST_WORD, PAD, Workload

CONTEXT = 1024


def save_model(work: Workload, directory: Path, *, seed: int = 0, context: int = CONTEXT) -> Path:
    """Write the same float32 weights for the same workload and seed."""
    shape = work.shape
    config = Qwen2Config(
        vocab_size=work.limits.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).to(torch.float32)
    logging.disable_progress_bar()
    model.save_pretrained(directory)
    word_tokenizer(work.limits.vocabulary).save_pretrained(directory)
    return directory


def word_tokenizer(vocabulary: int) -> Any:
    """A fast tokenizer in which token n is the word `wn`, so that all libraries read the same ids."""
    words = {"<pad>": PAD, "<eos>": EOS} | {f"w{token}": token for token in range(FIRST_WORD, vocabulary)}
    backend = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<pad>",
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def load_model(directory: str | Path) -> Any:
    """Load a saved model in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


def load_tokenizer(directory: str | Path) -> Any:
    """Load a saved tokenizer."""
    return PreTrainedTokenizerFast.from_pretrained(directory)
