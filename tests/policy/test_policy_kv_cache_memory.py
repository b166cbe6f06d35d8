from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.policy.kv_cache import PromptCache, fitting_buckets, graded_buckets
from flatpeak.policy.model import Policy
from flatpeak.policy.packing import pack_prompts
from support.architectures import COMMON
from support.models import tiny_model
from support.policies import Tokenizer

CPU = torch.device("cpu")


def test_an_evaluation_with_one_long_question_gives_it_a_region_of_its_own() -> None:
    lengths = [*[100] * 300, 8000, *[100] * 211]
    assert fitting_buckets(lengths, 512, multiple=16) == {8000: 1, 112: 511}
    assert graded_buckets(lengths, 512) == {128 * 2: 512, 8192: 1}
    assert fitting_buckets(lengths, 65, multiple=16) == {8000: 1, 112: 65}


@pytest.mark.parametrize("seed", range(20))
def test_regions_take_little_more_than_the_prompts_that_may_be_in_use_at_once(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([draw.randint(1, 60), draw.randint(1, 2000)]) for _ in range(draw.randint(1, 400))]
    entries = draw.randint(1, len(lengths))
    fitting, graded = fitting_buckets(lengths, entries, multiple=16), graded_buckets(lengths, entries)
    assert sum(columns * rows for columns, rows in fitting.items()) <= 4 * sum(lengths) + 4096 + 16 * len(lengths)
    assert sum(columns * rows for columns, rows in graded.items()) <= 3 * sum(lengths) + 512 * len(lengths)
    for buckets in (fitting, graded):
        assert max(buckets) >= max(lengths)
        assert all(rows <= entries for rows in buckets.values())


def keys_of(prompt: int, length: int) -> Tensor:
    """[length, 2 heads, D = 1], of which every entry says where it belongs."""
    return prompt + torch.arange(length)[:, None, None] / 1e4 + torch.tensor([0.0, 0.5])[:, None]


@pytest.mark.parametrize("sized", [fitting_buckets, graded_buckets])
@pytest.mark.parametrize("seed", range(6))
def test_every_prompt_finds_a_region_and_stays_as_it_was_stored_while_others_come_and_go(sized: Any, seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.choice([draw.randint(1, 40), draw.randint(1, 700)]) for _ in range(60)]
    entries = draw.randint(3, 9)
    wanted = sized(lengths, entries, **({"multiple": 16} if sized is fitting_buckets else {}))
    memory = PromptCache(entries, wanted, CPU)
    addresses: list[int] | None = None
    waiting, held = list(range(60)), dict[int, int]()
    while waiting:
        free = draw.sample(
            [entry for entry in range(entries) if entry not in held], k=draw.randint(1, entries - len(held))
        )
        come = {entry: waiting.pop() for entry in free if waiting}
        row = pack_prompts([[2] * lengths[p] for p in come.values()], device=CPU, multiple=1)
        stored = list(come.values())
        kept = torch.cat([keys_of(stored[index], lengths[stored[index]]) for index in row.order_P])
        memory.store(list(come), row, {0: (kept, -kept)})
        now = [tensor.data_ptr() for tensor in (*memory.tables, *memory.layers[0])]
        assert addresses in (None, now)
        addresses = now
        held |= come
        for entry in draw.sample(list(held), k=draw.randint(0, len(held) - 1)):
            del held[entry]
        if draw.random() < 0.3:
            source, target = draw.choice(list(held)), draw.choice([p for p in range(entries) if p not in held] or [0])
            if target not in held:
                memory.move([source], [target])
                held[target] = held.pop(source)
        if len(held) == entries:
            del held[draw.choice(list(held))]
        for entry, p in held.items():
            assert int(memory.lengths_A[entry]) == lengths[p]
            columns, index = memory.region_of(entry)
            start, width = int(memory.starts_A[entry]), int(memory.columns_A[entry])
            assert width == columns
            for side, sign in ((0, 1), (1, -1)):
                exact = sign * keys_of(p, lengths[p]).transpose(0, 1)
                assert torch.equal(memory.bucket(0, columns)[side][index, :, : lengths[p]], exact)
                flat = memory.layers[0][side][2 * start : 2 * (start + width)].view(2, width, 1)
                assert torch.equal(flat[:, : lengths[p]], exact)


def test_on_a_gpu_requests_that_differ_a_little_share_memory_and_what_was_wanted_once_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = Policy(tiny_model("qwen2", **COMMON).eval(), Tokenizer())
    monkeypatch.setattr(Policy, "device", torch.device("meta"))  # a GPU's choices, without memory
    first = policy.open(slots=8, entries=8, prompt_lengths=[30] * 5 + [300], new_tokens=40)
    assert first.prompts.buckets == {256: 8, 384: 1}
    assert policy.open(slots=8, entries=8, prompt_lengths=[100] * 8, new_tokens=64) is first
    assert first.new_tokens == 64
    assert policy.open(slots=4, entries=4, prompt_lengths=[300], new_tokens=1) is first
    second = policy.open(slots=8, entries=8, prompt_lengths=[300, 310, 900], new_tokens=40)
    assert second.prompts.buckets == {256: 8, 384: 2, 1024: 1}
    assert policy.open(slots=8, entries=8, prompt_lengths=[30] * 5 + [300], new_tokens=40) is second
