"""Two tiny chat models, made on the spot: one says anything, the other always gives its verdict."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

TEMPLATE = (
    # ChatML, which servers expect of a Qwen2.
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{{ '<|im_start|>assistant\\n' }}"
)
_CONTROL = ["<|im_end|>", "<|im_start|>"]
_VERDICT = '{"correct": '
"""The beginning of a verdict, as one token."""
NEWLINE = "\u010a"
"""The line break as byte-level tokenizers write it."""


def make_judge_model(directory: Path, *, verdict: str | None) -> None:
    """Save a Qwen2 of 2 layers and its tokenizer of single bytes.

    With a `verdict` of one character the weights are set so that every token decides the next one alone: after the
    template's last token come `{"correct": `, that character, `}`, and the end. Without one they are random.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = _tokenizer()
    size = 320
    assert len(tokenizer) <= size
    settings: dict[str, Any] = {"hidden_size": size, "intermediate_size": 64, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 5, "num_key_value_heads": 1, "max_position_embeddings": 8192}
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(
        Qwen2Config(vocab_size=size, eos_token_id=end, bos_token_id=None, tie_word_embeddings=False, **settings)
    )
    if verdict is not None:
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(torch.eye(size))
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight.zero_()
                layer.mlp.down_proj.weight.zero_()
            model.lm_head.weight.zero_()
            said = [NEWLINE, _VERDICT, verdict, "}", "<|im_end|>"]
            ids = tokenizer.convert_tokens_to_ids(said)
            for current, following in pairwise(ids):
                model.lm_head.weight[following, current] = 10.0
    model.generation_config.eos_token_id = end
    model.generation_config.pad_token_id = end
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _tokenizer() -> Any:
    """Bytes as tokens, in the layout of Qwen2's own tokenizer: transformers loads a Qwen2's tokenizer as that class."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_CONTROL, _VERDICT, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _CONTROL])
    tokenizer.add_tokens([AddedToken(_VERDICT, special=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|im_end|>")
    wrapped.chat_template = TEMPLATE
    return wrapped
