"""Host memory: for tensors that a device needs only now and then; on a CPU, kept from pass to pass."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

KEPT = 1 << 30
"""Bytes of freed memory that the C library keeps."""
LARGEST_KEPT = 32 << 20
"""Bytes of the largest tensor whose memory is kept: the maximum that glibc allows."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Let glibc keep the memory of freed tensors for the next pass; False if its settings are left unchanged.

    By default it returns free memory above 64 MiB or less to Linux, and clearing the same pages again took a tenth of a
    small model's training pass. The thresholds hold for the whole process; user-set thresholds win.
    """
    chosen = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
    if sys.platform != "linux" or any(name in os.environ for name in chosen):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # missing in other C libraries
    return bool(mallopt and mallopt(_MMAP_THRESHOLD, LARGEST_KEPT) and mallopt(_TRIM_THRESHOLD, KEPT))


class HostMemory:
    """Copies of a device's tensors in host memory, pinned so that a copy is one transfer without the processor.

    Copies are ordered with the device's other work. The host may read them after `wait`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @classmethod
    def beside(cls, device: torch.device) -> HostMemory | None:
        """The host memory of a CUDA device; None for other devices, such as a CPU, whose tensors are already there."""
        return cls(device) if device.type == "cuda" else None

    def store(self, tensor: Tensor, *, into: Tensor | None = None) -> Tensor:
        """Copy a tensor to the host; into the memory of an earlier result, if given."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True) if into is None else into
        return host.copy_(tensor.detach(), non_blocking=True)

    def fetch(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the device."""
        return tensor.to(self.device, non_blocking=True)

    def wait(self) -> None:
        """Wait until all copies are made."""
        torch.cuda.synchronize(self.device)


class OffloadedWeights:
    """Weights that are in host memory, and on the device only while they are read.

    A weight stays the same object. To change values for good, write them while the weight is on the host.
    """

    def __init__(self, weights: Iterable[Tensor], host: HostMemory) -> None:
        self._weights = list(weights)
        self._host = host
        self._readers = 0
        for weight in self._weights:
            weight.data = host.store(weight.data)
        host.wait()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """A context in which the weights are on the device; nested contexts copy them only once."""
        self._readers += 1
        hosts = [weight.data for weight in self._weights] if self._readers == 1 else []
        try:
            for weight, host in zip(self._weights, hosts, strict=False):
                weight.data = self._host.fetch(host)
            yield
        finally:
            self._readers -= 1
            for weight, host in zip(self._weights, hosts, strict=False):
                weight.data = host


def offload_notices(switches: Mapping[str, bool], device: torch.device) -> list[str]:
    """The notice about settings, by dotted key, that have no effect because the device uses host memory itself."""
    wanted = [key for key, on in switches.items() if on]
    if not wanted or HostMemory.beside(device) is not None:
        return []
    settings = ", ".join(f"{key}=true" for key in wanted)
    return [f"{settings}: no effect on device {device.type}, which keeps everything in host memory"]
