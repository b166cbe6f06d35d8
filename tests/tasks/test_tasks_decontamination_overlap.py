import itertools
import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from flatpeak.errors import UserError
from flatpeak.tasks.config import TaskConfig, build_task
from flatpeak.tasks.data_files import SourceConfig
from flatpeak.tasks.decontamination import (
    NearDuplicateIndex,
    OverlapConfig,
    find_overlap,
    first_occurrences,
    word_set,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz"
LONG = (
    "A uniform rod of length L pivots about one end and is let go from rest while it is level with the floor. Find T."
)
PROSE = (
    "the quick red fox of the north ran along a frozen river bank until it met an old bear who had lost its way home"
)


def config(**settings):
    return OverlapConfig(sources=(SourceConfig(path="unused.jsonl"),), **settings)


def overlaps(question, *evaluation, **settings):
    return find_overlap([question], evaluation=evaluation, config=config(**settings)).overlapping == [True]


def words(seed, count, vocabulary=400):
    generator = random.Random(seed)
    return ["".join(generator.choices(LETTERS[: 1 + vocabulary % 26], k=3)) for _ in range(count)]


def test_the_equal_question_overlaps_whatever_its_case_and_punctuation():
    assert overlaps("WHAT is osmosis", "What is osmosis?")
    assert not overlaps("What is mitosis?", "What is osmosis?")


def test_thirteen_words_in_a_row_overlap_and_twelve_do_not():
    tokens = PROSE.split()
    assert overlaps("zero " + " ".join(tokens[4:17]) + " one", PROSE, similarity=None)
    assert not overlaps("zero " + " ".join(tokens[4:16]) + " one", PROSE, similarity=None)
    assert overlaps("zero " + " ".join(tokens[4:16]) + " one", PROSE, similarity=None, ngram=12)


def test_a_short_evaluation_question_is_looked_for_whole():
    eight = "what is the mass of one blue whale"
    seven = "what is the mass of a whale"
    assert overlaps(f"Now tell me: {eight}, in tons?", eight, similarity=None)
    assert not overlaps(f"Now tell me: {seven}, in tons?", seven, similarity=None)
    assert overlaps(seven, seven, similarity=None)


def test_words_that_many_evaluation_questions_share_are_wording_and_no_overlap():
    stem = "which one of the following statements about the cell as a whole is not true"
    few = [f"{stem} {name}" for name in LETTERS[:10]]
    many = [f"{stem} {name}" for name in LETTERS[:11]]
    assert overlaps(f"{stem} entirely unlike", *few, similarity=None)
    assert not overlaps(f"{stem} entirely unlike", *many, similarity=None)


def test_a_question_with_other_numbers_and_one_other_word_is_similar():
    asked, again = LONG.replace("L ", "3 m "), LONG.replace("L ", "12 m ").replace("level", "even")
    assert overlaps(again, asked, ngram=40)
    assert not overlaps(again, asked, ngram=40, similarity=0.95)
    assert not overlaps(again, asked, ngram=40, similarity=None)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.9, 1.0])
def test_the_near_duplicate_index_finds_what_comparing_all_pairs_finds(threshold):
    base = [" ".join(words(seed, 12, vocabulary=4)) for seed in range(60)]
    near = [
        " ".join([*text.split()[: 4 + seed % 9], *words(1000 + seed, seed % 4, vocabulary=4)])
        for seed, text in enumerate(base)
    ]
    sets = [word_set(text) for text in base]
    index = NearDuplicateIndex(Counter(word for one in sets for word in one), threshold=threshold)
    for one in sets:
        index.add(one)
    queries = [word_set(text) for text in near]
    expected = [{one for one in sets if len(query & one) / len(query | one) >= threshold} for query in queries]
    assert [set(index.similar(query)) for query in queries] == expected
    assert [index.has_similar(query) for query in queries] == [bool(similar) for similar in expected]
    assert {bool(similar) for similar in expected} == {True, False}


def test_an_index_with_no_idea_of_frequencies_is_right_too():
    index = NearDuplicateIndex(Counter(), threshold=0.5)
    index.add(frozenset("abcd"))
    index.add(frozenset())
    assert index.has_similar(frozenset("abc"))
    assert index.has_similar(frozenset())
    assert not index.has_similar(frozenset("aefg"))


def test_of_near_duplicates_the_first_is_kept():
    questions = [LONG, "What is osmosis?", LONG.replace("L ", "9 "), "what is osmosis", "What is heat?"]
    assert first_occurrences(questions, threshold=0.9) == [True, True, False, False, True]
    assert first_occurrences(questions, threshold=None) == [True, True, True, False, True]


def test_what_repeats_a_dropped_question_but_no_kept_one_stays():
    chain = [" ".join(LETTERS[start : start + 9]) for start in range(4)]
    assert first_occurrences(chain, threshold=0.7) == [True, False, True, False]


def test_the_notice_counts_rows_and_questions():
    result = find_overlap(["What is osmosis?", "Why?"], evaluation=["what is OSMOSIS", "b", "c"], config=config())
    assert result.notice == "1 of 2 training rows dropped: they overlap the 3 questions of task.overlap"


def rows_task(tmp_path, rows, overlap, **settings):
    for name, content in (("rows", rows), ("evaluation", overlap)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return build_task(
        TypeAdapter(TaskConfig).validate_python(
            {
                "type": "rows",
                "train": [{"path": str(tmp_path / "rows.jsonl")}],
                "overlap": {"sources": [{"path": str(tmp_path / "evaluation.jsonl"), "question": "stem"}]},
                **settings,
            }
        )
    )


def test_rows_of_any_task_are_checked_against_an_evaluation_set(tmp_path):
    pairs = ["".join(pair) for pair in itertools.product("abcde", "fghij")]
    rows = [{"question": f"Tell me about {pair}.", "answer": "1"} for pair in pairs]
    whole = rows_task(tmp_path, rows, [{"stem": "nothing alike"}])
    taken = whole.train[3].question
    task = rows_task(tmp_path, rows, [{"stem": taken.upper()}, {"stem": ""}])
    assert [e.question for e in task.train] == [e.question for e in whole.train if e.question != taken]
    assert task.test == whole.test
    assert task.notices == (
        f"1 of {len(whole.train)} training rows dropped: they overlap the 1 questions of task.overlap",
    )


def test_nothing_left_to_train_on_is_an_error(tmp_path):
    rows = [{"question": f"What is {name * 3}?", "answer": "1"} for name in LETTERS]
    with pytest.raises(UserError, match=r"every training row overlaps task\.overlap"):
        rows_task(tmp_path, rows, [{"stem": row["question"]} for row in rows])


@pytest.mark.skipif("FLATPEAK_DATA" not in os.environ, reason="FLATPEAK_DATA names no folder of data sets")
def test_gsm_hard_is_found_to_be_gsm8k_and_training_problems_are_not():
    data = Path(os.environ["FLATPEAK_DATA"])

    def questions(file, column):
        return [json.loads(line)[column] for line in (data / file).read_text(encoding="utf-8").splitlines()]

    test = questions("gsm8k/test.jsonl", "question")
    hard = find_overlap(questions("gsm_hard/test.jsonl", "input"), evaluation=test, config=config())
    assert (sum(hard.overlapping), len(hard.overlapping)) == (1318, 1319)
    train = find_overlap(questions("gsm8k/train.jsonl", "question"), evaluation=test, config=config())
    assert (sum(train.overlapping), len(train.overlapping)) == (5, 7473)
