"""Multiple choice by rank: the answer is the most probable letter after the prompt, as in published results on MMLU.

Hendrycks et al. 2021 (hendrycks/test) and lm-evaluation-harness compare the log-probabilities of ` A`, ` B`, ` C` and
` D`, each with a leading space, and generate nothing. A model that would write something else still has a most probable
letter, so its accuracy differs from that of generated answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, Protocol

import torch
from torch import Tensor

from flatpeak.errors import StoppedError, UserError
from flatpeak.protocols import Tokenizer
from flatpeak.types import Completion, Group, PackedCompletions, Prompt


class Scorer(Protocol):
    """The part of a policy that ranking needs."""

    @property
    def device(self) -> Any:
        """The torch device of the policy's tensors."""
        ...

    def token_logprobs(self, batch: PackedCompletions, *, temperature: float) -> tuple[Tensor, Tensor]:
        """The log-probability of, and the entropy at, each response token."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """The most probable letter of one question, and all letters' log-probabilities."""

    group: Group
    """A single completion: the most probable letter; the first of equally probable ones."""
    letter: str
    logprobs: Mapping[str, float]
    """By letter, its log-probability after the prompt; the sum if it has several tokens."""


Ranker = Callable[[Sequence[Prompt]], list[Ranked]]
"""Ranks the letters of every prompt's options, in the order of the prompts."""


@dataclass(frozen=True, kw_only=True)
class LetterRanker:
    """Ranks the letters of lettered options by the policy's log-probabilities at temperature 1.

    Prompts share a forward pass if they have at most `prompt_tokens` tokens together; each prompt is read once for all
    its letters. Nothing is sampled, so equal weights give equal results.
    """

    policy: Scorer
    tokenizer: Tokenizer
    prompt_tokens: int = 8192
    stopping: Callable[[], bool] = lambda: False
    """Raises StoppedError between two passes once it is true."""
    _tokens: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)

    def __call__(self, prompts: Sequence[Prompt]) -> list[Ranked]:
        """Rank the letters of every prompt. UserError if a question has no options, or a letter has no tokens."""
        return [ranked for chunk in self._chunks(prompts) for ranked in self._rank(chunk)]

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check that all questions have options, and that the first one's letters have tokens; UserError otherwise."""
        for prompt in prompts:
            letters_of(prompt)
        for prompt in prompts[:1]:
            self._continuations(prompt)

    def _chunks(self, prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
        chunk: list[Prompt] = []
        tokens = 0
        for prompt in prompts:
            if chunk and tokens + len(prompt.token_ids) > self.prompt_tokens:
                yield chunk
                chunk, tokens = [], 0
            chunk.append(prompt)
            tokens += len(prompt.token_ids)
        if chunk:
            yield chunk

    def _rank(self, prompts: Sequence[Prompt]) -> Iterator[Ranked]:
        if self.stopping():
            raise StoppedError("a signal asked to stop while letters were ranked")
        continuations = [self._continuations(prompt) for prompt in prompts]
        batch = _batch(prompts, [list(by_letter.values()) for by_letter in continuations], device=self.policy.device)
        with torch.no_grad():
            logprobs_T, _ = self.policy.token_logprobs(batch, temperature=1.0)
        per_continuation = iter(logprobs_T.cpu().split(batch.lengths_N.tolist()))
        for prompt, tokens in zip(prompts, continuations, strict=True):
            token_logprobs = {letter: next(per_continuation).tolist() for letter in tokens}
            sums = {letter: sum(values) for letter, values in token_logprobs.items()}
            best = max(sums, key=sums.__getitem__)
            completion = Completion(
                token_ids=tokens[best],
                logprobs=tuple(token_logprobs[best]),
                finish_reason="stop",
                text=_continuation_text(prompt, best),
            )
            yield Ranked(group=Group(prompt=prompt, completions=(completion,)), letter=best, logprobs=sums)

    def _continuations(self, prompt: Prompt) -> dict[str, tuple[int, ...]]:
        """The tokens of each letter of the question's options."""
        tokens = {letter: self._continuation(prompt, letter) for letter in letters_of(prompt)}
        if len(set(tokens.values())) < len(tokens):
            raise UserError(
                f"evaluation.choices=rank: this tokenizer writes several of the letters {', '.join(tokens)} alike, as "
                "tokens it does not know: set evaluation.choices=generate, or use a tokenizer with capital letters"
            )
        return tokens

    def _continuation(self, prompt: Prompt, letter: str) -> tuple[int, ...]:
        """The tokens that the letter adds to the prompt, by tokenizing the prompt's last line with and without it."""
        ending = prompt.text[prompt.text.rstrip().rfind("\n") + 1 :]
        if (ending, letter) not in self._tokens:
            before, after = (
                tuple(self.tokenizer.encode(text, add_special_tokens=False))
                for text in (ending, ending + _continuation_text(prompt, letter))
            )
            if after[: len(before)] != before or len(after) == len(before):
                raise UserError(
                    f"evaluation.choices=rank: this tokenizer joins the letter {letter} to the end of the prompt "
                    f"({ending[-20:]!r}), so that it has no tokens of its own: set evaluation.choices=generate"
                )
            self._tokens[ending, letter] = after[len(before) :]
        return self._tokens[ending, letter]


def letters_of(prompt: Prompt) -> str:
    """The letters of the question's options. UserError if it has none."""
    options = prompt.example.columns.get("options")
    if not isinstance(options, list | tuple) or not 2 <= len(options) <= len(ascii_uppercase):
        raise UserError(
            f"evaluation.choices=rank: question {prompt.id!r} has no lettered options; use a multiple-choice task "
            "(task.type=mmlu, mmlu_pro or choices), or evaluation.choices=generate"
        )
    return ascii_uppercase[: len(options)]


def _continuation_text(prompt: Prompt, letter: str) -> str:
    """The text of the letter after the prompt, with a space before it unless the prompt ends in whitespace."""
    return letter if prompt.text[-1:].isspace() else f" {letter}"


def _batch(prompts: Sequence[Prompt], tokens: Sequence[Sequence[tuple[int, ...]]], *, device: Any) -> PackedCompletions:
    """Every letter of every prompt as a response, packed."""
    responses = [response for row in tokens for response in row]
    prompt_indices = [index for index, row in enumerate(tokens) for _ in row]
    lengths_N = torch.tensor([len(response) for response in responses], device=device)
    return PackedCompletions(
        prompts=tuple(prompt.token_ids for prompt in prompts),
        prompt_N=torch.tensor(prompt_indices, device=device),
        lengths_N=lengths_N,
        tokens_T=torch.tensor([token for response in responses for token in response], device=device),
        sequence_T=torch.arange(len(responses), device=device).repeat_interleave(lengths_N),
    )
