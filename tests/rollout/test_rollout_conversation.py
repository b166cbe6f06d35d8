"""Several turns in one request of the native engine: the same episodes as a request for each turn draws."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatpeak.episodes import episode_sampler
from flatpeak.episodes.environments import Session
from flatpeak.errors import StoppedError
from flatpeak.policy.model import Policy
from flatpeak.protocols import WrappedSampler
from flatpeak.rollout.conversation import NextTurn
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Group, Prompt, SamplingParams
from flatpeak.utils.out_of_memory import Halvings
from support.architectures import ARCHITECTURES, VOCABULARY, architecture_model
from support.episodes import TOKENIZER, Game, asked, done, draw, sampler_of
from support.models import letter_tokenizer, tiny_model

KERNELS = ("native", "torch")
PROMPTS = [asked("a", "2+2="), asked("b", "what is seven?"), asked("c", "x"), asked("d", "12 - 5 * 3 =")]


def writer(kernels: str, *, seed: int = 0) -> Policy:
    """A random policy over characters."""
    policy = Policy(tiny_model(vocab_size=len(TOKENIZER), max_position_embeddings=512, seed=seed), TOKENIZER)
    policy.kernels.choose(kernels, unserved=policy.notice)
    return policy


class Rounds(WrappedSampler):
    """The engine as a sampler that knows no turns."""

    def stream(self, prompts: Sequence[Prompt], **request: Any) -> Iterator[tuple[int, Group]]:
        """Its groups."""
        yield from self.sampler.stream(prompts, **request)


def episodes(
    engine: Any, *, host: Any = None, seed: int = 3, limits: dict[str, Any] | None = None, **sampling: Any
) -> Any:
    """The episodes of all prompts."""
    sampler = sampler_of(engine, host or Game(), **({"max_tokens": 6} if limits is None else limits))
    return draw(sampler, PROMPTS, group_size=3, seed=seed, **{"max_new_tokens": 160, **sampling})


def same(ours: Sequence[Group], theirs: Sequence[Group]) -> None:
    """Assert that episodes have the same tokens, turns and rewards, and the same numbers up to rounding."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.prompt == other.prompt
        for mine, its in zip(one.completions, other.completions, strict=True):
            blank: dict[str, Any] = {"logprobs": (), "filtered_logprobs": ()}
            assert replace(mine, **blank) == replace(its, **blank)
            assert mine.logprobs == pytest.approx(its.logprobs, abs=2e-6)
            assert (mine.filtered_logprobs is None) == (its.filtered_logprobs is None)
            if mine.filtered_logprobs is not None:
                assert mine.filtered_logprobs == pytest.approx(its.filtered_logprobs, abs=2e-6)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "cut by the limit": {"max_new_tokens": 40},
    "top-k": {"top_k": 5},
    "least length": {"min_new_tokens": 4},
    "stop strings": {"stop": ("a", "+1", "b(")},
    "long turns": {"limits": {}},
    "one turn": {"limits": {"max_turns": 1, "max_tokens": 5}},
    "two turns": {"limits": {"max_turns": 2, "max_tokens": 5}},
    "least length beyond a turn": {"min_new_tokens": 120, "stop": ("a", "e", " ")},
    "cold and filtered": {"temperature": 0.7, "top_p": 0.9, "stop": ("e",), "min_new_tokens": 2},
}


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", SETTINGS)
def test_episodes_are_those_of_a_request_for_each_turn(kernels: str, name: str) -> None:
    policy = writer(kernels)
    theirs = episodes(Rounds(NativeEngine(policy)), **SETTINGS[name])
    same(episodes(NativeEngine(policy), **SETTINGS[name]), theirs)
    turns = [len(episode.turns) for group in theirs for episode in group.completions]
    assert max(turns) > (0 if name in ("one turn", "long turns") else 1)


@pytest.mark.parametrize("kernels", KERNELS)
def test_no_bit_depends_on_slots_or_on_when_answers_come(kernels: str) -> None:
    policy = writer(kernels)
    first = episodes(NativeEngine(policy))
    assert any(len(episode.turns) > 3 for group in first for episode in group.completions)
    for rows, every in ((1, 1), (2, 3), (5, 8), (512, 2)):
        engine = NativeEngine(policy, max_rows=rows, read_every=every, prefill_tokens=16)
        assert episodes(engine, host=Game(delays=Random(rows))) == first


class Spy:
    """A policy that counts the tokens it reads in passes of several."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.prefilled = self.extended = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def prefill(self, state: Any, prompts: Any, entries: Any) -> Any:
        """Count prompts."""
        self.prefilled += sum(map(len, prompts))
        return self._policy.prefill(state, prompts, entries)

    def extend(self, state: Any, slots: Any, kept: Any, tokens: Any) -> Any:
        """Count what follows turns."""
        self.extended += sum(map(len, tokens))
        return self._policy.extend(state, slots, kept, tokens)


def test_a_turn_costs_its_own_tokens_and_a_prompt_is_read_once() -> None:
    spy = Spy(writer("torch"))
    groups = episodes(NativeEngine(spy))  # type: ignore[arg-type]
    turns = [turn for group in groups for episode in group.completions for turn in episode.turns]
    assert spy.prefilled == sum(len(prompt.token_ids) for prompt in PROMPTS)
    # What was added, and the last token of the turn before it.
    assert spy.extended == sum(turn.added + 1 for turn in turns if turn.added) > 100


class Held(Game):
    """Answers the first action of each episode of one prompt only when all others have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[tuple[Future[Any], Future[Any]]] = []
        self.others = 0

    def start(self, example: Any, *, seed: int) -> Future[Any]:
        """A session that knows whether it is held."""
        return done((Session(state=b"b" if example.id == "b" else None), None))

    def step(self, session: Session, action: str) -> Future[Any]:
        """The answer, or one that waits."""
        answer = super().step(session, action)
        if session.state != b"b" or session.rewards:
            return answer
        late: Future[Any] = Future()
        self.held.append((late, answer))
        return late

    def finish(self, session: Session, episode: Any) -> Future[Any]:
        """Count the ends of others, and release at the last."""
        self.others += session.state != b"b"
        if self.others == 9:
            for late, answer in self.held:
                late.set_result(answer.result())
            self.held = []
        return super().finish(session, episode)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("rows", [512, 4])
def test_an_answer_that_does_not_come_holds_up_no_other_episode(rows: int) -> None:
    policy = writer("native")
    assert episodes(NativeEngine(policy, max_rows=rows), host=Held()) == episodes(NativeEngine(policy))


class Single:
    """Answers each completion once: the first that ends a turn at once, the others when that one has ended."""

    max_tokens = None

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.waiting: list[int] = []

    def begin(self, completions: Sequence[int]) -> None:
        """Nothing is counted."""

    def take(self, completion: int, turn: Any) -> bool:
        """Answer first turns."""
        self.waiting += [completion] if completion not in self.taken else []
        self.taken.append(completion)
        return completion in self.waiting

    def answers(self, *, least: int, wait: bool) -> list[tuple[int, NextTurn]]:
        """Those that may have an answer by now."""
        first = self.taken[0]
        ready = self.waiting if self.taken.count(first) > 1 else [c for c in self.waiting if c == first]
        if len(ready) < least:
            return []
        self.waiting = [completion for completion in self.waiting if completion not in ready]
        return [(completion, NextTurn(id=f"{completion}", added=[3])) for completion in ready]


def test_an_answer_waits_for_no_other_where_few_completions_sample() -> None:
    dialogue = Single()
    sampling = SamplingParams(max_new_tokens=400, stop=("a", "e", "t", "o"))
    engine = NativeEngine(writer("torch"))
    assert sorted(engine.converse(PROMPTS, group_size=5, sampling=sampling, seed=0, dialogue=dialogue)) == [0, 1, 2, 3]
    second_turn = dialogue.taken.index(dialogue.taken[0], 1)
    assert len(set(dialogue.taken[:second_turn])) < 15  # others are still in their first turn


def test_the_seconds_of_an_episode_begin_with_its_first_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, host = [0.0], Game()
    step = host.step
    monkeypatch.setattr(episode_sampler, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(host, "step", lambda *action: [clock.append(clock.pop() + 1), step(*action)][1])
    engine = NativeEngine(writer("native"), max_rows=1)
    untimed = episodes(engine, host=host)
    longest = max(len(episode.turns) for group in untimed for episode in group.completions)
    assert episodes(engine, host=host, limits={"max_tokens": 6, "timeout": float(longest)}) == untimed
    assert episodes(engine, host=host, limits={"max_tokens": 6, "timeout": 1.0}) != untimed


def test_no_prompts_have_no_episodes() -> None:
    assert draw(sampler_of(NativeEngine(writer("native")), Game()), [], group_size=2) == []


def test_episodes_go_on_turn_by_turn_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = writer("torch")
    theirs, calls, notices = episodes(Rounds(NativeEngine(policy))), count(), list[str]()
    engine = NativeEngine(policy, max_rows=8)
    engine.halve_with(Halvings(notices.append))
    host, decode = Game(), policy.decode
    actions: list[str] = []
    step = host.step
    monkeypatch.setattr(host, "step", lambda session, action: [actions.append(action), step(session, action)][1])

    def fail_once(state: Any, tokens_R: Any) -> Any:
        if next(calls) == 25:
            raise torch.OutOfMemoryError("none left")
        return decode(state, tokens_R)

    monkeypatch.setattr(policy, "decode", fail_once)
    same(episodes(engine, host=host), theirs)
    assert notices and "max_rows is 4" in notices[0]
    assert len(actions) == sum(len(episode.turns) for group in theirs for episode in group.completions)


def test_a_signal_ends_the_wait_for_an_answer() -> None:
    class Never(Game):
        def step(self, session: Session, action: str) -> Future[Any]:
            return Future()

    sampler = sampler_of(NativeEngine(writer("native")), Never(), max_tokens=6)
    sampler.stop_when(lambda: threading.active_count() > 0)
    with pytest.raises(StoppedError):
        draw(sampler, PROMPTS, group_size=2, seed=3, max_new_tokens=160)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_after_several_tokens_are_those_after_each_of_them(name: str) -> None:
    policy = Policy(architecture_model(name), letter_tokenizer())
    assert policy.native, policy.notice
    generator = Random(0)
    tokens = [[generator.randrange(2, VOCABULARY) for _ in range(length)] for length in (7, 3, 12)]
    prompts = [[generator.randrange(2, VOCABULARY) for _ in range(length)] for length in (9, 2)]
    for kernels in KERNELS:
        policy.kernels.choose("auto", unserved=None)
        policy.kernels.setting = kernels if kernels == "torch" else "auto"  # type: ignore[assignment]
        with policy.decoding(), torch.inference_mode():
            cache = policy.open(slots=4, entries=2, prompt_lengths=[9, 2], new_tokens=16)
            policy.prefill(cache, prompts, [0, 1])
            cache.admit([0, 1, 2], [0, 1, 0])
            first = torch.tensor([5, 6, 7, 2])
            for _ in range(3):  # a slot that is not read has these tokens too, until it is extended
                policy.decode(cache, first)
            ours = policy.extend(cache, [2, 0, 1], [1, 1, 1], tokens)
            after = policy.decode(cache, torch.tensor([3, 4, 5, 2]))[:3]
            for k, (slot, prompt) in enumerate(((2, 0), (0, 0), (1, 1))):
                row = [*prompts[prompt], int(first[slot]), *tokens[k]]
                for ids, mine in ((row, ours[k]), ([*row, 3 + slot], after[slot])):
                    whole = policy.open(slots=1, entries=1, prompt_lengths=[len(ids)], new_tokens=1)
                    torch.testing.assert_close(mine, policy.prefill(whole, [ids], [0])[0], atol=2e-5, rtol=2e-5)
