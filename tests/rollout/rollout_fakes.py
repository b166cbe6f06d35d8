"""What the rollout tests share: tokenizers with byte tokens, and decoders whose logits depend on the history alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from flatpeak.types import Example, Prompt


def make_prompt(prompt_id: str, token_ids: Sequence[int]) -> Prompt:
    example = Example(id=prompt_id, question="", gold="")
    return Prompt(id=prompt_id, token_ids=tuple(token_ids), text="", example=example)


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """GPT-2's kind: 256 byte tokens, a few merges, and the special tokens <|end|> and <|pad|>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("<", "/"), ("a", "n"), ("an", "s"), ("Ġ", "t"), (">", "Ċ")]
    vocabulary = {token: i for i, token in enumerate(alphabet + [a + b for a, b in merges])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<|pad|>")


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Llama's kind: characters, "▁" for a space, and <0x00>..<0xFF> for what has no token of its own."""
    characters = ["▁", "a", "b", "n", "s", "<", "/", ">", "\n", "▁a", "an"]
    vocabulary = {
        token: i for i, token in enumerate([f"<0x{byte:02X}>" for byte in range(256)] + characters + ["<unk>"])
    }
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("a", "n")], byte_fallback=True, unk_token="<unk>")
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


class NumberTokenizer:
    """Token 7 reads "<7>"; the ids in `special` vanish where special tokens are skipped."""

    chat_template = None

    def __init__(self, special: Sequence[int] = (0,)):
        self.eos_token_id = next(iter(special), None)
        self.special = frozenset(special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [int(part) for part in text.strip("<>").split("><")]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f"<{i}>" for i in token_ids if not (skip_special_tokens and i in self.special))

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]


class HistoryState:
    def __init__(self, hashes_R: Tensor, sizes: list[int]):
        self.hashes_R = hashes_R
        self.sizes = sizes

    def keep(self, rows_R: Tensor) -> None:
        self.hashes_R = self.hashes_R[rows_R]
        self.sizes.append(len(rows_R))


class HistoryDecoder:
    """Logits are a row of a fixed table, chosen by a hash of all tokens so far: exactly independent of the batch."""

    device = torch.device("cpu")

    def __init__(
        self, *, vocabulary: int = 12, eos_token_ids: Sequence[int] = (0,), tokenizer=None, scale: float = 2.0
    ):
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(997, vocabulary, generator=generator) * scale
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tokenizer = tokenizer or NumberTokenizer(special=eos_token_ids)
        self.prefilled: list[tuple[int, int]] = []  # (prompts, copies) of each prefill
        self.decoded: list[int] = []  # rows of each decode step
        self.kept: list[int] = []  # rows left by each compaction

    def logits_after(self, token_ids: Sequence[int]) -> Tensor:
        value = 1
        for token in token_ids:
            value = (value * 31 + token + 1) % 997
        return self.table[value]

    def prefill(self, prompts, *, copies: int, max_new_tokens: int) -> tuple[HistoryState, Tensor]:
        self.prefilled.append((len(prompts), copies))
        hashes = []
        for prompt in prompts:
            value = 1
            for token in prompt:
                value = (value * 31 + token + 1) % 997
            hashes.append(value)
        hashes_P = torch.tensor(hashes)
        return HistoryState(hashes_P.repeat_interleave(copies), self.kept), self.table[hashes_P]

    def decode(self, state: HistoryState, tokens_R: Tensor) -> Tensor:
        assert len(tokens_R) == len(state.hashes_R)
        self.decoded.append(len(tokens_R))
        state.hashes_R = (state.hashes_R * 31 + tokens_R + 1) % 997
        return self.table[state.hashes_R]


class ScriptedDecoder:
    """After k tokens every row of every prompt prefers, by far, token k of the script."""

    device = torch.device("cpu")

    def __init__(self, script: Sequence[int], *, vocabulary: int, eos_token_ids: Sequence[int], tokenizer):
        self.script = script
        self.vocabulary = vocabulary
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tokenizer = tokenizer

    def _logits(self, step: int) -> Tensor:
        logits_V = torch.zeros(self.vocabulary)
        logits_V[self.script[step]] = 50.0
        return logits_V

    def prefill(self, prompts, *, copies: int, max_new_tokens: int) -> tuple[ScriptedState, Tensor]:
        return ScriptedState(), self._logits(0).repeat(len(prompts), 1)

    def decode(self, state: ScriptedState, tokens_R: Tensor) -> Tensor:
        state.step += 1
        return self._logits(state.step).repeat(len(tokens_R), 1)


class ScriptedState:
    step = 0

    def keep(self, rows_R: Tensor) -> None:
        """Nothing is kept per row."""
