"""A long run holds no more than a short one, and the engine leaves nothing behind."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak.kernels.matmul import SETTING, onednn_is_faster
from flatpeak.kernels.native.build import UnavailableError, library
from flatpeak.policy.linears import FastLinear
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import SamplingParams
from support.engines import LIBRARIES_SERVE, make_policy, prompt
from support.runs import Recipe, Train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
STEPS, SETTLED = 200, 20
RESIDENT_BOUND = 24 << 20
"""Bytes: what Python and the allocator may take between step 20 and step 200, for the run's own history among them."""
PROMPTS = [prompt(length) for length in (5, 30, 90)]
SAMPLING = SamplingParams(max_new_tokens=12)


def live_tensors() -> tuple[int, int]:
    """How many tensors there are, and the bytes of their storages."""
    gc.collect()
    # Plain ones: what torch.compile left behind in other tests holds no memory, and says so with an error.
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return len(tensors), sum(storages.values())


def resident_bytes() -> int:
    """The resident set of this process; 0 where there is no /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def test_two_hundred_steps_hold_no_tensor_and_no_memory_that_twenty_did_not(
    recipe: Recipe, train: Train, watch: Any
) -> None:
    seen: dict[int, tuple[tuple[int, int], int]] = {}

    def look(step: int) -> Callable[[], None]:
        return lambda: seen.update({step: (live_tensors(), resident_bytes())})

    config = recipe(
        training={"steps": STEPS, "epochs_per_rollout": 2, "minibatches": 2},
        rollout={"prompts_per_step": 3, "max_rows": 8},
        kl={"coefficient": 0.01},
        run={"log_rollouts_every": 0},
    )
    progress = watch({("train", step): look(step) for step in (SETTLED, STEPS // 2, STEPS)})
    assert train(config, progress=progress).exit_code == 0
    assert progress.steps("train") == list(range(1, STEPS + 1))
    settled, half, end = (seen[step] for step in (SETTLED, STEPS // 2, STEPS))
    assert settled[0][0] > 50
    assert half[0] == settled[0]
    assert end[0] == settled[0]
    assert end[1] - settled[1] < RESIDENT_BOUND


@pytest.fixture(params=["torch", "native"])
def policy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Policy]:
    """A policy whose layers are packed for decoding, by oneDNN or for the native kernels."""
    monkeypatch.setenv(SETTING, "onednn")
    onednn_is_faster.cache_clear()
    if not onednn_is_faster():
        pytest.skip("torch was built without oneDNN")
    made = make_policy(**LIBRARIES_SERVE)
    made.kernels.setting = request.param
    if request.param == "native":
        try:
            library()
        except UnavailableError as unavailable:
            pytest.skip(str(unavailable))
        with made.decoding():  # which tests the kernels once
            pass
    yield made
    onednn_is_faster.cache_clear()


@pytest.fixture
def caches(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Weak references to every memory of keys and values; no garbage collection frees them."""
    opened: list[Any] = []
    plain = policy.open

    def spy(**request: int) -> Any:
        cache = plain(**request)
        opened.append(weakref.ref(cache))
        return cache

    monkeypatch.setattr(policy, "open", spy)
    gc.collect()
    gc.disable()
    yield opened
    gc.enable()


def packed(policy: Policy) -> list[bool]:
    if policy.kernels.setting == "native":
        return [policy._packed is not None]
    return [layer.packed is not None for layer in policy.model.modules() if isinstance(layer, FastLinear)]


def test_after_a_rollout_neither_keys_and_values_nor_packed_weights_are_left(
    policy: Policy, caches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    during: list[list[bool]] = []
    decode = policy.decode
    monkeypatch.setattr(policy, "decode", lambda *call: (during.append(packed(policy)), decode(*call))[1])
    engine = NativeEngine(policy)
    for seed in range(3):
        engine.generate(PROMPTS, group_size=4, sampling=SAMPLING, seed=seed)
        assert [cache() for cache in caches] == [None] * (seed + 1)
        assert not any(packed(policy))
    assert len(during) >= 20
    assert all(flags and all(flags) for flags in during)


def test_an_exception_inside_a_rollout_leaves_nothing_behind(
    policy: Policy, caches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, calls = policy.decode, []

    def failing(state: Any, tokens_R: torch.Tensor) -> torch.Tensor:
        calls.append(all(packed(policy)))
        if len(calls) == 3:
            raise RuntimeError("no memory left")
        return decode(state, tokens_R)

    monkeypatch.setattr(policy, "decode", failing)
    engine = NativeEngine(policy)
    with pytest.raises(RuntimeError, match="no memory left"):
        engine.generate(PROMPTS, group_size=4, sampling=SAMPLING, seed=0)
    assert calls == [True] * 3
    assert not any(packed(policy))
    assert [cache() for cache in caches] == [None]
    monkeypatch.setattr(policy, "decode", decode)
    again = engine.generate(PROMPTS, group_size=4, sampling=SAMPLING, seed=0)
    assert again == NativeEngine(policy).generate(PROMPTS, group_size=4, sampling=SAMPLING, seed=0)


@pytest.mark.parametrize("end", ["closed", "forgotten"])
def test_a_stream_that_is_not_read_to_its_end_leaves_nothing_behind(
    policy: Policy, caches: list[Any], end: str
) -> None:
    stream = NativeEngine(policy, max_rows=4).stream(PROMPTS, group_size=4, sampling=SAMPLING, seed=0)
    next(stream)
    assert packed(policy)
    assert all(packed(policy))
    assert caches[0]() is not None
    if end == "closed":
        stream.close()  # type: ignore[attr-defined]
    else:
        del stream
    assert not any(packed(policy))
    assert caches[0]() is None
