import csv
import json
from collections import Counter

import pytest

from flatpeak.errors import UserError
from flatpeak.tasks.config import build_task
from flatpeak.tasks.multiple_choice import Choices, ChoicesConfig


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def gold_text(example):
    return example.columns["options"]["ABCDEFGHIJ".index(example.gold)]


def build(source, *, side="test", **settings):
    return build_task(ChoicesConfig(**{side: (source,)}, **settings))


def one(tmp_path, row, *, shuffle=False, **source):
    path = write(tmp_path / "rows.jsonl", [row])
    (example,) = build({"path": path, **source}, shuffle=shuffle).test
    return example


def test_options_of_a_list_stand_below_the_question_with_their_letters(tmp_path):
    example = one(
        tmp_path,
        {"question": " Which? ", "opts": ["red", " green", "blue"], "answer": "green", "why": "It is.", "field": "art"},
        options="opts",
        rationale="why",
        subsets={"topic": "field"},
    )
    assert example.question == "Which?\n\nA. red\nB. green\nC. blue"
    assert (example.id, example.gold, example.rationale) == ("test.0/0", "B", "It is.")
    assert example.subsets == {"topic": "art"}
    assert example.columns["options"] == ["red", "green", "blue"]
    assert example.columns["opts"] == ["red", " green", "blue"]


@pytest.mark.parametrize(
    ("options", "correct", "gold"),
    [
        (["red", "green"], 1, "B"),
        (["red", "green"], "B", "B"),
        (["red", "green"], "b", "B"),
        (["red", "green"], " green ", "B"),
        (["red", "green"], "1", "B"),
        (["2", "1", "0"], "0", "C"),
        ({"text": ["red", "green"], "label": ["1", "2"]}, "2", "B"),
        ({"text": ["red", "green"], "label": ["A", "B"]}, "A", "A"),
        (["B", "x"], "x", "B"),
    ],
)
def test_the_right_option_is_named_by_index_letter_text_or_label(tmp_path, options, correct, gold):
    assert one(tmp_path, {"question": "?", "o": options, "answer": correct}, options="o").gold == gold


def test_options_may_stand_in_columns_of_their_own_of_which_empty_ones_are_none(tmp_path):
    file = tmp_path / "rows.csv"
    with file.open("w", newline="") as out:
        csv.writer(out).writerows([["q", "a", "b", "c", "key"], ["Which?", "red", "green", "", "B"]])
    source = {"path": str(file), "question": "q", "options": ("a", "b", "c"), "correct": "key"}
    (example,) = build(source, shuffle=False).test
    assert (example.question, example.gold) == ("Which?\n\nA. red\nB. green", "B")


def gpqa_rows(size, *, start=0):
    return [
        {
            "Record ID": f"rec{i}",
            "Question": f"What is {i} of {i * i}?\nThink.",
            "Correct Answer": f"right {i}",
            "Incorrect Answer 1": f"wrong {i}",
            "Incorrect Answer 2": f"worse {i}",
            "Incorrect Answer 3": f"worst {i}",
            "High-level domain": ("Physics", "Biology")[i % 2],
        }
        for i in range(start, start + size)
    ]


GPQA = {
    "question": "Question",
    "correct": "Correct Answer",
    "incorrect": ("Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3"),
    "id": "Record ID",
    "subsets": {"domain": "High-level domain"},
}


def test_right_and_wrong_columns_are_shuffled_by_seed_and_id(tmp_path):
    path = write(tmp_path / "main.jsonl", gpqa_rows(200))
    test = build({"path": path, **GPQA}, name="gpqa").test
    assert all(gold_text(example) == f"right {example.id.removeprefix('test.0/rec')}" for example in test)
    counts = Counter(example.gold for example in test)
    assert set(counts) == set("ABCD")
    assert min(counts.values()) > 30
    reordered = write(tmp_path / "reordered.jsonl", gpqa_rows(200)[::-1])
    again = {example.id: example for example in build({"path": reordered, **GPQA}).test}
    assert all(again[example.id] == example for example in test)
    other = build({"path": path, **GPQA}, seed=1).test
    assert [example.gold for example in other] != [example.gold for example in test]
    assert {example.gold for example in build({"path": path, **GPQA}, shuffle=False).test} == {"A"}
    assert test[1].subsets == {"domain": "Biology"}


def test_training_rows_whose_question_is_held_out_are_left_out(tmp_path):
    main = write(tmp_path / "main.jsonl", gpqa_rows(20))
    diamond = write(tmp_path / "diamond.jsonl", gpqa_rows(8, start=4))
    task = build_task(ChoicesConfig(name="gpqa", train=({"path": main, **GPQA},), test=({"path": diamond, **GPQA},)))
    assert task.name == "gpqa"
    assert len(task.test) == 8
    assert {e.id for e in task.train} == {f"train.0/rec{i}" for i in (*range(4), *range(12, 20))}
    assert task.notices == ("8 of 20 training rows dropped: test rows ask the same",)
    with pytest.raises(UserError, match=r"task\.train: all 8 questions are questions of task\.test too"):
        build_task(ChoicesConfig(train=({"path": diamond, **GPQA},), test=({"path": diamond, **GPQA},)))


def test_without_test_sources_a_hash_of_the_question_holds_rows_out(tmp_path):
    path = write(tmp_path / "main.jsonl", [*gpqa_rows(100), *(r | {"Record ID": "again"} for r in gpqa_rows(1))])
    task = build({"path": path, **GPQA}, side="train", test_fraction=0.3)
    assert len(task.train) + len(task.test) == 101
    assert 15 < len(task.test) < 45
    assert not {e.columns["question"] for e in task.train} & {e.columns["question"] for e in task.test}


def test_an_empty_option_never_moves_the_letters_of_the_others(tmp_path):
    row = {
        "question": "q",
        "a": "w",
        "b": "x",
        "c": "y",
        "d": "z",
        "e": None,
        "options": ["w", None, "y"],
        "answer": "D",
    }
    columns = {"options": ["a", "b", "c", "d", "e"], "question": "question", "correct": "answer"}
    path = write(tmp_path / "rows.jsonl", [row])
    (example,) = build({"path": path, **columns}, shuffle=False).test
    assert (example.gold, example.columns["options"]) == ("D", ["w", "x", "y", "z"])


def test_shuffling_keeps_track_of_the_right_option():
    choices = Choices(options=("a", "b", "c", "d"), right=2)
    for seed in range(20):
        shuffled = choices.shuffled(seed=seed, id="x")
        assert sorted(shuffled.options) == ["a", "b", "c", "d"]
        assert shuffled.options["ABCD".index(shuffled.letter)] == "c"
    assert choices.lettered() == "A. a\nB. b\nC. c\nD. d"
