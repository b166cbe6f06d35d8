"""Cases of a test that are data: tables of a YAML file beside it, each a list of rows."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import yaml

Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read_tables(file: str | Path) -> dict[str, Any]:
    """The tables of a YAML file, or of the one that is named like a test."""
    tables: dict[str, Any] = yaml.load(Path(file).with_suffix(".yaml").read_text(encoding="utf-8"), Loader)
    return tables


def exact(number: str | int | None) -> Fraction | None:
    """A number of a table, such as 7/2, or None."""
    return None if number is None else Fraction(number)
