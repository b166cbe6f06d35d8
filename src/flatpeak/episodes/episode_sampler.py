"""Episodes by any sampler: a turn of the policy, the answers of its tools, the next turn, until each episode ends.

Tokens are append-only. The prompt of a turn is, id by id, that of the turn before, what the policy sampled then, and
what was added after it; nothing is rendered or tokenized again. An episode without a call is the completion that would
be drawn without tools. A token depends on (seed, prompt id, index in group, turn, position) alone, so that episodes do
not depend on each other or on how they are scheduled.

The native engine draws all turns in one request, in which an episode keeps its keys and waits for no other
(rollout/conversation.py). Other samplers get a request for each turn of all episodes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from itertools import chain
from typing import Any, Final, TypeVar

from flatpeak.episodes.config import EpisodesConfig
from flatpeak.episodes.environments import EnvironmentHost, Session
from flatpeak.episodes.episode import Episode, cut_turn
from flatpeak.episodes.rendering import Renderer
from flatpeak.errors import StoppedError
from flatpeak.protocols import Sampler, Tokenizer, WrappedSampler
from flatpeak.rollout.conversation import NextTurn
from flatpeak.rollout.randomness import derive_seed
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams, Score, StopReason, ToolCall, Turn
from flatpeak.utils.control_tokens import TextEncoder

T = TypeVar("T")
POLL_SECONDS: Final = 0.5
TOGETHER_SECONDS: Final = 0.02
"""Answers that come within this time are read in one pass, where no episode samples meanwhile."""
CHARACTERS_PER_TOKEN: Final = 16
"""More than any text has on average: what is longer is cut without counting its tokens."""


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
        sampling = replace(sampling, stop=tuple(dict.fromkeys((*sampling.stop, *self.renderer.stop))))
        going = {
            p: [
                Episode(
                    prompt=prompt,
                    index=g,
                    session=replace(session, key=derive_seed(seed, prompt.id, g)),
                    begun=begun,
                    limit=sampling.max_new_tokens,
                )
                for g in range(group_size)
            ]
            for p, (prompt, session) in enumerate(started)
        }
        settings: dict[str, Any] = {"group_size": group_size, "sampling": sampling, "seed": seed}
        finishing: dict[int, tuple[list[Episode], list[Completion], list[Future[Score]]]] = {}
        for p in chain(self._in_one_request(going, **settings), self._turn_by_turn(going, **settings)):
            completions = [episode.completion() for episode in going[p]]
            rewards = [self.host.finish(e.session, c) for e, c in zip(going[p], completions, strict=True)]
            finishing[p] = (going.pop(p), completions, rewards)
            for done in [p for p, (_, _, rewards) in finishing.items() if all(reward.done() for reward in rewards)]:
                yield done, self._finished(*finishing.pop(done))
        for p, last in finishing.items():
            yield p, self._finished(*last)

    def _in_one_request(
        self, going: dict[int, list[Episode]], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[int]:
        """The groups as they end, in one request of a sampler that can converse; none by others."""
        prompts = [episodes[0].prompt for episodes in going.values()]
        dialogue = Answering(self, [episode for episodes in going.values() for episode in episodes])
        if self.config.max_tokens is not None:  # the least length is the first turn's, also where that is cut
            sampling = replace(sampling, min_new_tokens=min(sampling.min_new_tokens, self.config.max_tokens + 1))
        yield from self.sampler.converse(
            prompts, group_size=group_size, sampling=sampling, seed=seed, dialogue=dialogue
        )

    def _turn_by_turn(
        self, going: dict[int, list[Episode]], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[int]:
        """The groups as they end, in one request of any sampler for each turn of all episodes."""
        new = [p for p, episodes in going.items() if not all(episode.drawn for episode in episodes)]
        if new:
            prompts = [going[p][0].prompt for p in new]
            first = self._draw(prompts, sampling.max_new_tokens, sampling, group_size=group_size, seed=seed)
            for index, group in first:
                for episode, completion in zip(going[new[index]], group.completions, strict=True):
                    if not episode.drawn:
                        episode.version = group.version
                        self.take(episode, completion)
        sampling = replace(sampling, min_new_tokens=0)  # of the first turn
        while going:
            for episode in (episode for episodes in going.values() for episode in episodes):
                self.read_answer(episode)
            yield from [
                p for p, episodes in going.items() if all(episode.stop_reason is not None for episode in episodes)
            ]
            living = [one for episodes in going.values() for one in episodes if one.stop_reason is None]
            for most, batch in self._batches(living):
                turns = [episode.next_prompt() for episode in batch]
                for index, group in self._draw(turns, most, sampling, group_size=1, seed=seed):
                    self.take(batch[index], group.completions[0])

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

    def wait_for_any(self, futures: Collection[Future[Any]]) -> None:
        """Wait until one of these calls has a result, and a little for the others; unless a signal asks to stop."""
        wait(futures, timeout=TOGETHER_SECONDS)
        while not wait(futures, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED).done:
            if self._stopping():
                raise StoppedError("a signal asked to stop while tools were called")

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

    def take(self, episode: Episode, completion: Completion) -> None:
        """Read a turn that the policy has sampled, and ask for the answer to it."""
        completion = cut_turn(completion, episode.left, self.tokenizer)
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

    def read_answer(self, episode: Episode) -> None:
        """Append the answer to the last turn, where one is waited for."""
        if episode.answering is None:
            return
        before = len(episode.session.rewards)
        episode.session, answered = self._wait(episode.answering)
        episode.answering = None
        calls: tuple[ToolCall, ...] = ()
        if isinstance(answered, str):
            answers = [("", self._fitting(answered))]
        else:
            calls = tuple(self._fitting_call(call) for call in answered)
            answers = [(call.name, call.answer) for call in calls]
        text = "\n".join(answer for _, answer in answers)
        reward = next(iter(episode.session.rewards[before:]), None)
        episode.turns[-1] = replace(episode.turns[-1], calls=calls, answer=text, reward=reward)
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

    def _finished(
        self, episodes: Sequence[Episode], completions: Sequence[Completion], rewards: Sequence[Future[Score]]
    ) -> Group:
        """The group of episodes that have ended, with what their environments reward."""
        rewarded = [
            replace(completion, reward=self._wait(reward))
            for completion, reward in zip(completions, rewards, strict=True)
        ]
        if self.host.first_failure is not None and not self._announced:
            self._announced = True
            self._notice(f"an episode without a reward: {self.host.first_failure}; see reward/missing_fraction")
        group = Group(prompt=episodes[0].prompt, completions=tuple(rewarded), version=episodes[0].version)
        self.observe([group])
        return group


class Answering:
    """Implements conversation.Dialogue for episodes, of which each is a completion of a request."""

    def __init__(self, sampler: EpisodeSampler, episodes: Sequence[Episode]) -> None:
        self.max_tokens = sampler.config.max_tokens
        self._sampler = sampler
        self._episodes = episodes
        self._answering: dict[int, Future[Any]] = {}

    def begin(self, completions: Sequence[int]) -> None:
        """Count the seconds of these episodes from now on."""
        for completion in completions:
            self._episodes[completion].begun = time.monotonic()

    def take(self, completion: int, turn: Completion) -> bool:
        """Read a turn; False if it is not answered."""
        episode = self._episodes[completion]
        self._sampler.take(episode, turn)
        if episode.answering is not None:
            self._answering[completion] = episode.answering
        return episode.answering is not None

    def answers(self, *, least: int, wait: bool) -> list[tuple[int, NextTurn | None]]:
        """The episodes with an answer, each with its next turn; see Dialogue."""
        if wait:
            self._sampler.wait_for_any(self._answering.values())
        done = [completion for completion, answer in self._answering.items() if answer.done()]
        return [(completion, self._next_turn(completion)) for completion in done] if len(done) >= least else []

    def _next_turn(self, completion: int) -> NextTurn | None:
        del self._answering[completion]
        episode = self._episodes[completion]
        self._sampler.read_answer(episode)
        return NextTurn(id=episode.next_id, added=episode.added[-1]) if episode.stop_reason is None else None
