"""Host memory beside a device: where there is one, and weights that are on the device only while they are read."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from flatpeak.utils.host_memory import HostMemory, OffloadedWeights, offload_notices
from support.host_memory import SimulatedHost

CPU = torch.device("cpu")
PAGES = """
import resource, torch
from flatpeak.utils.host_memory import keep_freed_memory
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(1 << 20) for _ in range(40)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
kept = keep_freed_memory()
print(kept, pages(), pages())
"""
"""The pages that 160 MiB of tensors ask Linux for, and those that the same ask for again."""
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_a_cuda_device_has_a_host_beside_it_and_a_cpu_has_none() -> None:
    assert HostMemory.beside(CPU) is None
    host = HostMemory.beside(torch.device("cuda", 0))
    assert host is not None
    assert host.device == torch.device("cuda", 0)


def test_settings_that_are_on_are_named_where_they_have_no_effect() -> None:
    switches = {"optimizer.offload": True, "sft.optimizer.offload": False, "reference.offload": True}
    assert offload_notices(switches, CPU) == [
        "optimizer.offload=true, reference.offload=true: no effect on device cpu, which keeps everything in host memory"
    ]
    assert offload_notices(switches, torch.device("cuda")) == []
    assert offload_notices({"optimizer.offload": False}, CPU) == []


def test_weights_are_on_the_device_inside_and_stay_the_same_objects() -> None:
    layer = nn.Linear(3, 2)
    weight, values = layer.weight, layer.weight.detach().clone()
    host = SimulatedHost(CPU)
    offloaded = OffloadedWeights(layer.parameters(), host)
    assert layer.weight is weight
    assert host.holds(weight)
    with offloaded.on_device():
        assert not host.holds(weight)
        assert torch.equal(weight, values)
        with offloaded.on_device():
            assert host.fetched == 2
        assert not host.holds(weight)
    assert host.holds(weight)
    assert host.living == 0
    with torch.no_grad():
        weight.fill_(3.0)  # written on the host, as a reset does
    with offloaded.on_device():
        assert weight.tolist() == [[3.0] * 3] * 2


@needs_cuda
def test_a_copy_to_a_gpus_host_is_pinned_and_returns_the_same_values() -> None:
    device = torch.device("cuda")
    host = HostMemory(device)
    tensor = torch.randn(100_000, device=device)
    stored = host.store(tensor)
    changed = tensor + 1
    again = host.store(changed, into=stored)
    fetched = host.fetch(again)
    host.wait()
    assert again is stored
    assert stored.is_pinned()
    assert fetched.is_cuda
    assert torch.equal(fetched, changed)
    assert torch.equal(stored, changed.cpu())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
@pytest.mark.parametrize("chosen", [False, True])
def test_memory_that_was_freed_is_asked_for_once_unless_the_user_has_chosen(chosen: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    environment |= {"MALLOC_TRIM_THRESHOLD_": "131072"} if chosen else {}
    command = [sys.executable, "-c", PAGES]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kept, first, again = done.stdout.split()
    assert kept == str(not chosen)
    assert int(first) > 10_000
    assert (int(again) > 10_000) is chosen
