import csv
import os
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

from flatpeak.errors import UserError
from flatpeak.tasks.config import build_task
from flatpeak.tasks.mmlu import CATEGORIES, MMLUConfig

ODD = ['Which of these,\nif any, is "round"?', 'a "wheel"', "b,c", "a\nline", "42"]


def rows(subject, split, size):
    return [[f"{subject} {split} {i}?", f"w{i}", f"x{i}", f"y{i}", f"z{i}", "ABCD"[i % 4]] for i in range(size)]


@pytest.fixture
def tree(tmp_path):
    for split, size in (("dev", 5), ("val", 2), ("test", 3)):
        (tmp_path / split).mkdir()
        for subject in ("astronomy", "human_aging"):
            content = rows(subject, split, size)
            if split == "test" and subject == "astronomy":
                content[1] = [*ODD, "D"]
            with (tmp_path / split / f"{subject}_{split}.csv").open("w", newline="") as file:
                csv.writer(file).writerows(content)
    return tmp_path


def build(tree, **settings):
    return build_task(MMLUConfig(path=str(tree), **settings))


def by_id(examples):
    return {example.id: example for example in examples}


def test_the_original_tree_gives_five_shot_prompts_of_the_same_subject(tree):
    task = build(tree)
    assert task.name == "mmlu"
    assert (len(task.train), len(task.test)) == (4, 6)
    example = by_id(task.test)["test/human_aging/2"]
    assert example.preamble == "The following are multiple choice questions (with answers) about  human aging.\n\n"
    assert example.question == "human_aging test 2?\nA. w2\nB. x2\nC. y2\nD. z2\nAnswer:"
    assert len(example.shots) == 5
    assert example.shots[1] == "human_aging dev 1?\nA. w1\nB. x1\nC. y1\nD. z1\nAnswer: B\n\n"
    assert (example.gold, example.rationale) == ("C", " C")
    assert example.subsets == {"subject": "human_aging", "category": "other"}
    assert example.columns["options"] == ["w2", "x2", "y2", "z2"]
    assert set(by_id(task.train)) == {f"validation/{s}/{i}" for s in ("astronomy", "human_aging") for i in (0, 1)}


def test_line_breaks_quotes_and_commas_inside_cells_survive(tree):
    example = by_id(build(tree).test)["test/astronomy/1"]
    assert example.question == (
        'Which of these,\nif any, is "round"?\nA. a "wheel"\nB. b,c\nC. a\nline\nD. 42\nAnswer:'
    )
    assert example.gold == "D"


def test_official_questions_keep_their_own_spaces_and_plain_ones_lose_them(tree):
    for split in ("dev", "test"):
        with (tree / split / f"astronomy_{split}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([[f" {split} {i}? ", "w", "x ", "y", "z", "A"] for i in range(5)])
    example = by_id(build(tree).test)["test/astronomy/3"]
    assert example.shots[4] == " dev 4? \nA. w\nB. x \nC. y\nD. z\nAnswer: A\n\n"
    assert example.question == " test 3? \nA. w\nB. x \nC. y\nD. z\nAnswer:"
    assert by_id(build(tree, wording="plain").test)["test/astronomy/3"].question.startswith("test 3?\n\nA. w")


def test_fewer_shots_are_the_first_ones_and_none_leave_the_preamble(tree):
    two = by_id(build(tree, shots=2).test)["test/astronomy/0"]
    assert [shot.split("?")[0] for shot in two.shots] == ["astronomy dev 0", "astronomy dev 1"]
    none = by_id(build(tree, shots=0).test)["test/astronomy/0"]
    assert (none.shots, none.preamble[:13]) == ((), "The following")


def test_plain_wording_is_the_question_and_its_lettered_options_alone(tree):
    example = by_id(build(tree, wording="plain").test)["test/astronomy/0"]
    assert example.question == "astronomy test 0?\n\nA. w0\nB. x0\nC. y0\nD. z0"
    assert (example.preamble, example.shots) == ("", ())
    assert example.rationale == "The answer is (A)."


def test_subjects_limit_both_sides(tree):
    task = build(tree, subjects=("Human Aging",))
    assert {e.subsets["subject"] for e in (*task.train, *task.test)} == {"human_aging"}


def test_the_first_rows_are_of_all_subjects_in_a_seeded_order(tree):
    whole = [example.id for example in build(tree).test]
    assert whole != sorted(whole)
    assert [example.id for example in build(tree, test_size=4).test] == whole[:4]
    assert len({id.split("/")[1] for id in whole[:4]}) == 2


def test_auxiliary_rows_have_no_subject_and_no_shots(tree):
    (tree / "auxiliary_train").mkdir()
    with (tree / "auxiliary_train" / "race.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows("read", "aux", 3))
    task = build(tree, train="auxiliary_train", subjects=("astronomy",))
    assert sorted(by_id(task.train)) == [f"auxiliary_train/rows/{i}" for i in range(3)]
    assert (task.train[0].shots, task.train[0].subsets) == ((), {})
    assert task.train[0].preamble == "The following are multiple choice questions (with answers).\n\n"


def test_a_folder_above_or_within_the_tree_is_answered_with_the_tree(tree, tmp_path_factory):
    above = tmp_path_factory.mktemp("above")
    (above / "mmlu").symlink_to(tree)
    for misplaced, meant in ((tree / "test", tree), (above, above / "mmlu")):
        with pytest.raises(UserError) as error:
            build(misplaced)
        assert str(error.value) == f"task.path={misplaced}: no .csv files in dev/; did you mean task.path={meant}?"


def test_without_a_path_the_splits_come_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split):
        asked.append((name, config, split))
        size = 5 if split == "dev" else 1
        return [
            {"question": f"{split} {i}", "subject": "virology", "choices": ["p", "q", "r", "s"], "answer": 2}
            for i in range(size)
        ]

    hub = ModuleType("datasets")
    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = build_task(MMLUConfig())
    assert sorted(asked) == [("cais/mmlu", "all", split) for split in ("dev", "test", "validation")]
    assert task.test[0].question == "test 0\nA. p\nB. q\nC. r\nD. s\nAnswer:"
    assert (task.test[0].gold, task.test[0].subsets["category"]) == ("C", "other")


def test_the_57_subjects_have_the_published_grouping():
    assert Counter(CATEGORIES.values()) == {"STEM": 18, "humanities": 13, "social sciences": 12, "other": 14}


@pytest.mark.skipif("FLATPEAK_DATA" not in os.environ, reason="FLATPEAK_DATA names no folder of data sets")
def test_the_published_files_load_whole():
    task = build(Path(os.environ["FLATPEAK_DATA"]) / "mmlu")
    assert (len(task.train), len(task.test)) == (1531, 14042)
    assert len({example.id for example in (*task.train, *task.test)}) == 1531 + 14042
    assert {example.subsets["subject"] for example in task.test} == set(CATEGORIES)
    assert sum(len(shots) for shots in {e.subsets["subject"]: e.shots for e in task.test}.values()) == 285
    # The published grouping of the published files.
    assert Counter(example.subsets["category"] for example in task.test) == {
        "STEM": 3018,
        "humanities": 4705,
        "social sciences": 3077,
        "other": 3242,
    }
    assert Counter(example.gold for example in task.test) == {"A": 3222, "B": 3462, "C": 3582, "D": 3776}
