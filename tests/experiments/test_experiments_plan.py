"""The plan of a sweep: recipes, names and columns, all checked before anything runs."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from flatpeak.errors import UserError
from flatpeak.experiments.config import read_sweep
from flatpeak.experiments.plan import SweepPlan, build_plan, substitute
from support.sweeps import RECIPE, write_sweep


def plan_of(tmp_path: Path, *, processes: int | None = 2, **sections: Any) -> SweepPlan:
    return build_plan(read_sweep(write_sweep(tmp_path, **sections)), processes=processes)


def test_arms_axes_and_seeds_are_crossed_and_an_arms_own_axes_concern_it_alone(tmp_path: Path) -> None:
    arms = {"none": {}, "kl": {"axes": {"kl.coefficient": [0.1, 0.2]}}}
    plan = plan_of(tmp_path, arms=arms, axes={"optimizer.learning_rate": [1e-3, 1e-4]}, seeds=[7, 3])
    names = ["none,learning_rate=0.001", "none,learning_rate=0.0001"]
    names += [f"kl,learning_rate={rate},coefficient={k}" for rate in ("0.001", "0.0001") for k in ("0.1", "0.2")]
    assert [run.name for run in plan.runs] == [f"{name}/seed-{seed}" for name in names for seed in (3, 7)]
    last = plan.runs[-1]
    assert last.path == tmp_path / "sweeps" / "tiny" / "runs" / "kl,learning_rate=0.0001,coefficient=0.2" / "seed-7"
    assert (last.recipe.optimizer.learning_rate, last.recipe.kl.coefficient, last.recipe.run.seed) == (1e-4, 0.2, 7)


def test_a_run_is_the_recipe_under_settings_under_the_arm_under_its_axes(tmp_path: Path) -> None:
    (tmp_path / "overlay.yaml").write_text(
        yaml.safe_dump({"kl": {"coefficient": 0.5}, "training": {"steps": 5}, "optimizer": {"learning_rate": 0.5}})
    )
    arm = {
        "recipe": "overlay.yaml",
        "settings": {"training.steps": 6, "optimizer": {"learning_rate": 0.25}},
        "axes": {"optimizer.learning_rate": [0.125]},
    }
    run = plan_of(tmp_path, settings={"training.steps": 4, "kl.coefficient": 0.1}, arms={"a": arm}).runs[0]
    assert run.recipe.kl.coefficient == 0.5
    assert run.recipe.training.steps == 6
    assert run.recipe.optimizer.learning_rate == 0.125
    assert run.recipe.rollout.group_size == RECIPE["rollout"]["group_size"]


def test_columns_are_the_axes_and_the_settings_in_which_arms_differ(tmp_path: Path) -> None:
    arms = {"none": {}, "kl": {"settings": {"kl.coefficient": 0.3}}}
    plan = plan_of(tmp_path, arms=arms, axes={"optimizer.learning_rate": [1e-3]})
    assert plan.columns == ("optimizer.learning_rate", "kl.coefficient")
    assert [dict(run.settings) for run in plan.runs[::2]] == [
        {"optimizer.learning_rate": 1e-3, "kl.coefficient": 0.0},
        {"optimizer.learning_rate": 1e-3, "kl.coefficient": 0.3},
    ]


def test_paths_of_a_python_caller_become_strings() -> None:
    assert substitute({"a": [Path("${prefix}/x")]}, seed=7, prefix=Path("runs/p")) == {"a": ["runs/p/x"]}


def test_seed_and_prefix_are_replaced_in_strings_everywhere() -> None:
    value = {"path": "${prefix}/rows_${seed}.jsonl", "seed": "${seed}", "list": ["${seed}", 1], "text": "${other}"}
    assert substitute(value, seed=7, prefix=Path("runs/p")) == {
        "path": "runs/p/rows_7.jsonl",
        "seed": 7,
        "list": [7, 1],
        "text": "${other}",
    }
    with pytest.raises(UserError, match="the sweep has no prefix"):
        substitute("${prefix}/x", seed=7, prefix=None)
    with pytest.raises(UserError, match=r"\$\{sed\} is unknown, did you mean 'seed'"):
        substitute("${sed}", seed=7, prefix=None)


def test_the_prefix_of_a_seed_comes_before_its_runs_and_each_step_after_the_one_before(tmp_path: Path) -> None:
    prefix = {
        "data": {"call": "functions.py:write_rows", "arguments": {"count": 3}},
        "sft": {"sft": "recipe.yaml", "settings": {"sft.steps": 2, "sft.batch_size": 4}},
    }
    plan = plan_of(tmp_path, prefix=prefix, arms={"a": {}, "b": {"settings": {"kl.coefficient": 1}}})
    assert [cell.label for cell in plan.by_seed] == [
        *("prefix/seed-1/data", "prefix/seed-1/sft", "a/seed-1", "b/seed-1"),
        *("prefix/seed-2/data", "prefix/seed-2/sft", "a/seed-2", "b/seed-2"),
    ]
    sft = plan.steps[1]
    assert sft.recipe is not None
    assert (sft.recipe.run.seed, sft.recipe.run.name) == (1, "sft")
    assert sft.recipe.run.directory == str(tmp_path / "sweeps" / "tiny" / "prefix" / "seed-1")


def test_a_prefix_has_another_fingerprint_where_an_earlier_step_or_the_seed_differs(tmp_path: Path) -> None:
    def prints(count: int) -> dict[tuple[int, str], str]:
        prefix = {
            "data": {"call": "functions.py:write_rows", "arguments": {"count": count}},
            "sft": {"sft": "recipe.yaml", "settings": {"sft.steps": 2, "sft.batch_size": 4}},
        }
        plan = plan_of(tmp_path, prefix=prefix)
        assert [run.fingerprint for run in plan.runs] == [step.fingerprint for step in plan.steps if step.name == "sft"]
        return {(step.seed, step.name): step.fingerprint for step in plan.steps}

    first, again, other = prints(3), prints(3), prints(4)
    assert first == again
    assert len({*first.values(), *other.values()}) == 8


def test_threads_are_one_with_several_processes_unless_the_recipe_chooses(tmp_path: Path) -> None:
    assert {run.recipe.run.threads for run in plan_of(tmp_path, processes=2).runs} == {1}
    assert {run.recipe.run.threads for run in plan_of(tmp_path, processes=1).runs} == {None}
    assert {run.recipe.run.threads for run in plan_of(tmp_path, settings={"run.threads": 3}).runs} == {3}


def test_there_are_as_many_processes_as_the_cores_hold_and_no_more_than_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatpeak.experiments.plan.usable_cores", lambda: 12)
    assert plan_of(tmp_path, processes=None, seeds="1-20").processes == 12
    assert plan_of(tmp_path, processes=None, seeds="1-20", settings={"run.threads": 4}).processes == 3
    assert plan_of(tmp_path, processes=None, seeds="1-2").processes == 2
    assert plan_of(tmp_path, processes=50, seeds="1-3").processes == 3


@pytest.mark.parametrize("threads", ["many", [1], 1.5])
def test_threads_that_are_no_number_are_refused_by_name(tmp_path: Path, threads: Any) -> None:
    with pytest.raises(UserError, match=r"base/seed-1: run\.threads="):
        plan_of(tmp_path, processes=None, settings={"run.threads": threads})


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"axes": {"optimizer.lerning_rate": [1]}}, r"base,lerning_rate=1/seed-1: unknown key optimizer.lerning_rate"),
        ({"arms": {"a": {"settings": {"kl.coefficient": "much"}}}}, r"a/seed-1: kl\.coefficient=much"),
        ({"settings": {"distributed.processes": 2}}, "base/seed-1: runs of a sweep are trained in one process"),
        ({"recipe": "none.yaml"}, r"recipe .*none\.yaml not found"),
        ({"arms": {"a": {"recipe": "none.yaml"}}}, r"recipe .*none\.yaml not found"),
        ({"settings": {"model.path": "${prefix}/sft"}}, "the sweep has no prefix"),
        ({"prefix": {"p": {"call": "none.py:f"}}}, r"prefix\.p: call: there is no file .*none\.py"),
        ({"prefix": {"p": {"call": "functions.py:write_row"}}}, "no function 'write_row', did you mean 'write_rows'"),
        ({"prefix": {"p": {"sft": "recipe.yaml"}}}, r"prefix\.p: sft\.steps=0: there is nothing to train"),
        ({"axes": {"model.path": ["a/b", "a:b"]}}, "two runs would be named base,path=a_b"),
        ({"axes": {"kl.coefficient": [0.1, 0.1]}}, "two runs would be named"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_runs(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        plan_of(tmp_path, **sections)
    assert not (tmp_path / "sweeps").exists()


def test_long_and_structured_values_have_short_names_of_their_own(tmp_path: Path) -> None:
    long = ["x" * 90 + "1", "x" * 90 + "2"]
    names = {run.name for run in plan_of(tmp_path, axes={"prompt.system": long}).runs}
    assert len(names) == 4
    assert max(len(name) for name in names) < 90
