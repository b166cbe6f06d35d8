"""The device of a plan: its memory as it is sold, and what programs have of that."""

from __future__ import annotations

import math

import pytest

from flatpeak.apps.planning.device import CUDA_CONTEXT, GIB, plan_device
from flatpeak.errors import UserError
from flatpeak.utils.machine import host_memory


def test_a_size_stands_for_a_gpu_unless_the_recipe_says_cpu() -> None:
    gpu, computer = plan_device("auto", device_memory=24), plan_device("cpu", device_memory=2)
    assert (gpu.on_cpu, gpu.libraries, gpu.name) == (False, CUDA_CONTEXT, "a GPU of 24 GB")
    assert (computer.on_cpu, computer.name) == (True, "a computer of 2 GB")
    assert 0 < computer.libraries < 16 * GIB


@pytest.mark.parametrize(("sold", "seen"), [(24, 23.64), (80, 79.1), (141, 139.7)])
def test_programs_have_a_little_less_than_a_card_is_sold_with(sold: float, seen: float) -> None:
    usable = plan_device("cuda", device_memory=sold).memory / GIB
    assert 0.99 * seen < usable <= seen + 0.01


@pytest.mark.parametrize("size", [0, -1, math.nan, math.inf])
def test_a_size_that_is_none_is_refused(size: float) -> None:
    with pytest.raises(UserError, match=rf"^--device-memory {size:g}: give the GB of memory that the device has"):
        plan_device("auto", device_memory=size)


def test_the_device_at_hand_has_what_the_system_gives() -> None:
    device = plan_device("cpu", device_memory=None)
    assert (device.name, device.on_cpu, device.memory) == ("CPU", True, host_memory().total)


def test_a_device_that_is_not_here_can_be_planned_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UserError, match=r"torch sees no CUDA device; .*; or plan for .* with --device-memory GB"):
        plan_device("cuda", device_memory=None)
