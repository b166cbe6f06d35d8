"""Episodes by any sampler: a turn of the policy, the answers of its tools, the next turn, until each episode ends.

Tokens are append-only. The prompt of a turn is, id by id, that of the turn before, what the policy sampled then, and
what was added after it; nothing is rendered or tokenized again. The first turn is the ordinary request of a group, so
that an episode without a call is the completion that would be drawn without tools. A token depends on (seed, prompt id,
index in group, turn, position) alone, so that episodes do not depend on each other or on how they are scheduled.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

from flatpeak.episodes.config import EpisodesConfig
from flatpeak.episodes.environments import EnvironmentHost, Session
from flatpeak.episodes.rendering import Renderer
from flatpeak.errors import StoppedError
from flatpeak.functional.kept_tokens import ALL_BUT
from flatpeak.protocols import Sampler, Tokenizer, WrappedSampler
from flatpeak.rollout.randomness import derive_seed
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams, StopReason, ToolCall, Turn
from flatpeak.utils.control_tokens import TextEncoder

T = TypeVar("T")
POLL_SECONDS: Final = 0.5
CHARACTERS_PER_TOKEN: Final = 16
"""More than any text has on average: what is longer is cut without counting its tokens."""


@dataclass(kw_only=True, slots=True)
class Episode:
    """An episode so far."""

    prompt: Prompt
    index: int
    """Its place in the group."""
    session: Session
    begun: float
    limit: int
    """The most tokens after the prompt."""
    drawn: list[Completion] = field(default_factory=list)
    """The policy's sampled tokens of each turn."""
    added: list[tuple[int, ...]] = field(default_factory=list)
    """The tokens that were added after each turn but the last."""
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason | None = None
    answering: Future[Any] | None = None
    """The session and the answer after the last turn, while they are waited for."""

    @property
    def left(self) -> int:
        """The tokens that its limit leaves."""
        return self.limit - sum(len(completion.token_ids) for completion in self.drawn) - sum(map(len, self.added))

    @property
    def read(self) -> int:
        """The tokens of its next prompt."""
        return len(self.prompt.token_ids) + self.limit - self.left

    def next_prompt(self) -> Prompt:
        """The prompt of the next turn."""
        turns = zip(self.drawn, self.added, strict=True)
        after = (token for completion, added in turns for token in (*completion.token_ids, *added))
        name = f"{self.prompt.id}#{self.index}.{len(self.drawn)}"
        return replace(self.prompt, id=name, token_ids=(*self.prompt.token_ids, *after))

    def completion(self) -> Completion:
        """All turns as one completion, of which the policy is trained on what it sampled."""
        last = self.drawn[-1]
        ended_by_limit = self.stop_reason in ("max_turns", "max_calls", "max_tokens", "timeout")
        whole = replace(
            last,
            turns=tuple(self.turns),
            stop_reason=self.stop_reason,
            finish_reason="length" if ended_by_limit else last.finish_reason,
        )
        if not self.added:
            return whole
        # Only the first turn has a least length, so that its tokens alone may be filtered.
        filtered = any(turn.filtered_logprobs is not None for turn in self.drawn)
        kept = any(turn.kept is not None for turn in self.drawn)
        return replace(
            whole,
            token_ids=self._joined(lambda completion: completion.token_ids, lambda token: token),
            logprobs=self._joined(lambda completion: completion.logprobs, lambda _: 0.0),
            filtered_logprobs=self._joined(lambda turn: turn.filtered_logprobs or turn.logprobs, lambda _: 0.0)
            if filtered
            else None,
            kept=self._joined(lambda turn: turn.kept or ((ALL_BUT,),) * len(turn.token_ids), lambda _: (ALL_BUT,))
            if kept
            else None,
            trained=self._joined(lambda completion: (True,) * len(completion.token_ids), lambda _: False),
        )

    def _joined(self, sampled: Callable[[Completion], Any], added: Callable[[int], Any]) -> tuple[Any, ...]:
        """A value of each token: as sampled, or of a token that was added."""
        turns = zip(self.drawn, [*self.added, ()][: len(self.drawn)], strict=True)
        return tuple(value for completion, tokens in turns for value in (*sampled(completion), *map(added, tokens)))


class EpisodeSampler(WrappedSampler):
    """A sampler of episodes by another one, which draws their turns."""

    def __init__(
        self,
        sampler: Sampler,
        *,
        host: EnvironmentHost,
        renderer: Renderer,
        config: EpisodesConfig,
        tokenizer: Tokenizer,
        word: Callable[[Example], Prompt],
        context: int = 2**31,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`word` makes the prompt of an environment that begins with a text; `close` ends what calls the tools."""
        super().__init__(sampler)
        self.host = host
        self.renderer = renderer
        self.config = config
        self.tokenizer = tokenizer
        self._encoder = TextEncoder(tokenizer)
        self._stopping: Callable[[], bool] = lambda: False
        self.word = word
        self.context = context
        self.close_tools = close
        self._notice: Callable[[str], None] = lambda text: None
        self._announced = False

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        """The groups of episodes, in the order in which they end."""
        begun, started = time.monotonic(), self._started(prompts, seed)
        prompts = [prompt for prompt, _ in started]
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *self.renderer.stop))))
        going: dict[int, tuple[Group, list[Episode]]] = {}
        for p, group in self._draw(prompts, sampling.max_new_tokens, sampling, group_size=group_size, seed=seed):
            episodes = [
                Episode(
                    prompt=prompts[p],
                    index=g,
                    session=replace(started[p][1], key=derive_seed(seed, prompts[p].id, g)),
                    begun=begun,
                    limit=sampling.max_new_tokens,
                )
                for g in range(group_size)
            ]
            for episode, completion in zip(episodes, group.completions, strict=True):
                self._take(episode, completion)
            going[p] = (group, episodes)
        sampling = replace(sampling, min_new_tokens=0)  # of the first turn
        while going:
            for p, (group, episodes) in list(going.items()):
                for episode in episodes:
                    self._read_answer(episode)
                if all(episode.stop_reason is not None for episode in episodes):
                    del going[p]
                    yield p, replace(group, completions=tuple(self._finished(episodes)))
            living = [one for _, episodes in going.values() for one in episodes if one.stop_reason is None]
            if living:
                for most, batch in self._batches(living):
                    turns = [episode.next_prompt() for episode in batch]
                    for index, group in self._draw(turns, most, sampling, group_size=1, seed=seed):
                        self._take(batch[index], group.completions[0])

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Make waits for tools too raise StoppedError once `stopping()` is true."""
        super().stop_when(stopping)
        self._stopping = stopping

    def _wait(self, future: Future[T]) -> T:
        """The result of a call, unless a signal asks to stop."""
        while not wait([future], timeout=POLL_SECONDS).done:
            if self._stopping():
                raise StoppedError("a signal asked to stop while tools were called")
        return future.result()

    def announce_with(self, notice: Callable[[str], None]) -> None:
        """Give notices of the wrapped sampler, and of the first environment that fails."""
        super().announce_with(notice)
        self._notice = notice

    def keep_calls(self, log: Any) -> None:
        """Keep the results of calls for a resumed run, which reads them."""
        self.host.call_log = log

    def close(self) -> None:
        """Close the wrapped sampler, and end what calls the tools."""
        try:
            super().close()
        finally:
            self.close_tools()

    def _started(self, prompts: Sequence[Prompt], seed: int) -> list[tuple[Prompt, Session]]:
        """The prompts of the first turns, with an environment for each: one start is that of the whole group."""
        starts = [
            self.host.start(prompt.example, seed=derive_seed(seed, "environment", prompt.id)) for prompt in prompts
        ]
        started = []
        for prompt, start in zip(prompts, starts, strict=True):
            session, text = self._wait(start)
            if text is not None:
                worded = self.word(replace(prompt.example, question=text, messages=()))
                prompt = replace(worded, id=prompt.id, example=prompt.example)
            started.append((prompt, session))
        return started

    def _batches(self, living: Sequence[Episode]) -> Iterator[tuple[int, list[Episode]]]:
        """The episodes whose next turns fit into the context with one limit of tokens, and that limit."""
        rest = sorted(living, key=lambda episode: -episode.left)
        while rest:
            most = min(rest[0].left, self.config.max_tokens or rest[0].left)
            fits = [most <= self.context - episode.read for episode in rest]
            fits[0] = True
            yield most, [episode for episode, fit in zip(rest, fits, strict=True) if fit]
            rest = [episode for episode, fit in zip(rest, fits, strict=True) if not fit]

    def _draw(
        self, prompts: Sequence[Prompt], most: int, sampling: SamplingParams, *, group_size: int, seed: int
    ) -> Iterator[tuple[int, Group]]:
        """A turn of each prompt, of at most so many tokens."""
        sampling = replace(sampling, max_new_tokens=min(most, self.config.max_tokens or most))
        return self.sampler.stream(prompts, group_size=group_size, sampling=sampling, seed=seed)

    def _take(self, episode: Episode, completion: Completion) -> None:
        """Read a turn that the policy has sampled, and ask for the answer to it."""
        completion = _cut(completion, episode.left, self.tokenizer)
        stopped, game = completion.finish_reason == "stop", self.host.environment.is_game
        calls = self.renderer.calls(completion.token_ids) if stopped and not game else ()
        read = repr((episode.added[-1:], completion.token_ids))
        episode.session = replace(episode.session, key=derive_seed(episode.session.key, read))
        episode.drawn.append(completion)
        written = tuple(ToolCall(name=call.name, arguments=call.arguments) for call in calls)
        episode.turns.append(Turn(sampled=len(completion.token_ids), text=completion.text, calls=written))
        episode.stop_reason = self._limit_reached(episode, stopped=stopped, game=game)
        if episode.stop_reason is not None and not (game and episode.stop_reason == "max_turns"):
            return  # but the last action of a game counts
        host, session = self.host, episode.session
        episode.answering = host.step(session, completion.text) if game else host.answer(session, calls)

    def _limit_reached(self, episode: Episode, *, stopped: bool, game: bool) -> StopReason | None:
        """The reason to end the episode with its last turn; None where that is answered."""
        limits, turns = self.config, episode.turns
        calls, seconds = sum(len(turn.calls) for turn in turns), time.monotonic() - episode.begun
        reasons: dict[StopReason, bool] = {
            "failed": episode.session.failed is not None,
            "max_tokens": not stopped and (episode.left <= 0 or not game),
            "answered": not game and not turns[-1].calls,
            "max_turns": len(turns) >= limits.max_turns,
            "max_calls": limits.max_calls is not None and calls > limits.max_calls,
            "timeout": limits.timeout is not None and seconds > limits.timeout,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _read_answer(self, episode: Episode) -> None:
        """Append the answer to the last turn, where one is waited for."""
        if episode.answering is None:
            return
        episode.session, answered = self._wait(episode.answering)
        episode.answering = None
        calls: tuple[ToolCall, ...] = ()
        if isinstance(answered, str):
            answers = [("", self._fitting(answered))]
        else:
            calls = tuple(self._fitting_call(call) for call in answered)
            answers = [(call.name, call.answer) for call in calls]
        text = "\n".join(answer for _, answer in answers)
        episode.turns[-1] = replace(episode.turns[-1], calls=calls, answer=text)
        if episode.session.failed is not None or episode.session.done:
            episode.stop_reason = "done" if episode.session.failed is None else "failed"
            return
        if episode.stop_reason is not None:
            return
        completion = episode.drawn[-1]
        added = self.renderer.bridge(completion.token_ids, answers, stopped=completion.finish_reason == "stop")
        if added is None or len(added) >= episode.left:
            episode.stop_reason = "unbridgeable" if added is None else "max_tokens"
            return
        episode.added.append(tuple(added))
        episode.turns[-1] = replace(episode.turns[-1], added=len(added))

    def _fitting_call(self, call: ToolCall) -> ToolCall:
        fitting = self._fitting(call.answer)
        if fitting == call.answer:
            return call
        return replace(call, answer=fitting, failure=call.failure or "too_long")

    def _fitting(self, text: str) -> str:
        """An answer, cut where it has more tokens than an answer may have."""
        most = self.config.answer_tokens
        if len(text.encode()) <= most:  # no tokenizer makes more tokens than bytes; the common case, without encoding
            return text
        cut = text[: CHARACTERS_PER_TOKEN * most]
        while (tokens := len(self._encoder.encode_text(cut))) > most:
            cut = cut[: min(len(cut) * most // tokens, len(cut) - 1)]
        return text if cut == text else f"{cut} [cut]"

    def _finished(self, episodes: Sequence[Episode]) -> Iterator[Completion]:
        """The completions of a group's episodes, with what their environments reward."""
        completions = [episode.completion() for episode in episodes]
        rewards = [
            self.host.finish(episode.session, completion)
            for episode, completion in zip(episodes, completions, strict=True)
        ]
        for completion, reward in zip(completions, rewards, strict=True):
            yield replace(completion, reward=self._wait(reward))
        if self.host.first_failure is not None and not self._announced:
            self._announced = True
            self._notice(f"an episode without a reward: {self.host.first_failure}; see reward/missing_fraction")


def _cut(completion: Completion, left: int, tokenizer: Tokenizer) -> Completion:
    """A turn without the tokens beyond its episode's limit: what a request of this limit alone would have drawn."""
    if len(completion.token_ids) <= left:
        return completion
    return replace(
        completion,
        token_ids=completion.token_ids[:left],
        logprobs=completion.logprobs[:left],
        filtered_logprobs=None if completion.filtered_logprobs is None else completion.filtered_logprobs[:left],
        kept=None if completion.kept is None else completion.kept[:left],
        finish_reason="length",
        text=tokenizer.decode(completion.token_ids[:left], skip_special_tokens=True),
    )
