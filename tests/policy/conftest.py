from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flatpeak.kernels import matmul as products
from flatpeak.kernels.matmul import onednn_is_faster
from flatpeak.policy import kernel_verdicts


@pytest.fixture(autouse=True)
def no_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache without verdicts: kernels are damaged in these tests."""
    folder = tmp_path / "verdicts"
    folder.mkdir()
    monkeypatch.setattr(kernel_verdicts, "cache_folder", lambda: folder)


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products by oneDNN, on any CPU; no test sees the choice made for another."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setenv(products.SETTING, "onednn")
    onednn_is_faster.cache_clear()
    yield
    onednn_is_faster.cache_clear()
