"""Whole sweeps of tiny runs, their workers within the test's process; tests/end_to_end has real ones."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import flatpeak
from flatpeak.errors import UserError
from flatpeak.experiments.comparison import compare
from flatpeak.experiments.config import read_sweep
from flatpeak.experiments.plan import Cell
from flatpeak.experiments.records import remove_cell
from flatpeak.experiments.sweep import SweepResult, run_sweep
from flatpeak.experiments.table import read_table
from flatpeak.runs.directory import RunLock
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.summary import read_summary
from support.preferences import reward_model_recipe
from support.resumes import TIMES
from support.sweeps import FROM_PREFIX, FUNCTIONS, PREFIX, reward, use_local_workers, write_sweep

COMMAND = ["flatpeak", "sweep", "sweep.yaml"]


def sweep(path: Path, **options: Any) -> tuple[SweepResult, list[str]]:
    lines: list[str] = []
    return run_sweep(path, **{"processes": 2, "notice": lines.append, "command": COMMAND, **options}), lines


def finished_cells(lines: list[str]) -> list[str]:
    return [line.split("] ")[1].split()[0] for line in lines if " done in " in line]


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run without its times."""
    rows = read_metrics(run / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(TIMES)} for row in rows]


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Any:
    return use_local_workers(monkeypatch)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, SweepResult, list[str]]]:
    """A sweep of three arms, one of which crashes, after a prefix."""
    directory = tmp_path_factory.mktemp("finished")
    path = write_sweep(
        directory,
        settings=FROM_PREFIX,
        prefix=PREFIX,
        arms={
            "none": {},
            "broken": {"settings": {"rewards.letters": reward(directory, "broken")}},
            "kl": {"settings": {"kl.coefficient": 0.3}},
        },
        table={
            "window": 2,
            "metrics": ["reward/mean"],
            "first": {"reward/mean": {"above": -1}, "reward/absent": {"above": 0}},
        },
        curves={"metrics": ["reward/mean"], "every": 2},
    )
    with pytest.MonkeyPatch.context() as patch:
        use_local_workers(patch)
        result, lines = sweep(path)
    yield path, result, lines


Finished = tuple[Path, SweepResult, list[str]]


@pytest.mark.slow
def test_a_failed_run_stops_no_other_and_its_row_says_why(finished: Finished) -> None:
    _, result, lines = finished
    assert (result.done, result.failed, result.stopped, result.missing, result.exit_code) == (4, 2, 0, 0, 1)
    table = read_table(result.table)
    assert table.column("arm") == ["none", "none", "broken", "broken", "kl", "kl"]
    assert table.column("seed") == [1, 2] * 3
    assert table.column("status") == ["done"] * 2 + ["failed"] * 2 + ["done"] * 2
    assert table.column("steps")[:2] == [3, 3]
    assert table.column("end")[1:3] == ["steps", None]
    assert "no score today" in table.column("reason")[2]
    assert sum("failed" in line and "no score today" in line for line in lines) == 2


def test_the_prefix_is_made_once_per_seed(finished: Finished) -> None:
    _, result, lines = finished
    steps = [f"prefix/seed-{seed}/{name}" for seed in (1, 2) for name in ("data", "sft")]
    assert sorted(cell for cell in finished_cells(lines) if cell.startswith("prefix")) == steps
    prefix = result.path / "prefix" / "seed-2"
    assert json.loads((prefix / "data" / "rows.json").read_text()) == [2, 2, 2]


def test_the_numbers_of_a_row_are_those_of_the_runs_own_metrics(finished: Finished) -> None:
    _, result, _ = finished
    rows = [row for row in rows_of(result.path / "runs" / "kl" / "seed-2") if row["stage"] == "train"]
    values = [row["reward/mean"] for row in rows]
    assert len(set(values)) > 1
    row = read_table(result.table).rows[-1]
    assert row["reward/mean.last"] == values[-1]
    assert row["reward/mean.best"] == max(values)
    assert row["reward/mean.final"] == pytest.approx((values[1] + values[2]) / 2, abs=1e-15)
    assert row["reward/mean.auc"] == pytest.approx((values[0] / 2 + values[1] + values[2] / 2) / 2, abs=1e-15)
    assert row["reward/mean.first"] == 1
    curves = read_table(result.path / "curves.csv")
    assert curves.rows[-2]["reward/mean"] == pytest.approx((values[0] + values[1]) / 2, abs=1e-15)
    assert (curves.rows[-1]["step"], curves.rows[-1]["reward/mean"]) == (4, values[2])


def test_a_threshold_of_a_metric_that_no_run_logged_was_not_passed_by_none(finished: Finished) -> None:
    table = read_table(finished[1].table)
    assert table.column("reward/absent.first") == table.column("reward/absent.best") == [None] * 6
    none = compare(table, metrics=["reward/absent.first"]).metrics["reward/absent.first"][0]
    assert (none.never, none.mean.n) == (0, 0)


def test_the_header_names_command_versions_hardware_and_seeds(finished: Finished) -> None:
    header = read_table(finished[1].table).header
    assert header["sweep"] == "tiny, 6 runs"
    assert header["flatpeak"] == flatpeak.__version__
    assert header["command"] == "flatpeak sweep sweep.yaml"
    assert header["seeds"] == "1-2"
    assert header["commit"].endswith(("(clean)", "(changed files)", "git repository)"))
    assert {"hardware", "torch"} <= header.keys()


def test_a_run_of_a_sweep_has_the_bits_of_the_same_run_alone(
    finished: Finished, tmp_path: Path, one_thread: None, train: Any
) -> None:
    for name in ("none/seed-1", "kl/seed-2"):
        run = finished[1].path / "runs" / name
        settings = {"run.directory": str(tmp_path), "run.name": name}
        alone = train(run / "config.yaml", settings=settings, progress=False).path
        assert rows_of(alone) == rows_of(run)
        weights = [path / "checkpoints" / "last" / "model.safetensors" for path in (alone, run)]
        assert weights[0].read_bytes() == weights[1].read_bytes()


def test_the_same_command_again_tries_only_what_failed_and_gives_the_same_table(finished: Finished, local: Any) -> None:
    path, result, _ = finished
    before = read_table(result.table)
    again, lines = sweep(path)
    assert finished_cells(lines) == []
    assert len(lines) == 3  # the beginning, and both runs that fail again
    assert again.failed == 2
    assert read_table(result.table) == before
    started = len(local.started)
    skipped, lines = sweep(path, skip_failed=True)
    assert len(lines) == 1
    assert len(local.started) == started
    assert (skipped.failed, skipped.exit_code) == (2, 1)
    assert read_table(result.table) == before


def test_a_failed_run_whose_cause_is_gone_is_finished(tmp_path: Path, local: Any) -> None:
    path = write_sweep(tmp_path, settings={"rewards.letters": reward(tmp_path, "late")}, seeds=1)
    assert sweep(path)[0].failed == 1
    with (tmp_path / "functions.py").open("a") as file:
        file.write("\n\nlate = first_letters\n")
    result, lines = sweep(path)
    assert (result.done, result.exit_code) == (1, 0)
    assert finished_cells(lines) == ["base/seed-1"]
    assert read_table(result.table).column("reason") == [None]


def test_a_mended_reward_of_a_run_that_has_no_step_yet_is_no_other_text(tmp_path: Path, local: Any) -> None:
    path = write_sweep(tmp_path, settings={"rewards.letters": reward(tmp_path, "few")}, seeds=1)
    body = "    if len(completions) > 6:\n        raise ValueError\n    return [0.5] * 6\n"
    few = f"\n\ndef few(completions, **columns):\n{body}"
    (tmp_path / "functions.py").write_text(FUNCTIONS + few)  # an evaluation has 6, a step 16
    result, _ = sweep(path)
    assert result.failed == 1
    assert (result.path / "runs/base/seed-1/manifest.json").exists()
    (tmp_path / "functions.py").write_text(f"{FUNCTIONS}\n\nfew = first_letters\n")
    for _ in range(2):  # as it is mended, and once it is done
        result, lines = sweep(path)
        assert result.done == 1
        assert not any("another text" in line for line in lines)


@pytest.mark.slow
def test_arms_and_seeds_can_be_added_and_only_those_are_run(tmp_path: Path, local: Any) -> None:
    sweep(write_sweep(tmp_path, arms={"a": {}}, seeds=[1]))
    path = write_sweep(tmp_path, arms={"a": {}, "b": {"settings": {"kl.coefficient": 0.5}}}, seeds=[1, 2])
    _, lines = sweep(path)
    assert finished_cells(lines) == ["b/seed-1", "a/seed-2", "b/seed-2"]


def test_changed_settings_are_refused_with_run_and_key_and_rerun_with_overwrite(tmp_path: Path, local: Any) -> None:
    def path_at(strength: float) -> Path:
        return write_sweep(tmp_path, arms={"a": {"settings": {"kl.coefficient": strength}}, "b": {}}, seeds=1)

    result, _ = sweep(path_at(0.1))
    before = read_table(result.table)
    problem = (
        r"tiny: a/seed-1 was made with other settings \(kl\.coefficient: 0\.1 -> 0\.2\): put the old values back, "
        "choose another name for the sweep, or rerun what changed with --overwrite"
    )
    with pytest.raises(UserError, match=problem):
        sweep(path_at(0.2))
    assert read_table(result.table) == before
    assert not any("leaves out" in line for line in sweep(path_at(0.1))[1])
    _, lines = sweep(path_at(0.2), overwrite=True)
    assert finished_cells(lines) == ["a/seed-1"]
    assert read_table(result.table).column("kl.coefficient") == [0.2, 0.0]


@pytest.mark.slow
def test_runs_made_with_another_text_of_a_users_file_are_named_and_rerun_with_overwrite(
    tmp_path: Path, local: Any
) -> None:
    (tmp_path / "other.py").write_text(FUNCTIONS)
    other = {"rewards.letters.function": str(tmp_path / "other.py:first_letters")}
    path = write_sweep(tmp_path, arms={"a": {}, "b": {"settings": other}}, seeds=[1, 2])
    sweep(path)
    _, lines = sweep(path)
    assert not any("another text" in line for line in lines)
    with (tmp_path / "functions.py").open("a") as file:
        file.write("\n\ndef first_letters(completions, **columns):\n    return [len(text) for text in completions]\n")
    result, lines = sweep(path)
    (line,) = [line for line in lines if "another text" in line]
    assert re.fullmatch(
        r"a/seed-1 and 1 more ran with another text of the file of rewards\.letters\.function=\S*functions\.py:"
        r"first_letters, and the table will hold both: put that text back, or rerun with --overwrite",
        line,
    )
    assert (result.done, finished_cells(lines)) == (4, [])
    before = read_table(result.table).column("reward/mean.auc")
    result, lines = sweep(path, overwrite=True)
    assert finished_cells(lines) == ["a/seed-1", "a/seed-2"]
    assert not any("another text" in line for line in lines)
    assert read_table(result.table).column("reward/mean.auc") != before
    _, lines = sweep(path)
    assert not any("another text" in line for line in lines)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def first_letters(completions, **columns:\n", "SyntaxError"),
        ("def last_letters(completions, **columns):\n    return [0.0]\n", "has no function 'first_letters'"),
    ],
)
def test_overwrite_deletes_no_run_that_its_functions_file_could_not_make_again(
    tmp_path: Path, local: Any, text: str, problem: str
) -> None:
    path = write_sweep(tmp_path, arms={"a": {}}, seeds=[1])
    result, _ = sweep(path)
    before = read_table(result.table)
    (tmp_path / "functions.py").write_text(text)
    with pytest.raises(UserError, match=rf"a/seed-1: rewards\.letters\.function=.*{problem}.*; nothing was deleted"):
        sweep(path, overwrite=True)
    assert (result.path / "runs/a/seed-1/summary.json").exists()
    assert read_table(result.table) == before


@pytest.mark.slow
def test_overwrite_takes_up_unfinished_runs_of_another_text_from_their_beginning(tmp_path: Path, local: Any) -> None:
    path = write_sweep(tmp_path, arms={"a": {}, "b": {}}, seeds=[1])
    result, _ = sweep(path)
    unfinished = result.path / "runs/b/seed-1"
    (unfinished / "summary.json").unlink()
    with (tmp_path / "functions.py").open("a") as file:
        file.write("\n\ndef first_letters(completions, **columns):\n    return [len(text) for text in completions]\n")
    again, lines = sweep(path, overwrite=True)
    assert (again.done, sorted(finished_cells(lines))) == (2, ["a/seed-1", "b/seed-1"])
    assert "resumed" not in json.loads((unfinished / "manifest.json").read_text())


def killed_after_one(removed: list[str]) -> Callable[[Cell], None]:
    """A `remove_cell` that deletes one cell, and is killed at the next."""

    def remove(cell: Cell) -> None:
        if removed:
            raise KeyboardInterrupt
        removed.append(cell.label)
        remove_cell(cell)

    return remove


def test_another_text_of_a_call_in_the_prefix_is_named_and_overwrite_makes_all_that_follows_it_anew(
    tmp_path: Path, local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.py").write_text(FUNCTIONS)
    prefix = {"data": {"call": "rows.py:write_rows", "arguments": {"count": 3}}}
    path = write_sweep(tmp_path, prefix=prefix, seeds=[1])
    sweep(path)
    (tmp_path / "rows.py").write_text(FUNCTIONS.replace("[seed] * count", "[-seed] * count"))
    result, lines = sweep(path)
    (line,) = [line for line in lines if "another text" in line]
    assert line.startswith("prefix/seed-1/data ran with another text of the file of call=")
    assert finished_cells(lines) == []
    removed: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr("flatpeak.experiments.sweep.remove_cell", killed_after_one(removed))
        with pytest.raises(KeyboardInterrupt):
            sweep(path, overwrite=True)
    assert removed == ["base/seed-1"]  # and what says that the prefix has changed is still there
    _, lines = sweep(path, overwrite=True)
    assert finished_cells(lines) == ["prefix/seed-1/data", "base/seed-1"]
    assert json.loads((result.path / "prefix/seed-1/data/rows.json").read_text()) == [-1, -1, -1]
    assert not any("another text" in line for line in sweep(path)[1])


def test_rows_and_curves_that_a_changed_file_does_not_name_go_with_a_notice(tmp_path: Path, local: Any) -> None:
    both = write_sweep(tmp_path, arms={"a": {}, "b": {}}, seeds=[1, 2], curves={"metrics": ["reward/mean"], "every": 1})
    result, _ = sweep(both)
    curves = result.table.with_name("curves.csv")
    assert curves.is_file()
    _, lines = sweep(write_sweep(tmp_path, arms={"b": {}, "c": {}}, seeds=[2]))
    (line,) = [line for line in lines if "leaves out" in line]
    assert line == f"table.csv leaves out earlier rows, of arms a; seeds 1: their runs stay in {result.path / 'runs'}"
    assert not curves.exists()


def test_a_damaged_manifest_of_a_finished_run_stops_no_sweep(tmp_path: Path, local: Any) -> None:
    path = write_sweep(tmp_path, seeds=[1])
    result, _ = sweep(path)
    (result.path / "runs/base/seed-1/manifest.json").write_text('{"started": "2026-')
    again, lines = sweep(path)
    assert (again.done, finished_cells(lines)) == (1, [])


@pytest.mark.slow
def test_a_changed_prefix_reruns_every_arm_of_its_seed(tmp_path: Path, local: Any) -> None:
    def path_at(count: int) -> Path:
        prefix = {"data": {"call": "functions.py:write_rows", "arguments": {"count": count}}}
        return write_sweep(tmp_path, prefix=prefix, arms={"a": {}, "b": {}}, seeds=[1])

    result, _ = sweep(path_at(2))
    with pytest.raises(UserError, match=r"prefix/seed-1/data \(and 2 more\) was made with other settings \(its call, "):
        sweep(path_at(3))
    _, lines = sweep(path_at(3), overwrite=True)
    assert finished_cells(lines) == ["prefix/seed-1/data", "a/seed-1", "b/seed-1"]
    assert json.loads((result.path / "prefix" / "seed-1" / "data" / "rows.json").read_text()) == [1, 1, 1]


@pytest.mark.slow
def test_a_prefix_that_no_run_needs_any_more_is_not_made_again(tmp_path: Path, local: Any) -> None:
    prefix = {"data": PREFIX["data"]}
    result, _ = sweep(write_sweep(tmp_path, prefix=prefix, seeds=[1]))
    shutil.rmtree(result.path / "prefix" / "seed-1" / "data")
    _, lines = sweep(write_sweep(tmp_path, prefix=prefix, seeds=[1, 2]))
    assert finished_cells(lines) == ["prefix/seed-2/data", "base/seed-2"]
    _, lines = sweep(write_sweep(tmp_path, prefix=prefix, seeds=[1], arms={"base": {}, "kl": {}}))
    assert finished_cells(lines) == ["prefix/seed-1/data", "kl/seed-1"]


def test_a_failed_prefix_fails_the_runs_of_its_seed_with_its_reason(tmp_path: Path, local: Any) -> None:
    prefix = {"rows": {"call": "functions.py:fail"}, "sft": PREFIX["sft"]}
    result, _ = sweep(write_sweep(tmp_path, prefix=prefix, arms={"a": {}, "b": {}}, seeds=[4]))
    table = read_table(result.table)
    assert table.column("status") == ["failed", "failed"]
    assert table.column("reason") == ["prefix step rows failed: ValueError: no rows for seed 4"] * 2
    assert not (result.path / "prefix" / "seed-4" / "sft").exists()


def test_a_run_does_not_see_what_the_users_module_kept_of_another(tmp_path: Path, local: Any) -> None:
    """The reward counts its calls in a list of its module."""
    arms: dict[str, Any] = {"first": {"settings": {"run.checkpoint_every": 2}}, "second": {}}
    settings = {"rewards.letters": reward(tmp_path, "counted")}
    result, _ = sweep(write_sweep(tmp_path, settings=settings, seeds=1, arms=arms), processes=1)
    assert result.done == 2
    first, second = (rows_of(result.path / "runs" / arm / "seed-1") for arm in arms)
    assert first == second
    assert len({row["reward/mean"] for row in first if row["stage"] == "train"}) > 1


@pytest.mark.parametrize(("keep", "expected"), [("all", 5), ("last", 1), ("none", 0)])
def test_the_checkpoints_of_a_finished_run_stay_as_the_sweep_says(
    tmp_path: Path, local: Any, keep: str, expected: int
) -> None:
    settings = {"training.steps": 4, "run.keep_checkpoints": 9}
    result, _ = sweep(write_sweep(tmp_path, settings=settings, seeds=1, keep=keep))
    run = result.path / "runs" / "base" / "seed-1"
    summary = read_summary(run / "summary.json")
    assert len(summary.checkpoints) == expected
    links = {path.name: path.resolve().exists() for path in (run / "checkpoints").iterdir() if path.is_symlink()}
    assert all(links.values())
    assert ("last" in links) == (expected > 0)
    again, lines = sweep(tmp_path / "sweep.yaml")
    assert finished_cells(lines) == []
    assert again.done == 1


def test_two_processes_never_work_on_one_sweep(tmp_path: Path, local: Any) -> None:
    path = write_sweep(tmp_path, seeds=1)
    directory = tmp_path / "sweeps" / "tiny"
    directory.mkdir(parents=True)
    lock = RunLock(directory / ".lock")
    with pytest.raises(UserError, match="another process works on this sweep"):
        sweep(path)
    lock.release()
    assert sweep(path)[0].done == 1


@pytest.mark.slow
def test_each_worker_sees_one_gpu_of_its_own(tmp_path: Path, local: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    outcome = {"status": "failed", "reason": "this machine has none", "seconds": 0.0}
    monkeypatch.setattr("flatpeak.experiments.cell_worker.run_job", lambda job: outcome)

    def gpus(device: str, name: str, processes: int | None) -> list[str | None]:
        local.started.clear()
        sweep(write_sweep(tmp_path, settings={"model.device": device}, seeds="1-3", name=name), processes=processes)
        return [worker.gpu for worker in local.started]

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a, GPU-b")
    assert gpus("auto", "listed", None) == ["GPU-a", "GPU-b"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus("auto", "all", None) == ["0", "1"]
    assert gpus("auto", "shared", 3) == ["0", "1", "0"]
    assert gpus("cpu", "none", 2) == [None, None]


@pytest.mark.slow
def test_runs_are_scored_by_the_reward_model_of_their_seeds_prefix(tmp_path: Path, local: Any) -> None:
    (tmp_path / "pairs.py").write_text(
        "from support.preferences import write_pairs\n\n\n"
        "def pairs(directory, seed):\n    write_pairs(directory / 'pairs.jsonl', count=40, seed=seed)\n"
    )
    judge = reward_model_recipe(tmp_path, Path("${prefix}/pairs/pairs.jsonl"))
    (tmp_path / "judge.yaml").write_text(yaml.safe_dump(judge))
    path = write_sweep(
        tmp_path,
        prefix={
            "pairs": {"call": "pairs.py:pairs"},
            "judge": {"reward_model": "judge.yaml", "settings": {"reward_model.steps": 2}},
        },
        settings={"rewards": {"judge": {"type": "reward_model", "path": "${prefix}/judge"}}, "training.steps": 1},
    )
    result, lines = sweep(path)
    assert result.done == 2
    steps = {f"prefix/seed-{seed}/{name}" for seed in (1, 2) for name in ("pairs", "judge")}
    assert {cell for cell in finished_cells(lines) if cell.startswith("prefix/")} == steps
    for seed in (1, 2):
        config = yaml.safe_load((result.path / "prefix" / f"seed-{seed}" / "judge" / "config.yaml").read_text())
        assert (config["run"]["seed"], config["reward_model"]["steps"]) == (seed, 2)
    assert all(isinstance(value, float) for value in read_table(result.table).column("reward/judge.last"))


def test_a_worker_that_dies_costs_its_run_alone_and_is_replaced(
    tmp_path: Path, local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, receive = local.send, local.receive

    def die_of_the_first_job(worker: Any) -> Any:
        if worker is local.started[0]:
            raise EOFError("the worker process was killed by SIGSEGV")
        return receive(worker)

    monkeypatch.setattr(local, "receive", die_of_the_first_job)
    path = write_sweep(tmp_path, seeds="1-3", settings={"training.steps": 1})
    monkeypatch.setattr(local, "send", lambda worker, job: None if worker is local.started[0] else send(worker, job))
    result, _ = sweep(path, processes=1)
    assert (result.done, result.failed, result.exit_code) == (2, 1, 1)
    assert read_table(result.table).column("reason") == ["the worker process was killed by SIGSEGV", None, None]
    assert len(local.started) == 2
    assert local.started[1].index == 0


def test_a_second_signal_ends_the_sweep_at_once_and_leaves_a_table(
    tmp_path: Path, local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first signal comes when the first run begins, the second when the sweep says that it stops."""
    killed: list[int] = []
    monkeypatch.setattr(local, "send", lambda worker, job: job and os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(local, "interrupt", lambda worker: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr(local, "kill", lambda worker: killed.append(worker.index))
    path = write_sweep(tmp_path, seeds="1-3")
    result, lines = sweep(path, processes=1)
    assert (result.exit_code, result.stopped, result.missing) == (143, 1, 2)
    assert lines[-1] == "stopping: runs in progress save a checkpoint; once more to end at once"
    assert killed == [0]
    assert read_table(result.table).column("status") == ["stopped", "missing", "missing"]


def test_changes_of_a_file_are_refused_beside_a_configuration(tmp_path: Path) -> None:
    config = read_sweep(write_sweep(tmp_path))
    with pytest.raises(UserError, match="settings change a sweep file: give its path"):
        run_sweep(config, settings=["seeds=3"])
    assert not (tmp_path / "sweeps").exists()
