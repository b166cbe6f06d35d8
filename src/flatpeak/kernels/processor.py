"""The maker of the processor, read without importing torch."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def vendor() -> str:
    """The first processor's vendor as Linux names it, such as GenuineIntel; empty where nothing says it."""
    try:
        with Path("/proc/cpuinfo").open(encoding="utf-8") as lines:
            named = next((line for line in lines if line.startswith("vendor_id")), "")
    except OSError:
        return ""
    return named.partition(":")[2].strip()
