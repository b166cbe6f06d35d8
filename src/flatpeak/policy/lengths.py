"""Groups of similar length: padded side by side, they take little more room and work than their tokens do."""

from __future__ import annotations

from collections.abc import Sequence

SPAN = 64
"""Lengths that differ by no more than this, or by a quarter of the longest, are padded to it together."""
LARGEST_WASTE = 4
"""Padded positions per token, at most, ..."""
SMALL = 4096
"""... in a layout of more positions than this."""


def by_length(lengths: Sequence[int], *, similar: bool = True) -> list[list[int]]:
    """Indices in groups, the longest first; within a group they stay in order.

    Not `similar`: lengths may differ as they like, as long as a group padded to its longest is within LARGEST_WASTE.
    """
    groups: list[list[int]] = []
    longest = tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        tokens += length
        near = not similar or longest - length <= max(SPAN, longest // 4)
        if not groups or not near or (len(groups[-1]) + 1) * longest > max(SMALL, LARGEST_WASTE * tokens):
            groups.append([])
            longest = tokens = length
        groups[-1].append(index)
    return [sorted(group) for group in groups]
