import json
import sys
from types import ModuleType

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.math.extract import extract_answer, gold_answer
from flatpeak.tasks.config import build_task
from flatpeak.tasks.data_files import slug
from flatpeak.tasks.math import MATH500_HUB_NAME, MATH_HUB_NAME, SUBJECTS, MATHConfig, boxed_answer
from support.tables import read_tables

TABLES = read_tables(__file__)


def row(problem, answer, *, level="Level 1", type="Algebra"):
    return {"problem": problem, "level": level, "type": type, "solution": f"Look: $\\boxed{{{answer}}}$."}


TRAIN = [
    row("Solve $x=1$.", "1"),
    row("Halve $1$.", "\\frac{1}{2}", level="Level 3", type="Number Theory"),
    row("Draw a  line.", "2", level="Level ?", type="Geometry"),
]
TEST = [row("Solve $x=4$.", "4", level="Level 5"), row("Count to two.", "2", type="Counting & Probability")]
MATH500 = [
    {
        "problem": "Draw a line.",
        "solution": "So $\\boxed{2}$.",
        "answer": "2",
        "subject": "Geometry",
        "level": 2,
        "unique_id": "test/geometry/2.json",
    },
    {
        "problem": "Count to two.",
        "solution": "So $\\boxed{2\\text{ }}$.",
        "answer": "2",
        "subject": "Counting & Probability",
        "level": 1,
        "unique_id": "test/counting_and_probability/1.json",
    },
]


def write(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path):
    for name, rows in (("train", TRAIN), ("test", TEST), ("math500", MATH500)):
        write(tmp_path / f"{name}.jsonl", rows)
    return tmp_path


def build(**settings):
    return build_task(MATHConfig(**settings))


def by_id(examples):
    return {example.id: example for example in examples}


@pytest.mark.parametrize(("solution", "answer"), TABLES["boxes"])
def test_the_gold_answer_is_the_last_box_whose_braces_balance(solution, answer):
    assert boxed_answer(solution) == answer


@pytest.mark.parametrize(("solution", "gold"), TABLES["several_boxes"])
def test_a_gold_answer_in_several_boxes_is_read_as_an_answer_is(solution, gold):
    assert boxed_answer(solution) == gold
    assert gold_answer(gold) == extract_answer(solution)


def test_a_million_braces_or_boxes_are_read_in_linear_time():
    for text in (
        "\\boxed{7}, " * 30_000,
        "$-\\boxed{7}^2$ and " * 20_000,
        "\\boxed{} " * 50_000,
        "{" * 300_000,
        "\\boxed{" * 100_000,
        "\\boxed " * 100_000,
        "\\boxed" + " " * 300_000,
    ):
        assert boxed_answer(text + "}" * 10 + "\\boxed{1}") == "1"


def test_a_directory_of_two_files_gives_the_official_split(folder):
    task = build(path=str(folder))
    assert task.name == "math"
    train, test = by_id(task.train), by_id(task.test)
    assert {id: e.gold for id, e in train.items()} == {"train/0": "1", "train/1": "\\frac{1}{2}", "train/2": "2"}
    assert {id: e.gold for id, e in test.items()} == {"test/0": "4", "test/1": "2"}
    half = train["train/1"]
    assert half.question == "Halve $1$."
    assert half.rationale == "Look: $\\boxed{\\frac{1}{2}}$."
    assert half.subsets == {"subject": "Number Theory", "level": "3"}
    assert half.columns["level"] == "Level 3"
    assert train["train/2"].subsets["level"] == "?"


def test_the_original_tree_is_read_in_the_natural_order_of_its_files(tmp_path):
    for split, rows in (("train", TRAIN), ("test", TEST)):
        for number, one in zip((2, 10, 1), rows, strict=False):
            file = tmp_path / split / slug(one["type"]) / f"{number}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(one))
    task = build(path=str(tmp_path))
    assert set(by_id(task.train)) == {"train/algebra/2", "train/number_theory/10", "train/geometry/1"}
    assert by_id(task.test)["test/counting_and_probability/10"].gold == "2"


def test_math500_trains_on_all_that_its_problems_are_not(folder):
    task = build(path=str(folder), split="math500")
    assert task.name == "math500"
    # `Draw a  line.` of train differs from the held-out one in a space, `Count to two.` of test is held out itself.
    assert set(by_id(task.train)) == {"train/0", "train/1", "test/0"}
    test_rows = by_id(task.test)
    assert {id: e.gold for id, e in test_rows.items()} == {"math500/0": "2", "math500/1": "2"}
    assert test_rows["math500/0"].subsets == {"subject": "Geometry", "level": "2"}
    assert test_rows["math500/0"].columns["unique_id"] == "test/geometry/2.json"


def test_the_500_may_stand_in_a_file_of_their_own(folder, tmp_path):
    (folder / "math500.jsonl").rename(tmp_path / "held_out.jsonl")
    task = build(path=str(folder), split="math500", math500_path=str(tmp_path / "held_out.jsonl"))
    assert (len(task.train), len(task.test)) == (3, 2)


def test_levels_and_subjects_limit_both_sides(folder):
    task = build(path=str(folder), levels=(1, 5), subjects=("algebra", "counting & probability"))
    assert {e.gold for e in task.train} == {"1"}
    assert set(by_id(task.test)) == {"test/0", "test/1"}
    task = build(path=str(folder), split="math500", levels=(1,))
    assert (set(by_id(task.train)), set(by_id(task.test))) == ({"train/0"}, {"math500/1"})


def test_the_order_is_seeded_and_sizes_take_its_first_rows(tmp_path):
    for split in ("train", "test"):
        write(tmp_path / f"{split}.jsonl", [row(f"{split} {i}", i) for i in range(50)])
    whole = [e.id for e in build(path=str(tmp_path)).train]
    assert whole != [f"train/{i}" for i in range(50)]
    assert sorted(whole) == sorted(f"train/{i}" for i in range(50))
    assert [e.id for e in build(path=str(tmp_path), train_size=7).train] == whole[:7]
    assert [e.id for e in build(path=str(tmp_path), seed=1).train] != whole


def test_without_a_path_the_seven_subjects_come_from_the_hub(monkeypatch):
    asked = []

    def load_dataset(name, config=None, *, split):
        asked.append((name, config, split))
        if name == MATH500_HUB_NAME:
            return MATH500
        return [one for one in (TRAIN if split == "train" else TEST) if slug(one["type"]) == config]

    hub = ModuleType("datasets")
    hub.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", hub)
    task = build()
    assert asked == [(MATH_HUB_NAME, slug(subject), split) for split in ("train", "test") for subject in SUBJECTS]
    assert "counting_and_probability" in {config for _, config, _ in asked}
    assert set(by_id(task.train)) == {"train/algebra/0", "train/number_theory/0", "train/geometry/0"}
    assert len(build(split="math500").train) == 3
    assert asked[-1] == (MATH500_HUB_NAME, None, "test")


def test_a_few_rows_without_an_answer_are_left_out_and_told_of(folder):
    """As two of the published training problems are, whose boxes hold nothing."""
    write(folder / "train.jsonl", [*(row(f"Say ${n}$.", str(n)) for n in range(198)), row("Say.", ""), row("Say!", "")])
    task = build(path=str(folder))
    assert len(task.train) == 198
    assert {example.gold for example in task.train} == {str(n) for n in range(198)}
    (notice,) = task.notices
    assert notice.startswith("2 rows without an answer are left out: ")
    assert "train.jsonl line 199" in notice


def test_many_rows_without_an_answer_are_an_error(folder):
    write(folder / "train.jsonl", [*(row(f"Say ${n}$.", str(n)) for n in range(97)), *[row("Say.", "")] * 3])
    with pytest.raises(UserError, match=r"train.jsonl line 98: no \\boxed\{\} with .* in 3 rows in all"):
        build(path=str(folder))
