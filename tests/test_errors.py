from flatpeak.errors import did_you_mean, nearest


def test_the_nearest_name_is_found_whatever_its_letter_case():
    assert nearest("questoin", ["Answer", "Question"]) == ["Question"]
    assert nearest("levle", ["level", "levels", "x"], count=2) == ["level", "levels"]
    assert nearest("zebra", ["level", "question"]) == []


def test_a_hint_quotes_the_nearest_name_and_is_empty_without_one():
    assert did_you_mean("levle", ["level"]) == ", did you mean 'level'?"
    assert did_you_mean("levle", ["level"], form=" ({}?)") == " ('level'?)"
    assert did_you_mean("zebra", ["level"]) == ""
