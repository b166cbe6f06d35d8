"""The recipes of the package as `flatpeak recipes` lists and prints them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flatpeak.config.load import RECIPES, load_recipe, shipped_recipes
from flatpeak.config.shipped_recipes import all_recipes, of_paper, read, select, to_json, to_text
from flatpeak.errors import UserError

DOCS = Path(__file__).parents[2] / "docs"


def test_the_list_and_the_document_say_the_same_of_every_recipe() -> None:
    """Where this fails: the first line of a recipe, a comment of one sentence, is its row in docs/recipes.md."""
    page = (DOCS / "recipes.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(flatpeak:[\w/]+)` \| (.*) \|$", page, flags=re.MULTILINE))
    assert {one.name: one.summary for one in all_recipes()} == rows


def test_a_paper_has_the_recipes_that_name_it() -> None:
    names = [one.name for one in of_paper(" 2505.22617 ")]
    assert names == ["flatpeak:algorithms/clip_cov", "flatpeak:algorithms/kl_cov"]
    for paper in ("2505", "9999.99999", ""):
        with pytest.raises(UserError, match="no shipped recipe names this paper; give an arXiv number"):
            of_paper(paper)


@pytest.mark.parametrize("name", shipped_recipes())
def test_every_recipe_begins_with_a_sentence_about_it(name: str) -> None:
    first = read(name).text.splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    assert len(first) <= 120


def test_recipes_without_a_folder_come_first() -> None:
    names = [one.name for one in all_recipes()]
    assert sorted(names) == shipped_recipes()
    assert ["/" in name for name in names] == sorted("/" in name for name in names)
    assert names[0] == "flatpeak:arithmetic_then_gsm8k"


def test_a_recipe_names_what_it_extends_and_what_that_extends() -> None:
    dapo, run = read("flatpeak:algorithms/dapo"), read("math_qwen_7b_141gb")
    assert (dapo.extends, dapo.inherits) == (("flatpeak:algorithms/grpo",), ("flatpeak:algorithms/grpo",))
    assert run.extends == ("flatpeak:math_qwen_7b_80gb",)
    assert run.inherits == (
        "flatpeak:math_qwen_7b_80gb",
        "flatpeak:math_qwen_24gb",
        "flatpeak:tasks/math",
        "flatpeak:algorithms/grpo_no_clip",
        "flatpeak:algorithms/grpo",
    )
    assert read("demo").inherits == ()


@pytest.mark.parametrize("name", ["flatpeak:demo", "demo", "demo.yaml", " demo "])
def test_a_recipe_is_selected_with_and_without_prefix_and_ending(name: str) -> None:
    selected = select(name)
    assert selected == read("flatpeak:demo")


@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("name", ["flatpeak:algorithms/gspo", "flatpeak:gsm8k_smollm2", "flatpeak:demo"])
def test_what_is_printed_is_the_file_and_a_recipe_itself(name: str, width: int, tmp_path: Path) -> None:
    text = to_text(select(name), width=width)
    file = (RECIPES / f"{name.removeprefix('flatpeak:')}.yaml").read_text(encoding="utf-8")
    assert text.startswith(file)
    added = text.removeprefix(file).split("\n")
    assert all(line.startswith("#") for line in added if line)
    assert name in text.removeprefix(file)
    (tmp_path / "copy.yaml").write_text(text, encoding="utf-8")
    assert load_recipe(tmp_path / "copy.yaml") == load_recipe(name)


def test_a_folder_selects_its_recipes() -> None:
    names = [one.name for one in all_recipes("tasks")]
    assert names == [name for name in shipped_recipes() if name.startswith("flatpeak:tasks/")]
    assert select("flatpeak:tasks/") == all_recipes("tasks")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dapo", "recipe dapo is not shipped with flatpeak: did you mean flatpeak:algorithms/dapo?"),
        ("flatpeak:dmeo", "recipe flatpeak:dmeo is not shipped with flatpeak: did you mean flatpeak:demo?"),
        ("tasks/gsm9k", "recipe tasks/gsm9k is not shipped with flatpeak: did you mean flatpeak:tasks/gsm8k"),
        ("zzzz", "recipe zzzz is not shipped with flatpeak: `flatpeak recipes` lists them"),
        ("../recipes/demo", "recipe ../recipes/demo is not shipped with flatpeak: did you mean flatpeak:demo?"),
    ],
)
def test_an_unknown_recipe_is_an_error_with_the_nearest_one(name: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        select(name)
    assert str(error.value).startswith(message)


def test_the_json_of_the_list_and_of_a_recipe() -> None:
    listed = json.loads(to_json(all_recipes()))["recipes"]
    assert [one["name"] for one in listed] == [one.name for one in all_recipes()]
    assert listed[0].keys() == {"name", "summary", "hardware", "time", "extends", "inherits"}
    gspo = json.loads(to_json(select("algorithms/gspo")))
    assert gspo["text"] == (RECIPES / "algorithms/gspo.yaml").read_text(encoding="utf-8")
    assert gspo["extends"] == ["flatpeak:algorithms/grpo"]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_list_has_every_name_and_sentence_on_lines_that_fit(width: int) -> None:
    text = to_text(all_recipes(), width=width)
    assert [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1] == []
    words = " ".join(text.split())
    for one in all_recipes():
        needs = [one.hardware, one.time] if width == 120 else [", ".join(filter(None, [one.hardware, one.time]))]
        assert " ".join(filter(None, [one.name, *needs, one.summary])) in words


def test_a_recipe_says_what_its_run_needs_and_how_long_that_takes() -> None:
    demo, planned, part = read("demo"), read("math_qwen_24gb"), read("tasks/gsm8k")
    assert (demo.hardware, demo.time) == ("2 CPU cores", "75 s")
    assert (planned.hardware, planned.time) == ("GPU of 24 GB", "")
    assert (part.hardware, part.time) == ("", "")
    assert [one.name for one in all_recipes() if "/" not in one.name and not one.hardware] == []
