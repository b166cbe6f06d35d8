"""Episodes token by token: what each turn reads, what is trained on, and every reason to end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from flatpeak.episodes.tools import ParsedCall
from flatpeak.types import Completion
from support.episodes import END, TOKENIZER, LocalHost, Scripted, asked, draw, ids, pieces, sampler_of

SCRIPT = {
    ("a", 0): "so <call>add(x=2)</call>",
    ("a#0.1", 0): "and <call>add(x=3)</call>",
    ("a#0.2", 0): "5",
    ("a", 1): "4",
    ("b", 0): "<call>add(x=1)</call>",
    ("b#0.1", 0): "1",
    ("b", 1): "<call>add(x=</call>",
    ("b#1.1", 0): "7",
}


def add(call: ParsedCall) -> str:
    return "bad" if call.error else f"{call.name}{json.dumps(dict(call.arguments))}"


def episodes(
    script: Any = SCRIPT, *, answers: Any = add, group_size: int = 2, names: str = "ab", **settings: Any
) -> Any:
    limits = {name: settings.pop(name) for name in list(settings) if name in ("max_turns", "max_calls", "max_tokens")}
    inner = Scripted(lambda name, index: script[name, index])
    host = settings.pop("host", None) or LocalHost(answers)
    sampler = sampler_of(inner, host, **limits, **{k: settings.pop(k) for k in list(settings) if k == "answer_tokens"})
    groups = draw(sampler, [asked(name) for name in names], group_size=group_size, **settings)
    return [group.completions for group in groups], inner


def test_an_episode_is_what_was_sampled_and_what_was_added_and_only_the_former_is_trained_on() -> None:
    ((first, second), (third, fourth)), _ = episodes()
    assert list(pieces(first)) == [
        ("so <call>add(x=2)</call>", True),
        ('<result>add{"x": 2}</result>', False),
        ("and <call>add(x=3)</call>", True),
        ('<result>add{"x": 3}</result>', False),
        (f"5{TOKENIZER.eos_token}", True),
    ]
    assert first.trained is not None
    assert all((logprob == 0.0) != own for logprob, own in zip(first.logprobs, first.trained, strict=True))
    assert [turn.sampled for turn in first.turns] == [24, 25, 2]
    assert sum(turn.sampled + turn.added for turn in first.turns) == len(first.token_ids)
    assert (first.text, first.stop_reason, first.finish_reason) == ("5", "answered", "stop")
    assert [call.arguments for turn in first.turns for call in turn.calls] == [{"x": 2}, {"x": 3}]
    assert (second.text, second.trained, len(second.turns)) == ("4", None, 1)
    assert (third.text, [turn.calls[0].failure for turn in third.turns[:1]]) == ("1", [None])
    assert (fourth.text, fourth.turns[0].calls[0].failure) == ("7", "malformed")


def test_each_turn_reads_id_by_id_what_was_before_it() -> None:
    ((first, _), _), inner = episodes()
    whole = (*asked("a").token_ids, *first.token_ids)
    read = [prompt.token_ids for prompt, _ in inner.seen if prompt.id.startswith("a")]
    assert [whole[: len(tokens)] for tokens in read] == read
    ends = [len(read[0]), *(len(read[0]) + sum(t.sampled + t.added for t in first.turns[:k]) for k in (1, 2))]
    assert [len(tokens) for tokens in read] == ends


def test_an_episode_without_a_call_is_the_completion_of_a_sampler_without_tools() -> None:
    script = {("a", 0): "4", ("a", 1): "5"}
    ((first, second),), inner = episodes(script, names="a")
    plain = Scripted(lambda name, index: script[name, index])
    (group,) = draw(plain, [asked("a")], group_size=2)  # type: ignore[arg-type]
    bare = [replace(one, turns=(), stop_reason=None) for one in (first, second)]
    assert bare == list(group.completions)
    assert len(inner.seen) == 1


CALLS = "<call>add(x=2)</call>"
LONG: dict[tuple[str, int], str] = {("a", 0): CALLS, **{(f"a#0.{turn}", 0): CALLS for turn in range(1, 20)}}
CALLING = len(CALLS)
ANSWER = len(ids('<result>add{"x": 2}</result>'))


@pytest.mark.parametrize(
    ("settings", "reason", "turns"),
    [
        ({"max_turns": 3}, "max_turns", 3),
        ({"max_calls": 2}, "max_calls", 3),
        ({"max_new_tokens": 2 * CALLING + ANSWER}, "max_tokens", 2),
        ({"max_new_tokens": 2 * CALLING + ANSWER - 1}, "max_tokens", 2),
        ({"max_new_tokens": CALLING + ANSWER}, "max_tokens", 1),
        ({"max_tokens": CALLING - 1}, "max_tokens", 1),
    ],
)
def test_limits_end_an_episode_and_count_as_cut(settings: dict[str, Any], reason: str, turns: int) -> None:
    ((only,),), _ = episodes(LONG, names="a", group_size=1, **settings)
    assert (only.stop_reason, only.finish_reason, len(only.turns)) == (reason, "length", turns)
    assert len(only.token_ids) <= settings.get("max_new_tokens", 200)
    assert only.turns[-1].added == 0


def test_a_lost_environment_ends_the_episode_and_leaves_its_reward_missing() -> None:
    ((only,),), _ = episodes(LONG, names="a", group_size=1, answers=lambda call: None)
    assert (only.stop_reason, only.reward, len(only.turns)) == ("failed", None, 1)


def test_a_long_answer_is_cut_and_says_so() -> None:
    script = {("a", 0): CALLS, ("a#0.1", 0): "5"}
    ((only,),), _ = episodes(script, names="a", group_size=1, answers=lambda call: "x" * 100, answer_tokens=10)
    (call,) = only.turns[0].calls
    assert (call.answer, call.failure) == (f"{'x' * 10} [cut]", "too_long")
    assert only.turns[0].added == len(ids("<result></result>")) + 16


def test_a_game_is_played_turn_by_turn_until_it_is_over_and_pays_the_sum_of_its_steps() -> None:
    script = {("a", 0): "up", ("a#0.1", 0): "down", ("a#0.2", 0): "left"}
    host = LocalHost(lambda call: "over" if call.name == "left" else f"saw {call.name}", game=True, rewards=True)
    ((only,),), _ = episodes(script, names="a", group_size=1, host=host)
    assert [turn.answer for turn in only.turns] == ["saw up", "saw down", "over"]
    assert (only.stop_reason, only.reward) == ("done", 2.0 + 4.0 + 4.0)
    assert only.token_ids.count(END) == 3  # each turn's own


def test_a_game_that_ends_with_an_action_of_as_many_tokens_as_one_may_have_is_not_cut() -> None:
    host = LocalHost(lambda call: "over", game=True, rewards=True)
    ((only,),), _ = episodes({("a", 0): "upwards"}, names="a", group_size=1, host=host, max_tokens=2)
    assert (only.text, only.stop_reason, only.finish_reason) == ("up", "done", "stop")


def test_a_least_length_filters_the_first_turn_alone_and_its_sets_stay() -> None:
    class FilteringFirst(Scripted):
        def _write(self, name: str, index: int, sampling: Any) -> Completion:
            completion = super()._write(name, index, sampling)
            if not sampling.min_new_tokens:
                return completion
            kept = tuple((-1, END) for _ in completion.token_ids)
            return replace(completion, kept=kept, filtered_logprobs=tuple(-0.25 for _ in completion.token_ids))

    sampler = sampler_of(FilteringFirst(lambda name, index: SCRIPT[name, index]), LocalHost(add))
    (group,) = draw(sampler, [asked("a")], group_size=2, min_new_tokens=2)
    first = group.completions[0]
    sampled = first.turns[0].sampled
    assert first.kept is not None
    assert first.filtered_logprobs is not None
    assert [tuple(one) for one in first.kept] == [(-1, END)] * sampled + [(-1,)] * (len(first.token_ids) - sampled)
    assert first.filtered_logprobs[sampled:] == first.logprobs[sampled:]


def test_kept_tokens_and_filtered_log_probabilities_cover_added_tokens_too() -> None:
    class Filtering(Scripted):
        def _write(self, name: str, index: int, sampling: Any) -> Completion:
            part = super()._write(name, index, sampling)
            kept = tuple((token,) for token in part.token_ids)
            return replace(part, kept=kept, filtered_logprobs=tuple(-1.0 for _ in part.token_ids))

    sampler = sampler_of(Filtering(lambda name, index: SCRIPT[name, index]), LocalHost(add))
    (group,) = draw(sampler, [asked("a")], group_size=2)
    first = group.completions[0]
    assert first.kept is not None
    assert first.trained is not None
    assert [tuple(one) == (-1,) for one in first.kept] == [not own for own in first.trained]
    assert first.filtered_logprobs == tuple(-1.0 if own else 0.0 for own in first.trained)
