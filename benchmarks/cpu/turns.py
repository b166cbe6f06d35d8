"""Episodes of several turns: all turns in one request of the engine, beside a request for each turn.

    python -m benchmarks.cpu.turns MODEL --json FILE [--row "6 turns of 12 tokens, answers at once"] [--rounds 3]

MODEL is SmolLM2-135M-Instruct, as a transformers directory or a GGUF file. 8 prompts of about 70 tokens with 4 episodes
each play a game that answers every action with a sentence, at once or after a random time of 0.5 s on average. Both
sample the same tokens up to rounding, in turn, with one thread.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch

from benchmarks.harness.runner import Row, Run, main, say
from flatpeak.episodes.config import EpisodesConfig
from flatpeak.episodes.environments import Environment, EnvironmentHost, Session
from flatpeak.episodes.episode_sampler import EpisodeSampler
from flatpeak.episodes.rendering import PlainRenderer
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.protocols import WrappedSampler
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams, Score
from flatpeak.utils.control_tokens import TextEncoder

PROMPTS, GROUP, TURNS, CAP = 8, 4, 6, 400
ROWS = {
    f"{TURNS} turns of {tokens} tokens, answers {name}": (tokens, seconds)
    for tokens in (12, 40)
    for name, seconds in (("at once", 0.0), ("after 0.5 s", 0.5))
}


class TurnByTurn(WrappedSampler):
    """The engine without its conversations."""

    def stream(self, prompts: Sequence[Prompt], **request: Any) -> Iterator[tuple[int, Group]]:
        """Its groups."""
        yield from self.sampler.stream(prompts, **request)


class Actor:
    """The class of the game, whose steps the host below makes itself."""

    def step(self, action: str) -> None:
        """Act."""


class Host(EnvironmentHost):
    """Answers in this process, so that no worker is measured."""

    def __init__(self, seconds: float) -> None:
        self.environment = Environment(tools=(), actor=Actor)
        self.first_failure, self.call_log, self._seconds = None, None, seconds

    def start(self, example: Example, *, seed: int) -> Future[tuple[Session, str | None]]:
        """A session without an observation."""
        return _answered((Session(), None))

    def step(self, session: Session, action: str) -> Future[tuple[Session, str]]:
        """A sentence, at its time."""
        answer = replace(session), f"The number that you said is {action[:20]}. Now say another one."
        if not self._seconds:
            return _answered(answer)
        late: Future[Any] = Future()
        threading.Timer(random.uniform(0, 2 * self._seconds), late.set_result, [answer]).start()
        return late

    def finish(self, session: Session, episode: Completion) -> Future[Score]:
        """No reward."""
        return _answered(None)


def _answered(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def measure(run: Run, name: str) -> Row:
    """Measure both ways of one row, in turn."""
    torch.set_num_threads(1)
    tokens, seconds = ROWS[name]
    policy = load_policy(ModelConfig(path=run.model, device="cpu"), texts=(), seed=0)
    engine = NativeEngine(policy)
    prompts = [_prompt(number, policy.tokenizer) for number in range(1, PROMPTS + 1)]
    measured: dict[str, list[dict[str, float]]] = {"one request": [], "a request a turn": []}
    for repeat in range(run.repeats + 1):
        for contender, sampler in zip(measured, (engine, TurnByTurn(engine)), strict=True):
            episodes = EpisodeSampler(
                sampler,
                host=Host(seconds),
                renderer=PlainRenderer(TextEncoder(policy.tokenizer)),
                config=EpisodesConfig(max_turns=TURNS, max_tokens=tokens),
                tokenizer=policy.tokenizer,
                word=lambda example: _prompt(int(example.id), policy.tokenizer),
            )
            wall, cpu = time.perf_counter(), time.process_time()
            groups = episodes.generate(
                prompts, group_size=GROUP, sampling=SamplingParams(max_new_tokens=CAP), seed=repeat
            )
            figures = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
            figures["tokens"] = sum(len(one.token_ids) for group in groups for one in group.completions)
            say(f"  {repeat} {contender}: {figures}")
            if repeat:  # the first warms up
                measured[contender].append(figures)
    return {"contenders": measured}


def _prompt(number: int, tokenizer: Any) -> Prompt:
    text = f"Question {number}: say a number between {number} and {number * 7}, and explain why. "
    text += "Some background text follows. " * 8
    return Prompt(
        id=str(number),
        token_ids=tuple(tokenizer.encode(text)),
        text=text,
        example=Example(id=str(number), question=text, gold=""),
    )


if __name__ == "__main__":
    help_text = "SmolLM2-135M-Instruct: a transformers directory, or a GGUF file"
    main("turns", __doc__, rows=list(ROWS), quick=list(ROWS)[:1], repeats=3, measure=measure, model=help_text)
