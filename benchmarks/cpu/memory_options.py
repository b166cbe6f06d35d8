"""Costs and savings of the training pass's options: one forward and backward pass each, on one CPU thread.

    python -m benchmarks.cpu.memory_options [--rounds 7] [--json FILE]

A Qwen2 model of 7M parameters scores one packed row of 8,192 tokens (16 prompts of 64 tokens with 8 completions of 40
to 72 tokens each) and backpropagates, as a learner does for a micro-batch. Every variant has its own process; a round
runs each of them once, in turns, and the first round is not counted. Time is CPU seconds of the process, median over
rounds. Memory is the peak of resident memory in a pass relative to the memory before it, including gradients. The
memory between passes (weights, and float32 masters of bfloat16 weights) is a separate column.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import training_layers
from flatpeak.runs.manifest import describe_start
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.learner import Learner
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.types import Batch

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "activation checkpointing": {"recompute": True},
    "compile": {"compiled": True},
    "bfloat16 weights": {"dtype": "bfloat16"},
}
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 256,
}
PROMPTS, PROMPT_TOKENS, GROUP = 16, 64, 8
RESPONSE_TOKENS = (40, 72, 48, 64)


def main() -> None:
    """Measure and print, or run as the process of one variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=VARIANTS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        serve(**VARIANTS[arguments.worker])
        return
    rows = measure(repeats=arguments.rounds)
    start = describe_start(None)
    print(table(rows, start))
    if arguments.json:
        arguments.json.write_text(json.dumps({"start": start, "rows": rows}, indent=1) + "\n")


def measure(*, repeats: int) -> dict[str, dict[str, Any]]:
    """Measurements of each variant, by name."""
    with tempfile.TemporaryDirectory() as cache, ExitStack() as stack:
        # An empty cache makes the first call compile.
        settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TORCHINDUCTOR_CACHE_DIR": cache}
        workers = {
            name: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, __file__, "--worker", name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    env={**os.environ, **settings},
                )
            )
            for name in VARIANTS
        }
        rows = {name: answer(worker) for name, worker in workers.items()}
        for number in range(repeats):
            for name, worker in workers.items():
                measured = answer(worker)
                if number:
                    for key, value in measured.items():
                        rows[name].setdefault(key, []).append(value)
        for worker in workers.values():
            assert worker.stdin is not None
            worker.stdin.close()
        return rows


def answer(worker: subprocess.Popen[str]) -> dict[str, Any]:
    """Request a worker's next measurements and wait for them."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    line = worker.stdout.readline()
    if not line:
        raise RuntimeError(f"{worker.args} ended with {worker.wait()}")
    measured: dict[str, Any] = json.loads(line)
    return measured


def serve(*, dtype: str = "float32", recompute: bool = False, compiled: bool = False) -> None:
    """Run one variant: build it, then run a pass per line of stdin. The first answer is about the first pass."""
    torch.set_num_threads(1)
    policy = build_policy(dtype)
    learner = Learner(
        policy,
        Objective(config=ObjectiveConfig(loss="policy_gradient"), kl=KLConfig()),
        OptimizerConfig(),
        temperature=1.0,
        micro_batch_tokens=2**20,
    )
    batch = build_batch()
    held = {id(t): t.numel() * t.element_size() for t in (*policy.parameters(), *policy.masters().values())}
    with training_layers(policy.causal, recompute=recompute, compiled=compiled):
        sys.stdin.readline()
        started = time.perf_counter()
        one_pass(learner, batch)
        first = time.perf_counter() - started
        say({"first_call_seconds": first, "held_mib": sum(held.values()) / 2**20, "parameters": count(policy)})
        while sys.stdin.readline():
            before = resident_before_a_pass(policy)
            cpu = time.process_time()
            one_pass(learner, batch)
            cpu = time.process_time() - cpu
            say({"cpu_seconds": cpu, "peak_mib": (status("VmHWM") - before) / 2**10})


def build_policy(dtype: str) -> Policy:
    """7M parameters with random weights, the same in every variant except for rounding."""
    model = {"new": {"architecture": "qwen2", "config": SIZES}, "device": "cpu", "dtype": dtype}
    policy = load_policy(ModelConfig.model_validate(model), texts=["0123456789"], seed=0)
    assert policy.native, policy.notice
    return policy


def build_batch() -> Batch:
    """8,192 tokens in one packed row."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, SIZES["vocab_size"], (PROMPTS, PROMPT_TOKENS), generator=generator)
    lengths_N = torch.tensor(RESPONSE_TOKENS).repeat(PROMPTS * GROUP // len(RESPONSE_TOKENS))
    count, total = len(lengths_N), int(lengths_N.sum())
    assert PROMPTS * PROMPT_TOKENS + total == 8192
    return Batch(
        prompts=tuple(tuple(row) for row in tokens.tolist()),
        prompt_N=torch.arange(PROMPTS).repeat_interleave(GROUP),
        lengths_N=lengths_N,
        tokens_T=torch.randint(3, SIZES["vocab_size"], (total,), generator=generator),
        sequence_T=torch.arange(count).repeat_interleave(lengths_N),
        advantages_T=torch.randn(count, generator=generator).repeat_interleave(lengths_N),
        weights_N=torch.full((count,), 1 / count),
        old_logprobs_T=torch.zeros(total),
    )


def one_pass(learner: Learner, batch: Batch) -> None:
    """Run forward and backward; the gradients stay until the next pass."""
    learner.accumulate_gradients(batch)


def resident_before_a_pass(policy: Policy) -> int:
    """Free the memory of the last pass, reset the peak, and return the resident memory in KiB. Linux only."""
    for parameter in policy.parameters():
        parameter.grad = None
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def status(key: str) -> int:
    """A field of /proc/self/status, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def count(policy: Policy) -> int:
    """Count the trainable parameters."""
    return sum(parameter.numel() for parameter in policy.parameters())


def say(measured: dict[str, Any]) -> None:
    """Send one line to the parent."""
    print(json.dumps(measured), flush=True)


def table(rows: dict[str, dict[str, Any]], start: dict[str, Any]) -> str:
    """Write the table in Markdown."""
    plain = rows["plain"]
    lines = [
        f"{plain['parameters']:,} parameters, 8,192 packed tokens, {len(plain['cpu_seconds'])} rounds. "
        f"{start['hardware']['cpu']}, 1 thread; torch {start['versions']['torch']}, "
        f"commit {start['commit']['flatpeak']}.",
        "",
        "| Variant | CPU s a pass (range) | Ratio | Peak, MiB | Ratio | Held between, MiB | First pass, wall s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        ratio = median(a / b for a, b in zip(row["cpu_seconds"], plain["cpu_seconds"], strict=True))
        seconds, peak = row["cpu_seconds"], median(row["peak_mib"])
        lines.append(
            f"| {name} | {median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f}) | {ratio:.2f} | {peak:.0f} | "
            f"{peak / median(plain['peak_mib']):.2f} | {row['held_mib']:.0f} | {row['first_call_seconds']:.1f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
