"""The memory of reward models, beside real ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from flatpeak.apps.planning.dry_run import reward_model_memory
from flatpeak.apps.planning.fake_policy import MemoryTracker
from flatpeak.config.load import parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.utils.adapters import LoraConfig, add_adapters, save_adapter
from support.plans import saved_model

SIZES = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4}


def config_of(path: Path, **settings: Any) -> RunConfig:
    return parse_config(
        {
            "model": {"path": str(path), "device": "cpu"},
            "rewards": {"preference": {"type": "reward_model", "path": str(path), **settings}},
            "evaluation": {"accuracy": None, "metric": "reward"},
        }
    )


def real_model(path: Path) -> Any:
    return AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(path)).eval()


def test_a_pass_without_data_takes_what_a_real_one_takes(tmp_path: Path) -> None:
    base = saved_model(tmp_path, **SIZES)
    memory = reward_model_memory(config_of(base, batch_tokens=400), text_tokens=100, texts=50, on_cpu=True)
    model = real_model(base)
    assert memory.weights == sum(parameter.nbytes for parameter in model.parameters())
    token_ids = torch.zeros(4, 100, dtype=torch.int64)  # as many texts as 400 tokens are
    with torch.no_grad(), MemoryTracker([*model.parameters(), *model.buffers()]) as tracker:
        model.base_model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), use_cache=False)
    assert memory.scoring == pytest.approx(tracker.peak, rel=0.05)


def test_no_more_texts_are_scored_together_than_there_are(tmp_path: Path) -> None:
    config = config_of(saved_model(tmp_path, **SIZES))
    few, more = (reward_model_memory(config, text_tokens=100, texts=texts, on_cpu=True).scoring for texts in (3, 6))
    assert more == pytest.approx(2 * few, rel=0.1)


def test_adapters_count_with_the_base_that_they_name(tmp_path: Path) -> None:
    base = saved_model(tmp_path / "base", **SIZES)
    model = real_model(base)
    model.name_or_path = str(base)
    adapted = add_adapters(model, LoraConfig(rank=4), seed=0, head="score")
    save_adapter(adapted, tmp_path / "adapter")
    size = (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size
    plain, with_adapter = (
        reward_model_memory(config_of(path), text_tokens=10, texts=1, on_cpu=True).weights
        for path in (base, tmp_path / "adapter")
    )
    assert with_adapter - plain == size


def test_a_reward_model_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    config = config_of(saved_model(tmp_path))
    missing = config.model_copy(
        update={"rewards": {"preference": config.rewards["preference"].model_copy(update={"path": "./nowhere"})}}
    )
    with pytest.raises(UserError, match=r"rewards\.preference\.path=\./nowhere: no such directory"):
        reward_model_memory(missing, text_tokens=10, texts=1, on_cpu=True)
