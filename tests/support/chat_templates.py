"""The shapes of the chat templates in wide use, each with the control tokens of its tokenizer."""

import re
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

LOOP, END = "{% for m in messages %}", "{% endfor %}"
THOUGHTS = "{% set text = m.content.split('</think>')[-1] if m.role == 'assistant' else m.content %}"


@dataclass(frozen=True)
class Chat:
    """A chat template, the special tokens of its tokenizer, and the added tokens that are not special."""

    template: str
    special: tuple[str, ...]
    added: tuple[str, ...] = ()

    def render(self, messages: list[dict[str, str]], *, answered: bool) -> str:
        """The conversation as the tokenizer's own template words it."""
        text: str = byte_level_tokenizer(self).apply_chat_template(
            messages, tokenize=False, add_generation_prompt=not answered
        )
        return text


def asking(header: str) -> str:
    """The header of the assistant's turn, where an answer is asked for."""
    return "{% if add_generation_prompt %}" + header + "{% endif %}"


def chatml(text: str = "m.content", before: str = "", header: str = "<|im_start|>assistant\n") -> str:
    """A template of ChatML's shape."""
    return LOOP + before + "<|im_start|>{{ m.role }}\n{{ " + text + " }}<|im_end|>\n" + END + asking(header)


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHATS = {
    "qwen2.5": Chat(chatml(), CHATML, ("<tool_call>", "</tool_call>", "<|fim_pad|>")),
    "qwen3": Chat(
        chatml("text", THOUGHTS, "<|im_start|>assistant\n<think>\n\n</think>\n\n"), CHATML, ("<think>", "</think>")
    ),
    "llama3": Chat(
        "<|begin_of_text|>"
        + LOOP
        + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
        + END
        + asking("<|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "llama2": Chat(
        LOOP
        + "{% if m.role == 'user' %}<s>[INST] {{ m.content.strip() }} [/INST]{% else %} {{ m.content }} </s>{% endif %}"
        + END,
        ("<s>", "</s>", "<unk>"),
    ),
    "mistral": Chat(
        "<s>"
        + LOOP
        + "{% if m.role == 'user' %}[INST] {{ m.content }}[/INST]{% else %}{{ m.content }}</s>{% endif %}"
        + END,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    ),
    "gemma": Chat(
        "<bos>"
        + LOOP
        + "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
        + END
        + asking("<start_of_turn>model\n"),
        ("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        ("\n\n", "<table>"),
    ),
    "phi3": Chat(
        LOOP + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + END + asking("<|assistant|>\n"),
        ("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
    ),
    "phi4": Chat(
        LOOP
        + "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>"
        + END
        + asking("<|im_start|>assistant<|im_sep|>"),
        (*CHATML, "<|im_sep|>"),
    ),
    "deepseek-v2": Chat(
        "<｜begin▁of▁sentence｜>"
        + LOOP
        + "{% if m.role == 'user' %}User: {{ m.content }}\n\n"
        + "{% else %}Assistant: {{ m.content }}<｜end▁of▁sentence｜>{% endif %}"
        + END
        + asking("Assistant:"),
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    ),
    "deepseek-r1": Chat(
        "<｜begin▁of▁sentence｜>"
        + LOOP
        + THOUGHTS
        + "{% if m.role == 'user' %}<｜User｜>{{ text }}"
        + "{% else %}<｜Assistant｜>{{ text }}<｜end▁of▁sentence｜>{% endif %}"
        + END
        + asking("<｜Assistant｜><think>\n"),
        ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
        ("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
    ),
    "zephyr": Chat(LOOP + "<|{{ m.role }}|>\n{{ m.content }}</s>\n" + END + asking("<|assistant|>\n"), ("<s>", "</s>")),
    "command-r": Chat(
        "<BOS_TOKEN>"
        + LOOP
        + "<|START_OF_TURN_TOKEN|><|{{ 'USER' if m.role == 'user' else 'CHATBOT' }}_TOKEN|>"
        + "{{ m.content }}<|END_OF_TURN_TOKEN|>"
        + END
        + asking("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>"),
        ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
        ("<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>"),
    ),
    "granite": Chat(
        LOOP
        + "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n"
        + END
        + asking("<|start_of_role|>assistant<|end_of_role|>"),
        ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
    ),
    "glm4": Chat(
        "[gMASK]<sop>" + LOOP + "<|{{ m.role }}|>\n{{ m.content }}" + END + asking("<|assistant|>\n"),
        ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|observation|>"),
    ),
    "gpt-oss": Chat(
        LOOP
        + "<|start|>{{ m.role }}{{ '<|channel|>final' if m.role == 'assistant' }}<|message|>{{ m.content }}<|end|>"
        + END
        + asking("<|start|>assistant"),
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>"),
    ),
    "vicuna": Chat(
        LOOP
        + "{{ m.role | upper }}: {{ m.content }}{{ ' ' if m.role == 'user' else '</s>' }}"
        + END
        + asking("ASSISTANT:"),
        ("<s>", "</s>"),
    ),
    "tulu": Chat(
        LOOP
        + "<|{{ m.role }}|>\n{{ m.content }}{{ '<|endoftext|>' if m.role == 'assistant' }}\n"
        + END
        + asking("<|assistant|>\n"),
        ("<|endoftext|>",),
    ),
    "minimax": Chat(
        LOOP + "]~b]{{ m.role }}\n{{ m.content }}[e~[\n" + END + asking("]~b]ai\n"), ("]~!b[", "]~b]", "[e~[")
    ),
    "seed": Chat(
        LOOP + "<seed:bos>{{ m.role }}\n{{ m.content }}<seed:eos>" + END + asking("<seed:bos>assistant\n"),
        ("<seed:bos>", "<seed:eos>"),
    ),
    "exaone": Chat(
        LOOP + "[|{{ m.role }}|]{{ m.content }}[|endofturn|]\n" + END + asking("[|assistant|]"),
        ("[BOS]", "[|endofturn|]", "[|user|]", "[|assistant|]", "[|system|]"),
    ),
    "json": Chat(chatml("m.content | tojson"), CHATML),
    "upper case": Chat(chatml("m.content | upper"), CHATML),
    "twice": Chat(chatml("m.content ~ ' ' ~ m.content"), CHATML),
    "letter by letter": Chat(chatml("m.content | list | join('-')"), CHATML),
}


def byte_level_tokenizer(chat: Chat, *, merges: tuple[tuple[str, str], ...] = ()) -> Any:
    """A byte-level BPE with the control tokens of a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: index for index, piece in enumerate([*letters, *dict.fromkeys(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in chat.special])
    backend.add_tokens([AddedToken(token, normalized=False) for token in chat.added])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=chat.special[-1])
    tokenizer.chat_template = chat.template
    return tokenizer


HERMES = Chat(
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    + LOOP
    + "<|im_start|>{{ m.role }}\n{{ m.content }}"
    + "{% for c in m.tool_calls or [] %}"
    + '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
    + "{% endfor %}<|im_end|>\n{% endfor %}"
    + asking("<|im_start|>assistant\n"),
    CHATML,
    ("<tool_call>", "</tool_call>"),
)
"""A template that writes tools and calls as Qwen2.5 and Hermes do."""


_CONTROL = re.compile(
    r"<\|[^|<>]{1,40}\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|\[/?[A-Z_]{3,}\]|<\|?[a-z_]+\|>|<\|[a-z_]+>"
)


def trl_templates() -> list[str]:
    """The names of the chat templates that TRL ships, if it is installed."""
    return sorted(_trl_files())


@cache
def trl_tokenizer(name: str) -> Any:
    """A tokenizer with one of the chat templates that TRL ships, and its control tokens."""
    text = _trl_files()[name].read_text(encoding="utf-8")
    tokenizer = byte_level_tokenizer(Chat(text, ("<bos>", *dict.fromkeys(_CONTROL.findall(text)))))
    tokenizer.bos_token = "<bos>"
    return tokenizer


def _trl_files() -> dict[str, Path]:
    spec = find_spec("trl")
    folder = Path(spec.origin).parent / "chat_templates" if spec and spec.origin else None
    return {file.stem: file for file in folder.glob("*.jinja")} if folder else {}
