"""The shipped profiles: each fits the GPU in its name, planned from the published sizes of its model alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flatpeak.apps.planning.run_plan import RunPlan, plan_run
from flatpeak.config.load import load_recipe, parse_config, shipped_recipes

pytestmark = pytest.mark.slow

PUBLISHED: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-Math-1.5B": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-Math-7B": {
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
}
"""What tells the config.json of these models apart (Qwen2.5-Math, arXiv 2409.12122)."""
PARAMETERS = {"Qwen/Qwen2.5-Math-1.5B": 1_543_714_304, "Qwen/Qwen2.5-Math-7B": 7_615_616_512}
PROFILES = {name: int(name.rpartition("_")[2].removesuffix("gb")) for name in shipped_recipes() if name.endswith("gb")}


def planned(name: str, directory: Path, *overrides: str, memory: float) -> RunPlan:
    """The plan of a recipe with its model's config.json alone, in a directory."""
    content = load_recipe(name, overrides)
    shape = {"model_type": "qwen2", "num_hidden_layers": 28, "max_position_embeddings": 4096, "dtype": "bfloat16"}
    shape |= PUBLISHED[content["model"]["path"]]
    (directory / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    content["model"]["path"] = str(directory)
    return plan_run(parse_config(content), device_memory=memory)


def test_there_are_profiles_for_three_sizes() -> None:
    assert sorted(set(PROFILES.values())) == [24, 80, 141]


@pytest.mark.parametrize(("name", "size"), PROFILES.items(), ids=str)
def test_a_profile_fits_the_gpu_in_its_name_with_some_room(name: str, size: int, tmp_path: Path) -> None:
    plan = planned(name, tmp_path, memory=size)
    assert plan.memory.inventory.parameters == PARAMETERS[load_recipe(name)["model"]["path"]]
    assert plan.fits, f"{plan.needed / 2**30:.1f} GiB"
    assert not plan.is_tight, f"{plan.needed / 2**30:.1f} GiB"


def test_what_a_profile_saves_it_needs(tmp_path: Path) -> None:
    without = planned("flatpeak:math_qwen_24gb", tmp_path, "optimizer.offload=false", memory=24)
    assert not without.fits or without.is_tight
    assert not planned("flatpeak:math_qwen_7b_80gb", tmp_path, "optimizer.offload=false", memory=80).fits
