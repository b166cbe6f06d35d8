"""Sweep files: what they may say, how they extend each other, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flatpeak.errors import UserError
from flatpeak.experiments.config import read_sweep


def write(path: Path, **content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


BASE: dict[str, Any] = {"name": "x", "recipe": "r.yaml", "seeds": [1]}


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [("100-103", (100, 101, 102, 103)), ("1-2,7", (1, 2, 7)), ([3, 1], (3, 1)), (5, (5,)), ("9", (9,))],
)
def test_seeds_are_a_range_a_list_or_a_number(tmp_path: Path, seeds: Any, expected: tuple[int, ...]) -> None:
    path = write(tmp_path / "s.yaml", **BASE | {"seeds": seeds})
    assert read_sweep(path).seeds == expected


def test_keys_of_the_command_line_change_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "s.yaml", **BASE, settings={"training.steps": 300}, axes={"kl.coefficient": [0.1]})
    config = read_sweep(path, ["seeds=20-22", "name=y", "settings.training.steps=7", "axes.kl.coefficient=[0.2, 0.3]"])
    assert (config.name, config.seeds) == ("y", (20, 21, 22))
    assert config.settings == {"training.steps": 7}
    assert config.axes == {"kl.coefficient": (0.2, 0.3)}


@pytest.mark.parametrize("axes", [None, {}])
def test_a_sweep_extends_another_whatever_the_spelling_of_keys_and_where_it_lies(tmp_path: Path, axes: Any) -> None:
    write(
        tmp_path / "base" / "s.yaml",
        **BASE,
        settings={"training": {"steps": 300, "epochs_per_rollout": 2}},
        prefix={"data": {"call": "bed.py:rows"}},
        arms={"none": {}, "gr": {"recipe": "arms/gr.yaml"}},
        axes={"kl.coefficient": [0.1]},
    )
    path = write(tmp_path / "s.yaml", extends="base/s.yaml", settings={"training.steps": 5}, axes=axes)
    config = read_sweep(path)
    assert config.settings == {"training.steps": 5, "training.epochs_per_rollout": 2}
    assert config.axes == {}
    assert config.recipe == str(tmp_path / "base" / "r.yaml")
    assert config.arms["gr"].recipe == str(tmp_path / "base" / "arms" / "gr.yaml")
    assert config.prefix["data"].call == f"{tmp_path / 'base' / 'bed.py'}:rows"


def test_names_of_shipped_recipes_and_of_modules_are_no_paths(tmp_path: Path) -> None:
    path = write(tmp_path / "s.yaml", **BASE | {"recipe": "flatpeak:demo", "prefix": {"a": {"call": "package.bed:f"}}})
    config = read_sweep(path)
    assert config.recipe == "flatpeak:demo"
    assert config.prefix["a"].call == "package.bed:f"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arm": {}}, "unknown key arm: did you mean arms"),
        ({"arms": {"gr": {"setings": {}}}}, r"unknown key arms\.gr\.setings: did you mean arms\.gr\.settings"),
        ({"table": {"windows": 3}}, r"unknown key table\.windows: did you mean table\.window"),
        ({"zzz": 1}, "unknown key zzz: the sections of a sweep are name, directory"),
        ({"seeds": "1..5"}, r"seeds='1\.\.5': write a list, or text such as 100-119"),
        ({"seeds": [1, 2, 1]}, "seeds: 1 is given twice"),
        ({"seeds": "5-3"}, "seeds='5-3': 5-3 has no seeds; write 3-5"),
        ({"seeds": "9,5-3"}, "5-3 has no seeds"),
        ({"name": "../x"}, "must be a name inside directory"),
        ({"name": "a\0b"}, "leave out what cannot be printed"),
        ({"arms": {"a/b": {}}}, r"arms\.a/b: the name becomes a directory"),
        ({"axes": {"run.seed": [1]}}, r"axes\.run\.seed: the sweep sets it"),
        ({"axes": {"kl.coefficient": []}}, r"axes\.kl\.coefficient"),
        ({"prefix": {"a": {}}}, "one of call, sft and reward_model, this has none of them"),
        ({"prefix": {"a": {"call": "f.py:g", "sft": "x.yaml"}}}, "this has call and sft"),
        ({"prefix": {"a": {"call": "f.py:g", "settings": {"x": 1}}}}, "write arguments"),
        ({"prefix": {"a": {"sft": "x.yaml", "arguments": {"x": 1}}}}, "write settings"),
        ({"prefix": {"a": {"call": "f.py:g", "arguments": {"x": [{1: 2}]}}}}, "the key 1 arrives as text"),
        ({"prefix": {"a": {"call": "f.py:g"}, "a.json": {"call": "f.py:g"}}}, "step a has a file of that name"),
        ({"table": {"first": {"reward/x": {"above": 1, "below": 0}}}}, "either above or below"),
        ({"table": {"first": {"reward/x": {"above": float("nan")}}}}, "above=nan: input should be a finite number"),
        ({"table": {"first": {"reward/*": {"above": 1}}}}, r"first\.reward/\*: give the name of one metric"),
        ({"table": {"best": {"reward/*": "min"}}}, r"best\.reward/\*: give the name of one metric"),
        ({"keep": "best"}, "keep=best: .*allowed values are all, last, none"),
    ],
)
def test_bad_input_is_refused_in_one_line_that_names_the_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "s.yaml", **BASE | change)
    with pytest.raises(UserError, match=message) as error:
        read_sweep(path)
    assert "\n" not in str(error.value)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="seeds is missing: give it in the sweep or as an override"):
        read_sweep(write(tmp_path / "s.yaml", name="x", recipe="r.yaml"))


def test_a_circle_and_a_missing_base_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", **BASE, extends="b.yaml")
    write(tmp_path / "b.yaml", extends="a.yaml")
    with pytest.raises(UserError, match="extend each other in a circle"):
        read_sweep(tmp_path / "a.yaml")
    with pytest.raises(UserError, match=r"none\.yaml not found \(extended by .*c\.yaml\)"):
        read_sweep(write(tmp_path / "c.yaml", **BASE, extends="none.yaml"))
