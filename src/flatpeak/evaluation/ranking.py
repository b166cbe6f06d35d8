"""Multiple choice by rank: the most probable letter after the prompt is the answer, as in published figures of MMLU.

Hendrycks et al. 2021 (hendrycks/test) and lm-evaluation-harness compare the log-probabilities of ` A`, ` B`, ` C` and
` D`, a space before each, and generate nothing. A model that would write something else still has a most probable
letter, so its figure differs from one by generated answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import ascii_uppercase
from typing import Any, Protocol

import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.protocols import Tokenizer
from flatpeak.types import Batch, Completion, Group, Prompt


class Scorer(Protocol):
    """A policy, as far as ranking needs it."""

    @property
    def device(self) -> Any:
        """The torch device that tokens live on."""
        ...

    def token_logprobs(self, batch: Batch, *, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability of, and entropy at, each response token."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranked:
    """What ranking made of one question."""

    group: Group
    """One completion, the most probable letter; of equal ones the first."""
    letter: str
    logprobs: Mapping[str, float]
    """Of each letter after the prompt; of several tokens, their sum."""


@dataclass(frozen=True, kw_only=True)
class LetterRanker:
    """Ranks the letters of lettered options by the policy's log-probabilities at temperature 1.

    Prompts of together at most `prompt_tokens` tokens go through one forward pass, each of them read once for all its
    letters; nothing is drawn, so equal weights give equal figures.
    """

    policy: Scorer
    tokenizer: Tokenizer
    prompt_tokens: int = 8192
    _tokens: dict[tuple[str, str], tuple[int, ...]] = field(default_factory=dict)

    def __call__(self, prompts: Sequence[Prompt]) -> list[Ranked]:
        """One per prompt, in order. UserError where a question has no options, or letters no tokens of their own."""
        return [ranked for piece in self._pieces(prompts) for ranked in self._rank(piece)]

    def check(self, prompts: Sequence[Prompt]) -> None:
        """UserError where a question has no options, or the first one's letters no tokens of their own."""
        for prompt in prompts:
            letters_of(prompt)
        for prompt in prompts[:1]:
            self._continuations(prompt)

    def _pieces(self, prompts: Sequence[Prompt]) -> Iterator[list[Prompt]]:
        piece: list[Prompt] = []
        tokens = 0
        for prompt in prompts:
            if piece and tokens + len(prompt.token_ids) > self.prompt_tokens:
                yield piece
                piece, tokens = [], 0
            piece.append(prompt)
            tokens += len(prompt.token_ids)
        if piece:
            yield piece

    def _rank(self, prompts: Sequence[Prompt]) -> Iterator[Ranked]:
        wanted = [self._continuations(prompt) for prompt in prompts]
        batch = _batch(prompts, [list(tokens.values()) for tokens in wanted], device=self.policy.device)
        with torch.no_grad():
            logprobs_T, _ = self.policy.token_logprobs(batch, temperature=1.0)
        by_letter = iter(logprobs_T.cpu().split(batch.lengths_N.tolist()))
        for prompt, tokens in zip(prompts, wanted, strict=True):
            parts = {letter: next(by_letter).tolist() for letter in tokens}
            sums = {letter: sum(values) for letter, values in parts.items()}
            best = max(sums, key=sums.__getitem__)
            completion = Completion(
                token_ids=tokens[best],
                logprobs=tuple(parts[best]),
                finish_reason="stop",
                text=_written(prompt, best),
            )
            yield Ranked(group=Group(prompt=prompt, completions=(completion,)), letter=best, logprobs=sums)

    def _continuations(self, prompt: Prompt) -> dict[str, tuple[int, ...]]:
        """The tokens of each letter of the question's options."""
        found = {letter: self._continuation(prompt, letter) for letter in letters_of(prompt)}
        if len(set(found.values())) < len(found):
            raise UserError(
                f"evaluation.choices=rank: this tokenizer writes several of the letters {', '.join(found)} alike, as "
                "tokens it does not know: set evaluation.choices=generate, or use a tokenizer with capital letters"
            )
        return found

    def _continuation(self, prompt: Prompt, letter: str) -> tuple[int, ...]:
        """The tokens that the letter adds to the prompt; its last line decides how they are cut."""
        ending = prompt.text[prompt.text.rstrip().rfind("\n") + 1 :]
        if (ending, letter) not in self._tokens:
            before, after = (
                tuple(self.tokenizer.encode(text, add_special_tokens=False))
                for text in (ending, ending + _written(prompt, letter))
            )
            if after[: len(before)] != before or len(after) == len(before):
                raise UserError(
                    f"evaluation.choices=rank: this tokenizer joins the letter {letter} to the end of the prompt "
                    f"({ending[-20:]!r}), so that it has no tokens of its own: set evaluation.choices=generate"
                )
            self._tokens[ending, letter] = after[len(before) :]
        return self._tokens[ending, letter]


def letters_of(prompt: Prompt) -> str:
    """The letters of the question's options. UserError where it has none."""
    options = prompt.example.columns.get("options")
    if not isinstance(options, list | tuple) or not 2 <= len(options) <= len(ascii_uppercase):
        raise UserError(
            f"evaluation.choices=rank: question {prompt.id!r} has no lettered options; use a multiple-choice task "
            "(task.type=mmlu, mmlu_pro or choices), or evaluation.choices=generate"
        )
    return ascii_uppercase[: len(options)]


def _written(prompt: Prompt, letter: str) -> str:
    """The letter as it follows the prompt: after a space, unless the prompt ends in one or in a line break."""
    return letter if prompt.text[-1:].isspace() else f" {letter}"


def _batch(prompts: Sequence[Prompt], tokens: Sequence[Sequence[tuple[int, ...]]], *, device: Any) -> Batch:
    """Every letter of every prompt as a response, without anything that only training reads."""
    responses = [response for row in tokens for response in row]
    owners = [index for index, row in enumerate(tokens) for _ in row]
    lengths_N = torch.tensor([len(response) for response in responses], device=device)
    zeros_N = torch.zeros(len(responses), device=device)
    return Batch(
        prompts=tuple(prompt.token_ids for prompt in prompts),
        prompt_N=torch.tensor(owners, device=device),
        lengths_N=lengths_N,
        tokens_T=torch.tensor([token for response in responses for token in response], device=device),
        sequence_T=torch.arange(len(responses), device=device).repeat_interleave(lengths_N),
        advantages_N=zeros_N,
        weights_N=zeros_N,
        old_logprobs_T=None,
    )
