"""Tokenizers with byte tokens, and decoders whose logits depend on the history alone."""

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
        return [int(number) for number in text.strip("<>").split("><")]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(f"<{i}>" for i in token_ids if not (skip_special_tokens and i in self.special))

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]


class HistoryState:
    """The hash of what each slot has read; `free` slots and entries raise where they are read."""

    def __init__(self, *, slots: int, prompts: int, sizes: list[int]):
        self.slots: list[int | None] = [None] * slots
        self.entries: list[int | None] = [None] * prompts
        self.sizes = sizes

    def admit(self, slots: Sequence[int], entries: Sequence[int]) -> None:
        for slot, entry in zip(slots, entries, strict=True):
            assert self.entries[entry] is not None
            self.slots[slot] = self.entries[entry]

    def compact(self, slots, entries, idle: Sequence[int]) -> None:
        for held, (sources, targets) in ((self.slots, slots), (self.entries, entries)):
            for source, target in zip(sources, targets, strict=True):
                held[target], held[source] = held[source], None
        for slot in idle:
            self.slots[slot] = 0
        self.sizes.append(sum(slot is not None for slot in self.slots))


class HistoryDecoder:
    """Logits are a row of a fixed table, chosen by a hash of all tokens so far: exactly independent of the batch."""

    device = torch.device("cpu")
    state_class = HistoryState

    def __init__(
        self, *, vocabulary: int = 12, eos_token_ids: Sequence[int] = (0,), tokenizer=None, scale: float = 2.0
    ):
        generator = torch.Generator().manual_seed(5)
        self.table = torch.randn(997, vocabulary, generator=generator) * scale
        self.eos_token_ids = frozenset(eos_token_ids)
        self.tokenizer = tokenizer or NumberTokenizer(special=eos_token_ids)
        self.prefilled: list[tuple[int, ...]] = []  # prompt lengths of each prefill
        self.decoded: list[int] = []  # rows of each decode step
        self.kept: list[int] = []  # slots in use after each compaction
        self.opened: list[tuple[int, int, int, int]] = []  # slots, entries, longest prompt, new tokens

    def logits_after(self, token_ids: Sequence[int]) -> Tensor:
        return self.table[self.hash_of(token_ids)]

    @staticmethod
    def hash_of(token_ids: Sequence[int]) -> int:
        value = 1
        for token in token_ids:
            value = (value * 31 + token + 1) % 997
        return value

    def batch_sizes(self, slots: int) -> list[int]:
        return list(range(1, slots + 1))

    def open(self, *, slots: int, entries: int, prompt_lengths: Sequence[int], new_tokens: int) -> HistoryState:
        self.opened.append((slots, entries, max(prompt_lengths), new_tokens))
        return self.state_class(slots=slots, prompts=entries, sizes=self.kept)

    def prefill(self, state: HistoryState, prompts, entries: Sequence[int]) -> Tensor:
        self.prefilled.append(tuple(map(len, prompts)))
        hashes = [self.hash_of(prompt) for prompt in prompts]
        for entry, value in zip(entries, hashes, strict=True):
            state.entries[entry] = value
        return self.table[hashes]

    def decode(self, state: HistoryState, tokens_R: Tensor) -> Tensor:
        rows = len(tokens_R)
        self.decoded.append(rows)
        before = torch.tensor([value if value is not None else 0 for value in state.slots[:rows]])
        after = (before * 31 + tokens_R + 1) % 997
        state.slots[:rows] = after.tolist()
        return self.table[after]


class ScriptedDecoder(HistoryDecoder):
    """After k tokens every row of every prompt prefers, by far, token k of the script."""

    def __init__(self, script: Sequence[int], *, vocabulary: int, eos_token_ids: Sequence[int], tokenizer):
        super().__init__(vocabulary=vocabulary, eos_token_ids=eos_token_ids, tokenizer=tokenizer)
        self.script = script
        self.step = 0

    def _logits(self, rows: int) -> Tensor:
        logits_V = torch.zeros(self.table.shape[1])
        logits_V[self.script[self.step]] = 50.0
        return logits_V.repeat(rows, 1)

    def prefill(self, state: HistoryState, prompts, entries: Sequence[int]) -> Tensor:
        self.step = 0
        return self._logits(len(super().prefill(state, prompts, entries)))

    def decode(self, state: HistoryState, tokens_R: Tensor) -> Tensor:
        super().decode(state, tokens_R)
        self.step = min(self.step + 1, len(self.script) - 1)
        return self._logits(len(tokens_R))
