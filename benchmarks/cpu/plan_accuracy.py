"""Accuracy of `flatpeak plan`: estimated and measured peak memory of eight kinds of runs.

    python -m benchmarks.cpu.plan_accuracy [--only NAME ...] [--device cpu|cuda] [--json FILE]

Models are Qwen2 models with random weights, saved to a temporary directory; tokens are random words, and rewards are
random numbers, so that every completion has a gradient. Each run takes two steps in its own process. On a CPU the peak
is of resident memory, relative to the memory after all imports; on a GPU it is of the memory that torch has allocated.
--json also writes the peaks of the phases of a step.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import yaml
from transformers import Qwen2Config, Qwen2ForCausalLM

from benchmarks.harness.models import word_tokenizer
from benchmarks.harness.worker_process import Meter
from benchmarks.harness.workloads import EOS, FIRST_WORD, PAD
from flatpeak.apps.planning.run_plan import plan_run
from flatpeak.config.load import load_recipe, merge, parse_config
from flatpeak.runs.manifest import describe_start
from flatpeak.runs.metrics import read_metrics
from flatpeak.types import Example

GIB = 2**30
TARGET = 0.15
ROWS = 40


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model's sizes and the sections of a recipe."""

    hidden: int
    intermediate: int
    layers: int
    vocabulary: int = 4096
    prompt: int = 64
    sections: dict[str, Any] = field(default_factory=dict)


def rollout(prompts: int, group: int, tokens: int) -> dict[str, int]:
    """The section `rollout`."""
    return {"prompts_per_step": prompts, "group_size": group, "max_new_tokens": tokens}


LORA = {"lora": {}}
CASES = {
    "full": Case(hidden=768, intermediate=2048, layers=6, sections={"rollout": rollout(4, 4, 64)}),
    "LoRA": Case(hidden=1024, intermediate=2816, layers=8, sections={"model": LORA, "rollout": rollout(4, 8, 48)}),
    "QLoRA": Case(
        hidden=1536,
        intermediate=4096,
        layers=8,
        sections={"model": {**LORA, "quantization": "nf4", "dtype": "bfloat16"}, "rollout": rollout(4, 4, 32)},
    ),
    "activation checkpointing": Case(
        hidden=768,
        intermediate=2048,
        layers=6,
        sections={"training": {"activation_checkpointing": True}, "rollout": rollout(4, 8, 64)},
    ),
    "adamw_8bit": Case(
        hidden=1024,
        intermediate=2816,
        layers=6,
        sections={"optimizer": {"name": "adamw_8bit"}, "rollout": rollout(4, 4, 48)},
    ),
    "reference kept": Case(
        hidden=768, intermediate=2048, layers=6, sections={"kl": {"coefficient": 0.1}, "rollout": rollout(4, 4, 64)}
    ),
    "long prompts": Case(hidden=512, intermediate=1408, layers=8, prompt=1000, sections={"rollout": rollout(3, 4, 48)}),
    "large vocabulary": Case(
        hidden=512, intermediate=1408, layers=4, vocabulary=100_000, sections={"rollout": rollout(4, 4, 48)}
    ),
}


def main() -> None:
    """Estimate and measure each case, or run as the process of one run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=CASES, help="only this case; may be repeated")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--json", type=Path, help="also write this file")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run(arguments.worker)
        return
    rows = {}
    print(f"{'recipe':26} {'estimated':>10} {'measured':>10} {'error':>7}  largest phase")
    for name in arguments.only or CASES:
        row = rows[name] = compare(CASES[name], device=arguments.device)
        sizes = f"{row['estimated_gib']:10.3f} {row['measured_gib']:10.3f} {row['error']:+7.1%}"
        beyond = "" if abs(row["error"]) <= TARGET else ", beyond the target"
        print(f"{name:26} {sizes}  {row['phase']}{beyond}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"start": describe_start(None), "rows": rows}, indent=1) + "\n")


def compare(case: Case, *, device: str) -> dict[str, Any]:
    """The estimate and the measurement of a case, in GiB."""
    with tempfile.TemporaryDirectory(prefix="flatpeak-plan-accuracy-") as directory:
        path = save(case, Path(directory), device=device)
        memory = plan_run(parse_config(load_recipe(path))).memory
        peaks = measured_gib(path)
    estimated, measured = memory.peak / GIB, peaks["memory/peak_gib"]
    return {
        "estimated_gib": estimated,
        "measured_gib": measured,
        "error": estimated / measured - 1,
        "phase": memory.largest.name,
        "phases_gib": {phase.name: phase.total / GIB for phase in memory.phases},
        "measured_phases_gib": {
            name.removeprefix("memory/").removesuffix("_peak_gib"): peak
            for name, peak in peaks.items()
            if name != "memory/peak_gib"
        },
    }


def save(case: Case, directory: Path, *, device: str) -> Path:
    """Save the model and a recipe of two steps with it; return the recipe's path."""
    shape = Qwen2Config(
        vocab_size=case.vocabulary,
        hidden_size=case.hidden,
        intermediate_size=case.intermediate,
        num_hidden_layers=case.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen2ForCausalLM(shape)
    model.save_pretrained(directory / "model")
    word_tokenizer(case.vocabulary).save_pretrained(directory / "model")
    own = str(Path(__file__).resolve())
    recipe = {
        "run": {"name": "run", "directory": str(directory / "runs"), "checkpoint_every": 0},
        "model": {"path": str(directory / "model"), "device": device},
        "task": {
            "type": "custom",
            "factory": f"{own}:words",
            "arguments": {"tokens": case.prompt, "vocabulary": case.vocabulary},
        },
        "rewards": {"noise": {"type": "function", "function": f"{own}:noise", "timeout": None}},
        "training": {"steps": 2},
        "evaluation": {"every": 0, "size": 1, "accuracy": None, "metric": "reward"},
    }
    path = directory / "recipe.yaml"
    path.write_text(yaml.safe_dump(merge(recipe, case.sections)), encoding="utf-8")
    return path


def measured_gib(recipe: Path) -> dict[str, float]:
    """The peaks of a run in its own process, by metric."""
    command = [sys.executable, "-m", "benchmarks.cpu.plan_accuracy", "--worker", str(recipe)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    peaks: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def run(recipe: Path) -> None:
    """Run a recipe, and print its peaks on the last line."""
    import bitsandbytes  # noqa: F401  # before the measurement starts, like all other imports
    import peft  # noqa: F401

    from flatpeak.pipeline.train import train

    meter = Meter()
    meter.loaded()
    meter.start()
    result = train(recipe, progress=False)
    last = meter.stop()["peak_mib"] / 1024
    # A run resets its process's peak in each phase of a step, and reports the highest.
    rows = [row for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
    before = 0.0 if torch.cuda.is_available() else meter.loaded_kib / 2**20
    named = {name for row in rows for name in row if name.startswith("memory/")}
    peaks = {name: max(row[name] for row in rows if name in row) - before for name in named}
    if not torch.cuda.is_available():
        peaks["memory/peak_gib"] = max(peaks["memory/peak_gib"], last)
    print(json.dumps(peaks))


def words(*, tokens: int, vocabulary: int) -> Any:
    """A task whose prompts are `tokens` random words."""
    draw = random.Random(0)
    examples = [
        Example(
            id=str(row), question=" ".join(f"w{draw.randrange(FIRST_WORD, vocabulary)}" for _ in range(tokens)), gold=""
        )
        for row in range(ROWS)
    ]
    return SimpleNamespace(name="words", train=examples[1:], test=examples[:1])


def noise(completion_ids: list[list[int]]) -> list[float]:
    """Rewards that differ within every group."""
    return [sum(ids) % 1000 / 1000 for ids in completion_ids]


if __name__ == "__main__":
    main()
