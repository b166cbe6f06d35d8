"""A comparison of recipes with the configurations made of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def unsaid(content: Any, dumped: Any, where: str = "") -> list[str]:
    """The keys of a recipe whose values did not arrive in the configuration made of it."""
    if isinstance(content, Mapping):
        pairs = {str(key): (value, dumped.get(key, ...)) for key, value in content.items()}
    elif isinstance(content, list | tuple) and isinstance(dumped, list) and len(content) == len(dumped):
        pairs = {str(index): pair for index, pair in enumerate(zip(content, dumped, strict=True))}
    else:
        return [] if content == dumped else [where]
    missing = []
    for key, (said, value) in pairs.items():
        place = f"{where}.{key}" if where else key
        missing += [place] if value is ... else unsaid(said, value, place)
    return missing
