"""The cost of batch invariance: rollouts with and without the padding that makes every bit independent of the batch.

    python -m benchmarks.cpu.invariance [--rounds 9]

Tokens per CPU-second on one thread for the same completions, in turns; median, smallest and largest round.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.harness.models import load_model, load_tokenizer, save_model
from benchmarks.harness.workloads import GROUP, prompt_ids, workload
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Example, Prompt, SamplingParams


def measure(size: str, lengths: str, repeats: int) -> None:
    """Measure and print one row."""
    torch.set_num_threads(1)
    work = workload(size, lengths)
    with tempfile.TemporaryDirectory() as directory:
        model = save_model(work, Path(directory))
        policy = Policy(load_model(model), load_tokenizer(model))
    prompts = [
        Prompt(id=str(p), token_ids=tuple(ids), text="", example=Example(id=str(p), question="", gold=""))
        for p, ids in enumerate(prompt_ids(work, 0))
    ]
    sampling = SamplingParams(max_new_tokens=work.limits.cap)
    speeds: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(repeats + 1):
        for invariant, measured in speeds.items():
            policy.batch_invariant = invariant
            began = time.process_time()
            groups = NativeEngine(policy).generate(prompts, group_size=GROUP, sampling=sampling, seed=seed)
            tokens = sum(len(completion.token_ids) for group in groups for completion in group.completions)
            measured.append(tokens / (time.process_time() - began))
    on, off = (sorted(measured[1:]) for measured in (speeds[True], speeds[False]))  # the first round warms up
    ratio = statistics.median(on) / statistics.median(off)
    cells = [f"{statistics.median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f})" for rates in (on, off)]
    print(f"| {size}, {lengths} | {cells[0]} | {cells[1]} | {ratio:.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, dest="repeats", default=9, help="counted rounds (9)")
    repeats = parser.parse_args().repeats
    print("| Workload | With the padding | Without | Ratio |\n| --- | --- | --- | --- |")
    measure("1M", "skewed", repeats)
    measure("7M", "skewed", repeats)
