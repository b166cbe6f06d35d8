"""Tensors of a checkpoint by name, those of each component under a prefix of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def with_prefix(prefix: str, tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Put a prefix before every name."""
    return {prefix + name: tensor for name, tensor in tensors.items()}


def split_prefix(prefix: str, tensors: Mapping[str, Value]) -> tuple[dict[str, Value], dict[str, Value]]:
    """Split off the tensors under a prefix, named without it, from all others."""
    own = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return own, {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
