"""The guard in Hugging Face trainers: the penalty is checked by the trainer's own arguments, and state is rewound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from torch import Tensor

from flatpeak.errors import UserError
from support.trl import (
    EPS,
    RATE,
    STRENGTH,
    distance,
    grpo_trainer,
    logged,
    need_trl,
    plain_trainer,
    saved_model,
    trained,
    weights,
)

need_trl()


def test_the_first_update_and_every_so_many_are_checked_and_the_weights_do_not_tell(tmp_path: Path) -> None:
    checked = trained(grpo_trainer(tmp_path, max_steps=3, grad_reg_check_every=2))
    plain = trained(grpo_trainer(tmp_path, max_steps=3, grad_reg_check_every=0))
    rows = [row for row in checked.state.log_history if "gradreg/penalty_ratio" in row]
    assert ["gradreg/step_consistency" in row for row in rows] == [True, False, True]
    assert min(logged(checked, "gradreg/step_consistency")) > 0.9
    assert logged(plain, "gradreg/step_consistency") == []
    assert distance(weights(checked.model), weights(plain.model)) == 0


def test_published_behavior_is_not_checked(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, grad_reg_behavior="published", max_steps=1, grad_reg_perturbed="blocks")
    assert logged(trained(trainer), "gradreg/step_consistency") == []


LORA = LoraConfig(
    r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=False
)


def test_float32_adapters_of_a_bfloat16_model_take_a_longer_step_and_are_refused_at_a_short_one(tmp_path: Path) -> None:
    given: dict[str, Any] = {"peft_config": LORA, "max_steps": 1}
    model = saved_model(tmp_path).bfloat16()
    trainer = grpo_trainer(tmp_path, model=model, grad_reg_eps=None, **given)
    adapters = [p for p in trainer.model.parameters() if p.requires_grad]
    assert {p.dtype for p in adapters} == {torch.float32}
    start = weights(trainer.model)
    assert logged(trained(trainer), "gradreg/step_consistency")[0] > 0.5
    assert logged(trainer, "gradreg/perturbation_kept")[0] > 0.99
    assert distance(weights(trainer.model), start) > 0
    short = grpo_trainer(tmp_path, model=saved_model(tmp_path).bfloat16(), grad_reg_eps=1e-3, **given)
    start = weights(short.model)
    with pytest.raises(UserError, match=r"rounding to bfloat16 swamps .* raise grad_reg_eps") as messages:
        short.train()
    assert "gradient_regularization." not in str(messages.value)
    assert "grad_reg_check_every=0" in str(messages.value)
    assert distance(weights(short.model), start) == 0


def without_signal(trainer: Any, steps: set[int]) -> Any:
    """All advantages are 0 in these steps, as where every group is solved; the KL term stays."""
    stock = trainer._generate_and_score_completions

    def score(inputs: Any) -> Any:
        scored = stock(inputs)
        if trainer.state.global_step in steps:
            scored["advantages"] = torch.zeros_like(scored["advantages"])
        return scored

    trainer._generate_and_score_completions = score
    return trainer


def test_updates_without_advantages_neither_move_the_ratio_nor_are_checked(tmp_path: Path) -> None:
    settings = {
        "grad_reg_strength": "ratio:0.3",
        "beta": 0.1,
        "max_steps": 3,
        "num_iterations": 1,
        "learning_rate": 1e-3,
    }
    trainer = trained(without_signal(grpo_trainer(tmp_path, **settings), {0, 1}))
    rows = [row for row in trainer.state.log_history if "gradreg/g1_norm" in row]
    assert [row["gradreg/strength"] for row in rows[:-1]] == [0.0] * (len(rows) - 1)
    assert rows[-1]["gradreg/penalty_ratio"] == pytest.approx(0.3, rel=1e-4)
    assert ["gradreg/step_consistency" in row for row in rows] == [False] * (len(rows) - 1) + [True]


class Counting(torch.nn.Module):
    """A model whose loss depends on how often it ran, which a buffer holds."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner
        self.blocks = inner.transformer.h
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, **inputs: Any) -> dict[str, Tensor]:
        self.calls = self.calls + 1
        return {"loss": self.inner(**inputs)["loss"] * (1 + self.calls)}


def test_a_buffer_that_every_pass_changes_and_uses_is_rewound(tmp_path: Path) -> None:
    """Two micro-batches with factors 2 and 3: the penalty is that of this sum, whatever the passes counted."""
    settings = {"max_steps": 1, "learning_rate": RATE, "remove_unused_columns": False, "grad_reg_eps": EPS / 10}
    trainer = trained(plain_trainer(tmp_path, model=Counting(saved_model(tmp_path, "gpt2")), **settings))
    assert trainer.model.calls == 2
    assert logged(trainer, "gradreg/step_consistency")[0] > 0.9
    ratios = logged(trainer, "gradreg/penalty_ratio")
    finer = plain_trainer(
        tmp_path, model=Counting(saved_model(tmp_path, "gpt2")), **settings | {"grad_reg_eps": EPS / 100}
    )
    # A count that went on would be divided by the step.
    assert logged(trained(finer), "gradreg/penalty_ratio")[0] == pytest.approx(ratios[0], rel=0.2)
    assert ratios[0] < 100 * STRENGTH
