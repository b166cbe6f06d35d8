"""Decode attention: the reference against one row at a time, the kernel by Triton's interpreter, and the choice."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatpeak.kernels import decode_attention as module
from flatpeak.kernels import gpu_kernels
from flatpeak.kernels.decode_attention import (
    decode_attention,
    kernel_fault,
    reference_attention,
    uses_kernel,
)
from flatpeak.kernels.gpu_kernels import kernel_notices
from flatpeak.kernels.prompt_tiles import TILE_ROWS, PromptTiles
from support.decode_attention import Case, as_argument, naive, problem
from support.triton_interpreter import has_interpreter, has_triton, run

CASES = [
    Case(),
    Case(window=1),
    Case(window=70),
    Case(softcap=2.0),
    Case(window=40, softcap=1.5),
    Case(dtype="bfloat16"),
    Case(dtype="bfloat16", window=70, softcap=2.0),
    Case(rows=2),
    Case(dim=64, repeats=1, kv_heads=3),
    Case(dim=80, repeats=6, kv_heads=1, dtype="bfloat16"),
    Case(dim=96, repeats=3, kv_heads=1),
    Case(dim=128, repeats=7, kv_heads=1),
    Case(dim=256, repeats=2, kv_heads=1),
    Case(repeats=16, kv_heads=1),
    # Five slots of one prompt at 16 rows each need two tiles, and a third prompt lies unused in the arena.
    Case(repeats=16, kv_heads=1, lengths=(1,) * 6, prompts=(2, 2, 0, 2, 2, 2), prompt_lengths=(3, 64, 40)),
    # Every slot its own prompt; chunks of several sizes; prompts longer than answers and the other way round.
    Case(lengths=(5, 64, 1, 30), prompts=(3, 2, 1, 0), prompt_lengths=(1, 64, 63, 2)),
    Case(columns=64, prompt_columns=256, lengths=(64, 1), prompts=(0, 1), prompt_lengths=(256, 1), chunk=128),
    Case(columns=320, lengths=(320, 200), prompts=(1, 1), chunk=256),
    Case(columns=320, lengths=(320, 200), prompts=(1, 1), window=130),
    Case(columns=320, lengths=(320, 129), prompts=(0, 1), chunk=None),
    # Rooms of several sizes, one of them not used.
    Case(prompts=(2, 0, 1), prompt_lengths=(200, 7, 64, 1), rooms=(256, 64, 64, 128)),
    Case(prompts=(1, 0, 1), prompt_lengths=(40, 300), rooms=(64, 320), window=150, softcap=1.5, dtype="bfloat16"),
    # More chunks than are merged at once.
    Case(columns=1152, kv_heads=1, repeats=16, lengths=(1152,), prompts=(0,)),
]
GAPS = {"float32": 3e-6, "bfloat16": 1.5e-2}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_is_the_softmax_of_one_row_at_a_time(case: Case) -> None:
    tensors = problem(case)
    result = decode_attention(**tensors, **case.settings)
    assert result.dtype == getattr(torch, case.dtype)
    assert float((result.double() - naive(case, tensors)).abs().max()) < GAPS[case.dtype]


@has_interpreter
def test_the_kernel_is_the_softmax_of_one_row_at_a_time() -> None:
    gaps = json.loads(run("-m", "support.decode_attention", as_argument(CASES), TRITON_INTERPRET="1"))
    assert len(gaps) == len(CASES)
    for case, (from_naive, from_reference) in zip(CASES, gaps, strict=True):
        assert from_naive < GAPS[case.dtype], case
        assert from_reference < 2 * GAPS[case.dtype], case


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from flatpeak.kernels import decode_attention_triton as K

pointers = {"lengths": "*i64", "prompt_lengths": "*i64", "prompts": "*i64", "order": "*i64", "tile_starts": "*i64",
            "tile_counts": "*i64", "region_starts": "*i64", "region_columns": "*i64", "partial": "*fp32",
            "logsum": "*fp32"}
pointers |= dict.fromkeys(("query", "keys", "values", "prompt_keys", "prompt_values", "output"), "*bf16")

def build(kernel, num_stages=3, num_warps=4, **constants):
    types = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in kernel.arg_names}
    types |= dict.fromkeys({"scale", "softcap"} & types.keys(), "fp32")
    source = ASTSource(fn=kernel, signature=types, constexprs=constants)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)

heads = dict(KV_HEADS=2, REPEATS=6, TILE=K.TILE_ROWS, **K.launch_settings(128, repeats=6, item_size=2))
attend = build(K._attend_chunks, **heads, WINDOWED=True, SOFTCAPPED=True)
assert "wgmma" in attend.asm["ptx"] and attend.metadata.shared < 232448
# The launcher makes constants of arguments that are 1.
build(K._attend_chunks, **heads, WINDOWED=True, SOFTCAPPED=False, chunks=1, prompt_chunks=1, num_tiles=1, window=1)
print(len(attend.asm["cubin"]), len(build(K._merge_chunks, BLOCK_D=128, BLOCK_C=16).asm["cubin"]))
"""


@has_triton
def test_the_kernel_compiles_for_an_h200(tmp_path: Path) -> None:
    sizes = run("-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path), TRITON_INTERPRET="0").split()
    assert all(int(size) > 1000 for size in sizes)


def test_the_reference_takes_a_few_slots_at_a_time_where_their_keys_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[0]
    monkeypatch.setattr(module, "MOST_COLUMNS", 2 * (case.columns + case.prompt_columns))
    widest: list[int] = []
    attend = module._attend_side_by_side

    def spy(query: torch.Tensor, keys: torch.Tensor, *others: Any, **settings: Any) -> torch.Tensor:
        widest.append(keys.shape[0] * keys.shape[2])
        return attend(query, keys, *others, **settings)

    monkeypatch.setattr(module, "_attend_side_by_side", spy)
    tensors = problem(case)
    result = decode_attention(**tensors, **case.settings)
    assert float((result.double() - naive(case, tensors)).abs().max()) < GAPS[case.dtype]
    assert widest == [module.MOST_COLUMNS, module.MOST_COLUMNS // 2]


def test_slots_that_are_not_decoded_do_not_matter() -> None:
    case = Case(rows=2)
    tensors = problem(case)
    before = decode_attention(**tensors, **case.settings)
    tensors["keys_SHTD"][2:] = 9
    tensors["lengths_S"][2:] = 3
    assert before.equal(decode_attention(**tensors, **case.settings))


@pytest.mark.parametrize("repeats", [1, 6, 16])
def test_tiles_hold_every_slot_once_and_one_prompt_each(repeats: int) -> None:
    generator = torch.Generator().manual_seed(repeats)
    for num_entries in (1, 3, 40):
        prompts = torch.randint(num_entries, (150,), generator=generator)
        tiles = PromptTiles.build(prompts, num_entries=num_entries, repeats=repeats)
        assert tiles.slots_per_tile * repeats <= TILE_ROWS
        held = []
        for start, count in zip(tiles.starts_W[:-1].tolist(), tiles.counts_W[:-1].tolist(), strict=True):
            slots = tiles.order_R[start : start + count].tolist()
            assert len({int(prompts[slot]) for slot in slots}) == (1 if slots else 0)
            assert count <= tiles.slots_per_tile
            held += slots
        assert sorted(held) == list(range(150))
        assert int(tiles.counts_W[-1]) == 0


def test_the_number_of_tiles_covers_the_worst_split_and_no_more() -> None:
    # 64 rows hold 10 slots of 6: eleven slots of one prompt need two tiles, ten prompts of one slot ten.
    worst = PromptTiles.build(torch.tensor([0] * 11 + [1]), num_entries=2, repeats=6)
    assert worst.counts_W[:-1].tolist() == [10, 1, 1]
    assert len(PromptTiles.build(torch.arange(10), num_entries=50, repeats=6).starts_W) == 11


def test_tiles_are_refreshed_in_place() -> None:
    tiles = PromptTiles.build(torch.tensor([0, 0, 0, 0]), num_entries=4, repeats=1)
    addresses = [t.data_ptr() for t in (tiles.order_R, tiles.starts_W, tiles.counts_W)]
    tiles.refresh_(torch.tensor([3, 1, 3, 0]))
    assert tiles.order_R.tolist() == [3, 1, 0, 2]
    assert tiles.starts_W[:-1].tolist() == [0, 1, 2, 0]
    assert tiles.counts_W[:-1].tolist() == [1, 1, 2, 0]
    assert [t.data_ptr() for t in (tiles.order_R, tiles.starts_W, tiles.counts_W)] == addresses


HEADS: dict[str, Any] = {
    "device": torch.device("cpu"),
    "dtype": torch.float32,
    "dim": 32,
    "heads": 4,
    "kv_heads": 2,
    "windowed": True,
    "softcapped": False,
}


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Stands in for the kernel's module: the reference, until a test puts something else there."""
    fake = SimpleNamespace(kernel_attention=lambda *_, tiles, **given: reference_attention(**given))
    monkeypatch.setitem(sys.modules, "flatpeak.kernels.decode_attention_triton", fake)
    monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(gpu_kernels, "_FAULTS", [])
    kernel_fault.cache_clear()
    yield fake
    kernel_fault.cache_clear()


def test_a_kernel_that_agrees_is_used(kernel: SimpleNamespace) -> None:
    assert kernel_fault(**HEADS) is None
    assert kernel_fault(**HEADS | {"dtype": torch.bfloat16, "softcapped": True}) is None
    assert kernel_notices() == []


def test_a_kernel_that_is_off_is_not_used_and_the_notice_says_by_how_much(kernel: SimpleNamespace) -> None:
    kernel.kernel_attention = lambda *_, tiles, **given: reference_attention(**given) + 0.5
    fault = kernel_fault(**HEADS)
    assert fault == "its results are off by 5.0e-01 (allowed: 2e-05)"
    assert kernel_notices() == [f"decoding runs without the Triton kernel, and is slower: {fault}"]


def test_a_kernel_that_ignores_the_window_is_caught(kernel: SimpleNamespace) -> None:
    kernel.kernel_attention = lambda *_, tiles, **given: reference_attention(**given | {"window": None})
    assert "off by" in str(kernel_fault(**HEADS))
    assert kernel_fault(**HEADS | {"windowed": False}) is None


def test_a_kernel_that_gives_nan_is_not_used(kernel: SimpleNamespace) -> None:
    kernel.kernel_attention = lambda *_, tiles, **given: reference_attention(**given) * float("nan")
    assert "off by nan" in str(kernel_fault(**HEADS))


def test_a_kernel_that_does_not_compile_is_not_used(kernel: SimpleNamespace) -> None:
    def fail(*_: Any, **given: Any) -> None:
        raise LookupError("no such instruction\nat line 3")

    kernel.kernel_attention = fail
    assert kernel_fault(**HEADS) == "it failed: LookupError: no such instruction"


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": torch.float16}, "torch.float16"),
        ({"dim": 48}, "head dimension of 48"),
        ({"heads": 34}, "17 query heads per key head"),
    ],
)
def test_what_the_kernel_does_not_serve_is_named(kernel: SimpleNamespace, fields: Any, reason: str) -> None:
    assert reason in str(kernel_fault(**HEADS | fields))


def test_without_triton_the_reference_is_used(kernel: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    assert kernel_fault(**HEADS) == "triton is not installed"


def test_tensors_on_a_cpu_never_ask_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "kernel_fault", lambda **_: pytest.fail("asked"))
    tensors = problem(Case())
    assert not uses_kernel(tensors["query_RHD"], tensors["keys_SHTD"], window=None, softcap=None)
    assert torch.isfinite(decode_attention(**tensors, scale=1.0)).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_the_kernel_is_used_and_right(case: Case, dtype: str) -> None:
    from dataclasses import replace

    case = replace(case, dtype=dtype)
    tensors = problem(case)
    moved = {name: given.cuda() if isinstance(given, torch.Tensor) else given for name, given in tensors.items()}
    assert uses_kernel(moved["query_RHD"], moved["keys_SHTD"], window=case.window, softcap=case.softcap)
    result = decode_attention(**moved, **case.settings).cpu().double()
    assert float((result - naive(case, tensors)).abs().max()) < module.TOLERANCES[getattr(torch, dtype)]
