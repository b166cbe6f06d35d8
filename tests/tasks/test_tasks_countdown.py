import json

import pytest
from pydantic import TypeAdapter

from flatpeak.errors import UserError
from flatpeak.rewards.countdown import CountdownReward, evaluate
from flatpeak.tasks import arithmetic
from flatpeak.tasks.config import TaskConfig, build_task
from flatpeak.types import Completion, Prompt
from support.cpu_time import cpu_time


def build(**task):
    return build_task(TypeAdapter(TaskConfig).validate_python({"type": "countdown", **task}))


def key(example):
    return tuple(sorted(example.columns["nums"])), example.columns["target"]


@pytest.fixture(scope="module")
def generated():
    return build(train_size=3000, test_size=200)


def test_every_generated_problem_is_solved_by_its_solution(generated):
    assert (generated.name, len(generated.train), len(generated.test)) == ("countdown", 3000, 200)
    for example in (*generated.train, *generated.test):
        value, numbers = evaluate(example.columns["solution"])
        assert value == example.columns["target"] == int(example.gold)
        assert sorted(numbers) == example.columns["nums"]
        assert 10 <= example.columns["target"] <= 99
        assert all(1 <= number <= 99 for number in numbers)
        assert len(numbers) in (3, 4)


def test_the_rationale_scores_one(generated):
    for example in generated.test:
        prompt = Prompt(id=example.id, token_ids=(0,), text=example.question, example=example)
        answer = Completion(token_ids=(0,), logprobs=(0.0,), finish_reason="stop", text=example.rationale)
        assert CountdownReward()(answer, prompt) == 1.0


def test_no_problem_occurs_twice_on_one_side_or_on_both(generated):
    assert len({key(example) for example in (*generated.train, *generated.test)}) == 3200
    assert len({example.id for example in (*generated.train, *generated.test)}) == 3200


def test_all_operations_and_both_counts_occur(generated):
    solutions = [example.columns["solution"] for example in generated.train]
    for sign in ("+", "-", "*", "/", "("):
        assert sum(sign in solution for solution in solutions) > 100
    counts = [len(example.columns["nums"]) for example in generated.train]
    assert min(counts.count(3), counts.count(4)) > 600


def test_the_problems_are_a_function_of_the_seed(generated):
    assert [key(e) for e in generated.train][:50] == [key(e) for e in build(train_size=50, test_size=200).train]
    assert key(generated.train[0]) != key(build(train_size=50, test_size=200, seed=1).train[0])
    # Pinned: another version of NumPy must not make other problems.
    assert [key(e) for e in generated.test[:3]] == [((60, 92, 93), 59), ((1, 5, 23, 41), 23), ((61, 69, 76), 68)]


def test_the_question_has_the_numbers_and_the_target():
    task = build(train_size=5, test_size=1, question="{target} of {nums}?", counts=[2], min_number=3, max_number=5)
    for example in task.train:
        first, second = example.columns["nums"]
        assert example.question == f"{example.gold} of {first}, {second}?"


def test_problems_are_a_sequence(generated):
    assert generated.train[-1] == generated.train[2999]
    assert list(generated.train[1:3]) == [generated.train[1], generated.train[2]]
    assert [example.id for example in generated.train[:2]] == ["train/0", "train/1"]
    with pytest.raises(IndexError):
        generated.train[3000]


def test_tinyzeros_size_is_made_in_seconds():
    with cpu_time() as spent:
        task = build()
        assert (len(task.train), len(task.test)) == (327_680, 1024)
        assert task.train[327_679].id == "train/327679"
    assert spent.seconds < 20


def published(tmp_path, rows, **task):
    file = tmp_path / "countdown.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build(source="published", path=str(file), **task)


def test_published_rows_are_train_then_test_and_overlaps_leave_train(tmp_path):
    rows = [{"target": 24 + n, "nums": [n, 3, 8]} for n in range(6)]
    rows[1] = {"target": 28, "nums": [8, 4, 3]}  # what row 4 asks, in another order
    task = published(tmp_path, [*rows, {"target": 1, "nums": [1, 2]}], train_size=4, test_size=2)
    assert [e.id for e in task.train] == ["0", "2", "3"]
    assert [e.id for e in task.test] == ["4", "5"]
    assert task.train[1].columns == {"nums": [2, 3, 8], "target": 26}
    assert task.train[1].rationale is None
    assert task.notices == ("1 training rows dropped: test rows ask the same",)


def test_without_a_path_the_hub_is_asked(monkeypatch):
    asked = []

    def nothing(name, *, config, split, path_option):
        asked.append((name, split, path_option))
        return iter(())

    monkeypatch.setattr(arithmetic, "read_hub", nothing)
    with pytest.raises(UserError, match="there are only 0 rows"):
        build(source="published")
    assert asked == [("Jiayi-Pan/Countdown-Tasks-3to4", "train", "task.path, a file")]
