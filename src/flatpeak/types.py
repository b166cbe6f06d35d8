"""The data that flows through a step, each type frozen and each field with its shape.

Shape letters: P prompts (groups) in a step, G completions in a group, N = P * G completions, T response tokens of
those N completions laid end to end, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from flatpeak.functional.kept_tokens import KeptTokens, TokenSet

Score = float | None
"""A reward, or None where it is missing (a grader failed, a judge did not answer). Missing is never 0."""
FinishReason = Literal["stop", "length"]
StopReason = Literal["answered", "done", "max_turns", "max_calls", "max_tokens", "timeout", "failed", "unbridgeable"]
"""answered: a turn without a call. done: the environment said so. max_turns, max_calls, max_tokens, timeout: a limit of
`episodes`. failed: the environment raised or was lost, so that its reward is missing. unbridgeable: the chat template
cannot continue the tokens that were sampled."""
Message = Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One row of a task, before it is formatted as a prompt."""

    id: str
    """Unique within the task. It identifies a group; the text may occur twice."""
    question: str
    """The question itself, without instructions."""
    gold: str
    """The reference answer, as graders expect it; empty if the data set has none."""
    other_golds: tuple[str, ...] = ()
    """Further reference answers: a completion is right if it gives any of them."""
    messages: tuple[Message, ...] = ()
    """The chat messages to ask, a system message among them; empty if they are `question` alone, by the user."""
    rationale: str | None = None
    """The full text of a perfect completion: the target of SFT. None if the data set has none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the data set's row, by name, for reward functions that ask for it."""
    subsets: Mapping[str, str] = field(default_factory=dict)
    """The subsets of the evaluation's tables that it belongs to: {"subject": "Algebra", "level": "3"}."""
    preamble: str = ""
    """The text that a published protocol puts before its worked examples and the question; part of the prompt."""
    shots: tuple[str, ...] = ()
    """Worked examples between preamble and question. If the prompt would be too long, the last ones are omitted."""
    task: str = ""
    """The name of its task in a mixture of tasks; empty without a mixture."""

    @property
    def golds(self) -> tuple[str, ...]:
        """The reference answers, `gold` first."""
        return (self.gold, *self.other_golds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """An example as the model sees it."""

    id: str
    """The example's id."""
    token_ids: tuple[int, ...]
    """The tokens that the model reads; at least one."""
    text: str
    """The same as text. Format rewards judge its end (such as a prefilled `<think>`) together with the completion."""
    example: Example
    """The row the prompt was made from."""
    messages: tuple[Message, ...] | None = None
    """The chat messages behind `text` when the template is a chat template, else None."""
    ends_in_question: bool = False
    """Whether `text` ends with the question: a `<think>` there belongs to the question and does not start thinking."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """The settings for drawing completions."""

    temperature: float = 1.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    """Nucleus: the smallest set of tokens whose probability reaches top_p; 1 keeps all."""
    top_k: int = 0
    """Only the k most probable tokens; 0 keeps all."""
    min_p: float = 0.0
    """Only tokens of at least this share of the most probable one's probability; 0 keeps all."""
    max_new_tokens: int = 256
    """A completion that reaches it ends with `finish_reason="length"`."""
    min_new_tokens: int = 0
    """Until this many tokens are drawn, neither end-of-sequence tokens nor stop strings end a completion."""
    stop: tuple[str, ...] = ()
    """A completion ends at the first token that completes one of these strings; the text keeps the string."""

    @property
    def filtered(self) -> bool:
        """Whether tokens are drawn from less than the full distribution: top-p, top-k, min-p or a least length."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.min_new_tokens > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that the policy wrote, and its answer."""

    name: str
    """The tool's name as written; empty where no name could be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments by name, as written."""
    answer: str = ""
    """The text that the policy read as the answer, an error's message included."""
    failure: str | None = None
    """malformed, unknown_tool, bad_arguments, raised, timeout, memory, died or too_long; None: it did not fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A message of the policy in an episode, and what answered it."""

    sampled: int
    """The number of tokens that the policy sampled."""
    added: int = 0
    """The number of tokens that were added after them: read by the policy, and not trained on."""
    text: str = ""
    """The sampled tokens decoded, without special tokens."""
    calls: tuple[ToolCall, ...] = ()
    answer: str = ""
    """The text that answered the turn: of its calls, or an environment's observation; empty where nothing did."""
    reward: Score = None
    """The reward that the step of a game gave; None where it gave none, and for turns that no step answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One sampled answer. Tokens are as sampled; text is for reading and grading and is never tokenized again."""

    token_ids: tuple[int, ...]
    """The sampled tokens, including the end-of-sequence token if one was drawn."""
    logprobs: tuple[float, ...]
    """The sampler's log-probability of each token: full-vocabulary log-softmax at the sampling temperature."""
    finish_reason: FinishReason
    """`stop` at an end-of-sequence token or stop string, `length` when cut at max_new_tokens."""
    text: str = ""
    """The tokens decoded, without special tokens."""
    filtered_logprobs: tuple[float, ...] | None = None
    """With `SamplingParams.filtered`: the log-probability under the filtered, renormalized distribution. Else None."""
    kept: tuple[TokenSet, ...] | None = field(default=None, compare=False, repr=False)
    """The ids of the tokens that each token was drawn from, or -1 and the ids of all others. Ratios are taken over
    them. None where all were, or where it is not known."""
    trained: tuple[bool, ...] | None = None
    """Whether each token is trained on; None: all. The policy reads the others, and did not sample them."""
    weight_version: int | None = None
    """The number of weight updates of the servers that drew it; None for engines that use the trainer's weights."""
    turns: tuple[Turn, ...] = ()
    """The turns of an episode with tools or an environment; empty without these. `text` is that of the last one."""
    stop_reason: StopReason | None = None
    """The reason why an episode ended; None without tools or an environment."""
    reward: Score = None
    """The reward that the episode's environment gave; None where it gave none."""

    @property
    def transcript(self) -> str:
        """Its text; of an episode, the texts of all turns and their answers, to be read and not to be parsed."""
        if len(self.turns) < 2:
            return self.text
        lines = (text for turn in self.turns for text in (turn.text, f"-> {turn.answer}" if turn.answer else ""))
        return "\n".join(line for line in lines if line)

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that the policy sampled: all but those that were added between turns."""
        if self.trained is None:
            return self.token_ids
        return tuple(token for token, sampled in zip(self.token_ids, self.trained, strict=True) if sampled)


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """A prompt and its G completions."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    version: int | None = None
    """The version of the policy that drew it (its number of steps); None if the sampler does not report it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """The rewards of a list of groups; [p][g] is completion g of group p."""

    total: list[list[Score]]
    """The weighted sum of the components that have a weight; missing if any of them is missing."""
    parts: dict[str, list[list[Score]]]
    """Every component by its name, unweighted, including those of weight 0."""
    timed_out: Mapping[str, list[list[bool]]] = field(default_factory=dict)
    """By component, whether a score stands for an answer that ran out of time or memory; components without such
    answers are left out."""
    logged: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Values that reward functions logged, by `<component>/<metric>`."""
    turn_weight: float = 0.0
    """The weight that the rewards of turns have in the total; 0 where they are not in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedCompletions:
    """Completions laid end to end, as a policy reads them: without padding, so padding masks cannot be wrong."""

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
    """float32 [T]: the sampler's log-probabilities, over `kept_T` if it is there; None if nothing was sampled."""
    kept_T: KeptTokens | None = None
    """The tokens that each token was drawn from, over which all log-probabilities are taken; None: all tokens."""
    reference_logprobs_T: Tensor | None = None
    """float32 [T]: the reference model's; None if there is no reference or it has not scored them."""
    trained_T: Tensor | None = None
    """bool [T]: tokens that the policy sampled and that count: losses, lengths in normalizations, ratios, KL, entropy
    and metrics range over them. None: all."""

    def to_batch(self, *, advantages_T: Tensor, weights_N: Tensor, old_logprobs_T: Tensor | None) -> Batch:
        """The same completions, with the values that a loss needs in addition."""
        return Batch(
            prompts=self.prompts,
            prompt_N=self.prompt_N,
            lengths_N=self.lengths_N,
            tokens_T=self.tokens_T,
            sequence_T=self.sequence_T,
            sampler_logprobs_T=self.sampler_logprobs_T,
            reference_logprobs_T=self.reference_logprobs_T,
            kept_T=self.kept_T,
            trained_T=self.trained_T,
            advantages_T=advantages_T,
            weights_N=weights_N,
            old_logprobs_T=old_logprobs_T,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch(PackedCompletions):
    """Completions ready for training, each with its tokens' advantages and its weight in the loss."""

    advantages_T: Tensor
    """float32 [T]: the advantage of each token."""
    weights_N: Tensor
    """float32 [N]: the weight of every trained token of a completion in the loss (functional.completion_weights)."""
    old_logprobs_T: Tensor | None
    """float32 [T]: the old log-probabilities of the importance ratio, at the sampling temperature. None: use those of
    the training pass, detached, which is correct until the step changes a weight."""
    kl_T: Tensor | None = None
    """float32 [T]: the exact KL at each token, with its gradient; None: it is estimated from `reference_logprobs_T`."""
    policy_weights_T: Tensor | None = None
    """float32 [T]: factors of the tokens' policy loss, computed over a whole minibatch; None: 1."""
    penalty_weights_T: Tensor | None = None
    """float32 [T]: coefficients of |log p - log p_old|; None: 0."""
