"""The device of a planned run: the device of this machine, or another one of a given size."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from flatpeak.errors import UserError
from flatpeak.utils.huggingface import pick_device
from flatpeak.utils.machine import host_memory, resident_memory

GIB: Final = 2**30
USABLE: Final = 0.985
"""GiB of memory available to programs per GB that a device is sold with: torch sees 23.6 GiB of a 24 GB card, 79.1 of
80, and 139.7 of 141."""
CUDA_CONTEXT: Final = 6 * GIB // 10
"""Bytes of a CUDA context with the kernels of torch's libraries: an allowance, not measured here."""


@dataclass(frozen=True, kw_only=True)
class PlannedDevice:
    """A device, its memory, and what a process takes of it before a model is loaded."""

    name: str
    on_cpu: bool
    memory: int
    """Bytes available to programs."""
    libraries: int
    """Bytes of libraries: on a CPU, of this process."""


def plan_device(wanted: str, *, device_memory: float | None) -> PlannedDevice:
    """The device of `model.device`, or a GPU sold with this many GB (with model.device=cpu: a computer with as many).

    UserError for a device that is not in this machine and whose size is not given.
    """
    if device_memory is None:
        return _device_at_hand(wanted)
    if not (math.isfinite(device_memory) and device_memory > 0):
        raise UserError(f"--device-memory {device_memory:g}: give the GB of memory that the device has, such as 24")
    on_cpu = wanted.startswith("cpu")
    return PlannedDevice(
        name=f"a {'computer' if on_cpu else 'GPU'} of {device_memory:g} GB",
        on_cpu=on_cpu,
        memory=int(USABLE * device_memory * GIB),
        libraries=resident_memory() if on_cpu else CUDA_CONTEXT,
    )


def _device_at_hand(wanted: str) -> PlannedDevice:
    try:
        device = pick_device(wanted, where="model.device")
    except UserError as error:
        raise UserError(f"{error}; or plan for a device that is not here, with --device-memory GB") from error
    if device.type == "cpu":
        return PlannedDevice(name="CPU", on_cpu=True, memory=host_memory().total, libraries=resident_memory())
    properties = torch.cuda.get_device_properties(device)
    return PlannedDevice(name=properties.name, on_cpu=False, memory=properties.total_memory, libraries=CUDA_CONTEXT)
