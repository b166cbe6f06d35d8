"""Requests for completions and their answers, as token ids; every answer is checked before use."""

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
"""vLLM's endpoint for token ids; its answers include the version of the weights that sampled each token."""
LARGEST_LOGPROB: Final = 1e-4
"""Log-probabilities may exceed 0 by the float32 rounding of large logits."""
NOT_A_NUMBER: Final = -9999.0
"""vLLM's replacement for log-probabilities that are NaN or -inf."""


PROCESSED, RAW = "processed_logprobs", "raw_logprobs"
"""vLLM's log-probability modes: of the sampling distribution, or of the raw model before temperature, bans and
filters."""


class StaleWeightsError(ServerError):
    """Completions of outdated weights."""


class UnfinishedError(ServerError):
    """A completion that the server interrupted."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest:
    """The request of a call: a group of completions for each prompt."""

    group_size: int
    sampling: SamplingParams
    seed: int
    eos_token_ids: Set[int]
    tokenizer: Tokenizer
    vocabulary_size: int
    stop_strings: StopStrings | None

    @property
    def drawn(self) -> int:
        """The number of requested completions: greedy ones are all equal, so one is enough."""
        return self.group_size if self.sampling.temperature > 0 else 1

    def body(self, prompt: Prompt, *, model: str) -> dict[str, Any]:
        """The request for a group.

        vLLM samples completion i of n with the seed plus i, so each completion's seed depends only on (seed, prompt id,
        index in its group). flatpeak decides what ends a completion; the model's files have no effect.
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
                "min_p": sampling.min_p,
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
        """The completions of an answer, sampled by the weights with this `tag` and version number `version`.

        `mode` is the server's log-probability mode. Log-probabilities that are not of the full distribution at the
        temperature become NaN.

        Raises StaleWeightsError for other weights, UnfinishedError for interrupted completions, UnreadableAnswerError
        for anything else than an answer, and UserError for answers that training must not use.
        """
        choices = answer.get("choices") if isinstance(answer, Mapping) else None
        if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
            raise UnreadableAnswerError("the answer has no completions")
        if (read := answer.get("prompt_token_ids")) != list(prompt.token_ids):
            raise UserError(
                f"the server read {_beginning(read)} for the prompt {prompt.id}, which is "
                f"{_beginning(prompt.token_ids)}: it must not change token ids"
            )
        indices = [choice.get("index") for choice in choices]
        if not all(type(index) is int for index in indices):
            raise UnreadableAnswerError(f"the answer has completions with the indices {_beginning(indices)}")
        by_index = dict(zip(indices, choices, strict=True))
        if by_index.keys() != set(range(self.drawn)) or len(choices) != self.drawn:
            raise UserError(
                f"the server returned {len(choices)} completions with the indices {_beginning(indices)}, instead of "
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
        """Tokens, log-probabilities, and whether the completion ended before the limit."""
        reason = choice.get("finish_reason")
        if reason not in ("stop", "length"):
            raise UnfinishedError(f"the server interrupted a completion ({reason})")
        versions = _versions(choice.get("weight_versions"), tag)
        tokens = choice.get("token_ids")
        if not isinstance(tokens, list) or not tokens or not all(self._is_token(token) for token in tokens):
            raise UserError(
                f"the server returned the tokens {_beginning(tokens)}, but the vocabulary has {self.vocabulary_size}: "
                "does it serve the model in training?"
            )
        _check_covered(versions, tag, length=len(tokens))
        logprobs = _logprobs(choice.get("logprobs"), tokens)
        kept, stopped = self._end(tokens, reason)
        return tokens[:kept], logprobs[:kept], stopped

    def _is_token(self, token: Any) -> bool:
        return type(token) is int and 0 <= token < self.vocabulary_size

    def _end(self, tokens: Sequence[int], reason: str) -> tuple[int, bool]:
        """The number of tokens up to the end of a completion, and whether it ended before the limit.

        A stop string may be complete some tokens before the server detects it.
        """
        limit, shortest = self.sampling.max_new_tokens, self.sampling.min_new_tokens
        if len(tokens) > limit:
            raise UserError(f"the server returned {len(tokens)} tokens instead of at most {limit}")
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
                f"the server ended a completion ({reason}) after {len(tokens)} tokens, but neither the tokens "
                f"{sorted(self.eos_token_ids)} nor a stop string end it: start the server with flatpeak serve, or "
                "with --generation-config vllm"
            )
        return len(tokens), False


def logprobs_modes(sampling: SamplingParams) -> frozenset[str]:
    """The modes with log-probabilities of the full distribution at the temperature, which training needs.

    Greedy tokens have those at temperature 1 in both modes, as everywhere in flatpeak.
    """
    modes = set()
    if not sampling.filtered:
        modes.add(PROCESSED)
    if sampling.temperature in (0, 1):
        modes.add(RAW)
    return frozenset(modes)


def _versions(versions: Any, tag: str) -> list[Mapping[str, Any]]:
    """The versions of a completion. Raises StaleWeightsError if any of them has another tag."""
    if not isinstance(versions, list) or not versions or not all(isinstance(one, Mapping) for one in versions):
        raise UserError(
            "the server does not report which weights sampled a completion, so training cannot use it; flatpeak needs "
            "vLLM 0.32 or newer"
        )
    others = [str(one.get("version")) for one in versions if one.get("version") != tag]
    if others:
        raise StaleWeightsError(f"a completion of the weights {others[0]}, but {tag} are current")
    return versions


def _check_covered(versions: Sequence[Mapping[str, Any]], tag: str, *, length: int) -> None:
    """Raise StaleWeightsError unless the versions' spans [start, end) are contiguous and cover all tokens.

    vLLM omits tokens whose weights have no name.
    """
    covered = 0
    for one in versions:
        start, end = one.get("start"), one.get("end")
        if start != covered or type(end) is not int:
            break
        covered = end
    if covered != length:
        raise StaleWeightsError(f"the weights {tag} have sampled only {covered} of a completion's {length} tokens")


def _logprobs(content: Any, tokens: Sequence[int]) -> list[float]:
    rows = content.get("content") if isinstance(content, Mapping) else None
    if not isinstance(rows, list) or len(rows) != len(tokens) or not all(isinstance(row, Mapping) for row in rows):
        count = len(rows) if isinstance(rows, list) else "no"
        raise UserError(
            f"the server returned {count} log-probs for {len(tokens)} tokens: training needs one for each token"
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
            raise UserError(f"the server returned the log-prob {logprob}, which is above 0")
        logprobs.append(float(logprob))
    return logprobs


def _beginning(value: Any) -> str:
    """The first tokens of a list, as text."""
    if not isinstance(value, list | tuple):
        return "none" if value is None else repr(value)[:40]
    return f"[{', '.join(map(str, value[:8]))}{', ...' if len(value) > 8 else ''}]"
