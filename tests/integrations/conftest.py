"""TRL without telemetry and the Hub, and one accelerator state per module."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator

import pytest
from huggingface_hub import constants


@pytest.fixture(scope="module", autouse=True)
def quiet_trl() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "1")
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
            patch.setenv(name, "1")
            patch.setattr(constants, name, True)
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
        gc.freeze()  # trainers collect garbage when they begin: half a second over TRL's modules
        yield
        gc.unfreeze()
        importlib.import_module("accelerate.state").AcceleratorState._reset_state(reset_partial_state=True)
