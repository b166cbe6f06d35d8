"""Tables by subject, from a task's files through a run and `flatpeak eval` to what is printed and written."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from flatpeak.cli.main import app
from flatpeak.functional import wilson_interval
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.summary import read_summary
from support.runs import quick_train, tiny_recipe

ROWS = {"anatomy": 3, "abstract_algebra": 5, "virology": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps on made-up questions in MMLU's layout, every one of them evaluated."""
    folder = tmp_path_factory.mktemp("mmlu")
    for split, file in (("dev", "dev"), ("val", "val"), ("test", "test")):
        (folder / split).mkdir()
        for subject, count in ROWS.items():
            with (folder / split / f"{subject}_{file}.csv").open("w", newline="") as lines:
                for number in range(count):
                    options = [str(number + shift) for shift in range(4)]
                    csv.writer(lines).writerow([f"{split} {subject} {number}?", *options, "ABCD"[number % 4]])
    recipe = tiny_recipe(
        tmp_path_factory.mktemp("runs"),
        model={"new": {"config": {"max_position_embeddings": 256}}},
        rewards={"correctness": {"type": "choice", "extraction": "letter"}},
        sft={"steps": 6, "batch_size": 8, "optimizer": {"learning_rate": 1e-2}},
        training={"steps": 3},
        evaluation={"every": 1},
        rollout={"max_new_tokens": 3},
    )
    return quick_train({**recipe, "task": {"type": "mmlu", "path": str(folder), "shots": 0}})


@pytest.mark.slow
def test_the_summary_has_the_tables_of_the_start_the_best_and_the_last(run: Path) -> None:
    summary = read_summary(run / "summary.json")
    kept = [(one.stage, one.step) for one in summary.evaluations if one.subsets]
    # The best one's own table is there; where RL's step 0 is the best, that is SFT's.
    best = ("train", summary.best_step) if summary.best_step else ("sft", 6)
    assert set(kept) == {("start", 0), ("sft", 6), best, ("train", 3)}
    table = summary.evaluations[-1].subsets["subject"]
    assert {subject: row["size"] for subject, row in table["values"].items()} == ROWS
    assert list(table["values"]) == ["abstract_algebra", "anatomy", "virology"]
    assert table["values"]["virology"]["intervals"] == {}
    assert set(summary.evaluations[-1].subsets["category"]["values"]) == {"STEM", "other"}


def test_the_metrics_have_no_subjects(run: Path) -> None:
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["stage"] == "eval"]
    names = {name for row in rows for name in row}
    assert {"eval/mmlu/accuracy", "eval/mmlu/extraction_failed", "eval/mmlu/missing"} <= names
    assert not [name for name in names if "anatomy" in name or "subject" in name]


def test_printed_and_written_figures_come_of_the_rows(run: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(app, ["eval", str(run), "--stages", "--rows", str(file), "--json"])
    assert done.exit_code == 0, done.output
    rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in file.read_text().splitlines():
        row = json.loads(line)
        rows[row["model"]].append(row)
    models = json.loads(done.stdout)["models"]
    assert list(rows) == [model["label"] for model in models]
    for model in models:
        answered = rows[model["label"]]
        right = [float(row["answer"] == row["gold"]) for row in answered]
        failed = [float(row["answer"] is None) for row in answered]
        assert len(answered) == sum(ROWS.values())
        assert model["metrics"]["accuracy"] == pytest.approx(sum(right) / 9)
        assert model["intervals"]["accuracy"] == list(wilson_interval(int(sum(right)), 9))
        assert model["metrics"]["extraction_failed"] == pytest.approx(sum(failed) / 9)
        table = model["subsets"]["subject"]
        shares = []
        for subject, count in ROWS.items():
            own = [r for r, row in zip(right, answered, strict=True) if row["subsets"]["subject"] == subject]
            assert len(own) == table["values"][subject]["size"] == count
            shares.append(sum(own) / count)
            assert table["values"][subject]["metrics"]["accuracy"] == pytest.approx(shares[-1])
        assert table["macro"]["accuracy"] == pytest.approx(sum(shares) / 3)
        assert table["micro"]["metrics"]["accuracy"] == pytest.approx(sum(right) / 9)
