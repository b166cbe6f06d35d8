"""RL against SFT over several seeds: each run's policy where RL began and where it ended, on the same questions.

    python docs/results/seeds.py runs/wp-0 runs/wp-1 runs/wp-2 [key=value ...]

Overrides change what is evaluated on (task.*, evaluation.*, rollout.*). Prints a Markdown table: means over the seeds,
the difference with its 95% paired bootstrap interval over questions (each question's mean over the seeds), and the
difference of every seed. The interval speaks of questions like these, for these seeds; the spread between seeds is in
the last column.
"""

from __future__ import annotations

import sys

from flatpeak.apps.compare import compare_checkpoints
from flatpeak.evaluation.evaluate import Evaluation
from flatpeak.functional import paired_bootstrap


def per_question(evaluations: list[Evaluation], metric: str) -> list[float]:
    """Each question's mean over the seeds; questions that any seed has no value for are left out."""
    columns = zip(*(evaluation.values[metric] for evaluation in evaluations), strict=True)
    return [sum(column) / len(column) for column in columns if None not in column]


def row(metric: str, before: list[Evaluation], after: list[Evaluation]) -> str:
    """One line of the table."""
    start, end = per_question(before, metric), per_question(after, metric)
    pooled = paired_bootstrap(start, end)
    seeds = ", ".join(f"{b.mean(metric) - a.mean(metric):+.4f}" for a, b in zip(before, after, strict=True))
    means = f"{sum(start) / len(start):.4f} | {sum(end) / len(end):.4f}"
    return f"| {metric} | {means} | {pooled.difference:+.4f} [{pooled.low:+.4f}, {pooled.high:+.4f}] | {seeds} |"


def main(arguments: list[str]) -> None:
    """Evaluate and print."""
    overrides = [argument for argument in arguments if "=" in argument]
    runs = [argument for argument in arguments if argument not in overrides]
    before, after = [], []
    for run in runs:
        comparison = compare_checkpoints([f"{run}/checkpoints/step_000000", f"{run}/checkpoints/last"], overrides)
        before.append(comparison.evaluations[0])
        after.append(comparison.evaluations[1])
    print(f"{before[0].task}: {before[0].size} questions, {len(runs)} seeds\n")
    print("| metric | after SFT | after RL | difference [95%] | each seed |\n|---|---|---|---|---|")
    for metric in before[0].values:
        if metric.removeprefix("sampled/") not in {"reward", "correctness"}:
            print(row(metric, before, after))


if __name__ == "__main__":
    main(sys.argv[1:])
