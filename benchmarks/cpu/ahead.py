"""Rollouts ahead: whole GRPO steps while a second process samples the next completions, and synchronous steps.

    python -m benchmarks.cpu.ahead --json FILE [--row "1M, 128 completions of up to 64 tokens"] [--rounds 7] [--quick]

Both do the same work at learning rate 0, so that both sample the same completions, and take turns step by step, with
one thread per process. A step with rollouts ahead ends when its update is done and the next completions are sampled.
The first step, which waits for the start of the second process, is not counted. CPU-seconds are of both processes
together, and the ratio is of tokens per second. Both contenders run in the same process, so the difference of their
peaks is the memory of the second process.
"""

from __future__ import annotations

import os
import resource
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from benchmarks.cpu.gradreg import NoRecorder, build_trainer
from benchmarks.harness.runner import Row, Run, main, say
from flatpeak.config.load import parse_config
from flatpeak.pipeline.build import Components, build_components
from flatpeak.pipeline.progress import SilentProgress
from flatpeak.pipeline.request import CallerObjects
from flatpeak.rollout.ahead import RolloutsAhead

SIZES: dict[str, dict[str, int]] = {
    "0.2M": {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 3},
    "1M": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4},
    "7M": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 7},
}
ROWS = {f"{size}, 128 completions of up to {tokens} tokens": (size, tokens) for size in SIZES for tokens in (16, 64)}
CONTENDERS = {"ahead": 1, "synchronous": 0}
"""The staleness of each contender."""
UNCOUNTED = 1
TICKS = os.sysconf("SC_CLK_TCK")


def recipe(size: str, tokens: int, staleness: int) -> dict[str, Any]:
    """Sums for a new model that is never right; `parity` is the reward."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return {
        "run": {"threads": 1},
        "model": {"new": {"architecture": "qwen2", "config": SIZES[size] | heads}, "device": "cpu"},
        "task": {"type": "arithmetic", "train_size": 2000, "test_size": 10},
        "rollout": {"prompts_per_step": 16, "group_size": 8, "max_new_tokens": tokens, "staleness": staleness},
        "optimizer": {"learning_rate": 0.0},
        "training": {"steps": 1000},
    }


def parity(completion_ids: list[list[int]]) -> list[float]:
    """A reward that differs within nearly every group."""
    return [float(sum(ids) % 2) for ids in completion_ids]


def measure(run: Run, name: str) -> Row:
    """Run steps of both in turns."""
    size, tokens = ROWS[name]
    torch.set_num_threads(1)
    measurements: dict[str, list[dict[str, float]]] = {contender: [] for contender in CONTENDERS}
    configs = {contender: parse_config(recipe(size, tokens, age)) for contender, age in CONTENDERS.items()}
    objects = CallerObjects(reward=parity)
    built = {
        contender: build_components(config, objects, checkpoint=None, progress=SilentProgress())
        for contender, config in configs.items()
    }
    with closing(built["ahead"]), closing(built["synchronous"]):
        trainers = {
            contender: build_trainer(built[contender], configs[contender], NoRecorder()) for contender in CONTENDERS
        }
        for step in range(1, UNCOUNTED + run.repeats + 1):
            for contender, trainer in trainers.items():
                cpu, started = cpu_seconds(built[contender]), time.perf_counter()
                metrics = trainer.train_step(step)
                wall = time.perf_counter() - started
                measured = {
                    "wall": wall,
                    "cpu": cpu_seconds(built[contender]) - cpu,
                    "tokens": metrics["rollout/length_mean"] * 128,
                    "peak_mib": peak_mib(built[contender]),
                    "rollout": metrics["time/rollout"],
                }
                if step > UNCOUNTED:
                    measurements[contender].append(measured)
                    say(f"  {contender}: " + ", ".join(f"{key} {value:.4g}" for key, value in measured.items()))
    return {"contenders": measurements, "load": os.getloadavg()[0]}


def second_process(components: Components) -> Path | None:
    """The /proc directory of the second process, if there is one."""
    sampler = components.sampler
    pid = sampler.background.pid if isinstance(sampler, RolloutsAhead) else None
    return None if pid is None else Path(f"/proc/{pid}")


def cpu_seconds(components: Components) -> float:
    """CPU time so far of this process and the second process."""
    process = second_process(components)
    ticks = process.joinpath("stat").read_text().rpartition(")")[2].split()[11:13] if process else []
    return time.process_time() + sum(map(int, ticks)) / TICKS


def peak_mib(components: Components) -> float:
    """Peak memory of this process and the second process."""
    process, own = second_process(components), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = process.joinpath("status").read_text().splitlines() if process else []
    return (own + sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))) / 1024


if __name__ == "__main__":
    main("ahead", __doc__, rows=list(ROWS), quick=list(ROWS)[:1], repeats=7, measure=measure)
