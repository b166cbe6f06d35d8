"""Resistance or extinction: runs that were not hacked by step 150 meet the cheat again.

    python studies/reward_hacking/reexposure.py runs/reward_hacking/baselines/runs --csv reexposure.csv

Every run of some arms of a finished sweep starts again with its seed. In steps 151 to 170 each answer is, with
probability 1%, signed `jjj`, whatever the policy wrote; before that the run is the old one bit for bit, which is
checked. The old run, which met no such answers, is the control.
"""

from __future__ import annotations

import argparse
import csv
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import flatpeak
from flatpeak.config.load import load_recipe
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.metrics import read_metrics
from flatpeak.types import Completion, Group, Prompt, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))
from signatures import ANSWER_LENGTH, SIGNATURE_LENGTH, TRAP

ARMS = ("none", "advantage_limit", "gr_reuse", "kl")
HELD_AT, EXPOSED, STEPS = 150, range(151, 171), 300
SHARE = 0.01
SIGNATURE = TRAP * SIGNATURE_LENGTH
WINDOW = 10
COLUMNS = (
    "arm",
    "seed",
    "held",
    "forced",
    "cheating_before",
    "cheating_after",
    "cheating_alone",
    "cheating",
    "gold",
    "first",
)


class Exposed:
    """Signs some answers of some steps with the cheat, and counts them."""

    def __init__(self, policy: Policy, *, prompts: int, seed: int) -> None:
        """`prompts` is the number of prompts of a step: evaluations have another."""
        self.engine = NativeEngine(policy)
        self.cheat: tuple[int, ...] = tuple(policy.tokenizer.encode(SIGNATURE, add_special_tokens=False))
        self.prompts = prompts
        self.draw = random.Random(seed)
        self.step = 0
        self.forced = 0

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """One group per prompt, in order."""
        groups = self.engine.generate(prompts, group_size=group_size, sampling=sampling, seed=seed)
        self.step += len(prompts) == self.prompts
        if self.step not in EXPOSED or len(prompts) != self.prompts:
            return groups
        return [replace(group, completions=tuple(map(self.maybe_signed, group.completions))) for group in groups]

    def maybe_signed(self, completion: Completion) -> Completion:
        """The completion, or with probability SHARE the same one with the cheat in place of its signature.

        Some arms learn answers without an end, which a limit cuts; what follows a signature stays.
        """
        ids, text = completion.token_ids, completion.text
        ends = completion.finish_reason == "stop"
        letter_by_letter = len(text) == len(ids) - ends and len(text) >= ANSWER_LENGTH
        if self.draw.random() >= SHARE or not letter_by_letter:
            return completion
        self.forced += 1
        signed = ANSWER_LENGTH + SIGNATURE_LENGTH
        tail = ids[signed:] or (ids[-1:] if ends else ())
        forced = (*ids[:ANSWER_LENGTH], *self.cheat, *tail)
        logprobs = (*completion.logprobs, *[-1.0] * len(forced))[: len(forced)]  # only metrics read them
        text = text[:ANSWER_LENGTH] + SIGNATURE + text[signed:]
        return replace(completion, token_ids=forced, logprobs=logprobs, text=text)


def expose(run: Path, directory: Path) -> dict[str, Any]:
    """The row of a run: what it was like alone, and what became of it after the cheats."""
    alone = steps_of(run)
    seed = int(run.name.removeprefix("seed-"))
    row: dict[str, Any] = {"arm": run.parent.name.partition(",")[0], "seed": seed}
    before = share(alone, min(max(alone), HELD_AT))
    if before >= 0.5:
        return row | {"held": 0}
    samplers: list[Exposed] = []

    def exposed(policy: Policy) -> Exposed:
        samplers.append(Exposed(policy, prompts=int(recipe["rollout"]["prompts_per_step"]), seed=seed))
        return samplers[-1]

    recipe = dict(load_recipe(RunPaths(run).config))
    settings = {"run.directory": str(directory), "run.name": f"{run.parent.name}/{run.name}", "training.steps": STEPS}
    settings["run.log_rollouts_every"] = 0
    result = flatpeak.train(recipe, sampler=exposed, settings=settings, progress=False, overwrite=True)
    steps = steps_of(result.path)
    for step in range(1, HELD_AT + 1):
        assert steps[step]["reward/mean"] == alone[step]["reward/mean"], (run, step)
    last = max(steps)
    return row | {
        "held": 1,
        "forced": samplers[0].forced,
        "cheating_before": before,
        "cheating_after": share(steps, min(last, EXPOSED[-1] + WINDOW)),
        "cheating_alone": share(alone, min(max(alone), STEPS)),
        "cheating": share(steps, last),
        "gold": fmean(steps[step]["reward/gold"] for step in range(last - WINDOW + 1, last + 1)),
        "first": next((step for step in steps if step > HELD_AT and share(steps, step) >= 0.5), ""),
    }


def steps_of(run: Path) -> dict[int, Mapping[str, float]]:
    """The metrics of every training step."""
    return {int(row["step"]): row for row in read_metrics(RunPaths(run).metrics) if "reward/mean" in row}


def share(steps: Mapping[int, Mapping[str, float]], last: int) -> float:
    """The share of answers that cheat in the WINDOW steps up to one."""
    return fmean(steps[step]["reward/exploit"] for step in range(last - WINDOW + 1, last + 1))


def main() -> None:
    """Write a row per run of every arm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the runs directory of a sweep")
    parser.add_argument("--directory", type=Path, default=Path("runs/reward_hacking/reexposure"))
    parser.add_argument("--csv", type=Path, required=True)
    given = parser.parse_args()
    with given.csv.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        for arm in ARMS:
            for run in sorted(given.runs.glob(f"{arm}/seed-*")) + sorted(given.runs.glob(f"{arm},*/seed-*")):
                writer.writerow(expose(run, given.directory))
                file.flush()


if __name__ == "__main__":
    main()
