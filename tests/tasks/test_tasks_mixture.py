"""Several tasks as one: ids, names, shares, and training questions that another task holds out."""

from __future__ import annotations

from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.tasks.data_files import ExampleTask
from flatpeak.tasks.mixture import check_names, leaks, mix, named
from flatpeak.types import Example


def examples(*questions: str) -> tuple[Example, ...]:
    return tuple(Example(id=str(n), question=text, gold="", columns={"n": n}) for n, text in enumerate(questions))


def task(name: str, train: tuple[Example, ...], test: tuple[Example, ...], *notices: str) -> Any:
    return ExampleTask(name=name, train=train, test=test, notices=notices)


SUMS = task("sums", examples("1+1", "1+2", "1+3"), examples("2+2"), "a notice")
WORDS = task("rows", examples("one apple"), examples("two apples", "2+2"))


def test_examples_alternate_and_name_their_task() -> None:
    mixture = mix([(None, 3, SUMS), ("words", 1, WORDS)])
    assert [one.id for one in mixture.train] == ["sums/0", "words/0", "sums/1", "sums/2"]
    assert [(one.id, one.task) for one in mixture.test] == [
        ("sums/0", "sums"),
        ("words/0", "words"),
        ("words/1", "words"),
    ]
    assert mixture.shares == {"sums": 0.75, "words": 0.25}
    assert (mixture.name, mixture.notices) == ("mixture", ("sums: a notice",))


def test_reward_functions_get_the_name_of_the_task_unless_the_data_has_such_a_column() -> None:
    assert [one.columns for one in named("words", examples("one"))] == [{"task": "words", "n": 0}]
    own = (Example(id="0", question="q", gold="", columns={"task": "mine"}),)
    assert named("words", own)[0].columns == {"task": "mine"}


def test_a_notice_counts_training_questions_that_another_task_holds_out() -> None:
    held = task("held", examples("x"), examples("1+2", "1+3", "5+5"))
    (notice,) = mix([(None, 1, task("sums", SUMS.train, SUMS.test)), (None, 1, held)]).notices
    assert notice.startswith(
        "2 of 4 training rows ask questions that held holds out, so that its accuracy may come from "
    )
    assert not list(leaks(mix([(None, 1, SUMS), (None, 1, WORDS)]).train, {"set": examples("7+7")}))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ("mixture", "rows", "rows"),
            "'rows' names two tasks or evaluation sets: set task.name, or tasks.0.name and so on, or rename",
        ),
        (
            ("mixture", "sums", "mixture"),
            "'mixture' names the whole in metrics: set task.name, or tasks.0.name and so on",
        ),
        (("sums", ""), "'' is empty: set task.name, or tasks.0.name and so on, or rename it in evaluation.sets"),
        (
            ("sums", "a/b"),
            "'a/b' has a slash: set task.name, or tasks.0.name and so on, or rename it in evaluation.sets",
        ),
    ],
)
def test_names_that_would_share_metrics_are_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        check_names(names)
    assert str(error.value).startswith(message)


def test_two_tasks_of_one_name_need_names() -> None:
    with pytest.raises(UserError, match="'rows' names two tasks"):
        mix([(None, 1, WORDS), (None, 1, WORDS)])
    assert set(mix([("a", 1, WORDS), ("b", 1, WORDS)]).shares) == {"a", "b"}
