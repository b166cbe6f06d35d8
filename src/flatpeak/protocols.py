"""Protocols between the components, which any object of the right shape fits, and the base class of samplers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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


class SamplerLike(Protocol):
    """A sampler of the caller's. If it also has `state()` and `load(state)`, checkpoints keep its state."""

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in the same order.

        A completion's randomness depends only on (seed, prompt id, index in its group).
        """
        ...


class Sampler:
    """Prompts in, one group of completions per prompt out.

    A subclass defines `generate` or `stream`; here each is implemented by the other. It also defines the hooks that it
    needs; by default a hook does nothing.
    """

    decoder = ""
    """The name of its decoder for the manifest; empty if the policy decodes."""
    foreign = False
    """Whether it belongs to the caller, and so may use weights other than the policy's."""
    alike = False
    """Whether `observe` gives the samplers of all ranks the same state."""

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in the order of the prompts."""
        groups = dict(self.stream(prompts, group_size=group_size, sampling=sampling, seed=seed))
        return [groups[p] for p in range(len(prompts))]

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        """The groups of `generate`, each once with the index of its prompt, in the order in which they finish."""
        yield from enumerate(self.generate(prompts, group_size=group_size, sampling=sampling, seed=seed))

    def converse(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int, dialogue: Any
    ) -> Iterator[int]:
        """Draw completions of several turns in one request, answered by a rollout.conversation.Dialogue.

        The indices of prompts as their groups end. It may end early, and does so at once here; what is left is then
        drawn turn by turn.
        """
        yield from ()

    def observe(self, groups: Sequence[Group]) -> None:
        """Record groups that the samplers of all ranks have drawn."""

    def state(self) -> Mapping[str, Any]:
        """The state that later results depend on, as JSON, saved in every checkpoint."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state, before the first request of a resumed run; empty if the checkpoint has none."""

    def measured(self) -> Mapping[str, float]:
        """The metrics of the requests since the last call."""
        return {}

    def use_version(self, version: int) -> None:
        """Set the current version of the policy: the number of its steps."""

    def ahead(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> AbstractContextManager[None]:
        """A context for updates, in which a later request is drawn by the policy as on entry; draws nothing here."""
        return nullcontext()

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Make waits for servers or processes raise StoppedError once `stopping()` is true."""

    def announce_with(self, notice: Callable[[str], None]) -> None:
        """Give notices of servers that are waited for."""

    def halve_with(self, halvings: Any) -> None:
        """Draw fewer completions at once where memory runs out; `halvings`: the run's out_of_memory.Halvings."""

    def keep_calls(self, log: Any) -> None:
        """Keep the results of calls of tools for a resumed run; `log`: the run's runs.call_log.CallLog."""

    def close(self) -> None:
        """End processes and threads, and delete temporary files."""


class WrappedSampler(Sampler):
    """A sampler around another one that passes hooks on to it; a subclass defines `generate` or `stream`."""

    def __init__(self, sampler: Sampler) -> None:
        self.sampler = sampler
        self.decoder = sampler.decoder
        self.foreign = sampler.foreign
        self.alike = sampler.alike

    def observe(self, groups: Sequence[Group]) -> None:
        """Record groups that the samplers of all ranks have drawn, in the wrapped sampler."""
        self.sampler.observe(groups)

    def state(self) -> Mapping[str, Any]:
        """The state of the wrapped sampler."""
        return self.sampler.state()

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state of the wrapped sampler."""
        self.sampler.load(state)

    def measured(self) -> Mapping[str, float]:
        """The metrics of the wrapped sampler."""
        return self.sampler.measured()

    def use_version(self, version: int) -> None:
        """Set the current version of the policy."""
        self.sampler.use_version(version)

    def ahead(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> AbstractContextManager[None]:
        """A context in which the wrapped sampler draws a later request."""
        return self.sampler.ahead(prompts, group_size=group_size, sampling=sampling, seed=seed)

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Make the wrapped sampler stop waiting once `stopping()` is true."""
        self.sampler.stop_when(stopping)

    def announce_with(self, notice: Callable[[str], None]) -> None:
        """Let the wrapped sampler give notices."""
        self.sampler.announce_with(notice)

    def halve_with(self, halvings: Any) -> None:
        """Let the wrapped sampler draw fewer completions at once where memory runs out."""
        self.sampler.halve_with(halvings)

    def keep_calls(self, log: Any) -> None:
        """Let the wrapped sampler keep the results of calls."""
        self.sampler.keep_calls(log)

    def close(self) -> None:
        """Close the wrapped sampler."""
        self.sampler.close()


class ServedPolicy(Protocol):
    """The part of a policy that servers need to draw its completions."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends a completion."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that decodes completions."""
        ...

    @property
    def vocabulary_size(self) -> int:
        """The number of tokens for which the output layer computes logits."""
        ...

    @property
    def adapted(self) -> bool:
        """Whether only adapters are trained and saved."""
        ...

    def saved_weights(self) -> Sequence[Tensor]:
        """The weights that `save_weights` writes."""
        ...

    def save_weights(self, directory: Path, *, head: bool = False) -> None:
        """Write the weights, or the adapters, in Hugging Face format; `head`: also a tied output layer separately."""
        ...

    def named_weights(self, *, head: bool = False) -> Sequence[tuple[str, Tensor]]:
        """The weights with their names in files: the model's tensors themselves, not copies."""
        ...


class Reward(Protocol):
    """Groups in, scores out."""

    def __call__(self, groups: Sequence[Group]) -> Scores:
        """Score every completion of every group."""
        ...


class Tokenizer(Protocol):
    """The interface of a Hugging Face tokenizer that flatpeak uses."""

    eos_token_id: int | None
    chat_template: Any

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to token ids."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Token ids to text."""
        ...

    def batch_decode(self, sequences: Sequence[Sequence[int]], *, skip_special_tokens: bool = False) -> list[str]:
        """Decode many sequences at once."""
        ...

    def apply_chat_template(self, conversation: Sequence[Mapping[str, str]], **kwargs: Any) -> Any:
        """Chat messages to text or token ids."""
        ...


class DecodeState(Protocol):
    """The keys and values of prompts, by entry, and of the completions being decoded, by slot.

    It may have a method `drawing(buffer)`, which returns a function that draws tokens in place of the CompletionBuffer,
    `skip(slots)`, after which these slots need no tokens until they are admitted or extended, and `prefill_tokens`, the
    most prompt tokens that it wants in one pass.
    """

    def admit(self, slots: Sequence[int], entries: Sequence[int]) -> None:
        """Begin completions in these slots, each with the prompt in its entry."""
        ...

    def compact(
        self,
        slots: tuple[Sequence[int], Sequence[int]],
        entries: tuple[Sequence[int], Sequence[int]],
        idle: Sequence[int],
    ) -> None:
        """Move completions and prompts, each (sources, targets); the `idle` slots hold no completion."""
        ...


class Decoder(Protocol):
    """The part of a policy that a rollout engine needs: it reads each prompt once, then decodes one token per slot.

    It may have a context manager `decoding()`, entered for a request, during which its weights do not change.
    """

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
        """The torch device of tokens and logits."""
        ...

    def batch_sizes(self, slots: int) -> Sequence[int]:
        """The numbers of slots that a step may decode, ascending; the last is the first that holds `slots`."""
        ...

    def open(self, *, slots: int, entries: int, prompt_lengths: Sequence[int], new_tokens: int) -> Any:
        """Memory (a DecodeState) for a request with prompts of these lengths, at most `entries` of them at a time."""
        ...

    def prefill(self, state: Any, prompts: Sequence[Sequence[int]], entries: Sequence[int]) -> Tensor:
        """Read prompts and keep them as these entries; returns the logits after each prompt, float32 [P, V]."""
        ...

    def extend(self, state: Any, slots: Sequence[int], kept: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Append tokens to these slots after the first kept[k] tokens of each; returns the logits after them, float32
        [K, V]."""
        ...

    def decode(self, state: Any, tokens_R: Tensor) -> Tensor:
        """Append a token, int64 [R], to each of the first R slots; returns the logits after it, float32 [R, V]."""
        ...


class SavesModel(Protocol):
    """Writes a model (and tokenizer) in Hugging Face format into an existing directory."""

    def __call__(self, directory: Path) -> None:
        """Write the model's files into the directory."""
        ...


class Progress(Protocol):
    """The display of a run's progress; it may show nothing.

    It may have a method `say(text)`, which is called with lines about the run: what is trained, and what is checked. It
    may also have a method `sampled(completions, total)`, which is called while the completions of a step or of an
    evaluation are sampled.
    """

    def update(self, stage: str, *, step: int, total: int, metrics: Mapping[str, float]) -> None:
        """Show that one step of a stage (`sft`, `train`, `eval`) is done; `metrics` are the step's."""
        ...

    def notice(self, text: str) -> None:
        """Show a message to the user, once."""
        ...
