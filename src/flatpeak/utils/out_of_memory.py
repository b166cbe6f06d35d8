"""Errors for want of memory, and settings that are halved until the work fits."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

import torch


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: Python's, torch's on a GPU, or the allocator's on a CPU."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate" in str(error)


class Halvings:
    """The settings that a run has halved because memory ran out, and their present values."""

    def __init__(self, notice: Callable[[str], None] | None = None, values: Mapping[str, int] | None = None) -> None:
        """`values`: settings that the run halved before it was resumed. Without a `notice` nothing is halved."""
        self.notice = notice
        self.values = dict(values or {})

    def apply(self, bound: MemoryBound) -> None:
        """Let a bound be halved, from the value to which the run has halved it already."""
        bound.halvings = self
        bound.value = min(bound.value, self.values.get(bound.setting, bound.value))


class MemoryBound:
    """The value of a setting that bounds how much is computed at once, and so how much memory that takes."""

    def __init__(self, setting: str, value: int) -> None:
        self.setting = setting
        self.value = value
        self.halvings = Halvings()

    def attempts(
        self, parts: Callable[[int], int], *, again: Callable[[], object] = lambda: None
    ) -> Iterator[AbstractContextManager[None]]:
        """Contexts in which to do the same work, until it fits into memory.

        `parts` is the number of parts into which a value divides the work. An error for want of memory halves the value
        until that number grows, and is raised if it cannot grow. `again` is called before every further attempt.
        """
        finished: list[bool] = []
        yield self._attempt(parts, finished)
        while not finished:
            again()
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
            yield self._attempt(parts, finished)

    @contextmanager
    def _attempt(self, parts: Callable[[int], int], finished: list[bool]) -> Iterator[None]:
        try:
            yield
            finished.append(True)
        except Exception as error:
            notice = self.halvings.notice
            if notice is None or not is_out_of_memory(error) or parts(1) == parts(self.value):
                raise
            before = parts(self.value)
            while parts(self.value) == before:
                self.value //= 2
            self.halvings.values[self.setting] = self.value
            notice(
                f"memory ran out: {self.setting} is {self.value} from here on, and the work is done again; write "
                f"{self.setting}={self.value} into the recipe"
            )
