"""A second memory on a CPU, to see what is moved between a device and its host."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from flatpeak.utils.host_memory import HostMemory


class SimulatedHost(HostMemory):
    """Host memory whose copies are clones, known by their addresses.

    As on a GPU, a copy to the host is not there before `wait`, but for later work of the device.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.tensors: list[Tensor] = []
        """All that was ever stored, so that no address is used twice."""
        self.fetched = 0
        self._copies: list[StorageWeakRef] = []
        self._waiting: list[tuple[Tensor, Tensor]] = []

    def store(self, tensor: Tensor, *, into: Tensor | None = None) -> Tensor:
        assert not self.holds(tensor), "stored from the host"
        if into is None:
            into = torch.zeros_like(tensor).detach()
            self.tensors.append(into)
        assert self.holds(into), "stored on the device"
        self._waiting.append((into, tensor.detach().clone()))
        return into

    def fetch(self, tensor: Tensor) -> Tensor:
        self.fetched += 1
        self.wait()  # the device's work is done in order
        copy = tensor.detach().clone()
        self._copies.append(StorageWeakRef(copy.untyped_storage()))
        return copy

    def wait(self) -> None:
        for host, value in self._waiting:
            host.copy_(value)
        self._waiting.clear()

    @property
    def living(self) -> int:
        """How many of the copies that were made for the device are still in memory."""
        return sum(not copy.expired() for copy in self._copies)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies on the host."""
        return tensor.data_ptr() in {host.data_ptr() for host in self.tensors}


def simulate_host(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedHost]:
    """Give the CPU a host; the list has every one that was made since."""
    made: list[SimulatedHost] = []

    def beside(device: torch.device) -> SimulatedHost:
        made.append(SimulatedHost(device))
        return made[-1]

    monkeypatch.setattr(HostMemory, "beside", beside)
    return made
