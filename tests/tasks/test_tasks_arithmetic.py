import pytest

from flatpeak.errors import UserError
from flatpeak.tasks.arithmetic import ArithmeticConfig
from flatpeak.tasks.config import build_task


def problems(examples):
    return {(e.columns["a"], e.columns["op"], e.columns["b"]) for e in examples}


def test_sizes_are_as_asked_and_no_problem_occurs_twice():
    task = build_task(ArithmeticConfig(train_size=300, test_size=50))
    assert (task.name, len(task.train), len(task.test)) == ("arithmetic", 300, 50)
    assert len(problems(task.train)) == 300
    assert len(problems(task.test)) == 50
    assert len({e.id for e in (*task.train, *task.test)}) == 350


def test_neither_a_held_out_problem_nor_its_commuted_twin_is_trained_on():
    config = ArithmeticConfig(max_value=19, operators=("+", "-", "*"), train_size=800, test_size=150)
    task = build_task(config)
    train, test = problems(task.train), problems(task.test)
    assert not train & test
    assert not {(b, op, a) for a, op, b in test if op in "+*"} & train
    # a - b and b - a are different problems: some pair is split between the sides.
    assert {(b, op, a) for a, op, b in test if op == "-"} & train


def test_gold_is_the_integer_with_its_sign():
    task = build_task(ArithmeticConfig(min_value=-9, max_value=9, operators=("-", "*"), train_size=200, test_size=50))
    by_id = {e.id: e for e in (*task.train, *task.test)}
    for (a, op, b), e in ((k, by_id[f"{k[0]}{k[1]}{k[2]}"]) for k in problems(by_id.values())):
        assert e.gold == str(a - b if op == "-" else a * b)
        assert e.question == f"{a}{op}{b}="
    assert any(e.gold.startswith("-") for e in by_id.values())


def test_rationale_follows_its_format_with_real_line_breaks():
    config = ArithmeticConfig(
        question="{a} {op} {b} =", rationale="{a}{op}{b}={answer}\n#### {answer}", train_size=20, test_size=5
    )
    e = build_task(config).train[0]
    total = e.columns["a"] + e.columns["b"]
    assert e.question == f"{e.columns['a']} + {e.columns['b']} ="
    assert e.rationale == f"{e.columns['a']}+{e.columns['b']}={total}\n#### {total}"


def test_format_specifications_pad_numbers():
    config = ArithmeticConfig(max_value=9, question="{a:03d}{op}{b:03d}=", train_size=10, test_size=2)
    assert all(len(e.question) == 8 and e.question.startswith("00") for e in build_task(config).train)


def test_the_seed_decides_and_the_test_set_does_not_depend_on_the_train_size():
    def ids(**changes):
        task = build_task(ArithmeticConfig(**{"train_size": 100, "test_size": 20, **changes}))
        return [e.id for e in task.train], [e.id for e in task.test]

    assert ids() == ids()
    assert ids()[0] != ids(seed=1)[0]
    assert ids()[1] == ids(train_size=500)[1]


def test_a_range_of_astronomical_size_is_sampled_without_being_listed():
    config = ArithmeticConfig(max_value=10**30, operators=("+", "*"), train_size=1000, test_size=100)
    task = build_task(config)
    assert len(problems(task.train) | problems(task.test)) == 1100
    assert max(e.columns["a"] for e in task.train) > 10**29
    e = task.train[0]
    assert int(e.gold) == (
        e.columns["a"] + e.columns["b"] if e.columns["op"] == "+" else e.columns["a"] * e.columns["b"]
    )


def test_drawing_is_uniform_over_the_range():
    task = build_task(ArithmeticConfig(max_value=1, operators=("-",), train_size=3, test_size=1))
    assert sorted(e.id for e in (*task.train, *task.test)) == ["0-0", "0-1", "1-0", "1-1"]
    first = [
        build_task(ArithmeticConfig(max_value=1, operators=("-",), train_size=3, test_size=1, seed=s)).test[0].id
        for s in range(400)
    ]
    # 100 expected of each; the standard deviation is 8.7.
    assert all(65 < first.count(id) < 135 for id in ("0-0", "0-1", "1-0", "1-1"))


def test_the_size_an_error_suggests_works():
    with pytest.raises(UserError) as caught:
        build_task(ArithmeticConfig(max_value=9, train_size=95, test_size=20))
    size = int(str(caught.value).split("task.train_size to ")[1].split()[0])
    assert len(build_task(ArithmeticConfig(max_value=9, train_size=size, test_size=20)).train) == size
