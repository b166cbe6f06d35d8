from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.kernels.block_attention import AttentionRule
from flatpeak.policy.decoding_attention import CpuDecodeAttention, GpuDecodeAttention
from flatpeak.policy.kv_cache import KeyValueCache, fitting_buckets, round_up
from flatpeak.policy.packing import pack_prompts
from flatpeak.policy.training_attention import PackedContext
from flatpeak.rollout.scheduler import Schedule

TOLERANCE = 5e-6
"""float32 against float64, on sums of a hundred values of size one, weighted."""
DIM = 8
HEADS = {0: (2, 2), 1: (1, 4)}
"""Per layer: key heads, and query heads to each."""
RULES = {
    "plain": {layer: AttentionRule(scale=0.6) for layer in HEADS},
    "one windowed layer": {0: AttentionRule(scale=0.6), 1: AttentionRule(scale=0.6, window=7)},
    "windows and softcap": {
        0: AttentionRule(scale=0.6, window=21, softcap=0.9),
        1: AttentionRule(scale=0.6, window=1),
    },
}
KINDS = ["shared prompts", "the kernel's tables"]


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written holds no numbers."""
    empty = Tensor.new_empty

    def poisoned(self: Tensor, *size: Any, **settings: Any) -> Tensor:
        memory = empty(self, *size, **settings)
        return memory.fill_(torch.nan) if memory.is_floating_point() else memory

    monkeypatch.setattr(Tensor, "new_empty", poisoned)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Run:
    """A cache, and beside it each slot's keys and values as plain lists, over which attention is plain to compute."""

    def __init__(
        self,
        kind: str,
        monkeypatch: pytest.MonkeyPatch,
        *,
        rules: dict[int, AttentionRule] = RULES["plain"],
        key_multiple: int = 4,
        dim: int = DIM,
        seed: int = 0,
        prompts: int,
        prompt_tokens: int | tuple[int, ...],
        **request: int,
    ) -> None:
        widths = [prompt_tokens] if isinstance(prompt_tokens, int) else prompt_tokens
        buckets = {round_up(width, key_multiple): prompts for width in widths}
        device = torch.device("cpu")
        on_gpu = kind == "the kernel's tables"  # what a GPU runs, by the reference that stands in for its kernel
        self.cache = KeyValueCache(
            **request,
            entries=prompts,
            buckets=buckets,
            key_multiple=key_multiple,
            attention=GpuDecodeAttention() if on_gpu else CpuDecodeAttention(),
            device=device,
        )
        if on_gpu:
            self.cache._on_gpu = True
            self.cache._cleared = self.cache.columns
        self.kind = kind
        self.dim = dim
        self.rules = rules
        self.generator = torch.Generator().manual_seed(seed)
        self.at_entry: dict[int, dict[int, list[Tensor]]] = {}
        self.held: dict[int, dict[int, list[Tensor]]] = {}

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def read(self, lengths_at: dict[int, int]) -> None:
        """Store prompts of these lengths as these entries, as a prefill would."""
        row = pack_prompts([[2] * length for length in lengths_at.values()], device=torch.device("cpu"), multiple=4)
        context = PackedContext(row, keep_prompts=True)
        assert context.kept is not None
        for layer, (kv_heads, _) in HEADS.items():
            prompts = [[self.normal(kv_heads, length, self.dim) for _ in range(2)] for length in lengths_at.values()]
            for entry, states in zip(lengths_at, prompts, strict=True):
                self.at_entry.setdefault(entry, {})[layer] = states
            in_row = [torch.cat([prompts[p][side] for p in row.order_P], 1).transpose(0, 1) for side in (0, 1)]
            context.kept[layer] = (in_row[0], in_row[1])
        self.cache.store(list(lengths_at), context)

    def admit(self, slots: Sequence[int], entries: Sequence[int]) -> None:
        self.cache.admit(slots, entries)
        for slot, entry in zip(slots, entries, strict=True):
            self.held[slot] = {layer: list(states) for layer, states in self.at_entry[entry].items()}

    def leave(self, slots: Sequence[int]) -> None:
        """What is decoded there from now on is nobody's."""
        for slot in slots:
            self.held.pop(slot, None)

    def compact(self, slots: Any, entries: Any, idle: Sequence[int]) -> None:
        self.cache.compact(slots, entries, idle)
        moved = {target: self.held.pop(source) for source, target in zip(*slots, strict=True)}
        self.held |= moved
        self.at_entry |= {target: self.at_entry[source] for source, target in zip(*entries, strict=True)}

    def check_step(self, batch_size: int) -> dict[int, Tensor]:
        """Decode a token for each of the first slots; check each one held, return the outputs of the first layer."""
        self.cache.begin_token(batch_size)
        first = torch.empty(0)
        for layer, (kv_heads, repeats) in HEADS.items():
            query = self.normal(batch_size, kv_heads * repeats, 1, self.dim)
            key, value = (self.normal(batch_size, kv_heads, 1, self.dim) for _ in range(2))
            output = self.cache.attend(layer, query, key, value, self.rules[layer])
            assert output.shape == (batch_size, 1, kv_heads * repeats, self.dim)
            assert bool(output.isfinite().all())  # those of slots that are nobody's too
            first = output if layer == 0 else first
            for slot, states in self.held.items():
                assert slot < batch_size
                new = [key[slot], value[slot]]
                states[layer] = [torch.cat(pair, 1) for pair in zip(states[layer], new, strict=True)]
                exact = plain_attention(self.rules[layer], query[slot, :, 0], *states[layer], repeats)
                torch.testing.assert_close(output[slot, 0].double(), exact, atol=TOLERANCE, rtol=0)
        assert self.cache.calls == list(HEADS)
        self.cache.end_token(batch_size)
        limits = self.cache.limits_S.tolist()  # a completion's last token is fed here too; no token comes after it
        positions = {slot: min(states[0][0].shape[1], limits[slot]) for slot, states in self.held.items()}
        assert {slot: int(self.cache.positions_S[slot]) for slot in positions} == positions
        return {slot: first[slot] for slot in self.held}


def plain_attention(rule: AttentionRule, query: Tensor, keys: Tensor, values: Tensor, repeats: int) -> Tensor:
    """query [Hq, D] over keys and values [Hkv, K, D], of which the last is the query's own; float64."""
    query, keys, values = (each.double() for each in (query, keys, values))
    scores = rule.scale * torch.einsum("hd,hkd->hk", query, keys.repeat_interleave(repeats, 0))
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if rule.window is not None:
        scores = scores[:, -rule.window :]
    weights = torch.softmax(scores, -1)
    return torch.einsum("hk,hkd->hd", weights, values.repeat_interleave(repeats, 0)[:, -weights.shape[1] :])


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("seed", range(3))
def test_each_slot_attends_to_its_prompt_and_its_own_tokens_through_a_whole_schedule(
    kind: str, rules: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    num_prompts, group_size, new_tokens = 5, 3, 26
    lengths = [1, 17, 4, rng.randint(2, 30), rng.randint(2, 30)]
    slots = 7
    batch_sizes = [4, 8] if seed else [1, 2, 3, 4, 5, 6, 7]
    schedule = Schedule(
        rng.sample(range(num_prompts), num_prompts),
        group_size=group_size,
        num_slots=slots,
        batch_sizes=batch_sizes,
        compact_below=0.9,
    )
    run = Run(
        kind,
        monkeypatch,
        rules=RULES[rules],
        seed=seed,
        slots=batch_sizes[-1],
        prompts=num_prompts,
        prompt_tokens=max(lengths) if seed < 2 else (6, 20, 30),
        new_tokens=new_tokens,
    )
    left = {row: rng.choice([1, 5, 12, new_tokens]) for row in range(num_prompts * group_size)}
    compactions = 0
    while not schedule.done:
        while admission := schedule.admit():
            if admission.new_prompts:
                run.read({entry: lengths[p] for p, entry in admission.new_prompts.items()})
            run.admit(admission.slots, admission.entries)
        run.check_step(schedule.batch_size)
        for row in schedule.completion_in.values():
            left[row] -= 1
        ended = [slot for slot, row in schedule.completion_in.items() if left[row] == 0]
        run.leave(ended)
        schedule.end(ended)
        compaction = schedule.compact() if ended else None
        if compaction is not None:
            compactions += 1
            run.compact(compaction.slots, compaction.entries, compaction.idle)
            assert run.held.keys() == schedule.completion_in.keys()
    assert compactions
    assert set(left.values()) == {0}


def test_a_slot_decoded_past_its_memory_does_not_write_into_its_neighbours(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(kind, monkeypatch, slots=4, prompts=2, prompt_tokens=4, new_tokens=8)
    run.read({0: 3, 1: 4})
    run.admit([0, 2], [0, 1])
    run.leave([0, 2])  # ended at once, and decoded on and on
    for _ in range(10):
        run.check_step(4)
    run.admit([1, 3], [1, 0])
    for _ in range(8):
        run.check_step(4)
    assert int(run.cache.lengths_S.max()) < run.cache.columns
    run.admit([2, 0], [0, 1])  # and a slot that was past its memory begins anew
    run.leave([1, 3])
    for _ in range(8):
        run.check_step(4)


def test_a_completion_may_fill_its_memory_to_the_last_column(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(kind, monkeypatch, slots=2, prompts=2, prompt_tokens=8, new_tokens=16)
    run.read({0: 8, 1: 3})
    assert run.cache.columns == 16
    run.admit([0, 1], [0, 1])
    for _ in range(16):
        run.check_step(2)


def test_slots_and_prompts_move_together_and_idle_slots_attend_to_something(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(kind, monkeypatch, slots=8, prompts=4, prompt_tokens=9, new_tokens=20)
    run.read({0: 2, 1: 9, 2: 5, 3: 1})
    run.admit(range(8), [0, 0, 1, 1, 2, 2, 3, 3])
    for _ in range(6):
        run.check_step(8)
    run.leave([0, 1, 3, 4, 5])
    # Slot 2 stays and its prompt with it; slots 6 and 7 and their prompt move; slot 3 is idle.
    run.compact(([6, 7], [0, 1]), ([3], [0]), [3])
    assert run.cache.prompt_S[:4].tolist() == [0, 0, 1, 0]
    assert run.cache.lengths_S[3] == run.cache.positions_S[3] == 0
    for _ in range(5):
        run.check_step(4)
    run.leave([0, 2])
    run.compact(([], []), ([], []), [0])
    for _ in range(5):
        run.check_step(2)


def test_a_prompt_that_takes_over_a_longer_ones_place_sees_nothing_of_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(kind, monkeypatch, slots=4, prompts=2, prompt_tokens=30, new_tokens=40)
    run.read({0: 30})
    run.read({1: 7})
    run.admit(range(4), [0, 0, 1, 1])
    for _ in range(3):
        run.check_step(4)
    run.leave([0, 1])
    run.read({0: 2})
    run.admit([0, 1], [0, 0])
    for _ in range(6):
        run.check_step(4)


def test_prompts_shared_by_very_different_numbers_of_slots(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(kind, monkeypatch, slots=12, prompts=4, prompt_tokens=20, new_tokens=6)
    run.read({0: 3, 1: 20, 3: 11, 2: 1})
    run.admit(range(12), [3, 1, 1, 3, 1, 1, 1, 0, 1, 1, 3, 1])  # none of place 2
    for _ in range(3):
        run.check_step(12)


def test_one_cache_serves_requests_one_after_the_other(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(kind, monkeypatch, slots=4, prompts=2, prompt_tokens=9, new_tokens=20)
    for lengths in ({0: 9, 1: 2}, {0: 1, 1: 4}):
        run.cache.restart(new_tokens=20)
        run.leave(range(4))
        tables = (*run.cache.step_state, run.cache.limits_S, run.cache.prompt_S, *run.cache.prompts.tables)
        assert all(not tensor.any() for tensor in tables)
        run.read(lengths)
        run.admit(range(4), [1, 0, 0, 1])
        for _ in range(20):
            run.check_step(4)


def on_cpu(**request: Any) -> KeyValueCache:
    return KeyValueCache(**request, key_multiple=16, attention=CpuDecodeAttention(), device=torch.device("cpu"))


def opened(prompt_tokens: int, *, heads: int = 1, dtype: torch.dtype = torch.float32) -> KeyValueCache:
    """A cache that has read a first, short prompt."""
    buckets = fitting_buckets([prompt_tokens] * 3, 3, multiple=16)
    cache = on_cpu(slots=4, entries=3, buckets=buckets, new_tokens=20)
    context = PackedContext(pack_prompts([[2]], device=torch.device("cpu"), multiple=16), keep_prompts=True)
    keys = torch.ones(1, heads, DIM, dtype=dtype)
    context.kept = {0: (keys, keys)}
    cache.store([1], context)
    return cache


def test_a_slot_has_room_for_its_own_tokens_and_a_place_for_its_prompt() -> None:
    cache = opened(10)
    assert cache.columns == 32
    assert cache.layers[0][0].shape == (4, 1, 32, DIM)
    assert cache.prompts.bucket(0, 16)[1].shape == (3, 1, 16, DIM)


def test_a_cache_serves_what_it_has_room_for() -> None:
    room: dict[str, Any] = {"slots": 4, "entries": 3, "buckets": {16: 3, 64: 1}, "new_tokens": 32}  # multiples of 16
    cache = on_cpu(**room)
    assert cache.serves(**room)
    assert cache.serves(slots=1, entries=1, buckets={16: 1}, new_tokens=1)
    assert cache.serves(slots=1, entries=1, buckets={64: 1}, new_tokens=1)
    for name in ("slots", "entries", "new_tokens"):
        assert not cache.serves(**room | {name: room[name] + 1})
    for buckets in ({16: 4}, {64: 2}, {32: 1}):
        assert not cache.serves(**room | {"buckets": buckets})


def test_memory_stays_where_it_is_and_all_of_it_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(kind, monkeypatch, slots=4, prompts=3, prompt_tokens=6, new_tokens=20)
    run.read({0: 4, 1: 6, 2: 1})
    before = [tensor.data_ptr() for tensor in run.cache.tensors]
    assert len(before) == 7 + 2 * 2 * len(HEADS)
    run.admit(range(4), [0, 1, 1, 2])
    for _ in range(9):
        run.check_step(4)
    run.leave([0])
    run.compact(([3], [0]), ([2], [0]), [2, 3])
    run.leave([2])
    run.check_step(2)
    run.cache.restart(new_tokens=20)
    assert [tensor.data_ptr() for tensor in run.cache.tensors] == before


@pytest.mark.parametrize("kind", ["shared prompts"])
def test_a_slots_bits_do_not_depend_on_its_neighbours_or_their_number(
    kind: str, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With keys in multiples of 16 and rows in multiples of four, as the policy asks for."""

    def outputs(batch_size: int, *, early: int, longest: int) -> list[Tensor]:
        request: Any = {"slots": batch_size, "prompts": 2, "prompt_tokens": (11, longest), "new_tokens": 60}
        run = Run(kind, monkeypatch, key_multiple=16, dim=32, **request)
        run.read({1: longest, 0: 11})
        run.admit(range(1, batch_size), [0, 0, *[1] * (batch_size - 3)])
        for _ in range(early):
            run.check_step(batch_size)
        run.generator.manual_seed(7)
        run.read({0: 11})
        run.admit([0], [0])
        run.leave(range(1, batch_size))
        result = []
        for step in range(20):
            monkeypatch.setattr(run, "normal", lambda *shape, seed=step: by_row(shape, seed))
            result.append(run.check_step(batch_size)[0])
        return result

    alone = outputs(4, early=0, longest=12)
    for batch_size, early, longest in ((4, 30, 12), (16, 0, 12), (16, 35, 100)):
        company = outputs(batch_size, early=early, longest=longest)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(company, alone, strict=True))


def by_row(shape: tuple[int, ...], seed: int) -> Tensor:
    """Random numbers whose first row does not depend on how many rows there are."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed * 100 + shape[1]))


def test_rounding_up() -> None:
    assert [round_up(length, 16) for length in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert round_up(7, 1) == 7
