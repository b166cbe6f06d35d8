"""A real model on a CPU: parts of a step relative to a large product, rollouts versus vLLM, whole steps versus TRL.

    python -m benchmarks.cpu.real_model MODEL --json FILE [--row parts] [--rounds 3] [--quick]

MODEL is a transformers directory or a GGUF file. A GGUF file needs the packages gguf and accelerate, and is first
written to the user's cache as a float32 directory. Contenders have separate processes and take turns; those of flatpeak
decode and train by native kernels if these support the model.

"product" multiplies two float32 matrices of 1024 x 1024 by torch, which shows the machine's current speed. "decode"
feeds one token to 32 rows of four prompts, including the output layer; "prompts" reads four prompts of 64 tokens;
"training" is a forward and backward pass over 8 prompts of 70 tokens with 8 responses of 16 tokens each, without
counting recomputed logits. Shares of the product are of CPU time on one thread and of wall time on two.

Rollouts and steps use four chat prompts of the recipe `flatpeak:laptop`, different ones in each round, with 8
completions of at most 48 tokens, at temperature 1. In rollouts flatpeak packs its weights in every round, as after an
update; vLLM, which compiles the model, and transformers' `generate` keep theirs. vLLM with bfloat16 takes minutes if
the processor lacks instructions for it, and has one round. vLLM's peak excludes what it reserves at loading (1 GiB of
cache). Steps are GRPO with one update per rollout, in float32; TRL samples by `generate` and trains on 8 completions at
a time, its default, with accumulated gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cpu import engine, step
from benchmarks.cpu.real_model_worker import PARTS
from benchmarks.harness.models import load_tokenizer
from benchmarks.harness.runner import Row, Run, main, say
from benchmarks.harness.tables import real_model
from benchmarks.harness.workers import Worker, measure_in_turn
from benchmarks.harness.workloads import GROUP, Workload
from flatpeak.config.load import load_recipe, parse_config
from flatpeak.recipes.laptop import numbers
from flatpeak.utils.gguf import dequantized, find_gguf

THREADS = {"1 thread": 1, "2 threads": 2}
ROLLOUTS = ("flatpeak", "transformers generate", "vLLM")
BFLOAT16 = "rollouts beside bfloat16"
STEPS: dict[str, dict[str, object]] = {
    "flatpeak": {"contender": "flatpeak"},
    "TRL, 8 at a time": {"contender": "TRL generate", "micro_batch": 8},
}
UNCOUNTED = {"parts": 1, "rollouts": 1, BFLOAT16: 0, "steps": 1}
"""Warm-up turns of steps: the set-up with the first rollout. With products of this size, other warm-up is short."""
PROMPTS, MAX_NEW_TOKENS = 4, 48
QUICK_GROUP, QUICK_TOKENS = 2, 4


def measure(run: Run, name: str) -> Row:
    """Measure the parts of a step, or one comparison."""
    file = find_gguf(run.model)
    model = dequantized(file) if file else Path(run.model).absolute()
    repeats = 1 if name == BFLOAT16 else run.repeats
    work = chat_workload(model, steps=UNCOUNTED[name] + repeats + 3, quick=run.quick)
    starts = STARTS[name](run, work, model)
    measured, failures, reported = measure_in_turn(starts, uncounted=UNCOUNTED[name], repeats=repeats, say=say)
    return {
        "parts": PARTS,
        "workload": asdict(work),
        "contenders": measured,
        "failures": failures,
        "reported": engine.versions(reported),
    }


def chat_workload(model: Path, *, steps: int, quick: bool) -> Workload:
    """Texts of the recipe `laptop` as chats, or as plain text if the tokenizer has no chat template."""
    tokenizer = load_tokenizer(model)
    asked = parse_config(load_recipe("flatpeak:laptop")).prompt.user
    texts = [asked.replace("{question}", each.question) for each in numbers(train_size=steps * PROMPTS).train]
    if tokenizer.chat_template:
        texts = [chat(tokenizer, text) for text in texts]
    return Workload(
        size=model.name,
        lengths="chat",
        prompts=PROMPTS,
        group=QUICK_GROUP if quick else GROUP,
        asked=[(text, tokenizer(text)["input_ids"]) for text in texts],
        cap=QUICK_TOKENS if quick else MAX_NEW_TOKENS,
        eos=tokenizer.eos_token_id,
        pad=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
    )


def chat(tokenizer: Any, text: str) -> str:
    """A chat up to the assistant's turn."""
    message = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False))


def parts(run: Run, work: Workload, model: Path) -> dict[str, Callable[[], Worker]]:
    """Workers for the parts of a step, with one and with two threads."""
    return {
        name: partial(
            Worker,
            "benchmarks.cpu.real_model_worker",
            {"model": str(model), "threads": threads},
            log=run.log(name),
            environment={"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
        )
        for name, threads in THREADS.items()
    }


def rollouts(run: Run, work: Workload, model: Path) -> dict[str, Callable[[], Worker]]:
    """Workers that sample with float32 weights."""
    return engine.contenders(run, work, model, 1, ROLLOUTS)


def rollouts_beside_bfloat16(run: Run, work: Workload, model: Path) -> dict[str, Callable[[], Worker]]:
    """Workers that sample; vLLM has bfloat16 weights."""
    return engine.contenders(run, work, model, 1, ["flatpeak", "vLLM, bfloat16"])


def steps(run: Run, work: Workload, model: Path) -> dict[str, Callable[[], Worker]]:
    """Workers that train."""
    return {name: step.start(run, work, model, name, arguments) for name, arguments in STEPS.items()}


STARTS = {"parts": parts, "rollouts": rollouts, BFLOAT16: rollouts_beside_bfloat16, "steps": steps}

if __name__ == "__main__":
    measured = main(
        "real_model",
        __doc__,
        rows=list(STARTS),
        quick=list(STARTS),
        repeats=3,
        measure=measure,
        model="a model's directory, or a GGUF file",
    )
    print(real_model(measured))
