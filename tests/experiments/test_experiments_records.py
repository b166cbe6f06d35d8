"""The state of runs on disk, and which settings count as changed."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatpeak.errors import RunError
from flatpeak.experiments.config import read_sweep
from flatpeak.experiments.plan import PlannedRun, PrefixStep, build_plan
from flatpeak.experiments.records import (
    CellRecord,
    cell_state,
    changed_code,
    changed_keys,
    remove_cell,
    write_record,
)
from flatpeak.utils import redaction
from flatpeak.utils.user_code import file_digest
from support.sweeps import PREFIX, write_sweep


def run_of(tmp_path: Path, **settings: Any) -> PlannedRun:
    return build_plan(read_sweep(write_sweep(tmp_path, seeds=[1], settings=settings)), processes=2).runs[0]


def write_config(run: PlannedRun, **changes: Any) -> None:
    content = run.recipe.model_dump(mode="json")
    for key, value in changes.items():
        section, name = key.split("__")
        if value is ...:
            del content[section][name]
        else:
            content[section][name] = value
    run.path.mkdir(parents=True, exist_ok=True)
    (run.path / "config.yaml").write_text(yaml.safe_dump(content))


def test_a_secret_that_stands_in_two_places_is_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "_recipe_secrets", set())
    arguments = {"token": "tok-987-abc", "note": "see tok-987-abc"}
    run = run_of(tmp_path, **{"rewards.f": {"type": "function", "function": "f.py:f", "arguments": arguments}})
    hidden = {"token": "[redacted]", "note": "see [redacted]"}
    write_config(run, rewards__f={"type": "function", "function": "f.py:f", "arguments": hidden})
    assert "arguments" not in str(changed_keys(run))


@pytest.mark.parametrize(
    ("on_disk", "now", "changed"),
    [
        ({}, {}, None),
        ({"training__steps": 120}, {}, "training.steps: 120 -> 3"),
        ({"run__seed": 2}, {}, "run.seed: 2 -> 1"),
        ({"run__threads": 4, "run__checkpoint_every": 7, "run__directory": "moved"}, {}, None),
        ({"kl__coefficient": ...}, {"kl.coefficient": 0.5}, "kl.coefficient: (absent) -> 0.5"),
    ],
)
def test_only_settings_that_can_change_a_result_count(
    tmp_path: Path, on_disk: dict[str, Any], now: dict[str, Any], changed: str | None
) -> None:
    run = run_of(tmp_path, **now)
    write_config(run, **on_disk)
    assert changed_keys(run) == changed


def test_a_run_that_started_from_another_prefix_has_changed(tmp_path: Path) -> None:
    plan = build_plan(read_sweep(write_sweep(tmp_path, seeds=[1], prefix=PREFIX)), processes=2)
    (run,) = plan.runs
    write_record(run, CellRecord(status="done", prefix=run.fingerprint))
    assert changed_keys(run) is None
    write_record(run, CellRecord(status="done", prefix="another"))
    assert changed_keys(run) == "its prefix"


def test_the_state_of_a_run_follows_from_its_record_and_summary(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    assert cell_state(run).status == "missing"
    write_record(run, CellRecord(status="started"))
    assert cell_state(run).status == "stopped"
    write_record(run, CellRecord(status="failed", reason="no score"))
    assert (cell_state(run).status, cell_state(run).reason) == ("failed", "no score")
    remove_cell(run)
    assert cell_state(run).status == "missing"
    assert list(run.path.parent.iterdir()) == []


def test_a_prefix_step_is_done_only_while_its_directory_is_there(tmp_path: Path) -> None:
    plan = build_plan(read_sweep(write_sweep(tmp_path, seeds=[1], prefix=PREFIX)), processes=2)
    step = plan.steps[0]
    write_record(step, CellRecord(status="done", prefix=step.fingerprint))
    assert cell_state(step).status == "stopped"
    step.path.mkdir(parents=True)
    assert cell_state(step).status == "done"


def test_a_full_disk_is_told_in_one_line_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("flatpeak.experiments.records.write_atomic", full)
    with pytest.raises(RunError, match="No space left on device; what is finished stays: make room and give the same"):
        write_record(run_of(tmp_path), CellRecord(status="done", prefix=None))


LETTERS = "rewards.letters.function"


def write_manifest(cell: PlannedRun | PrefixStep, content: str | dict[str, Any]) -> None:
    cell.path.mkdir(parents=True, exist_ok=True)
    text = content if isinstance(content, str) else json.dumps(content)
    (cell.path / "manifest.json").write_text(text)


def test_a_run_that_another_text_began_is_named_after_it_went_on_with_the_present_one(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    function = tmp_path / "functions.py"
    before, now = {LETTERS: "0123456789abcdef"}, {LETTERS: file_digest(f"{function}:first_letters")}
    named = (f"{LETTERS}={function}:first_letters",)
    for starts, expected in (
        ([now], ()),
        ([before], named),
        ([now, now], ()),
        ([before, now], named),
        ([now, before], named),
        ([now, before, now], named),
    ):
        first, *others = [{"code": code} for code in starts]
        write_manifest(run, {**first, "resumed": [{**other, "anew": False} for other in others]})
        assert changed_code(run) == expected, starts


def test_a_run_of_which_no_step_was_kept_when_it_began_again_is_that_of_its_present_text(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    now = {LETTERS: file_digest(f"{tmp_path / 'functions.py'}:first_letters")}
    anew = {"code": now, "anew": True}
    write_manifest(run, {"code": {LETTERS: "0123456789abcdef"}, "resumed": [anew, {"code": now, "anew": False}]})
    assert changed_code(run) == ()


@pytest.mark.parametrize(
    "content", ["", '{"code": {', "[]", "null", "\0\0\0\0", "{}", '{"versions": {"flatpeak": "0.1"}}']
)
def test_nothing_is_said_of_a_manifest_that_is_damaged_or_older_than_digests(tmp_path: Path, content: str) -> None:
    run = run_of(tmp_path)
    write_manifest(run, content)
    assert changed_code(run) == ()


def test_nothing_is_said_of_a_file_that_is_gone(tmp_path: Path) -> None:
    run = run_of(tmp_path)
    write_manifest(run, {"code": {LETTERS: "0123456789abcdef"}})
    assert len(changed_code(run)) == 1
    (tmp_path / "functions.py").unlink()
    assert changed_code(run) == ()


def test_a_changed_module_counts_as_a_changed_file_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = tmp_path / "letters_of_a_sweep.py"
    module.write_text("def score(completions, **columns):\n    return [0.0 for _ in completions]\n")
    run = run_of(tmp_path, **{LETTERS: "letters_of_a_sweep:score"})
    write_manifest(run, {"code": {LETTERS: file_digest(f"{module}:score")}})
    assert changed_code(run) == ()
    module.write_text("def score(completions, **columns):\n    return [1.0 for _ in completions]\n")
    assert changed_code(run) == (f"{LETTERS}=letters_of_a_sweep:score",)


def test_a_function_of_a_curriculum_s_first_task_counts(tmp_path: Path) -> None:
    task = {"type": "custom", "factory": f"{tmp_path / 'tasks.py'}:easy"}
    (tmp_path / "tasks.py").write_text("def easy():\n    return 1\n")
    run = run_of(tmp_path, **{"curriculum": {"task": task, "steps": 1}})
    write_manifest(run, {"code": {"curriculum.task.factory": "0123456789abcdef"}})
    assert changed_code(run) == (f"curriculum.task.factory={tmp_path / 'tasks.py'}:easy",)


def test_a_call_of_the_prefix_is_named_once_it_is_done(tmp_path: Path) -> None:
    step = build_plan(read_sweep(write_sweep(tmp_path, seeds=[1], prefix=PREFIX)), processes=2).steps[0]
    function = f"{tmp_path / 'functions.py'}:write_rows"
    write_record(step, CellRecord(status="done", code=file_digest(function)))
    assert changed_code(step) == ()
    write_record(step, CellRecord(status="done"))  # of a version that kept no digest
    assert changed_code(step) == ()
    write_record(step, CellRecord(status="stopped", code="0123456789abcdef"))
    assert changed_code(step) == ()
    write_record(step, CellRecord(status="done", code="0123456789abcdef"))
    assert changed_code(step) == (f"call={function}",)
