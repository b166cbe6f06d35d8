"""A cache of native kernels of a test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flatpeak.kernels.native import build


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of its own that nobody else may write to, and no library found yet."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(build, "PREBUILT", tmp_path / "none")
    build._find.cache_clear()
    yield folder
    build._find.cache_clear()
