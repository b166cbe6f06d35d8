"""The part `decode` of the GPU benchmark: the rollout engine with completions of equal length."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.models import SHAPES, build_policy, decode_ceiling
from benchmarks.harness.runner import Row
from benchmarks.harness.workloads import FIRST_WORD
from flatpeak.kernels.decode_attention import decode_attention, reference_attention
from flatpeak.kernels.gpu_kernels import kernel_notices
from flatpeak.kernels.prompt_tiles import PromptTiles
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Example, Prompt, SamplingParams

SHORT, LONG = 16, 144
"""Tokens of two rollouts whose difference is decoding alone."""
HEADROOM = 0.85
"""The share of the device's memory for weights, keys and values."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Rows at a mean context; each prompt has `group` completions."""

    size: str
    batch: int
    context: int
    group: int = 1

    @property
    def name(self) -> str:
        """The name of the row in the table."""
        return f"{self.size}, B={self.batch}, context {self.context}, group {self.group}"

    @property
    def prompt(self) -> int:
        """Prompt tokens that make `context` the mean context of the last LONG - SHORT tokens."""
        return self.context - (SHORT + LONG) // 2


def grid() -> list[Point]:
    """All points, the goals of the plan first, because time may run out before the last."""
    goals = [
        Point(size="1.5B", batch=64, context=512),
        Point(size="1.5B", batch=256, context=512),
        Point(size="7B", batch=128, context=512),
    ]
    shared = [Point(size="1.5B", batch=batch, context=512, group=16) for batch in (64, 256, 512)]
    rest = [
        Point(size=size, batch=batch, context=context, group=16 if context > 512 and batch >= 16 else 1)
        for size in ("1.5B", "0.5B", "7B")
        for context in (512, 1024, 4096)
        for batch in (1, 16, 64, 256, 512)
    ]
    return list(dict.fromkeys([*goals, *shared, *rest]))


def measure_decode(bench: Bench) -> None:
    """Measure model by model, in the order of the grid, then attention alone."""
    points = grid()
    if bench.tiny:
        points = [
            Point(size="tiny", batch=4, context=96),
            Point(size="tiny", batch=8, context=96, group=4),
            Point(size="tiny", batch=10**9, context=96),
        ]
    held: dict[str, Policy] = {}
    for point in points:

        def measure(point: Point = point) -> Row:
            if point.size not in held:
                held.clear()
                bench.free()
                longest = max(other.context for other in points) + LONG
                held[point.size] = build_policy(
                    point.size, device=bench.device, dtype=bench.dtype, mean_length=None, longest=longest
                )
            return decode_row(bench, held[point.size], point)

        bench.row(point.name, measure)
    held.clear()
    for batch, context in [(4, 64)] if bench.tiny else [(64, 512), (256, 512), (256, 1024)]:
        bench.row(f"attention, B={batch}, context {context}", lambda b=batch, c=context: attention_row(bench, b, c))


def decode_row(bench: Bench, policy: Policy, point: Point) -> Row:
    """Measure the engine's time for LONG tokens minus that for SHORT, with all prompts read and completions
    returned."""
    shape = SHAPES[point.size]
    assert bench.peaks is not None
    numbers = shape.kv_numbers * (point.batch * LONG + point.batch // point.group * point.prompt)
    weights = shape.layer_parameters + shape.head_parameters * (1 if shape.tied else 2)
    needed = (numbers + weights) * bench.dtype.itemsize
    if needed > HEADROOM * bench.device_memory:
        return {"skipped": f"{needed / 1e9:.0f} GB of weights, keys and values do not fit"}
    engine = NativeEngine(policy, max_rows=point.batch)
    draw = random.Random(point.name)
    prompts = []
    for index in range(-(-point.batch // point.group)):
        ids = tuple(draw.randrange(FIRST_WORD, shape.vocabulary) for _ in range(point.prompt))
        example = Example(id=str(index), question="", gold="")
        prompts.append(Prompt(id=str(index), token_ids=ids, text="", example=example))

    def rollout(tokens: int) -> None:
        sampling = SamplingParams(max_new_tokens=tokens)
        groups = engine.generate(prompts, group_size=min(point.group, point.batch), sampling=sampling, seed=0)
        assert all(len(c.token_ids) == tokens for group in groups for c in group.completions)

    first = bench.timed(lambda: rollout(LONG))
    bench.check(2 * first)
    whole = bench.typical(lambda: rollout(LONG), times=2, warm_ups=0)
    less = bench.typical(lambda: rollout(SHORT), times=2)
    per_token = (whole - less) / (LONG - SHORT)
    ceiling = decode_ceiling(
        shape,
        bench.peaks,
        batch=point.batch,
        group=point.group,
        prompt=point.prompt,
        own=(SHORT + LONG) / 2,
    )
    rate = point.batch / per_token
    return {
        "tokens_per_second": rate,
        "milliseconds_per_token": 1000 * per_token,
        "ceiling_tokens_per_second": ceiling,
        "share_of_ceiling": rate / ceiling,
        "rollout_seconds": whole,
        "first_rollout_seconds_more": first - whole,  # compiling, captures and first allocations
        "without_kernel_because": kernel_notices(),
        **bench.memory(),
    }


def attention_row(bench: Bench, batch: int, context: int) -> Row:
    """Measure one layer of the 1.5B shape, where a prompt shared by 16 slots is half of the context.

    Gigabytes per second count the necessary reads: each slot's keys and values, and each prompt's once.
    """
    shape = SHAPES["tiny" if bench.tiny else "1.5B"]
    group, half = min(16, batch), context // 2
    prompts = batch // group

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, device=bench.device, dtype=bench.dtype)

    prompt_R = torch.arange(batch, device=bench.device) // group
    tensors = {
        "query_RHD": normal(batch, shape.heads, shape.head_dim),
        "keys_SHTD": normal(batch, shape.kv_heads, half, shape.head_dim),
        "values_SHTD": normal(batch, shape.kv_heads, half, shape.head_dim),
        "lengths_S": torch.full((batch,), half, device=bench.device),
        "prompt_keys_CD": normal(prompts * shape.kv_heads * half, shape.head_dim),
        "prompt_values_CD": normal(prompts * shape.kv_heads * half, shape.head_dim),
        "prompt_S": prompt_R,
        "prompt_lengths_A": torch.full((prompts,), half, device=bench.device),
        "starts_A": torch.arange(prompts, device=bench.device) * half,
        "columns_A": torch.full((prompts,), half, device=bench.device),
    }
    scale = shape.head_dim**-0.5
    tiles = PromptTiles.build(prompt_R, num_entries=prompts, repeats=shape.heads // shape.kv_heads)
    repeats = 3 if bench.tiny else 50

    def chosen() -> None:
        for _ in range(repeats):
            decode_attention(**tensors, prompt_columns=half, scale=scale, tiles=tiles)  # type: ignore[arg-type]

    def reference() -> None:
        for _ in range(repeats):
            reference_attention(**tensors, prompt_columns=half, scale=scale)  # type: ignore[arg-type]

    read = shape.kv_numbers / shape.layers * (batch + prompts) * half * bench.dtype.itemsize
    times = {"chosen": bench.typical(chosen, times=5), "reference": bench.typical(reference, times=5)}
    rates = {f"{name}_gb_per_second": read * repeats / taken / 1e9 for name, taken in times.items()}
    return {**rates, "chosen_microseconds": 1e6 * times["chosen"] / repeats, "without_kernel_because": kernel_notices()}
