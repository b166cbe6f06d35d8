"""`flatpeak plan`: exit codes, what is printed, and the JSON object."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

import flatpeak.apps.planning.advice
import flatpeak.apps.planning.measurement
from flatpeak.apps.planning.advice import Advice
from flatpeak.apps.planning.device import GIB
from flatpeak.apps.planning.measurement import Measurement
from flatpeak.cli.main import app
from flatpeak.errors import UserError
from flatpeak.utils.machine import Memory
from support.runs import Recipe


@pytest.fixture
def plan(recipe: Recipe, tmp_path: Path) -> Callable[..., Result]:
    """`plan(*arguments, **sections)`: the command on a tiny recipe."""

    def run(*arguments: str, **sections: Any) -> Result:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe(**sections)))
        return CliRunner().invoke(app, ["plan", str(path), *arguments])

    return run


def test_a_recipe_that_fits_is_described_and_exits_with_0(plan: Callable[..., Result], tmp_path: Path) -> None:
    result = plan("rollout.group_size=2")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[1].startswith("model: a new qwen2 (qwen2), 5,232 parameters")
    assert lines[2] == "data: arithmetic, 30 training and 6 held-out rows"
    assert "step: 4 prompts x 2 completions = 8, at most 32 new tokens; micro-batches of at most 48 tokens" in lines
    assert "run: 2 steps, 2 updates, at most 64 new tokens" in lines
    assert any(line.startswith("fits CPU: ") for line in lines)
    assert any(line.startswith("disk: at most 4 checkpoints of <0.01 GiB") for line in lines)
    assert any(
        "<0.01 GiB in all (run.keep_checkpoints=2 beside the first, the best and the last)" in line for line in lines
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["recipe.yaml"]


@pytest.fixture
def advised(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`advised(*advice)`: what is advised, instead of a search."""

    def advise(*advice: Advice) -> None:
        monkeypatch.setattr(flatpeak.apps.planning.advice, "advise", lambda plan: advice)

    return advise


def test_a_recipe_that_does_not_fit_exits_with_3_and_says_what_helps(
    plan: Callable[..., Result], advised: Callable[..., None]
) -> None:
    first = Advice(settings={"optimizer.name": "adamw_8bit"}, needed=0, saves={"optimizer.name": GIB}, fits=True)
    second = Advice(
        settings={"training.activation_checkpointing": True, "model.lora": {}},
        needed=0,
        saves={"training.activation_checkpointing": GIB // 2, "model.lora": GIB // 4},
        fits=True,
    )
    advised(first, second)
    result = plan("--device-memory", "0.1")
    assert result.exit_code == 3
    assert "does not fit a computer of 0.1 GB: " in result.stdout
    needed = json.loads(plan("--device-memory", "0.1", "--json").stdout)["memory"]["needed_gib"]
    told = result.stdout.partition("it fits with one of these, those that cost least time first:\n")[2].splitlines()
    (saved,) = {float(word) for line in told for word in re.findall(r"saves ([\d.]+)", line)}
    assert saved == pytest.approx(needed, abs=0.1)  # both options need nothing at all
    assert [line.replace(f"{saved:.2f}", "X") for line in told[:3]] == [
        "  optimizer.name=adamw_8bit  (needs <0.01 GiB, saves X); changes rounding",
        "  training.activation_checkpointing=true model.lora={}  (needs <0.01 GiB, saves X); trains adapters",
        "    of which training.activation_checkpointing 0.50, model.lora 0.25",
    ]


def test_where_nothing_helps_that_is_said(plan: Callable[..., Result], advised: Callable[..., None]) -> None:
    advised()
    assert "\nno settings make it fit\n" in plan("--device-memory", "0.1").stdout
    advised(Advice(settings={"rollout.max_rows": 8}, needed=GIB, saves={"rollout.max_rows": 0}, fits=False))
    told = "no settings make it fit; it needs least with\n  rollout.max_rows=8  (needs 1.00 GiB, saves "
    assert told in plan("--device-memory", "0.1").stdout


def test_json_has_everything_and_nothing_beside_it(plan: Callable[..., Result]) -> None:
    result = plan("--json", sft={"steps": 3})
    content = json.loads(result.stdout)
    assert set(content) == {
        *("recipe", "fits", "tight", "model", "data", "step", "run", "memory", "disk", "notes", "advice", "measured"),
    }
    assert content["fits"] is True
    assert content["model"]["parameters"] == content["model"]["trained"]
    assert content["run"] == {"sft_steps": 3, "steps": 2, "updates_at_most": 2, "new_tokens_at_most": 128}
    memory = content["memory"]
    phases = {name: sum(items.values()) for name, items in memory["phases"].items()}
    assert list(phases) == ["loading", "sft update", "rollout", "update"]
    assert memory["peak_gib"] == pytest.approx(max(phases.values()), abs=0.005)
    assert memory["needed_gib"] == pytest.approx(memory["peak_gib"] + memory["libraries_gib"], abs=0.002)
    assert (content["advice"], content["measured"], content["notes"]) == ([], None, [])


def test_json_of_what_does_not_fit_has_the_same_exit_code(
    plan: Callable[..., Result], advised: Callable[..., None]
) -> None:
    advised(Advice(settings={"rollout.max_rows": 8}, needed=GIB, saves={"rollout.max_rows": GIB // 2}, fits=False))
    result = plan("--json", "--device-memory", "0.1")
    assert result.exit_code == 3
    content = json.loads(result.stdout)
    assert content["fits"] is False
    assert content["advice"] == [
        {
            "settings": {"rollout.max_rows": 8},
            "needed_gib": 1.0,
            "saves_gib": {"rollout.max_rows": 0.5},
            "fits": False,
        }
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--price", "2"], "--price needs a time to multiply: add --measure"),
        (["--measure", "--price", "-1"], "--price -1: give the price of an hour"),
        (["--measure", "--price", "nan"], "--price nan: give the price of an hour"),
        (["--device-memory", "0"], "--device-memory 0: give the GB of memory that the device has"),
        (["--device-memory", "-24"], "--device-memory -24: give the GB"),
        (["--device-memory", "nan"], "--device-memory nan: give the GB"),
        (["model.new=null"], "the recipe gives no model: set model.path"),
        (["rollout.max_new_token=4"], "did you mean rollout.max_new_tokens"),
        (["rollout.max_new_tokens=64"], "leaves no room for a prompt"),
        (["model.new=null", "model.path=./nowhere"], "model.path=./nowhere: no such directory"),
    ],
)
def test_bad_input_is_one_line(plan: Callable[..., Result], arguments: list[str], message: str) -> None:
    result = plan(*arguments)
    assert isinstance(result.exception, UserError)  # which `main` prints, with exit code 2
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_model_on_the_hub_without_a_network_is_one_line(
    plan: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    result = plan("model.new=null", "model.path=someone/model-that-was-never-fetched")
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == (
        "model.path=someone/model-that-was-never-fetched does not load: it is not a directory here, HF_HUB_OFFLINE is "
        "set, and it was not fetched before; name one, or check the network"
    )


def test_measured_steps_are_told_with_their_price(plan: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measurement(
        first_step_seconds=9.0,
        step_seconds=3.0,
        rollout_seconds=1.0,
        informative_fraction=0.5,
        run_seconds=7200.0,
        peak_gib=1.25,
        cost=5.0,
    )
    prices = []

    def measure(config: Any, *, price: float | None) -> Measurement:
        prices.append(price)
        return measured

    monkeypatch.setattr(flatpeak.apps.planning.measurement, "measure_run", measure)
    lines = plan("--measure", "--price", "2.5").stdout.splitlines()
    assert prices == [2.5]
    assert lines[-4:] == [
        "measured: a step takes 3.00 s (1.00 s of it rollouts), the first 9.00 s",
        "measured: 50% of its groups had a gradient; updates take longest where all have one",
        "measured: at most 1.25 GiB of memory",
        "the run: 2 h 0 min without evaluations and checkpoints, 5.00 in money",
    ]
    assert json.loads(plan("--measure", "--json").stdout)["measured"] == asdict(measured)


def test_what_does_not_fit_this_machine_is_not_measured(
    plan: Callable[..., Result], advised: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    advised()
    monkeypatch.setattr("flatpeak.apps.planning.device.host_memory", lambda: Memory(total=1, free=1))
    result = plan("--measure")
    assert result.exit_code == 3
    assert "not measured: its steps would not fit this machine" in result.stdout


def test_an_unknown_option_and_a_missing_recipe_exit_with_2(tmp_path: Path) -> None:
    assert CliRunner().invoke(app, ["plan", "flatpeak:demo", "--device-size", "24"]).exit_code == 2
    missing = CliRunner().invoke(app, ["plan", str(tmp_path / "none.yaml")])
    assert isinstance(missing.exception, UserError)
    assert "none.yaml" in str(missing.exception)
