"""Episodes without worker processes, and a sampler that writes what it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

from flatpeak.episodes.config import EpisodesConfig
from flatpeak.episodes.environments import Session
from flatpeak.episodes.episode_sampler import EpisodeSampler
from flatpeak.episodes.rendering import PlainRenderer
from flatpeak.episodes.tools import ParsedCall
from flatpeak.policy.config import TokenizerConfig
from flatpeak.policy.loading import build_tokenizer
from flatpeak.protocols import Sampler
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams, Score, ToolCall
from flatpeak.utils.control_tokens import TextEncoder

CHARACTERS = "abcdefghijklmnopqrstuvwxyz 0123456789+-*=?,.:!<>/()\"'\n[]{}"
TOKENIZER = build_tokenizer(TokenizerConfig(type="characters"), [CHARACTERS])
END = TOKENIZER.eos_token_id


def ids(text: str) -> tuple[int, ...]:
    """The tokens of a text, one per character."""
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def asked(name: str, text: str = "2+2=") -> Prompt:
    """A prompt of this text."""
    return Prompt(id=name, token_ids=ids(text), text=text, example=Example(id=name, question=text, gold="4"))


class Scripted(Sampler):
    """Draws what a script has for (prompt id, index in group); an end token follows all but calls."""

    def __init__(self, script: Callable[[str, int], str]) -> None:
        self.script = script
        self.seen: list[tuple[Prompt, SamplingParams]] = []

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """The completions of the script."""
        self.seen += [(prompt, sampling) for prompt in prompts]
        return [
            Group(prompt=p, completions=tuple(self._write(p.id, g, sampling) for g in range(group_size)))
            for p in prompts
        ]

    def _write(self, name: str, index: int, sampling: SamplingParams) -> Completion:
        text = self.script(name, index)
        tokens = ids(text) if text.endswith("</call>") else (*ids(text), END)
        cut = tokens[: sampling.max_new_tokens]
        return Completion(
            token_ids=cut,
            logprobs=tuple(-0.5 - place for place in range(len(cut))),
            finish_reason="stop" if cut == tokens else "length",
            text=TOKENIZER.decode(cut, skip_special_tokens=True),
        )


def done(value: Any) -> Future[Any]:
    """A future with this result."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class LocalHost:
    """Answers in this process: `answers` maps a call to its text, or to None where the environment is lost."""

    def __init__(
        self, answers: Callable[[ParsedCall], str | None], *, game: bool = False, rewards: bool = False
    ) -> None:
        self.answers = answers
        self.environment = SimpleNamespace(is_game=game, rewards=rewards, schemas=[], tools=())
        self.first_failure: str | None = None

    def start(self, example: Example, *, seed: int) -> Future[Any]:
        """A session without an observation."""
        return done((Session(), None))

    def answer(self, session: Session, calls: Sequence[ParsedCall]) -> Future[Any]:
        """The answers of all calls."""
        texts = [self.answers(call) for call in calls]
        if None in texts:
            return done((replace(session, failed="lost"), ()))
        answered = [
            ToolCall(name=call.name, arguments=call.arguments, answer=str(text), failure=call.error and "malformed")
            for call, text in zip(calls, texts, strict=True)
        ]
        return done((session, tuple(answered)))

    def step(self, session: Session, action: str) -> Future[Any]:
        """The answer to an action as to a call of that name."""
        text = self.answers(ParsedCall(name=action, arguments={}))
        rewards = (*session.rewards, float(len(action)))
        return done((replace(session, rewards=rewards, done=text == "over"), text))

    def finish(self, session: Session, episode: Completion) -> Future[Score]:
        """The sum of a game's rewards."""
        return done(sum(session.rewards) if session.rewards else None)


class Game(LocalHost):
    """Answers an action by its first letters after a random time, and ends after an action that contains a digit."""

    def __init__(self, *, delays: Random | None = None) -> None:
        super().__init__(lambda call: f"saw {call.name[:3]}" if not set("0123") & set(call.name) else "over", game=True)
        self.delays = delays

    def step(self, session: Session, action: str) -> Future[Any]:
        """The answer, at some later time."""
        answer = super().step(session, action)
        if self.delays is None:
            return answer
        late: Future[Any] = Future()
        threading.Timer(self.delays.random() * 0.01, lambda: late.set_result(answer.result())).start()
        return late


def sampler_of(inner: Sampler, host: Any, *, tokenizer: Any = TOKENIZER, **limits: Any) -> EpisodeSampler:
    """Episodes in plain text by this sampler."""
    return EpisodeSampler(
        inner,
        host=host,
        renderer=PlainRenderer(TextEncoder(tokenizer)),
        config=EpisodesConfig(**limits),
        tokenizer=tokenizer,
        word=lambda example: asked(example.id, example.question),
    )


def draw(
    sampler: EpisodeSampler, prompts: Sequence[Prompt], *, group_size: int = 1, seed: int = 0, **sampling: Any
) -> list[Group]:
    """The groups of a request."""
    settings = SamplingParams(**{"max_new_tokens": 200, **sampling})
    return sampler.generate(prompts, group_size=group_size, sampling=settings, seed=seed)


def pieces(completion: Completion) -> Iterator[tuple[str, bool]]:
    """The texts of a completion's stretches, each with whether it is trained on."""
    trained = completion.trained or (True,) * len(completion.token_ids)
    start = 0
    for end in range(1, len(trained) + 1):
        if end == len(trained) or trained[end] != trained[start]:
            yield TOKENIZER.decode(completion.token_ids[start:end]), trained[start]
            start = end
