"""Where notices go unless the caller says otherwise."""

from __future__ import annotations

import warnings


def warn(text: str) -> None:
    """Python's warnings."""
    warnings.warn(text, stacklevel=3)
