import json
import pickle
from fractions import Fraction

import numpy as np
import pytest
from pydantic import TypeAdapter

from flatpeak.errors import UserError
from flatpeak.tasks.config import TaskConfig, build_task
from flatpeak.tasks.reasoning_gym import plain

pytest.importorskip("reasoning_gym")


def build(**task):
    return build_task(TypeAdapter(TaskConfig).validate_python({"type": "reasoning_gym", **task}))


def test_one_data_set_by_name_with_its_own_arguments():
    task = build(dataset="chain_sum", size=20, test_size=5, arguments={"min_terms": 2, "max_terms": 2})
    assert (task.name, len(task.train), len(task.test)) == ("reasoning_gym", 20, 5)
    for example in (*task.train, *task.test):
        numbers = example.question.split(":")[-1].rstrip("=? ").split()
        left, sign, right = numbers[-3:]
        assert int(example.gold) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        assert example.subsets == {"dataset": "chain_sum"}
    assert [task.train[0].id, task.test[4].id] == ["chain_sum/train/0", "chain_sum/test/4"]


def test_rows_are_a_function_of_the_seed_and_held_out_ones_do_not_depend_on_the_size():
    first = build(dataset="gcd", size=30, test_size=5, seed=3)
    assert first.train == build(dataset="gcd", size=30, test_size=5, seed=3).train
    assert first.test == build(dataset="gcd", size=10, test_size=5, seed=3).test
    assert first.train != build(dataset="gcd", size=30, test_size=5, seed=4).train


def test_no_question_stands_on_both_sides():
    task = build(dataset="coin_flip", size=300, test_size=30, arguments={"min_trials": 3, "max_trials": 6})
    asked = {example.question for example in task.test}
    assert asked.isdisjoint({example.question for example in task.train})
    dropped = 300 - len(task.train)
    assert dropped > 0
    assert task.notices == (f"coin_flip: {dropped} of 300 training rows dropped, held-out rows ask the same",)


def test_several_data_sets_share_the_sizes():
    task = build(datasets={"gcd": {}, "lcm": {"max_numbers": 2}, "leg_counting": {}}, size=20, test_size=5)
    counts = {
        side: [sum(e.columns["dataset"] == name for e in examples) for name in ("gcd", "lcm", "leg_counting")]
        for side, examples in (("train", task.train), ("test", task.test))
    }
    assert counts["test"] == [2, 2, 1]
    assert sum(counts["train"]) == 20 - sum(int(notice.split()[1]) for notice in task.notices)
    assert counts["train"][0] == 7


def test_what_a_row_needs_to_be_scored_survives_json_and_pickle():
    example = build(dataset="graph_color", size=1, test_size=1).train[0]
    stored = example.columns["reasoning_gym"]
    assert json.loads(json.dumps(dict(example.columns)))["reasoning_gym"] == stored
    assert pickle.loads(pickle.dumps(example)) == example
    assert json.loads(stored)["dataset"] == "graph_color"


def test_a_data_set_without_a_single_answer_has_an_empty_gold():
    assert build(dataset="rush_hour", size=1, test_size=1).train[0].gold == ""


@pytest.mark.parametrize(
    ("value", "stored"),
    [
        ((1, [2.5, None]), ["tuple", 1, ["list", 2.5, None]]),
        ({1: "a"}, ["dict", ["tuple", 1, "a"]]),
        ({True}, ["set", True]),
        (Fraction(1, 3), ["fraction", "1/3"]),
        (np.array([1, 2]), ["list", 1, 2]),
        (np.float64(0.5), 0.5),
        (np.str_("x"), "x"),
    ],
)
def test_values_are_stored_with_their_kind(value, stored):
    assert plain(value) == stored
    assert json.loads(json.dumps(plain(value))) == stored


def test_a_value_that_cannot_be_stored_is_a_type_error():
    with pytest.raises(TypeError, match="object"):
        plain({"a": object()})


def test_rows_that_depend_on_the_hash_seed_are_announced(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (notice,) = build(dataset="ransom_note", size=3, test_size=1).notices
    assert notice.startswith("ransom_note: its rows depend on Python's hash seed; set PYTHONHASHSEED=0")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert build(dataset="ransom_note", size=3, test_size=1).notices == ()


def test_what_a_data_set_prints_is_not_shown(capsys):
    build(dataset="codeio", size=10, test_size=1)
    assert capsys.readouterr().out == ""


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r'pip install "flatpeak\[tasks\]"'):
        build(dataset="gcd")
