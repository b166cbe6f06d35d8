import sys

import pytest

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


def example(n):
    return Example(id=str(n), question=f"twice {n}?", gold=str(2 * n))


def doubling(size: int, name: str = "doubling"):
    return Doubling(name, [example(n) for n in range(size)], [example(size)])


def failing():
    raise RuntimeError("the user's own")
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


def test_an_error_inside_the_factory_keeps_its_own_type(file):
    with pytest.raises(RuntimeError, match="the user's own"):
        build_task(CustomTaskConfig(factory=f"{file}:failing"))
