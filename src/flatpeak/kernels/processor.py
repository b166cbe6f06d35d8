"""The processor according to Linux, read without importing torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path

KIND = (
    "vendor_id",
    "cpu family",
    "model",
    "model name",
    "stepping",
    "flags",
    "CPU implementer",
    "CPU part",
    "Features",
)
"""The fields that are equal on two machines with the same processor."""


@cache
def fields() -> dict[str, str]:
    """The fields of the first processor; empty if the file does not exist."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            first = lines.read().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def vendor() -> str:
    """The processor's vendor, such as GenuineIntel; empty if unknown."""
    return fields().get("vendor_id", "")


def kind() -> list[str]:
    """Values that distinguish kinds of processors."""
    return [fields().get(name, "") for name in KIND]
