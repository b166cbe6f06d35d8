import sys

import pytest

from flatpeak.errors import UserError
from flatpeak.tasks.config import build_task
from flatpeak.tasks.custom import CustomTaskConfig
from flatpeak.utils.user_code import load_object

SOURCE = """
from __future__ import annotations

from dataclasses import dataclass

from flatpeak.types import Example


@dataclass
class Doubling:
    name: str
    train: list[Example]
    test: list[Example]


def example(n, **changes):
    return Example(**{"id": str(n), "question": f"twice {n}?", "gold": str(2 * n), **changes})


def doubling(size: int, name: str = "doubling"):
    return Doubling(name, [example(n) for n in range(size)], [example(size)])


def nameless():
    return object()


def numbered():
    return Doubling(5, [example(0)], [example(1)])


def lazy():
    return Doubling("lazy", (example(n) for n in range(3)), [example(9)])


def bare():
    return Doubling("bare", [{"question": "q"}], [example(9)])


def empty():
    return Doubling("empty", [example(0)], [])


def repeated():
    return Doubling("repeated", [example(0)], [example(0)])


def numeric():
    return Doubling("numeric", [example(0, gold=0)], [example(1)])


def failing():
    raise RuntimeError("the user's own")


constant = 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "my_doubling_task.py"
    path.write_text(SOURCE)
    return path


def test_a_file_of_the_user_makes_the_task(file):
    task = build_task(CustomTaskConfig(factory=f"{file}:doubling", arguments={"size": 3}))
    assert task.name == "doubling"
    assert [e.gold for e in task.train] == ["0", "2", "4"]
    assert [e.gold for e in task.test] == ["6"]


def test_a_module_on_the_path_makes_the_task(file, monkeypatch):
    monkeypatch.syspath_prepend(str(file.parent))
    task = build_task(CustomTaskConfig(factory="my_doubling_task:doubling", arguments={"size": 1, "name": "mine"}))
    assert (task.name, len(task.train)) == ("mine", 1)
    sys.modules.pop("my_doubling_task")


def test_two_files_of_one_name_do_not_answer_for_each_other(tmp_path):
    classes = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "task.py").write_text(f"class Which:\n    folder = {folder!r}\n")
        classes.append(load_object(f"{tmp_path / folder / 'task.py'}:Which", where="task"))
    assert [each.folder for each in classes] == ["one", "two"]
    assert [sys.modules[each.__module__].Which for each in classes] == classes


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("{file}", "write module:name or file.py:name"),
        ("{file}:", "write module:name or file.py:name"),
        ("{folder}/absent.py:make", "task.factory=.*absent.py:make: there is no file .*absent.py"),
        ("{file}:dubling", r"has no 'dubling', did you mean 'doubling'\?"),
        ("no_such_module_anywhere:make", "No module named 'no_such_module_anywhere'; install it, or write file.py"),
        ("{file}:constant", "is a int; name a function"),
        ("{file}:doubling", "missing a required argument: 'size'; change task.arguments"),
        ("{file}:nameless", "without name; a task has `name`, `train` and `test`"),
        ("{file}:numbered", "name is a int, not a string"),
        ("{file}:lazy", "train is a generator, not a sequence"),
        ("{file}:bare", r"train\[0\] is a dict, not a flatpeak.types.Example"),
        ("{file}:empty", "test is empty"),
        ("{file}:repeated", r"test\[0\] has id '0', which is taken"),
        ("{file}:numeric", r"train\[0\].gold is 0, not a string"),
    ],
)
def test_what_is_wrong_with_a_factory_is_said_in_one_line(file, factory, message):
    with pytest.raises(UserError, match=message) as caught:
        build_task(CustomTaskConfig(factory=factory.format(file=file, folder=file.parent)))
    assert "\n" not in str(caught.value)


def test_an_error_inside_the_factory_keeps_its_own_type(file):
    with pytest.raises(RuntimeError, match="the user's own"):
        build_task(CustomTaskConfig(factory=f"{file}:failing"))
