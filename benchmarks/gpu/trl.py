"""The part `trl` of the GPU benchmark: the step of the part `step` with TRL, with two ways of generating."""

from __future__ import annotations

import time
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.gpu.bench import Bench, OutOfTimeError
from benchmarks.gpu.models import SHAPES, build_model
from benchmarks.gpu.training import RATE, Sizes, random_prompts, step_sizes
from benchmarks.harness.models import word_tokenizer
from benchmarks.harness.runner import Row
from benchmarks.harness.workloads import as_text


class StepClock:
    """A reward function that is called once per step: from one call to the next is exactly one step.

    The response tokens of a step are the mean of two batches of completions: one is trained on, the other is sampled.
    """

    __name__ = "clock"

    def __init__(self, bench: Bench, *, until: float) -> None:
        """`until`: the time limit for all steps."""
        self.bench, self.until = bench, until
        self.calls: list[tuple[float, int]] = []

    def __call__(self, completions: Sequence[str], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
        """Score nearly every completion differently."""
        self.bench.wait()
        self.calls.append((time.perf_counter(), sum(map(len, completion_ids))))
        if len(self.calls) > 1 and 2 * self.calls[-1][0] - self.calls[-2][0] > self.until:
            raise OutOfTimeError("no time for another step")
        return [sum(ids) % 97 / 97 for ids in completion_ids]

    def rows(self) -> list[Row]:
        """Every step; the first also allocates memory."""
        steps = []
        for (began, before), (ended, after) in list(zip(self.calls, self.calls[1:], strict=False)):
            tokens = (before + after) / 2
            steps.append(
                {
                    "step_seconds": ended - began,
                    "response_tokens": tokens,
                    "response_tokens_per_second": tokens / (ended - began),
                }
            )
        return steps


def measure_trl(bench: Bench) -> None:
    """Measure one row per way of generating, with as many steps as time allows."""
    if find_spec("trl") is None:
        bench.row("TRL", lambda: {"skipped": "trl is not installed"})
        return
    sizes = step_sizes(bench)
    bench.row("generate", lambda: trl_row(bench, sizes, batching=False, until=bench.began + 0.8 * bench.seconds))
    if bench.device == "cpu":
        bench.row("continuous batching", lambda: {"skipped": "on a CPU it reserves all memory"})
        return
    bench.row(
        "continuous batching",
        lambda: trl_row(bench, sizes, batching=True, until=bench.began + bench.seconds),
        like_the_others=False,
    )


def trl_row(bench: Bench, sizes: Sizes, *, batching: bool, until: float) -> Row:
    """Run at most four steps; the first is not counted."""
    clock = StepClock(bench, until=until)
    stopped = None
    with TemporaryDirectory(prefix="flatpeak-bench-") as scratch:
        trainer = build_trainer(bench, sizes, clock, scratch, batching=batching)
        try:
            trainer.train()
        except Exception as error:  # out of time or memory, or generation that does not work here
            stopped = f"{type(error).__name__}: {str(error).partition('. ')[0]}"
    return {"trl": version("trl"), "steps": clock.rows(), "stopped": stopped, **bench.memory()}


def build_trainer(bench: Bench, sizes: Sizes, clock: StepClock, scratch: str, *, batching: bool) -> Any:
    """The same model, prompts, lengths, optimizer and loss, with recomputed activations, TRL's default."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = build_model(
        sizes.size,
        device=bench.device,
        dtype=bench.dtype,
        mean_length=sizes.mean,
        longest=2 * sizes.prompt + sizes.cap,
    )
    steps = 4
    completions = sizes.prompts * sizes.group
    micro = max(1, completions // 16) if not bench.tiny else completions
    config = GRPOConfig(
        output_dir=scratch,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=completions // micro,
        num_generations=sizes.group,
        max_completion_length=sizes.cap,
        max_steps=steps,
        learning_rate=RATE,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        bf16=False,  # the weights are already in bfloat16
        use_cpu=bench.device == "cpu",
        gradient_checkpointing=not bench.tiny,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_transformers_continuous_batching=batching,
    )
    texts = [as_text(list(p.token_ids)) for step in range(steps + 1) for p in random_prompts(sizes, step=step)]
    return GRPOTrainer(
        model,
        reward_funcs=[clock],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        processing_class=word_tokenizer(SHAPES[sizes.size].vocabulary),
    )
