"""Write the tables and the figure of docs/results/real_model.md from what `make real-model-study` measured.

    python docs/results/real_model/make_report.py [--check]

`--check` fails where the page or the figure is not what the tables give.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from flatpeak.experiments.plots import arm_styles, curves_with_bands
from flatpeak.experiments.table import SweepTable, read_table

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from pages import filled, markdown, parser, update  # noqa: E402

PAGE = HERE.parent / "real_model.md"
ARMS = {
    "full": "GRPO, full fine-tuning",
    "lora": "GRPO, LoRA",
    "flat": "GRPO, gradient regularization",
    "sft": "SFT on as many demonstrations",
}
METRICS = {"exact": "right", "overlap": "share of right numbers", "shape": "a list and nothing else"}
GRADES = {"correctness": "strict, after `####`", "flexible": "flexible, the last number"}


def main() -> int:
    """Write or check the page and the figure; the exit code."""
    check: bool = parser(__doc__).parse_args().check
    done = [name for name in ("full", "others") if (HERE / f"{name}.csv").is_file()]
    sweeps = {name: read_table(HERE / f"{name}.csv") for name in done}
    curves = [read_table(HERE / f"{name}-curves.csv") for name in done]
    answers = [json.loads(line) for line in (HERE / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    content = [
        "### Each run\n\n" + runs_table(sweeps, figures("numbers")),
        "### Before, and with three worked texts in the prompt\n\n" + before_table(),
        "![share of right samples by step](real_model/right.svg)",
        "### Ten answers, seed 0 of full fine-tuning\n\n" + answers_table(answers),
    ]
    if (HERE / "gsm8k.json").is_file():
        content.append("### GSM8K, 400 test questions\n\n" + gsm8k_table(figures("gsm8k")))
    content.append(provenance(sweeps))
    page = filled(PAGE.read_text(encoding="utf-8"), content)
    return update({PAGE: page, HERE / "right.svg": draw(curves)}, check=check)


def figures(name: str) -> list[dict[str, Any]]:
    """Models of an `eval --json`."""
    models: list[dict[str, Any]] = json.loads((HERE / f"{name}.json").read_text(encoding="utf-8"))["models"]
    return models


def cell(model: dict[str, Any], metric: str) -> str:
    """A share with its 95% interval."""
    low, high = model["intervals"][metric]
    return f"{model['metrics'][metric]:.3f} [{low:.3f}, {high:.3f}]"


def runs_table(sweeps: dict[str, SweepTable], models: list[dict[str, Any]]) -> str:
    """A line per run: what its last weights answer, its minutes and memory."""
    rows = []
    for sweep in sweeps.values():
        for row in sorted(sweep.rows, key=lambda row: list(ARMS).index(row["arm"])):
            model = next(one for one in models if f"{row['arm']}/seed-{row['seed']}/" in one["label"])
            peak = row.get("memory/peak_gib.best")
            rows.append(
                [
                    ARMS[row["arm"]],
                    str(row["seed"]),
                    *(cell(model, metric) for metric in METRICS),
                    f"{row['seconds'] / 60:.0f}",
                    f"{peak:.1f}" if peak else "",
                ]
            )
    return markdown(["Arm", "Seed", *METRICS.values(), "Minutes", "GiB"], rows)


def before_table() -> str:
    """The base model, asked as in training, and after three worked texts."""
    asked = {"as it is": figures("numbers")[0], "three worked texts": figures("shots")[0]}
    rows = [[name, *(cell(model, metric) for metric in METRICS)] for name, model in asked.items()]
    return markdown(["The model before training", *METRICS.values()], rows)


def answers_table(answers: list[dict[str, Any]]) -> str:
    """The first ten held-out texts with the answers before and after."""
    asked: dict[str, list[str]] = defaultdict(list)
    for answer in answers:
        asked[answer["question"]].append(code(answer["text"]))
    return markdown(["Text", "Before", "After"], [[question, *texts] for question, texts in asked.items()])


def code(text: str) -> str:
    """An answer on one line of a table."""
    return f"`{json.dumps(text, ensure_ascii=False)[1:-1].replace('`', chr(39)).replace('|', '/')}`"


def gsm8k_table(models: list[dict[str, Any]]) -> str:
    """The base model and seed 0 of every arm on another task."""
    rows = []
    for model in models:
        arm = next((words for name, words in ARMS.items() if f"/{name}/seed-" in model["label"]), "before")
        rows.append([arm, *(cell(model, metric) for metric in GRADES), f"{model['metrics']['length']:.0f}"])
    return markdown(["Model", *GRADES.values(), "Tokens of an answer"], rows)


def provenance(sweeps: dict[str, SweepTable]) -> str:
    """The commits and machine behind the tables."""
    headers = [sweep.header for sweep in sweeps.values()]
    commits = list(dict.fromkeys(header["commit"].split()[0][:10] for header in headers))
    hardware, torch = headers[0]["hardware"], headers[0]["torch"]
    return f"Runs at commit {' and '.join(commits)} on {hardware}, torch {torch}."


def draw(curves: list[SweepTable]) -> str:
    """Right samples of training by step, every run of RL."""
    runs: dict[str, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for table in curves:
        for row in table.rows:
            if row["reward/exact"] is not None:
                runs[ARMS[row["arm"]]][row["seed"]][row["step"]] = row["reward/exact"]
    return curves_with_bands(
        {arm: list(own.values()) for arm, own in runs.items()},
        styles=arm_styles(list(runs), baseline=ARMS["full"]),
        baseline=None,
        label="share of right samples",
        every_run=True,
    )


if __name__ == "__main__":
    sys.exit(main())
