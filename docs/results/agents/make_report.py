"""Write runs.csv, the picture, and what docs/results/agents.md has between its marks, from the runs of its commands.

python docs/results/agents/make_report.py runs/tools-? runs/no-tools-?    # without runs: the picture alone
"""

from __future__ import annotations

import csv
import json
import sys
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from flatpeak.report.canvas import svg_canvas, tidy

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from pages import filled, markdown  # noqa: E402

PAGE = HERE.parent / "agents.md"
TABLE = HERE / "runs.csv"
STAGES = {"start": "before training", "sft": "after SFT", "train": "after 20 steps of GRPO", "longer": "after 40 steps"}
ARMS = ("tools", "no tools")
WINDOW = 5
"""Steps of GRPO whose rewards are averaged at the beginning and the end."""
SHOWN = (0, 3, 4, 7, 9, 14)
"""One held-out question of each kind."""


def main(directories: list[Path]) -> None:
    """Write the CSV file, the picture, and the page between its marks."""
    if not directories:
        (HERE / "accuracy.svg").write_text(picture(), encoding="utf-8")
        return
    rows = [read_run(directory) for directory in directories]
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    (HERE / "accuracy.svg").write_text(picture(), encoding="utf-8")
    page = filled(PAGE.read_text(encoding="utf-8"), [table(), transcripts(directories[0])])
    PAGE.write_text(page, encoding="utf-8")


def read_run(directory: Path) -> dict[str, Any]:
    """A run's held-out accuracy at the end of each stage, with its 95% interval, and its seconds."""
    config = yaml.safe_load((directory / "config.yaml").read_text(encoding="utf-8"))
    row: dict[str, Any] = {"arm": ARMS[not config["tools"]], "seed": config["run"]["seed"]}
    last, seconds = evaluations(directory)
    longer = directory.with_name(f"{directory.name}-longer")
    if longer.is_dir():
        forked, seconds = evaluations(longer)  # with the seconds of what it goes on from
        last["longer"] = forked["train"]
    for stage in STAGES:
        measured = last.get(stage)
        numbers = (measured["metrics"]["accuracy"], *measured["intervals"]["accuracy"]) if measured else ()
        for name, number in zip_longest(("accuracy", "low", "high"), numbers):
            row[f"{stage}.{name}"] = "" if number is None else f"{number:.4f}"
    rewards = training_rewards(longer if longer.is_dir() else directory)
    row |= {"reward.first": f"{fmean(rewards[:WINDOW]):.4f}", "reward.last": f"{fmean(rewards[-WINDOW:]):.4f}"}
    return row | {"questions": last["train"]["size"], "seconds": round(seconds)}


def training_rewards(directory: Path) -> list[float]:
    """The mean reward of the episodes of each step of GRPO."""
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["reward/mean"] for row in map(json.loads, lines) if row["stage"] == "train"]


def evaluations(directory: Path) -> tuple[dict[str, Any], float]:
    """The last evaluation of each stage of a run, and the run's seconds."""
    summary = json.loads((directory / "summary.json").read_text(encoding="utf-8"))
    return {evaluation["stage"]: evaluation for evaluation in summary["evaluations"]}, summary["wall_seconds"]


def table() -> str:
    """A line per seed and arm, from the CSV file."""
    with TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    lines = []
    for row in sorted(rows, key=lambda row: (ARMS.index(row["arm"]), row["seed"])):
        training = f"{float(row['reward.first']):.2f}, {float(row['reward.last']):.2f}"
        lines.append([row["seed"], row["arm"], *(cell(row, stage) for stage in STAGES), training, row["seconds"]])
    return markdown(["Seed", "Arm", *STAGES.values(), "training: first steps, last", "seconds"], lines)


def picture() -> str:
    """Held-out accuracy by stage, a line for each seed and arm, from the CSV file."""
    with TABLE.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    with svg_canvas("agents", (7.0, 3.6)) as (figure, text):
        axes = figure.subplots()
        for number, row in enumerate(rows):
            stages = [stage for stage in STAGES if row[f"{stage}.accuracy"]]
            places = [list(STAGES).index(stage) + 0.06 * (number - 2) for stage in stages]
            values, lows, highs = (
                [float(row[f"{stage}.{name}"]) for stage in stages] for name in ("accuracy", "low", "high")
            )
            errors = [
                [value - low for value, low in zip(values, lows, strict=True)],
                [high - value for value, high in zip(values, highs, strict=True)],
            ]
            style = "-" if row["arm"] == "tools" else ":"
            axes.errorbar(
                places, values, errors, marker="o", linestyle=style, label=f"{row['arm']}, seed {row['seed']}"
            )
        tidy(axes)
        axes.set_xticks(range(len(STAGES)), list(STAGES.values()))
        axes.set_ylim(0, 1)
        axes.set_ylabel("held-out accuracy")
        axes.legend(frameon=False, loc="upper left")
    return text.getvalue()


def cell(row: dict[str, str], stage: str) -> str:
    """An accuracy with its interval; empty for a stage that the run did not have."""
    if not row[f"{stage}.accuracy"]:
        return ""
    accuracy, low, high = (float(row[f"{stage}.{name}"]) for name in ("accuracy", "low", "high"))
    return f"{accuracy:.3f} [{low:.3f}, {high:.3f}]"


def transcripts(directory: Path) -> str:
    """A run's answers to some questions before training, after SFT and after GRPO."""
    stages = list(STAGES)[:3]
    lines = []
    files = [sorted((directory / "evaluations").glob(f"{stage}_*.jsonl"))[-1] for stage in stages]
    answers = [[json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] for file in files]
    for shown in SHOWN:
        asked = answers[0][shown]
        lines.append([f"{asked['question']} ({asked['gold']})", *(code(rows[shown]["text"]) for rows in answers)])
    return markdown(["Question", *(STAGES[stage] for stage in stages)], lines)


def code(text: str) -> str:
    """An answer on one line of a table."""
    return f"`{text.replace(chr(10), ' ')}`"


if __name__ == "__main__":
    main([Path(argument) for argument in sys.argv[1:]])
