"""What the parts ask of each other. Any object of the right shape fits: none has to inherit from anything here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from flatpeak.types import Example, Group, Prompt, SamplingParams, Scores


class Task(Protocol):
    """A source of examples. Train and test are disjoint."""

    name: str
    train: Sequence[Example]
    test: Sequence[Example]


class Sampler(Protocol):
    """Prompts in, one group of completions per prompt out, in the same order."""

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """A completion's randomness depends on (seed, prompt id, index in its group) and on nothing else."""
        ...


class Reward(Protocol):
    """Groups in, scores out."""

    def __call__(self, groups: Sequence[Group]) -> Scores:
        """Score every completion of every group."""
        ...


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that flatpeak uses."""

    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""
        ...

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Many at once."""
        ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], **kwargs: Any) -> Any:
        """Chat messages to text or token ids."""
        ...


class DecodeState(Protocol):
    """The keys and values of the rows being decoded."""

    def keep(self, rows_R: Tensor) -> None:
        """Keep only these rows, int64 [R], in this order."""
        ...


class Decoder(Protocol):
    """What a rollout engine needs of a policy: one prefill per prompt, then one token per live row at a time."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a completion: the union of the tokenizer's and the generation config's."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that decodes completions."""
        ...

    @property
    def device(self) -> Any:
        """The torch device that tokens and logits live on."""
        ...

    def prefill(
        self, prompts: Sequence[Sequence[int]], *, copies: int, max_new_tokens: int
    ) -> tuple[DecodeState, Tensor]:
        """Run each of P prompts once; rows are P * copies, a prompt's copies side by side.

        Returns the state and the logits after the last prompt token, float32 [P, V] (one row per prompt, not copy).
        """
        ...

    def decode(self, state: Any, tokens_R: Tensor) -> Tensor:
        """Append one token, int64 [R], to each live row; the logits that follow, float32 [R, V].

        `state` is what this decoder's `prefill` returned.
        """
        ...


class Tracker(Protocol):
    """A place metrics go besides `metrics.jsonl` (Weights & Biases, TensorBoard, ...)."""

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Record one step's metrics."""
        ...

    def close(self) -> None:
        """Flush and close."""
        ...


class SavesModel(Protocol):
    """Writes a model (and tokenizer) in Hugging Face format into an existing directory."""

    def __call__(self, directory: Path) -> None:
        """Write the files."""
        ...


class Progress(Protocol):
    """Who watches a run: a live display, or nobody."""

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """One step of a stage (`sft`, `train`, `eval`) is done; `metrics` are the step's."""
        ...

    def notice(self, text: str) -> None:
        """Something the user should know, once."""
        ...
