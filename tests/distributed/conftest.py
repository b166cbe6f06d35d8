"""The two ranks that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """`ranks(function, *args)`: the function's results on two gloo ranks; started by the first test that asks."""
    both = Ranks()
    yield both
    both.close()
