import json
import sys
from types import ModuleType

import pytest

from flatpeak.errors import UserError
from flatpeak.tasks.config import build_task
from flatpeak.tasks.math import GSM8KConfig, gsm8k_gold
from support.tables import read_tables

TABLES = read_tables(__file__)

ROWS = [
    {"question": "Ada has 3 boxes of 4 pens. How many pens? ", "answer": "3 * 4 = <<3*4=12>>12 pens\n#### 12"},
    {"question": "Bo earns $600 twice. How much?", "answer": "600 * 2 = $<<600*2=1200>>1200\n#### 1,200"},
    {"question": "Cy owes 5. What does Cy have?", "answer": "#### -5"},
]


@pytest.fixture
def folder(tmp_path):
    for name, rows in (("train", ROWS), ("test", ROWS[:1])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize(("answer", "gold"), TABLES["golds"])
def test_gold_is_the_number_after_the_last_mark(answer, gold):
    assert gsm8k_gold(answer) == gold


def test_a_directory_in_the_published_layout_is_read(folder):
    task = build_task(GSM8KConfig(path=str(folder)))
    assert task.name == "gsm8k"
    assert [e.gold for e in task.train] == ["12", "1200", "-5"]
    assert [e.id for e in (*task.train, *task.test)] == ["train/0", "train/1", "train/2", "test/0"]
    assert task.train[0].question == "Ada has 3 boxes of 4 pens. How many pens?"
    assert task.train[0].rationale == "3 * 4 = <<3*4=12>>12 pens\n#### 12"
    assert task.train[0].columns["answer"] == task.train[0].rationale


def test_sizes_take_the_first_rows(folder):
    task = build_task(GSM8KConfig(path=str(folder), train_size=2, test_size=1))
    assert [e.gold for e in task.train] == ["12", "1200"]


def test_shots_are_the_first_training_rows_which_then_are_not_trained_on(folder):
    task = build_task(GSM8KConfig(path=str(folder), shots=2))
    assert [e.id for e in task.train] == ["train/2"]
    (example,) = task.test
    assert example.shots == (
        "Question: Ada has 3 boxes of 4 pens. How many pens?\nAnswer: 3 * 4 = <<3*4=12>>12 pens\n#### 12\n\n",
        "Question: Bo earns $600 twice. How much?\nAnswer: 600 * 2 = $<<600*2=1200>>1200\n#### 1,200\n\n",
    )
    assert example.question == "Question: Ada has 3 boxes of 4 pens. How many pens?\nAnswer:"
    assert (example.rationale, example.gold) == (" 3 * 4 = <<3*4=12>>12 pens\n#### 12", "12")
    assert [e.id for e in build_task(GSM8KConfig(path=str(folder), shots=1, train_size=1)).train] == ["train/1"]


def test_without_a_path_the_rows_come_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        return ROWS

    hub = ModuleType("datasets")
    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = build_task(GSM8KConfig(train_size=1))
    assert asked == [("openai/gsm8k", "main", "train"), ("openai/gsm8k", "main", "test")]
    assert (len(task.train), len(task.test)) == (1, 3)


def test_an_unreachable_hub_says_what_to_do(monkeypatch):
    def load_dataset(*_, **__):
        raise ConnectionError("Couldn't reach the Hub\nlong trace")

    hub = ModuleType("datasets")
    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(
        UserError, match=r"Couldn't reach the Hub; .* or give a local copy as task\.path, a directory"
    ) as caught:
        build_task(GSM8KConfig())
    assert "\n" not in str(caught.value)


def test_training_questions_of_the_test_file_are_counted_and_the_local_files_named(folder):
    assert build_task(GSM8KConfig(path=str(folder))).notices == (
        "1 of 3 training rows kept although test rows ask the same, so that test accuracy may come from memory; take "
        "them out of the training files",
    )
    (folder / "test.jsonl").write_text(json.dumps({"question": "Another?", "answer": "#### 1"}) + "\n")
    assert build_task(GSM8KConfig(path=str(folder))).notices == ()
