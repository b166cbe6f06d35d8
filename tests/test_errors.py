from flatpeak.errors import did_you_mean, nearest, plural


def test_the_nearest_name_is_found_whatever_its_letter_case():
    assert nearest("questoin", ["Answer", "Question"]) == ["Question"]
    assert nearest("levle", ["level", "levels", "x"], count=2) == ["level", "levels"]
    assert nearest("zebra", ["level", "question"]) == []


def test_a_hint_quotes_the_nearest_name_and_is_empty_without_one():
    assert did_you_mean("levle", ["level"]) == ", did you mean 'level'?"
    assert did_you_mean("levle", ["level"], form=" ({}?)") == " ('level'?)"
    assert did_you_mean("zebra", ["level"]) == ""


def test_a_noun_is_plural_beside_any_number_but_one():
    assert [plural(count, "token") for count in (0, 1, 2)] == ["0 tokens", "1 token", "2 tokens"]
