from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.slots import DecodeSlots
from flatpeak.types import Completion, SamplingParams
from support.fake_decoders import (
    HistoryDecoder,
    NumberTokenizer,
    ScriptedDecoder,
    byte_fallback_tokenizer,
    byte_level_tokenizer,
    make_prompt,
)

PROMPTS = [make_prompt(f"p{n}", range(2, 3 + n % 5)) for n in range(7)]


def generate(decoder, prompts=PROMPTS, *, group_size=4, seed=11, max_rows=512, **settings) -> dict[str, tuple]:
    """Completions by prompt id; settings that NativeEngine knows go there, the others are sampling parameters."""
    engine_settings = {
        key: settings.pop(key) for key in ("compact_below", "read_every", "prefill_tokens") if key in settings
    }
    engine = NativeEngine(decoder, max_rows=max_rows, **engine_settings)
    sampling = SamplingParams(**{"max_new_tokens": 24, **settings})
    groups = engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
    assert [group.prompt for group in groups] == list(prompts)
    return {group.prompt.id: group.completions for group in groups}


def run_script(script, tokenizer, *, eos_token_ids=(), vocabulary=None, **settings) -> Completion:
    decoder = ScriptedDecoder(
        script, vocabulary=vocabulary or len(tokenizer), eos_token_ids=eos_token_ids, tokenizer=tokenizer
    )
    return generate(decoder, PROMPTS[:1], group_size=1, **{"max_new_tokens": len(script), **settings})["p0"][0]


def test_the_stored_logprobs_are_those_of_the_decoders_logits() -> None:
    decoder = HistoryDecoder()
    for temperature in (0.5, 1.0, 2.0):
        for prompt in PROMPTS:
            for completion in generate(decoder, temperature=temperature)[prompt.id]:
                history = list(prompt.token_ids)
                for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
                    scaled = decoder.logits_after(history).double().numpy() / temperature
                    exact = scaled[token] - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()
                    assert logprob == pytest.approx(exact, abs=1e-5)
                    history.append(token)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.7)])
def test_first_and_second_tokens_follow_the_exact_distribution(top_k: int, top_p: float) -> None:
    decoder = HistoryDecoder(eos_token_ids=())
    prompt = make_prompt("x", [3, 1, 4])
    completions = generate(
        decoder, [prompt], group_size=20_000, max_rows=20_000, max_new_tokens=2, top_k=top_k, top_p=top_p
    )["x"]
    pairs = np.array([completion.token_ids for completion in completions])

    def kept(history: list[int]) -> np.ndarray:
        probs = torch.softmax(decoder.logits_after(history).double(), -1).numpy()
        order = np.argsort(-probs)[: top_k or None]
        if top_p < 1:
            order = order[: np.searchsorted(np.cumsum(probs[order]), top_p) + 1]
        result = np.zeros_like(probs)
        result[order] = probs[order]
        return result / result.sum()

    first = kept([3, 1, 4])
    expected = 20_000 * np.array([first[a] * kept([3, 1, 4, a]) for a in range(12)])
    counts = np.histogram2d(*pairs.T, bins=(range(13), range(13)))[0]
    assert counts[expected == 0].sum() == 0
    common = expected >= 5
    chi_square = ((counts - expected)[common] ** 2 / expected[common]).sum()
    assert chi_square < common.sum() + 4 * math.sqrt(2 * common.sum())


@pytest.mark.parametrize(
    "settings",
    [
        {"max_rows": 4},
        {"max_rows": 3},
        {"max_rows": 13},
        {"max_rows": 1},
        {"compact_below": 0.0},
        {"compact_below": 1.0},
        {"compact_below": 0.5, "max_rows": 9},
        {"read_every": 3},
        {"read_every": 8, "compact_below": 1.0},
        {"read_every": 1000},
    ],
)
@pytest.mark.parametrize("sampling", [{}, {"top_p": 0.8, "temperature": 1.3}, {"stop": ("<3><4>", "<7>")}])
def test_completions_do_not_depend_on_how_rows_are_chunked_compacted_and_read(settings: dict, sampling: dict) -> None:
    expected = generate(HistoryDecoder(), **sampling)
    lengths = [len(completion.token_ids) for group in expected.values() for completion in group]
    assert len(set(lengths)) > 5
    assert {completion.finish_reason for group in expected.values() for completion in group} == {"stop", "length"}
    assert generate(HistoryDecoder(), **settings, **sampling) == expected


def test_completions_do_not_depend_on_company_order_or_group_size() -> None:
    expected = generate(HistoryDecoder())
    for prompt in PROMPTS:
        assert generate(HistoryDecoder(), [prompt]) == {prompt.id: expected[prompt.id]}
        assert generate(HistoryDecoder(), [prompt], group_size=2)[prompt.id] == expected[prompt.id][:2]
    assert generate(HistoryDecoder(), PROMPTS[::-1], max_rows=8) == expected


def test_seeds_prompts_and_copies_differ() -> None:
    decoder = HistoryDecoder(eos_token_ids=())
    same_text = [make_prompt("a", [1, 2]), make_prompt("b", [1, 2])]
    first, second = generate(decoder, same_text), generate(decoder, same_text, seed=12)
    drawn = [c.token_ids for groups in (first, second) for group in groups.values() for c in group]
    assert len(set(drawn)) == 16
    assert generate(decoder, same_text) == first


def test_each_prompt_is_read_once_and_ended_completions_are_dropped() -> None:
    decoder = HistoryDecoder()
    completions = [c for group in generate(decoder, compact_below=1.0).values() for c in group]
    assert decoder.opened == [(28, 7, 5, 24)]
    assert decoder.prefilled == [tuple(sorted((len(p.token_ids) for p in PROMPTS), reverse=True))]
    # Dropping rows as soon as they end, a row is decoded once for each of its tokens but the last.
    assert sum(decoder.decoded) == sum(len(completion.token_ids) - 1 for completion in completions)
    assert decoder.kept
    never = HistoryDecoder()
    generate(never, compact_below=0.0)
    assert never.kept == []


def test_freed_slots_are_filled_from_the_queue_and_prompts_read_when_their_turn_comes() -> None:
    decoder = HistoryDecoder()
    generate(decoder, max_rows=8)
    assert max(decoder.decoded) == 8
    assert decoder.opened == [(8, 7, 5, 24)]
    assert sum(map(len, decoder.prefilled)) == len(PROMPTS)
    assert len(decoder.prefilled) > 2
    waiting = HistoryDecoder()
    generate(waiting, PROMPTS[:1], group_size=100, max_rows=8)
    one_by_one = HistoryDecoder()
    for first in range(100):
        generate(one_by_one, [make_prompt(f"q{first}", PROMPTS[0].token_ids)], group_size=1)
    assert waiting.prefilled == [(1,)]
    assert len(waiting.decoded) < len(one_by_one.decoded) / 5


def test_memory_for_prompts_grows_with_the_slots_and_not_with_the_request() -> None:
    decoder = HistoryDecoder()
    many = [make_prompt(f"m{n}", range(2, 3 + n % 5)) for n in range(40)]
    expected = generate(HistoryDecoder(), many, group_size=3)
    assert generate(decoder, many, group_size=3, max_rows=5) == expected
    assert decoder.opened == [(5, 6, 5, 24)]
    cut = HistoryDecoder()
    assert generate(cut, many, group_size=3, max_rows=1) == expected
    assert cut.opened == [(1, 2, 5, 24)]


def test_a_group_larger_than_max_rows_is_cut() -> None:
    decoder = HistoryDecoder()
    expected = generate(HistoryDecoder(), PROMPTS[:2], group_size=5)
    assert generate(decoder, PROMPTS[:2], group_size=5, max_rows=2) == expected
    assert decoder.prefilled == [(2,), (1,)]
    assert max(decoder.decoded) == 2


def test_prompts_are_read_within_the_token_budget() -> None:
    decoder = HistoryDecoder()
    assert generate(decoder, prefill_tokens=6) == generate(HistoryDecoder())
    assert [length for piece in decoder.prefilled for length in piece] == [5, 4, 3, 2, 2, 1, 1]
    assert all(sum(piece) <= 6 or len(piece) == 1 for piece in decoder.prefilled)
    assert len(decoder.prefilled) > 2


def test_first_tokens_are_drawn_before_the_next_prompts_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class SmallReads(HistoryDecoder):
        class state_class(HistoryDecoder.state_class):  # type: ignore[misc]  # noqa: N801
            prefill_tokens = 6

    decoder, expected = SmallReads(), generate(HistoryDecoder())
    read_before: list[int] = []
    begin = DecodeSlots.begin
    monkeypatch.setattr(
        DecodeSlots, "begin", lambda *arguments: (read_before.append(len(decoder.prefilled)), begin(*arguments))
    )
    assert generate(decoder) == expected
    assert decoder.prefilled == [(5,), (4,), (3, 2), (2, 1, 1)]
    assert read_before == [1, 2, 3, 4]


def test_groups_are_streamed_as_they_are_complete_and_equal_those_generated_at_once() -> None:
    sampling = SamplingParams(max_new_tokens=24)
    engine = NativeEngine(HistoryDecoder(), max_rows=6)
    together = engine.generate(PROMPTS, group_size=3, sampling=sampling, seed=4)
    stream = NativeEngine(decoder := HistoryDecoder(), max_rows=6).stream(
        PROMPTS, group_size=3, sampling=sampling, seed=4
    )
    first, group = next(stream)
    steps_for_the_first = len(decoder.decoded)
    streamed = {first: group} | dict(stream)
    assert [streamed[p] for p in range(len(PROMPTS))] == together
    assert steps_for_the_first < len(decoder.decoded) / 2


def test_prompts_whose_completions_were_long_are_begun_first() -> None:
    decoder = HistoryDecoder()
    engine = NativeEngine(decoder, max_rows=4)
    sampling = SamplingParams(max_new_tokens=24)
    groups = engine.generate(PROMPTS, group_size=2, sampling=sampling, seed=4)
    means = {g.prompt.id: sum(len(c.token_ids) for c in g.completions) / 2 for g in groups}
    assert engine.expected_lengths == means
    decoder.prefilled.clear()
    again = engine.generate(PROMPTS, group_size=2, sampling=sampling, seed=5)
    by_length = sorted(PROMPTS, key=lambda prompt: (-means[prompt.id], -len(prompt.token_ids)))
    assert [length for piece in decoder.prefilled[1:] for length in piece] == [len(p.token_ids) for p in by_length[2:]]
    assert again == NativeEngine(HistoryDecoder()).generate(PROMPTS, group_size=2, sampling=sampling, seed=5)


@pytest.mark.parametrize("eos", [9, 4])
def test_any_of_several_end_of_sequence_tokens_ends_a_completion_and_is_kept(eos: int) -> None:
    tokenizer = NumberTokenizer(special=(4, 9))
    completion = run_script([5, 6, eos, 7], tokenizer, eos_token_ids=(4, 9), vocabulary=12)
    assert completion.token_ids == (5, 6, eos)
    assert len(completion.logprobs) == 3
    assert completion.finish_reason == "stop"
    assert completion.text == "<5><6>"


def test_end_of_sequence_as_the_first_token_leaves_one_token_and_no_text() -> None:
    completion = run_script([4, 5, 6], NumberTokenizer(special=(4,)), eos_token_ids=(4,), vocabulary=12)
    assert completion.token_ids == (4,)
    assert (completion.finish_reason, completion.text) == ("stop", "")


@pytest.mark.parametrize(("last", "reason"), [(4, "stop"), (7, "length")])
def test_the_last_allowed_token_tells_stop_from_length(last: int, reason: str) -> None:
    completion = run_script([5, 6, last], NumberTokenizer(special=(4,)), eos_token_ids=(4,), vocabulary=12)
    assert completion.token_ids == (5, 6, last)
    assert completion.finish_reason == reason


@pytest.mark.parametrize(("token", "reason"), [(4, "stop"), (7, "length")])
def test_one_new_token(token: int, reason: str) -> None:
    decoder = ScriptedDecoder([token], vocabulary=12, eos_token_ids=(4,), tokenizer=NumberTokenizer(special=(4,)))
    for completion in generate(decoder, PROMPTS[:2], group_size=3, max_new_tokens=1)["p1"]:
        assert completion.token_ids == (token,)
        assert completion.finish_reason == reason


def test_min_new_tokens_holds_back_end_of_sequence_and_keeps_the_full_logprob() -> None:
    decoder = HistoryDecoder(vocabulary=5, eos_token_ids=(0, 3, 99), scale=0.5)
    completions = [c for group in generate(decoder, group_size=64, min_new_tokens=3).values() for c in group]
    assert all(token not in (0, 3) for completion in completions for token in completion.token_ids[:3])
    assert sum(len(completion.token_ids) == 4 for completion in completions) > 50  # the fourth token may end it
    for prompt, completion in zip(PROMPTS, completions[::64], strict=True):
        exact = torch.log_softmax(decoder.logits_after(prompt.token_ids), -1)[completion.token_ids[0]].item()
        assert completion.logprobs[0] == pytest.approx(exact, abs=1e-6)


def test_no_stop_string_is_heeded_before_min_new_tokens() -> None:
    tokenizer = NumberTokenizer()
    script = [1, 2, 5, 1, 2, 6]
    for minimum, length in ((0, 2), (2, 2), (3, 5), (5, 5), (6, 6)):
        completion = run_script(script, tokenizer, vocabulary=12, stop=("<1><2>",), min_new_tokens=minimum)
        assert completion.token_ids == tuple(script[:length])
        assert completion.finish_reason == ("length" if length == 6 else "stop")


@pytest.mark.parametrize("read_every", [1, 4])
@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_a_stop_string_of_several_tokens_and_bytes_ends_a_completion_and_is_kept(make, read_every: int) -> None:
    tokenizer = make()
    script = tokenizer.encode("ban na <終🙂> ans", add_special_tokens=False)
    completion = run_script(script, tokenizer, stop=("終🙂>",), read_every=read_every)
    assert completion.text == "ban na <終🙂>"
    assert completion.finish_reason == "stop"
    assert completion.token_ids == tuple(script[: len(completion.token_ids)])
    assert len(completion.logprobs) == len(completion.token_ids)


def test_temperature_zero_follows_the_largest_logit() -> None:
    decoder = HistoryDecoder(eos_token_ids=())
    history = list(PROMPTS[2].token_ids)
    logprobs = []
    for _ in range(24):
        logits_V = decoder.logits_after(history)
        history.append(int(logits_V.argmax()))
        logprobs.append(torch.log_softmax(logits_V, -1)[history[-1]].item())
    for completion in generate(decoder, temperature=0.0, top_p=0.5)["p2"]:
        assert completion.token_ids == tuple(history[len(PROMPTS[2].token_ids) :])
        np.testing.assert_allclose(completion.logprobs, logprobs, atol=1e-6)
        assert completion.filtered_logprobs is None


def test_filtered_logprobs_come_with_filters_and_never_lie_below_the_full_ones() -> None:
    completions = [c for group in generate(HistoryDecoder(), top_k=3).values() for c in group]
    differences = np.concatenate([np.subtract(c.filtered_logprobs, c.logprobs) for c in completions])
    assert differences.min() >= -1e-6
    assert differences.max() > 0.1
    assert all(c.filtered_logprobs is None for c in generate(HistoryDecoder())["p0"])
    # One candidate is drawn for certain.
    assert all(c.filtered_logprobs == (0.0,) * len(c.token_ids) for c in generate(HistoryDecoder(), top_k=1)["p0"])


def test_no_prompts_give_no_groups() -> None:
    assert NativeEngine(HistoryDecoder()).generate([], group_size=4, sampling=SamplingParams(), seed=0) == []


def test_logits_that_are_not_finite_are_an_error_that_says_so() -> None:
    decoder = HistoryDecoder()
    decoder.table = torch.full_like(decoder.table, torch.nan)
    with pytest.raises(UserError, match="NaN or infinite"):
        generate(decoder)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: at least 1"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"group_size": 0}, "group_size=0"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"min_new_tokens": -2}, "min_new_tokens=-2"),
        ({"stop": ("",)}, "empty string"),
        ({"prompts": [make_prompt("blank", [])]}, "prompt blank has no tokens"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(settings: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        generate(HistoryDecoder(), **settings)


def test_generation_leaves_no_trace_in_the_callers_random_state() -> None:
    before = torch.random.get_rng_state()
    generate(HistoryDecoder())
    assert torch.equal(before, torch.random.get_rng_state())
