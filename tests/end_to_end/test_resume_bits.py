"""Resuming changes no bit at sizes where the order of a sum depends on where its terms lie."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from support.reward_functions import odd
from support.runs import Recipe, Send, Train, Watch

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"model": {"new": {"config": {"hidden_size": 64}}}}
TIED = {"model": {"new": {"config": {"tie_word_embeddings": True}}}}


@pytest.mark.parametrize(
    "sections", [{}, SIZES, TIED, {"model": {"dtype": "bfloat16"}}], ids=["16", "64", "tied", "bfloat16"]
)
def test_a_resumed_run_equals_one_that_was_not_interrupted(
    recipe: Recipe, train: Train, watch: Watch, send: Send, sections: dict[str, Any]
) -> None:
    def run(name: str, *, stop: bool = False, resume: bool = False) -> dict[str, torch.Tensor]:
        config = recipe(
            **sections,
            run={"name": name},
            rollout={"prompts_per_step": 7, "group_size": 5, "max_new_tokens": 9},
            training={"steps": 3, "micro_batch_tokens": 7},
        )
        progress = watch({("train", 1): send(signal.SIGTERM)} if stop else {})
        result = train(config, reward=odd, progress=progress, resume=resume)
        assert result.exit_code == (143 if stop else 0)
        return load_file(Path(result.path) / "checkpoints" / "last" / "model.safetensors")

    whole = run("whole")
    run("stopped", stop=True)
    resumed = run("stopped", resume=True)
    different = {
        name: float((resumed[name].float() - tensor.float()).abs().max())
        for name, tensor in whole.items()
        if not torch.equal(resumed[name], tensor)
    }
    assert not different
