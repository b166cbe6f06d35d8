"""Measurement on a GPU: rows, remaining time, medians, memory."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch

from benchmarks.gpu.models import Peaks
from benchmarks.harness.runner import Row, say


class OutOfTimeError(Exception):
    """Raised if the part's time is nearly over."""


@dataclass(kw_only=True)
class Bench:
    """The device, the time limit and the rows of one part."""

    device: str
    dtype: torch.dtype
    tiny: bool
    seconds: float
    """The time limit of a part."""
    save: Callable[[], None]
    peaks: Peaks | None = None
    rows: list[Row] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)
    longest: float = 0.0
    """Seconds of the longest row of the part so far."""

    def begin(self) -> None:
        """Start a part: free memory, and reset its rows and clock."""
        self.free()
        self.rows, self.longest, self.began = [], 0.0, time.perf_counter()

    def row(self, name: str, measure: Callable[[], Row], *, like_the_others: bool = True) -> None:
        """Measure and keep one row, if there is time; `like_the_others`: it takes up to as long as the longest row."""
        started = time.perf_counter()
        say(f"  {name}")
        try:
            self.check(self.longest if like_the_others else 0.0)
            measured = measure()
        except OutOfTimeError as error:
            measured = {"skipped": str(error)}
        except torch.OutOfMemoryError as error:
            measured = {"skipped": f"out of memory: {str(error).partition('. ')[0]}"}
        self.free()
        taken = time.perf_counter() - started
        self.longest = max(self.longest, taken)
        self.rows.append({"name": name, "row_seconds": round(taken, 2), **measured})
        self.save()

    def check(self, needs: float) -> None:
        """Raise OutOfTimeError if the part has less time left."""
        if time.perf_counter() - self.began + needs > self.seconds:
            raise OutOfTimeError(f"not enough of the part's {self.seconds:.0f} s was left")

    def timed(self, run: Callable[[], Any]) -> float:
        """Time a call in seconds, until the device is done."""
        self.wait()
        started = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - started

    def typical(self, run: Callable[[], Any], *, times: int, warm_ups: int = 1) -> float:
        """Median seconds of up to `times` calls, as time allows."""
        warm = [self.timed(run) for _ in range(warm_ups)]
        taken: list[float] = []
        for _ in range(times):
            if taken or warm:
                self.check(max(taken or warm[-1:]))
            taken.append(self.timed(run))
        return median(taken)

    def wait(self) -> None:
        """Wait until the device is done."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def free(self) -> None:
        """Free cached memory and reset the peak."""
        if self.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    @property
    def device_memory(self) -> float:
        """Bytes of the device's memory; a fixed number on a CPU."""
        return float(torch.cuda.get_device_properties(0).total_memory) if self.device == "cuda" else 16e9

    def memory(self) -> Row:
        """Peak and reserved memory in GB since `free`; None on a CPU."""
        if self.device != "cuda":
            return {"peak_gb": None, "reserved_gb": None}
        return {
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
            "reserved_gb": round(torch.cuda.memory_reserved() / 1e9, 2),
        }
