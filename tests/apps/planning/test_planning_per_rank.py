"""The memory of one of several processes, against the formulas of docs/scaling.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatpeak.apps.planning.inventory import gathered_bytes
from flatpeak.apps.planning.memory import MemoryEstimate, Phase
from flatpeak.distributed.ranks import BUCKET
from support.plans import GPU, estimated, planned, saved_model

GR = {"strength": 0.1, "check_every": 0, "perturbed": "all"}


def phases(estimate: MemoryEstimate) -> dict[str, Phase]:
    return {phase.name: phase for phase in estimate.phases}


def of(directory: Path, model: Any = None, **distributed: Any) -> dict[str, Phase]:
    penalty = {"strength": 0.1} if model else GR
    sections = {"distributed": distributed, "kl": {"coefficient": 0.1}, "gradient_regularization": penalty}
    return phases(estimated(directory, GPU, **sections, **({"model": model} if model else {})))


@pytest.mark.parametrize(
    ("distributed", "shards"),
    [
        ({"processes": 2, "strategy": "fsdp2"}, 2),
        ({"processes": 8, "strategy": "fsdp2"}, 8),
        ({"processes": 8, "strategy": "hsdp", "shard_size": 4}, 4),
    ],
)
def test_a_rank_holds_its_share_of_weights_gradients_and_moments(tmp_path: Path, distributed: Any, shards: int) -> None:
    alone, rank = of(saved_model(tmp_path)), of(tmp_path, **distributed)
    weights = alone["update"].items["weights"]
    update = rank["update"].items
    four = sum(update[item] for item in ("weights", "gradients", "optimizer"))
    assert four == pytest.approx(16 * weights / 4 / shards, abs=4)  # 4 bytes of each weight: W, G and two moments
    assert update["regularization"] == pytest.approx(alone["update"].items["regularization"] / shards, abs=1)
    for item in ("reference", "activations"):
        assert update[item] == alone["update"].items[item]
    assert update["gathered layers"] == gathered_bytes(planned(tmp_path), gradients=True)
    assert rank["rollout"].items["whole copy"] == weights


def test_shards_of_a_model_in_bfloat16_are_float32_and_their_own_masters(tmp_path: Path) -> None:
    half = {"path": str(saved_model(tmp_path)), "dtype": "bfloat16"}
    alone, rank = of(tmp_path, half), of(tmp_path, half, processes=4, strategy="fsdp2")
    weights = alone["update"].items["weights"]
    assert alone["update"].items["masters"] == 2 * weights
    for phase in ("rollout", "update"):
        assert "weights" not in rank[phase].items
        assert rank[phase].items["masters"] == pytest.approx(2 * weights / 4, abs=1)
    assert rank["rollout"].items["whole copy"] == rank["update"].items["reference"] == weights


def test_of_a_base_in_4_bits_the_scales_are_whole_and_the_reference_too(tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    model = {"path": str(saved_model(tmp_path)), "quantization": "nf4", "lora": {"rank": 4}}
    alone, rank = of(tmp_path, model), of(tmp_path, model, processes=2, strategy="fsdp2")
    packed, shared = (one["update"].items["4-bit weights"] for one in (alone, rank))
    assert packed / 2 < shared < packed
    wanted = sum(alone["update"].items[item] for item in ("weights", "4-bit weights", "adapters"))
    assert rank["rollout"].items["whole copy"] == rank["update"].items["reference"] == wanted


def test_replicas_hold_everything_and_a_bucket_to_average(tmp_path: Path) -> None:
    alone, rank = of(saved_model(tmp_path)), of(tmp_path, processes=2)
    extra = rank["update"].items.keys() - alone["update"].items.keys()
    assert extra == {"averaged gradients"}
    assert rank["update"].items["averaged gradients"] == alone["update"].items["gradients"] < 4 * BUCKET


def test_a_rank_samples_its_share_of_the_prompts(tmp_path: Path) -> None:
    alone, rank = of(saved_model(tmp_path)), of(tmp_path, processes=3)
    cells = [one["rollout"].items["keys and values"] for one in (alone, rank)]
    assert 0 < cells[1] < cells[0]


def test_the_layers_gathered_at_once_are_two_with_the_root(tmp_path: Path) -> None:
    model = planned(saved_model(tmp_path, num_hidden_layers=3, tie_word_embeddings=True))
    sizes = {name: weight.nbytes for name, weight in model.modules.named_parameters()}
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    root = sum(sizes.values()) - 3 * layer
    assert gathered_bytes(model, gradients=False) == root + 2 * layer
    assert gathered_bytes(model, gradients=True) == root + 3 * layer
