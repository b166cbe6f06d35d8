"""The tool of the recipe `calculator`."""

from __future__ import annotations


def multiply(a: int, b: int) -> int:
    """Multiply two whole numbers."""
    return a * b
