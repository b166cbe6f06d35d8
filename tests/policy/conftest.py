from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flatpeak.kernels import matmul as products
from flatpeak.kernels.matmul import onednn_is_faster


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products by oneDNN, on any CPU; no test sees the choice made for another."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setenv(products.SETTING, "onednn")
    onednn_is_faster.cache_clear()
    yield
    onednn_is_faster.cache_clear()
