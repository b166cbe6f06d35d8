"""Problems for decode attention, the slow and obvious answer, and the kernel's answers by Triton's interpreter.

Run as a script it reads problems' settings from its argument and prints, for each, how far the kernel is off.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from flatpeak.kernels.decode_attention import reference_attention
from flatpeak.kernels.prompt_tiles import PromptTiles


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call; lengths and prompts are of the slots, the first `rows` of which are decoded (all where None)."""

    dim: int = 32
    kv_heads: int = 2
    repeats: int = 2
    columns: int = 128
    prompt_columns: int = 64
    lengths: tuple[int, ...] = (1, 128, 65)
    prompts: tuple[int, ...] = (0, 1, 0)
    prompt_lengths: tuple[int, ...] = (64, 5)
    rooms: tuple[int, ...] | None = None
    """The columns of each prompt's room; `prompt_columns` of all where None."""
    rows: int | None = None
    window: int | None = None
    softcap: float | None = None
    dtype: str = "float32"
    chunk: int | None = 64

    @property
    def settings(self) -> dict[str, Any]:
        return {"scale": 1.3 * self.dim**-0.5, "window": self.window, "softcap": self.softcap}


def problem(case: Case) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(len(case.lengths) + case.dim)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(getattr(torch, case.dtype))

    slots, arena = len(case.lengths), len(case.prompt_lengths)
    own = (slots, case.kv_heads, case.columns, case.dim)
    rooms = case.rooms or (case.prompt_columns,) * arena
    order = range(arena)[::-1]  # the last prompt's room comes first
    starts = [sum(rooms[other] for other in order if other > place) for place in range(arena)]
    shared = (sum(rooms) * case.kv_heads, case.dim)
    return {
        "query_RHD": normal(case.rows or slots, case.kv_heads * case.repeats, case.dim),
        "keys_SHTD": normal(*own),
        "values_SHTD": normal(*own),
        "lengths_S": torch.tensor(case.lengths),
        "prompt_keys_CD": normal(*shared),
        "prompt_values_CD": normal(*shared),
        "prompt_S": torch.tensor(case.prompts),
        "prompt_lengths_A": torch.tensor(case.prompt_lengths),
        "starts_A": torch.tensor(starts),
        "columns_A": torch.tensor(rooms),
        "prompt_columns": max(rooms),
    }


def naive(case: Case, tensors: dict[str, Any]) -> Tensor:
    """One slot and head at a time, in float64."""
    exact = {name: t.double() for name, t in tensors.items() if isinstance(t, Tensor) and t.is_floating_point()}
    query, output = exact["query_RHD"], torch.zeros_like(exact["query_RHD"])
    for slot in range(len(query)):
        prompt, length = case.prompts[slot], case.lengths[slot]
        prompt_length = case.prompt_lengths[prompt]
        for head in range(query.shape[1]):
            kv = head // case.repeats
            start = int(tensors["starts_A"][prompt]) * case.kv_heads + kv * int(tensors["columns_A"][prompt])
            room = slice(start, start + prompt_length)
            rows = [exact["prompt_keys_CD"][room], exact["keys_SHTD"][slot, kv, :length]]
            values = [exact["prompt_values_CD"][room], exact["values_SHTD"][slot, kv, :length]]
            scores = torch.cat(rows) @ query[slot, head] * case.settings["scale"]
            if case.softcap is not None:
                scores = case.softcap * torch.tanh(scores / case.softcap)
            seen = slice(-case.window if case.window else None, None)
            output[slot, head] = torch.softmax(scores[seen], 0) @ torch.cat(values)[seen]
    return output


def kernel_gaps(cases: list[Case]) -> list[tuple[float, float]]:
    """Largest differences of the kernel from the naive float64 answer, and from the reference in the same type."""
    from flatpeak.kernels.decode_attention_triton import kernel_attention

    _repair_interpreter()
    gaps = []
    for case in cases:
        tensors = problem(case)
        rows = len(tensors["query_RHD"])
        tiles = PromptTiles.build(
            tensors["prompt_S"][:rows], num_entries=len(case.prompt_lengths), repeats=case.repeats
        )
        output = kernel_attention(**tensors, **case.settings, tiles=tiles, chunk=case.chunk)
        assert output.dtype == tensors["query_RHD"].dtype
        reference = reference_attention(**tensors, **case.settings)
        gaps.append(
            (
                float((output.double() - naive(case, tensors)).abs().max()),
                float((output.double() - reference.double()).abs().max()),
            )
        )
    return gaps


def _repair_interpreter() -> None:
    """Triton's interpreter keeps bfloat16 as bits in uint16 and multiplies those in `dot`: give it float32 instead."""
    import triton.language as tl
    from triton.runtime import interpreter

    plain = interpreter.InterpreterBuilder.create_dot

    def widened(handle: Any) -> Any:
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        bits = handle.data.astype("uint32") << 16
        return interpreter.TensorHandle(bits.view("float32"), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return plain(self, widened(a), widened(b), *others)

    interpreter.InterpreterBuilder.create_dot = create_dot


def as_argument(cases: list[Case]) -> str:
    return json.dumps([asdict(case) for case in cases])


if __name__ == "__main__":
    torch.set_num_threads(1)
    read = [{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()} for row in json.loads(sys.argv[1])]
    sys.stdout.write(json.dumps(kernel_gaps([Case(**row) for row in read])))
