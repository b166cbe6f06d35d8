"""Whole GRPO steps with a tool, by flatpeak and TRL, from the same weights, with one update per rollout.

    python -m benchmarks.cpu.tools MODEL --json FILE [--row "returns at once"] [--rounds 3] [--quick]

MODEL is SmolLM2-135M-Instruct, as a transformers directory or a GGUF file. It gets Qwen2.5's chat template and learns
to call the tool in 12 steps of SFT by flatpeak, which are not measured. Then both train on products of three-digit
numbers: 4 questions with 4 episodes of at most 96 tokens in a step, in float32, at temperature 1. Tokens are those of
whole episodes, answers included. In the row "sleeps 0.5 s" each call takes that long, and the wall time of a step
counts.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import flatpeak
from benchmarks.harness.runner import Row, Run, main, model_directory, say
from benchmarks.harness.workers import Worker, measure_in_turn
from flatpeak.recipes.calculator import multiply
from flatpeak.utils.gguf import dequantized, find_gguf

ROWS = {"returns at once": 0.0, "sleeps 0.5 s": 0.5}
CONTENDERS = ("flatpeak", "TRL generate")
UNCOUNTED = 2
"""Warm-up turns: the set-up with the first rollout, and one step."""
CALL = '<tool_call>\n{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}\n</tool_call>'


def measure(run: Run, name: str) -> Row:
    """Measure both on one tool."""
    with model_directory(run, "model") as scratch:
        model = taught(run.model, scratch)
        arguments = {"model": str(model), "steps": UNCOUNTED + run.repeats + 2, "seconds": ROWS[name]}
        starts = {
            contender: partial(
                Worker,
                "benchmarks.cpu.tools_worker",
                arguments | {"contender": contender, "scratch": str(scratch / contender)},
                log=run.log(contender, name),
            )
            for contender in CONTENDERS
        }
        for contender in CONTENDERS:
            (scratch / contender).mkdir()
        measurements, failures, _ = measure_in_turn(starts, uncounted=UNCOUNTED, repeats=run.repeats, say=say)
    return {"contenders": measurements, "failures": failures}


def taught(model: str, scratch: Path) -> Path:
    """The model with a chat template that describes tools, after a little SFT."""
    import trl

    file = find_gguf(model)
    base = scratch / "base"
    shutil.copytree(dequantized(file) if file else model, base)
    shutil.copy(Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja", base / "chat_template.jinja")
    recipe: dict[str, Any] = {
        "extends": "flatpeak:tasks/arithmetic",
        "run": {"directory": str(scratch), "name": "sft"},
        "model": {"path": str(base), "device": "cpu"},
        "task": {
            "min_value": 100,
            "max_value": 999,
            "test_size": 4,
            "operators": ["*"],
            "question": "What is {a} * {b}?",
            "rationale": f"{CALL}<result>{{answer}}</result>{{answer}}",
        },
        "prompt": {"template": "chat"},
        "rewards": {"correctness": {"extraction": "last_number"}},
        "rollout": {"max_new_tokens": 96},
        "sft": {"steps": 12, "batch_size": 8, "optimizer": {"learning_rate": 1e-4}},
        "evaluation": {"every": 0},
    }
    result = flatpeak.sft(recipe, tools=[multiply], progress=False)
    return Path(result.path) / "checkpoints" / "sft" / "last"


if __name__ == "__main__":
    help_text = "SmolLM2-135M-Instruct: a transformers directory, or a GGUF file"
    main("tools", __doc__, rows=list(ROWS), quick=["returns at once"], repeats=3, measure=measure, model=help_text)
