import pytest

from flatpeak.utils.answers import is_integer, is_number, normalize_gold


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ("43.0", "43"),
        ("1,000", "1000"),
        ("1,234,567.50", "1234567.5"),
        (" 18. ", "18"),
        ("9,", "9"),
        ("-7.00", "-7"),
        ("−5", "-5"),
        ("-0.0", "0"),
        (".5", "0.5"),
        ("0.6666666667", "0.6666666667"),
        ("12345678901234567890123456789012345.0", "12345678901234567890123456789012345"),
    ],
)
def test_a_number_has_one_spelling(text, gold):
    assert normalize_gold(text) == gold
    assert is_number(gold)


@pytest.mark.parametrize("text", ["1,00", "12,3456", "007", "3:30", "1/2", "Yes.", "5 apples", "1e5", ".", "-", "$18"])
def test_what_is_not_plainly_a_number_is_kept(text):
    assert normalize_gold(f" {text} ") == text


def test_integers_are_told_from_decimals_and_words():
    assert [is_integer(gold) for gold in ("18", "-3", "0.5", "1/2", "", "abc")] == [True, True] + [False] * 4
    assert [is_number(gold) for gold in ("18", "-0.5", "", "-", "3:30")] == [True, True, False, False, False]
