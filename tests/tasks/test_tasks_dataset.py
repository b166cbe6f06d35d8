"""A data set given in Python: anything that has rows becomes a task."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.tasks.dataset import task_of

ROWS: list[dict[str, Any]] = [{"prompt": f"What is {n} + {n}?", "answer": 2 * n} for n in range(20)]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
]


def sides(task: Any) -> dict[str, dict[str, str]]:
    return {side: {e.question: e.gold for e in getattr(task, side)} for side in ("train", "test")}


def test_a_list_of_dicts_holds_out_a_tenth_of_its_questions() -> None:
    task = task_of(ROWS)
    assert (len(task.train), len(task.test)) == (18, 2)
    assert sides(task)["train"] | sides(task)["test"] == {row["prompt"]: str(row["answer"]) for row in ROWS}
    assert sides(task_of(ROWS)) == sides(task)


def test_the_first_held_out_questions_of_sorted_data_are_from_all_of_it() -> None:
    task = task_of([{"prompt": f"{number}?", "answer": number} for number in range(1000)])
    first = [int(example.gold) for example in task.test[:20]]
    assert len({number // 100 for number in first}) > 5
    assert [int(example.gold) for example in task.train] == sorted(set(range(1000)) - {int(e.gold) for e in task.test})


def test_equal_questions_stay_on_one_side_and_two_questions_are_enough() -> None:
    task = task_of([{"prompt": "a?"}, {"prompt": "b?"}, {"prompt": "A?"}, {"prompt": "b ?"}])
    assert sorted((len(task.train), len(task.test))) == [2, 2]
    assert len({e.question.casefold()[0] for e in task.test}) == 1


@pytest.mark.parametrize("kind", ["Dataset", "DataFrame", "file", "generator"])
def test_whatever_has_rows_gives_the_same_task(kind: str, tmp_path) -> None:
    match kind:
        case "Dataset":
            dataset = pytest.importorskip("datasets").Dataset.from_list(ROWS)
        case "DataFrame":
            dataset = pytest.importorskip("pandas").DataFrame(ROWS)
        case "file":
            dataset = tmp_path / "rows.jsonl"
            dataset.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
        case _:
            dataset = (row for row in ROWS)
    assert sides(task_of(dataset)) == sides(task_of(ROWS))


@pytest.mark.parametrize("held_out", ["test", "validation"])
def test_a_data_set_with_parts_keeps_them(held_out: str) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {"train": ROWS[:15], held_out: ROWS[15:]}
    expected = {"train": {r["prompt"]: str(r["answer"]) for r in ROWS[:15]}}
    expected["test"] = {r["prompt"]: str(r["answer"]) for r in ROWS[15:]}
    whole = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    assert sides(task_of(parts)) == sides(task_of(whole)) == expected
    ids = [e.id for task in (task_of(parts),) for e in (*task.train, *task.test)]
    assert len(set(ids)) == 20


@pytest.mark.parametrize(
    ("row", "question", "golds"),
    [
        ({"problem": "p", "solution": "s"}, "p", ("s",)),
        ({"instruction": "p", "input": "", "label": 3.0}, "p", ("3",)),
        ({"Question": "p", "Correct_Answer": "c"}, "p", ("c",)),
        ({"question": "p", "answers": ["Rome", "Roma", "Rome"]}, "p", ("Rome", "Roma")),
        ({"prompt": [CHAT[1]], "reward_model": {"ground_truth": "4"}}, "2+2?", ("4",)),
        ({"messages": [*CHAT, {"role": "assistant", "content": "4"}]}, "2+2?", ("",)),
        ({"prompt": "p", "other": 1}, "p", ("",)),
    ],
)
def test_question_and_gold_are_found_by_their_usual_names(row: Any, question: str, golds: Any) -> None:
    task = task_of({"train": [row], "test": [row]})
    (example,) = task.train
    assert (example.question, example.golds) == (question, golds)
    assert example.columns == row


def test_an_instruction_is_asked_with_its_input() -> None:
    rows = [{"instruction": "Translate.", "input": "chat", "output": "cat"}, {"instruction": "Smile.", "input": ""}]
    (first, second) = task_of({"train": rows, "test": ["x"]}).train
    assert (first.question, second.question) == ("Translate.\n\nchat", "Smile.")


@pytest.mark.parametrize("blank", [float("nan"), None, ""])
def test_a_blank_cell_of_an_instruction_or_its_input_is_left_out(blank: Any) -> None:
    rows = [{"Instruction": "Translate.", "Input": "chat"}, {"Instruction": "Smile.", "Input": blank}]
    rows.append({"Instruction": blank, "Input": "dog"})
    questions = [example.question for example in task_of({"train": rows, "test": ["x"]}).train]
    assert questions == ["Translate.\n\nchat", "Smile.", "dog"]


def test_the_gold_answers_of_the_held_out_part_have_their_own_notice() -> None:
    notices = task_of({"train": ROWS[:3], "test": [{"prompt": "a?", "output": "b"}]}).notices
    assert "dataset['test']: questions from 'prompt', without gold answers" in notices


def test_tool_calls_in_messages_are_refused() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
    with pytest.raises(UserError, match=r"dataset\['train'\]\[0\].* has tool_calls, which are not read from messages"):
        task_of({"train": [{"messages": [*CHAT, call]}], "test": ["x"]})


def test_values_of_numpy_and_columns_that_begin_empty_are_read() -> None:
    numpy = pytest.importorskip("numpy")
    pandas = pytest.importorskip("pandas")
    rows = [
        {"prompt": f"{n}?", "answer": value}
        for n, value in enumerate([numpy.float64(1.5), numpy.int64(2), numpy.array([3, 4])])
    ]
    rows.append({"prompt": "d?", "answer": Decimal("2.50")})
    task = task_of({"train": rows, "test": ["x"]})
    assert [example.golds for example in task.train] == [("1.5",), ("2",), ("3", "4"), ("2.5",)]
    frame = pandas.DataFrame({"name": ["a?", "b?"], "train": [1, 2], "test": [3, 4]})
    assert len(task_of(frame.rename(columns={"name": "prompt"})).train) == 1
    assert len(task_of(frame["name"]).train) == 1
    with pytest.raises(UserError, match=r"dataset\[0\]: the answer .* is empty"):
        task_of([{"prompt": "a?", "answer": None}, {"prompt": "b?", "answer": 2}])


def test_a_notice_says_which_columns_are_used_and_which_questions_repeat() -> None:
    assert task_of(ROWS).notices == ("dataset: questions from 'prompt', gold answers from 'answer'",)
    first, *others = task_of({"train": ROWS, "test": ROWS[:3]}).notices
    assert first.startswith("dataset['train']: questions from 'prompt'")
    assert any("3 of 20 training rows" in notice for notice in others)
    _, repeated = task_of([*ROWS, *ROWS[:3]] * 2).notices
    assert repeated.endswith("training rows kept although an earlier row asks the same; leave them out of dataset")


def test_a_conversation_keeps_its_turns_and_its_reply_is_the_rationale() -> None:
    (example,) = task_of({"train": [{"messages": [*CHAT, {"role": "assistant", "content": "4"}]}], "test": ["x"]}).train
    assert (list(example.messages), example.rationale) == (CHAT, "4")


def test_texts_alone_are_prompts_and_a_task_stays_as_it_is() -> None:
    task = task_of(["a?", "b?"])
    assert {e.question for e in (*task.train, *task.test)} == {"a?", "b?"}
    assert task_of(task) is task


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], "dataset has no rows: give some"),
        ([{"prompt": "a"}, {"prompt": "A!"}], "dataset has one question"),
        ([{"text": "a"}], "dataset: no column of 'text' is a question; name it 'prompt'"),
        ([3], r"dataset\[0\] is a int; a row is a dict with a prompt, or a text"),
        (7, "dataset is a int; give a list of dicts"),
        ({"training": ROWS}, "dataset has the parts 'training': name the one to train on 'train'"),
        ({"train": ROWS, "test": [{"prompt": ""}]}, r"dataset\['test'\]\[0\]: the question .* is empty"),
        ([{"prompt": [{"role": "assistant", "content": "hi"}]}] * 2, "the question is by nobody; the last message"),
        ([{"prompt": [{"role": "system", "content": "hi"}]}] * 2, "the question is by 'system'"),
        ([{"prompt": [{"role": "user"}]}] * 2, "column 'prompt' is neither text nor a list of messages"),
        ([{"prompt": "a", "answer": 1}, {"question": "b", "answer": 1}], r"dataset\[1\]: no column 'prompt'"),
        ("absent.jsonl", "dataset=absent.jsonl: does not exist"),
    ],
)
def test_rows_that_cannot_be_used_are_an_error_that_says_where(dataset: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        task_of(dataset)
