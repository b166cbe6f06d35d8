from __future__ import annotations

import random

import pytest
import torch

from flatpeak.errors import UserError
from flatpeak.rollout.stopping import StopStrings, is_end_of_sequence
from support.fake_decoders import NumberTokenizer, byte_fallback_tokenizer, byte_level_tokenizer


def first_by_definition(tokenizer, stop: tuple[str, ...], tokens: list[int]) -> int | None:
    """The first token at which the text of everything so far contains a stop string."""
    for position in range(len(tokens)):
        if any(string in tokenizer.decode(tokens[: position + 1]) for string in stop):
            return position
    return None


def first_found(tokenizer, stop: tuple[str, ...], tokens: list[int]) -> int | None:
    return StopStrings(stop, tokenizer).first_completed(tokens, range(len(tokens)))


def test_any_of_several_end_of_sequence_tokens_ends() -> None:
    tokens_BR = torch.tensor([[1, 2, 7], [9, 7, 0]])
    assert is_end_of_sequence(tokens_BR, torch.tensor([7, 9])).tolist() == [[False, False, True], [True, True, False]]
    assert not is_end_of_sequence(tokens_BR, torch.tensor([], dtype=torch.int64)).any()


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_a_stop_string_over_several_tokens_is_found_at_its_last(make) -> None:
    tokenizer = make()
    tokens = tokenizer.encode("banana </ans> ban", add_special_tokens=False)
    position = first_found(tokenizer, ("</ans>",), tokens)
    assert position is not None
    assert tokenizer.decode(tokens[: position + 1]) == "banana </ans>"


def test_a_stop_string_that_ends_inside_a_token_is_found() -> None:
    tokenizer = byte_level_tokenizer()
    tokens = tokenizer.encode("a</ans>\nb", add_special_tokens=False)  # ">\n" is one token
    position = first_found(tokenizer, ("</ans>",), tokens)
    assert tokenizer.decode(tokens[: position + 1]) == "a</ans>\n"


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
@pytest.mark.parametrize("stop", ["é", "終了", "了\n", "🙂"])
def test_characters_of_several_bytes_are_complete_at_their_last_byte(make, stop: str) -> None:
    tokenizer = make()
    before = tokenizer.encode("né終a" if stop != "é" else "n終a", add_special_tokens=False)
    ending = tokenizer.encode(stop, add_special_tokens=False)
    assert len(ending) >= 2
    tokens = before + ending + tokenizer.encode("🙂b", add_special_tokens=False)
    assert first_found(tokenizer, (stop,), tokens) == len(before) + len(ending) - 1


@pytest.mark.parametrize("character", ["é", "語", "🙂"])
def test_a_stop_string_after_a_long_run_of_byte_tokens_is_found(character: str) -> None:
    # One bad byte makes a byte-fallback decoder give up on the whole run, so a tail cut inside it reads as U+FFFD only.
    tokenizer = byte_fallback_tokenizer()
    for stop in ("é終", "終了", "了🙂"):
        tokens = tokenizer.encode(character * 50 + stop, add_special_tokens=False)
        assert first_found(tokenizer, (stop,), tokens) == len(tokens) - 1


def test_tokens_without_text_between_do_not_hide_a_stop_string() -> None:
    tokenizer = byte_level_tokenizer()
    beyond = [len(tokenizer) + 5] * 40  # ids of a padded vocabulary decode to nothing
    start, end = (tokenizer.encode(component, add_special_tokens=False) for component in ("x</an", "s>"))
    tokens = start + beyond + end
    assert tokenizer.decode(tokens) == "x</ans>"
    assert first_found(tokenizer, ("</ans>",), tokens) == len(tokens) - 1


@pytest.mark.parametrize("make", [byte_level_tokenizer, byte_fallback_tokenizer])
def test_the_first_position_is_the_one_of_the_definition_for_random_tokens(make) -> None:
    tokenizer = make()
    pieces = ["a", "an", "s", "\n", " a", "/", "<", ">", "é", "終了", "🙂", " ", "b", "n", " t"]
    rng = random.Random(0)
    result = 0
    for case in range(600):
        stop = tuple("".join(rng.choices(pieces, k=rng.randint(1, 3))) for _ in range(rng.randint(1, 2)))
        tokens = []
        while len(tokens) < rng.choice([10, 60]):
            if case % 4 == 3 and rng.random() < 0.1:
                tokens += [rng.randrange(256)]  # a byte out of place
            tokens += tokenizer.encode("".join(rng.choices(pieces, k=3)), add_special_tokens=False)
        expected = first_by_definition(tokenizer, stop, tokens)
        assert first_found(tokenizer, stop, tokens) == expected, (stop, tokens)
        result += expected is not None
    assert result > 100


def test_only_asked_positions_count_and_a_string_completed_before_them_is_not_new() -> None:
    tokenizer = NumberTokenizer()
    stops = StopStrings(("<4>",), tokenizer)
    tokens = [1, 4, 2, 3, 4, 5]
    assert stops.first_completed(tokens, range(6)) == 1
    assert stops.first_completed(tokens, range(2, 6)) == 4
    assert stops.first_completed(tokens, range(2, 4)) is None
    assert stops.first_completed(tokens, range(5, 6)) is None


def test_a_special_token_can_be_a_stop_string() -> None:
    tokenizer = byte_level_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert first_found(tokenizer, ("<|end|>",), [*tokenizer.encode("an"), end]) == 1


def test_tokens_that_cannot_complete_a_stop_string_are_decoded_once_only() -> None:
    class Counting(NumberTokenizer):
        calls = 0

        def decode(self, token_ids, *, skip_special_tokens=False):
            self.calls += 1
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens)

    tokenizer = Counting()
    stops = StopStrings(("7!",), tokenizer)
    assert stops.first_completed([1, 2, 3] * 100, range(300)) is None
    assert tokenizer.calls == 3


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UserError, match="empty string"):
        StopStrings(("a", ""), NumberTokenizer())
