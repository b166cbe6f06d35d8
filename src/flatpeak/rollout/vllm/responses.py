"""Requests for completions and the answers to them: tokens in, tokens out, every answer checked before it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from flatpeak.errors import DIVERGED, DivergedError, UserError
from flatpeak.rollout.randomness import derive_seed
from flatpeak.rollout.stopping import StopStrings
from flatpeak.rollout.vllm.http_client import ServerError, UnreadableAnswerError
from flatpeak.types import Completion, Prompt, SamplingParams

if TYPE_CHECKING:
    from flatpeak.protocols import Tokenizer

GENERATE: Final = "/inference/v1/generate"
"""vLLM's endpoint for token ids; its answers carry the version of the weights that drew each token."""
LARGEST_LOGPROB: Final = 1e-4
"""The logarithm of a probability may exceed 0 by as much as float32 rounds of large logits."""
NOT_A_NUMBER: Final = -9999.0
"""vLLM's replacement for log-probabilities that are NaN or -inf."""


PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
"""vLLM's modes: log-probabilities of the distribution that is drawn from, or of the model's own, before temperature,
bans and filters."""


class StaleWeightsError(ServerError):
    """Completions of other weights than the current ones."""


class UnfinishedError(ServerError):
    """A completion that the server broke off."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """The request for a group of completions of each prompt of a call."""

    group_size: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: Set[int]
    tokenizer: Tokenizer
    vocabulary_size: int
    stop_strings: StopStrings | None

    @property
    def drawn(self) -> int:
        """Completions that are asked for: greedy ones are all the same, and vLLM draws just one."""
        return self.group_size if self.sampling.temperature > 0 else 1

    def body(self, prompt: Prompt, *, model: str) -> dict[str, Any]:
        """The request for a group.

        vLLM draws completion i of n from the seed plus i, so that every completion has one of its own, which depends on
        (seed, prompt id, index in its group) alone. What ends a completion is ours, whatever the model's files say.
        """
        sampling = self.sampling
        return {
            "model": model,
            "token_ids": list(prompt.token_ids),
            "return_token_ids": True,
            "sampling_params": {
                "n": self.drawn,
                "seed": derive_seed("row", self.seed, prompt.id) >> 1,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_tokens": sampling.max_new_tokens,
                "min_tokens": sampling.min_new_tokens,
                "stop_token_ids": sorted(self.eos_token_ids),
                "ignore_eos": True,
                "stop": list(sampling.stop),
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "detokenize": bool(sampling.stop),
                "logprobs": 0,
            },
        }

    def completions(self, answer: Any, prompt: Prompt, *, tag: str, version: int, mode: str) -> list[Completion]:
        """The completions of an answer, drawn by the weights `tag`, whose count is `version`.

        `mode` is the server's of log-probabilities; those that are not of the full distribution at the temperature are
        NaN.

        Raises StaleWeightsError for those of other weights, UnfinishedError for those that were broken off,
        UnreadableAnswerError for what is no such answer at all, and UserError for one that training must not use.
        """
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
            raise UnreadableAnswerError("the answer has no completions")
        if (read := answer.get("prompt_token_ids")) != list(prompt.token_ids):
            raise UserError(
                f"the server read {_beginning(read)} for the prompt {prompt.id}, which is "
                f"{_beginning(prompt.token_ids)}: it must take token ids as they are"
            )
        indices = [choice.get("index") for choice in choices]
        if not all(type(index) is int for index in indices):
            raise UnreadableAnswerError(f"the answer has completions with the indices {_beginning(indices)}")
        by_index = dict(zip(indices, choices, strict=True))
        if by_index.keys() != set(range(self.drawn)) or len(choices) != self.drawn:
            raise UserError(
                f"the server returned {len(choices)} completions with the indices {_beginning(indices)}, asked for "
                f"{self.drawn}"
            )
        drawn = [self._checked(by_index[index], tag=tag) for index in range(self.drawn)]
        texts = self.tokenizer.batch_decode([tokens for tokens, _, _ in drawn], skip_special_tokens=True)
        full = mode in logprobs_modes(self.sampling)
        filtered = self.sampling.filtered and mode == PROCESSED
        completions = [
            Completion(
                token_ids=tuple(tokens),
                logprobs=tuple(logprobs) if full else (math.nan,) * len(tokens),
                filtered_logprobs=tuple(logprobs) if filtered else None,
                finish_reason="stop" if stopped else "length",
                text=text,
                weight_version=version,
            )
            for (tokens, logprobs, stopped), text in zip(drawn, texts, strict=True)
        ]
        return completions * (self.group_size // self.drawn)

    def _checked(self, choice: Mapping[str, Any], *, tag: str) -> tuple[list[int], list[float], bool]:
        """Tokens, log-probabilities, and whether the completion ended by itself."""
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise UnfinishedError(f"a completion was broken off ({reason})")
        versions = _versions(choice.get("weight_versions"), tag)
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list) or not tokens or not all(self._is_token(token) for token in tokens):
            raise UserError(
                f"the server returned the tokens {_beginning(tokens)}; the vocabulary has {self.vocabulary_size}: does "
                "it serve the model that is trained?"
            )
        _check_covered(versions, tag, length=len(tokens))
        logprobs = _logprobs(choice.get("logprobs"), tokens)
        kept, stopped = self._end(tokens, reason)
        return tokens[:kept], logprobs[:kept], stopped

    def _is_token(self, token: Any) -> bool:
        return type(token) is int and 0 <= token < self.vocabulary_size

    def _end(self, tokens: Sequence[int], reason: str) -> tuple[int, bool]:
        """The number of tokens up to the end of a completion, and whether it ended before the limit.

        A stop string may be complete some tokens before the server sees it.
        """
        limit, shortest = self.sampling.max_new_tokens, self.sampling.min_new_tokens
        if len(tokens) > limit:
            raise UserError(f"the server returned {len(tokens)} tokens, asked for at most {limit}")
        if self.stop_strings is not None:
            position = self.stop_strings.first_completed(tokens, range(max(shortest - 1, 0), len(tokens)))
            if position is not None:
                return position + 1, True
        ends = [position for position, token in enumerate(tokens) if token in self.eos_token_ids]
        if ends and ends[0] == len(tokens) - 1 and reason == "stop":
            return len(tokens), True
        if reason == "length" and len(tokens) < limit:
            raise UserError(
                f"the server's context was full after {len(tokens)} of rollout.max_new_tokens={limit}: start it with a "
                "larger --max-model-len, or lower rollout.max_new_tokens"
            )
        if ends or reason == "stop":
            raise UserError(
                f"the server ended a completion ({reason}) after {len(tokens)} tokens, where none of the tokens "
                f"{sorted(self.eos_token_ids)} nor a stop string ends it: start the server with flatpeak serve, or "
                "with --generation-config vllm"
            )
        return len(tokens), False


def logprobs_modes(sampling: SamplingParams) -> frozenset[str]:
    """The modes in which a server gives log-probabilities of the full distribution at the temperature, as training
    needs them.

    Greedy tokens have those at temperature 1 in both, as everywhere.
    """
    modes = set()
    if not sampling.filtered and not sampling.min_new_tokens:
        modes.add(PROCESSED)
    if sampling.temperature in (0, 1):
        modes.add(RAW)
    return frozenset(modes)


def _versions(versions: Any, tag: str) -> list[Mapping[str, Any]]:
    """The versions of a completion. Raises StaleWeightsError where any of them is not this tag's."""
    if not isinstance(versions, list) or not versions or not all(isinstance(one, Mapping) for one in versions):
        raise UserError(
            "the server does not say which weights drew a completion: training on it would be guesswork; it needs vLLM "
            "0.32 or newer"
        )
    others = [str(one.get("version")) for one in versions if one.get("version") != tag]
    if others:
        raise StaleWeightsError(f"a completion of the weights {others[0]}, where {tag} are current")
    return versions


def _check_covered(versions: Sequence[Mapping[str, Any]], tag: str, *, length: int) -> None:
    """Raise StaleWeightsError unless the spans [start, end) of the versions are all tokens, one span after the other.

    vLLM leaves out tokens whose weights it had no name of.
    """
    covered = 0
    for one in versions:
        start, end = one.get("start"), one.get("end")
        if start != covered or type(end) is not int:
            break
        covered = end
    if covered != length:
        raise StaleWeightsError(f"a completion of {length} tokens, of which the weights {tag} have drawn {covered}")


def _logprobs(content: Any, tokens: Sequence[int]) -> list[float]:
    rows = content.get("content") if isinstance(content, Mapping) else None
    if not isinstance(rows, list) or len(rows) != len(tokens) or not all(isinstance(row, Mapping) for row in rows):
        count = len(rows) if isinstance(rows, list) else "no"
        raise UserError(
            f"the server returned {count} log-probs for {len(tokens)} tokens: training needs one for each token drawn"
        )
    logprobs = []
    for row, token in zip(rows, tokens, strict=True):
        logprob = row.get("logprob")
        if row.get("token_id") != token or type(logprob) not in (int, float):
            raise UserError(f"the server returned the log-prob {logprob} of token {row.get('token_id')} for {token}")
        if logprob <= NOT_A_NUMBER or math.isnan(logprob):
            raise DivergedError(
                f"the server's logits are NaN or infinite: the weights have diverged or are damaged; {DIVERGED}"
            )
        if logprob > LARGEST_LOGPROB:
            raise UserError(f"the server returned the log-prob {logprob}, which no probability has")
        logprobs.append(float(logprob))
    return logprobs


def _beginning(value: Any) -> str:
    """The beginning of a list of tokens."""
    if not isinstance(value, list | tuple):
        return "none" if value is None else repr(value)[:40]
    return f"[{', '.join(map(str, value[:8]))}{', ...' if len(value) > 8 else ''}]"
