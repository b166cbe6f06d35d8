"""Cut a sequence into buckets of bounded size, in its order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def in_buckets(items: Iterable[Item], size: Callable[[Item], int], *, most: int) -> Iterator[list[Item]]:
    """Consecutive items whose sizes add up to at most `most`; a larger item is a bucket by itself."""
    bucket: list[Item] = []
    held = 0
    for item in items:
        if bucket and held + size(item) > most:
            yield bucket
            bucket, held = [], 0
        bucket.append(item)
        held += size(item)
    if bucket:
        yield bucket
