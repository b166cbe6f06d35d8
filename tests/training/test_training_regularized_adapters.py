"""Gradient regularization of adapters: its penalty is the exact one, or a notice or a refusal says that it is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak.gradreg.directions import ADAPTER_STEP
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.model import Policy
from flatpeak.utils.adapters import LoraConfig
from support.models import letter_tokenizer, tiny_model
from support.regularized_training import gradient_of, off_policy, penalty_of, relative_error


def save_base(directory: Path, *, scale: float) -> None:
    """A model whose weights bfloat16 holds exactly, so that it is the same base in both types."""
    model = tiny_model(hidden_size=64, intermediate_size=128, scale=scale)
    model.to(torch.bfloat16).to(torch.float32).save_pretrained(directory)
    letter_tokenizer().save_pretrained(directory)


def adapted(base: Path, *, moved: float, dtype: Any = "float32", quantization: Any = None, **lora: Any) -> Policy:
    """Adapters of rank 8 on the base; `moved` is the standard deviation of their B matrices, 0 as they begin."""
    settings = LoraConfig(rank=8, alpha=8, **lora)
    config = ModelConfig(path=str(base), device="cpu", dtype=dtype, quantization=quantization, lora=settings)
    policy = load_policy(config, seed=2)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in policy.model.named_parameters() if moved else ():
            if "lora_B" in name:
                weight.normal_(std=moved, generator=generator)
    return policy


@pytest.mark.parametrize("kind", [{}, {"rslora": True}, {"quantization": "nf4"}], ids=["lora", "rslora", "nf4"])
@pytest.mark.parametrize("difference", ["forward", "central"])
def test_the_penalty_over_a_base_in_float32_is_the_exact_one(tmp_path: Path, kind: Any, difference: str) -> None:
    save_base(tmp_path, scale=2.0)
    policy = adapted(tmp_path, moved=0.05, **kind)
    batch = off_policy(policy)
    exact = penalty_of(policy, batch, perturbed="adapters", difference="exact")
    ours = penalty_of(policy, batch, perturbed="adapters", difference=difference)
    assert relative_error(ours, exact) < 1e-2


@pytest.mark.parametrize("quantization", [None, "nf4"])
@pytest.mark.parametrize(
    ("scale", "moved", "outcome"),
    [(1.0, 0.0, "silent"), (2.0, 0.05, "silent"), (8.0, 0.0, "longer"), (2.0, 0.3, "shorter")],
)
def test_over_a_base_in_bfloat16_a_penalty_is_right_within_27_percent_or_better_at_the_step_that_was_found(
    tmp_path: Path, quantization: Any, scale: float, moved: float, outcome: str
) -> None:
    save_base(tmp_path, scale=scale)
    precise = adapted(tmp_path, moved=moved, quantization=quantization)
    batch = off_policy(precise)
    exact = penalty_of(precise, batch, perturbed="adapters", difference="exact")
    policy = adapted(tmp_path, moved=moved, quantization=quantization, dtype="bfloat16")
    notices: list[str] = []
    plain = gradient_of(policy, batch)
    settings: dict[str, Any] = {"perturbed": "adapters", "check_every": 100, "notice": notices.append}
    error = relative_error(penalty_of(policy, batch, plain=plain, **settings), exact)
    if outcome == "silent":
        assert notices == []
        assert error < 0.27
        return
    found = re.findall(r"the step is now (\S+) of the weights' norm", notices[0])
    assert [float(step) > ADAPTER_STEP for step in found] == [outcome == "longer"]
    assert error < relative_error(penalty_of(policy, batch, plain=plain, perturbed="adapters"), exact)
