"""The data that flows through a step, each type frozen and each field with its shape.

Shape letters: P prompts (groups) in a step, G completions in a group, N = P * G completions, T response tokens of
those N completions laid end to end, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length"]
Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row of a task, before it is worded as a prompt."""

    id: str
    """Unique within the task; it identifies a group, which its text does not."""
    question: str
    """The question itself, without instructions."""
    gold: str
    """The reference answer, as graders expect it."""
    rationale: str | None = None
    """A full text that a perfect completion would have: the target of SFT. None if the data set has none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the data set's row, by name, for reward functions that ask for it."""
    subsets: Mapping[str, str] = field(default_factory=dict)
    """Subsets that evaluation makes tables of: {"subject": "Algebra", "level": "3"}."""
    preamble: str = ""
    """The text of a published protocol before its worked examples and the question; part of the prompt."""
    shots: tuple[str, ...] = ()
    """Worked examples between preamble and question. The last ones are left out where a prompt would be too long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """An example as the model sees it."""

    id: str
    """The example's id."""
    token_ids: tuple[int, ...]
    """The tokens that the model reads, at least one."""
    text: str
    """The same as text; format rewards judge its end (a prefilled `<think>`, say) together with the completion."""
    example: Example
    """The row the prompt was made from."""
    messages: tuple[Message, ...] | None = None
    """The chat messages behind `text` when the template is a chat template, else None."""
    ends_in_question: bool = False
    """Whether `text` ends with the question: a `<think>` there is the question's, and opens no thinking."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """Settings by which completions are drawn."""

    temperature: float = 1.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens whose probability reaches top_p; 1 keeps all."""
    top_k: int = 0
    """Only the k most probable tokens; 0 keeps all."""
    max_new_tokens: int = 256
    """A completion that reaches it ends with `finish_reason="length"`."""
    min_new_tokens: int = 0
    """No end-of-sequence token is drawn before this many tokens, and no stop string ends a completion."""
    stop: tuple[str, ...] = ()
    """A completion ends at the first token whose decoded text completes one of these; the string is kept."""

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from less than the full distribution (top-p or top-k)."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled answer. Tokens are what was sampled; text is for reading and grading and is never tokenized again."""

    token_ids: tuple[int, ...]
    """The sampled tokens, the end-of-sequence token included where one was drawn."""
    logprobs: tuple[float, ...]
    """The sampler's log-probability of each token: full-vocabulary log-softmax at the sampling temperature."""
    finish_reason: FinishReason
    """`stop` at an end-of-sequence token or stop string, `length` when cut at max_new_tokens."""
    text: str = ""
    """The tokens decoded, without special tokens."""
    filtered_logprobs: tuple[float, ...] | None = None
    """With top-p or top-k: the log-probability under the filtered, renormalized distribution. Else None."""
    weight_version: int | None = None
    """Counts the weight updates of the servers that drew it; None for engines on the trainer's own weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A prompt and its G completions."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    version: int | None = None
    """The version of the policy that drew it, the number of its steps; None where the sampler does not say."""


Score = float | None
"""A reward, or None where it is missing (a grader failed, a judge did not answer). Missing is never 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The rewards of a list of groups; [p][g] is completion g of group p."""

    total: list[list[Score]]
    """The weighted sum of the components that have a weight; missing where any of them is missing."""
    parts: dict[str, list[list[Score]]]
    """Every component by its name, unweighted, those of weight 0 included."""
    timed_out: Mapping[str, list[list[bool]]] = field(default_factory=dict)
    """By component, whether a score stands for an answer that ran out of time or memory; components without any are
    left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCompletions:
    """Completions laid end to end, as a policy reads them: no padding, so no padding masks to get wrong."""

    prompts: tuple[tuple[int, ...], ...]
    """Token ids of the P distinct prompts."""
    prompt_N: Tensor
    """int64 [N]: index into `prompts` of each completion. Completions of one prompt stand side by side."""
    lengths_N: Tensor
    """int64 [N]: response tokens of each completion."""
    tokens_T: Tensor
    """int64 [T]: the response tokens of all completions, laid end to end."""
    sequence_T: Tensor
    """int64 [T]: the completion (0..N-1) of each token."""
    sampler_logprobs_T: Tensor | None = None
    """float32 [T]: the sampler's log-probabilities, or None where nothing was sampled."""
    reference_logprobs_T: Tensor | None = None
    """float32 [T]: the reference model's, or None where no reference is kept or it has not scored them."""

    def to_batch(self, *, advantages_N: Tensor, weights_N: Tensor, old_logprobs_T: Tensor | None) -> Batch:
        """The same completions with all that a loss needs."""
        return Batch(
            prompts=self.prompts,
            prompt_N=self.prompt_N,
            lengths_N=self.lengths_N,
            tokens_T=self.tokens_T,
            sequence_T=self.sequence_T,
            sampler_logprobs_T=self.sampler_logprobs_T,
            reference_logprobs_T=self.reference_logprobs_T,
            advantages_N=advantages_N,
            weights_N=weights_N,
            old_logprobs_T=old_logprobs_T,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch(PackedCompletions):
    """Completions ready for training, each with its advantage and its weight in the loss."""

    advantages_N: Tensor
    """float32 [N]: the advantage of every token of a completion."""
    weights_N: Tensor
    """float32 [N]: the weight of every token of a completion in the loss (functional.completion_weights)."""
    old_logprobs_T: Tensor | None
    """float32 [T]: the old log-probabilities of the importance ratio, at the sampling temperature. None: the training
    pass's own, detached, as long as no weight of the step has changed."""
