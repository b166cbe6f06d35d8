import json
import sys
from types import ModuleType

import pytest

from flatpeak.errors import UserError
from flatpeak.tasks.config import build_task
from flatpeak.tasks.data_files import SourceConfig
from flatpeak.tasks.rows import RowsConfig

NAMES = ["Ann", "Ben", "Cleo", "Dev", "Eve", "Finn", "Gus", "Hana", "Ivy", "Jon"]
THINGS = ["kites", "drums", "pears", "coins", "masks", "ropes", "seeds", "tiles", "lamps", "shells"]


@pytest.fixture
def write(tmp_path):
    def write_rows(rows, name="rows.jsonl"):
        file = tmp_path / name
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(file)

    return write_rows


def one_side(write, rows, **source):
    """The examples of a source, read as training rows; the test row is of no interest."""
    test = write([{"q": "unlike all others", "a": "0"}], "other.jsonl")
    config = RowsConfig(
        train=(SourceConfig(path=write(rows), **source),), test=(SourceConfig(path=test, question="q", answer="a"),)
    )
    return build_task(config).train


def distinct_rows(count):
    return [
        {"question": f"{NAMES[i % 10]} keeps {i} {THINGS[i // 20]} under the {THINGS[i % 7]}; how many?", "answer": i}
        for i in range(count)
    ]


def test_columns_and_format_strings_make_question_gold_and_rationale(write):
    rows = [{"Body": " Lu has 8 pens. ", "Question": "Half of them? ", "Answer": 4.0, "Equation": "( 8.0 / 2.0 )"}]
    (example,) = one_side(
        write, rows, question="{Body} {Question}\n", answer="Answer", rationale="{Equation} = {gold}\n#### {gold}"
    )
    assert example.question == "Lu has 8 pens. Half of them?\n"
    assert example.gold == "4"
    assert example.rationale == "( 8.0 / 2.0 ) = 4\n#### 4"
    assert example.columns == rows[0]


def test_an_empty_part_of_a_question_leaves_no_leading_space(write):
    rows = [{"Body": "", "Question": "What is 2+2?", "a": 4}, {"Body": None, "Question": "What is 2+3?", "a": 5}]
    examples = one_side(write, rows, question="{Body} {Question}", answer="a")
    assert [e.question for e in examples] == ["What is 2+2?", "What is 2+3?"]


def test_rows_without_gold_answers_are_told_how_to_say_so(write):
    asked = {"role": "user", "content": "1 + 1?"}
    rows = [{"messages": [asked, {"role": "assistant", "content": " 2.0 "}]}, {"messages": [asked]}]
    replied, silent = one_side(write, rows, question="messages", answer=None)
    assert (replied.gold, replied.rationale, silent.gold, silent.rationale) == ("", " 2.0 ", "", None)
    (replied,) = one_side(write, rows[:1], question="messages", answer="messages.1.content")
    assert replied.gold == "2"
    with pytest.raises(UserError, match=r"no column 'answer' \(task\.train\.0\.answer, null for none\)"):
        one_side(write, rows, question="messages")


def test_a_row_without_its_rationale_has_none(write):
    rows = [{"q": "one", "a": 1, "work": "1=1"}, {"q": "two", "a": 2, "work": None}]
    examples = one_side(write, rows, question="q", answer="a", rationale="{work}\n#### {gold}")
    assert [e.rationale for e in examples] == ["1=1\n#### 1", None]


def test_column_names_may_hold_any_sign(write):
    (example,) = one_side(write, [{"the-question: 1": "why", "a.b": "3"}], question="the-question: 1", answer="{a.b}0")
    assert (example.question, example.gold) == ("why", "30")


def test_answer_pattern_takes_its_group_or_the_whole_match(write):
    rows = [{"question": "q1", "answer": "9 (apples)"}, {"question": "q2", "answer": "1,250. (kg)"}]
    assert [e.gold for e in one_side(write, rows, answer_pattern=r"^(-?[0-9.,]+)")] == ["9", "1250"]
    assert [e.gold for e in one_side(write, rows, answer_pattern=r"\d+")] == ["9", "1"]


def test_rows_in_which_a_pattern_finds_nothing_are_dropped_where_only_integers_are_wanted(write):
    rows = [{"question": "q1", "answer": "9 (apples)"}, {"question": "q2", "answer": "Monday"}]
    config = RowsConfig(
        train=(SourceConfig(path=write(rows), answer_pattern=r"^\d+"),),
        test=(SourceConfig(path=write(distinct_rows(1), "t.jsonl")),),
        integers_only=True,
    )
    assert [e.gold for e in build_task(config).train] == ["9"]


def test_integers_only_drops_decimals_and_words_and_keeps_ids(write):
    answers = [43.0, 0.5, "1,000", "Yes", "-7", "3/4", 12]
    config = RowsConfig(
        train=(SourceConfig(path=write([{"question": f"q{i}", "answer": a} for i, a in enumerate(answers)])),),
        test=(SourceConfig(path=write(distinct_rows(1), "t.jsonl")),),
        integers_only=True,
    )
    assert [(e.id, e.gold) for e in build_task(config).train] == [
        ("train.0/0", "43"),
        ("train.0/2", "1000"),
        ("train.0/4", "-7"),
        ("train.0/6", "12"),
    ]


def test_large_and_small_floats_are_written_out(write):
    rows = [{"question": "big", "answer": 1e16}, {"question": "small", "answer": 1e-7}]
    assert [e.gold for e in one_side(write, rows)] == ["10000000000000000", "0.0000001"]


def test_ids_come_from_their_column(write):
    rows = [{"question": "a", "answer": 1, "ID": "x-1"}, {"question": "b", "answer": 2, "ID": "x-2"}]
    assert [e.id for e in one_side(write, rows, id="ID")] == ["train.0/x-1", "train.0/x-2"]


def test_sources_are_laid_end_to_end_with_ids_of_their_own(write):
    first = write([{"question": "a", "answer": 1}], "first.jsonl")
    second = write([{"input": "b", "target": 2.0}], "second.jsonl")
    config = RowsConfig(
        name="both",
        train=(SourceConfig(path=first), SourceConfig(path=second, question="input", answer="target")),
        test=(SourceConfig(path=first),),
    )
    task = build_task(config)
    assert task.name == "both"
    assert [(e.id, e.question, e.gold) for e in task.train] == [("train.0/0", "a", "1"), ("train.1/0", "b", "2")]
    assert [e.id for e in task.test] == ["test.0/0"]


def test_equal_questions_stay_apart_by_id_unless_deduplicated(write):
    rows = [{"question": q, "answer": a} for q, a in (("How many?", 1), ("how MANY", 2), ("How many 3?", 3))]
    files = {"train": (SourceConfig(path=write(rows)), SourceConfig(path=write(rows[2:], "more.jsonl")))}
    files["test"] = (SourceConfig(path=write(distinct_rows(2), "t.jsonl")),)
    assert [e.id for e in build_task(RowsConfig(**files)).train] == ["train.0/0", "train.0/1", "train.0/2", "train.1/0"]
    # The first of each stays, within a source and between sources.
    assert [e.id for e in build_task(RowsConfig(**files, deduplicate=True)).train] == ["train.0/0", "train.0/2"]


def test_deduplication_drops_training_rows_that_are_tested_on_and_no_test_row(write):
    train = [{"question": "Seen?", "answer": 1}, {"question": "New", "answer": 2}]
    test = [{"question": "seen", "answer": 1}, {"question": "seen!", "answer": 1}]
    config = RowsConfig(
        train=(SourceConfig(path=write(train)),), test=(SourceConfig(path=write(test, "t.jsonl")),), deduplicate=True
    )
    task = build_task(config)
    assert [e.question for e in task.train] == ["New"]
    assert len(task.test) == 2


def test_a_split_by_fraction_is_seeded_and_independent_of_row_order(write):
    rows = distinct_rows(200)

    def test_questions(rows, **changes):
        task = build_task(RowsConfig(train=(SourceConfig(path=write(rows)),), **changes))
        assert len(task.train) + len(task.test) == len(rows)
        return {e.question for e in task.test}

    test_rows = test_questions(rows)
    assert 20 <= len(test_rows) <= 60
    assert test_questions(rows[::-1]) == test_rows
    assert test_questions(rows[:100]) == test_rows & {row["question"] for row in rows[:100]}
    assert test_questions(rows, seed=1) != test_rows


def test_equal_and_near_equal_questions_stay_on_one_side(write):
    # A story's versions differ in the name, one word of 14; the stories differ in four words.
    story = "{name} went early to the {thing}shop with a {thing}bag and {thing}money to buy {number} {thing}"
    rows = [
        {"question": story.format(name=name, number=number, thing=thing), "answer": number}
        for thing in THINGS
        for name, number in (("Ann", 3), ("ANN", 3), ("Ben", 5), ("Cleo", 8))
    ]

    def shared(threshold):
        config = RowsConfig(train=(SourceConfig(path=write(rows)),), near_duplicates=threshold, test_fraction=0.5)
        task = build_task(config)
        stories = [{e.question.split()[-1] for e in side} for side in (task.train, task.test)]
        questions = [{e.question.casefold() for e in side} for side in (task.train, task.test)]
        return len(stories[0] & stories[1]), len(questions[0] & questions[1])

    assert shared(0.8) == (0, 0)
    stories, questions = shared(None)
    assert stories > 3
    assert questions == 0


def test_test_examples_say_whether_training_has_nearly_the_same_question(write):
    train = [{"question": "Ann has 3 red kites and buys 4 more; how many kites has she", "answer": 7}]
    test = [
        {"question": "Ann has 12 red kites and buys 9 more; how many kites has she?", "answer": 21},
        {"question": "Ann has 12 red coins and sells 9; how many are left?", "answer": 3},
    ]
    files = {
        "train": (SourceConfig(path=write(train)),),
        "test": (SourceConfig(path=write(test, "t.jsonl")),),
    }
    task = build_task(RowsConfig(**files, near_duplicates=0.8))
    assert [e.columns["near_train"] for e in task.test] == [True, False]
    assert task.test[0].columns["answer"] == 21
    assert "near_train" not in task.train[0].columns
    assert "near_train" not in build_task(RowsConfig(**files)).test[0].columns


def test_hub_rows_pass_through_the_same_mapping(monkeypatch):
    def load_dataset(name, config, *, split):
        assert (name, config) == ("some/name", "easy")
        return [{"q": f"{split} question", "a": "5.0"}]

    hub = ModuleType("datasets")
    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    source = SourceConfig(hub="some/name", hub_config="easy", question="q", answer="a")
    task = build_task(RowsConfig(train=(source,), test=(source.model_copy(update={"split": "validation"}),)))
    assert [(e.question, e.gold) for e in (*task.train, *task.test)] == [
        ("train question", "5"),
        ("validation question", "5"),
    ]


def test_csv_cells_are_numbers_once_normalized(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\nWhat is 1+1?,2.0\nWhat is 2+2?,4\n")
    (tmp_path / "b.csv").write_text('question,answer\nWhat is 500+500?,"1,000"\n')
    config = RowsConfig(
        train=(SourceConfig(path=str(tmp_path / "a.csv")),), test=(SourceConfig(path=str(tmp_path / "b.csv")),)
    )
    task = build_task(config)
    assert [e.gold for e in (*task.train, *task.test)] == ["2", "4", "1000"]


def test_questions_on_both_sides_or_with_several_answers_are_counted_in_notices(write):
    train = [{"q": "What is 2 + 2?", "a": 4}, {"q": "what is 2+2", "a": 5}, {"q": "What is 3 + 3?", "a": 6}]
    train += [{"q": "What is 2 + 2?", "a": number} for number in (6, 7, 8)]
    test = [{"q": "What is 3 + 3?", "a": 6}]
    sides = {
        side: (SourceConfig(path=write(rows, f"{side}.jsonl"), question="q", answer="a"),)
        for side, rows in (("train", train), ("test", test))
    }
    assert build_task(RowsConfig(**sides)).notices == (
        "4 of 6 training rows kept although an earlier row asks the same; task.deduplicate=true drops them",
        "1 of 6 training rows kept although test rows ask the same, so that test accuracy may come from memory; "
        "task.deduplicate=true drops them",
        "questions with several gold answers: 1, the first in rows train.0/0 and train.0/1; repair them",
    )
    assert build_task(RowsConfig(**sides, deduplicate=True)).notices == ()


@pytest.mark.parametrize("value", ["Infinity", "-Infinity", "1e999"])
def test_an_answer_that_is_no_finite_number_is_an_error_with_its_line(tmp_path, value):
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"question": "q", "answer": {value}, "other": Infinity}}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl line 1: column 'answer' holds -?inf, which is not a JSON number"):
        build_task(RowsConfig(train=(SourceConfig(path=str(file)),)))
    file.write_text('{"question": "Is 2 even?", "answer": true, "other": Infinity}\n' * 2)
    assert one_side_of(file).gold == "True"


def one_side_of(file):
    source = SourceConfig(path=str(file))
    return build_task(RowsConfig(train=(source,), test=(source,))).train[0]
