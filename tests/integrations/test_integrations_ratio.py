"""Off-policy, the second pass differentiates the function of the first: the penalty does not depend on the step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from support.trl import (
    GRAD_REG,
    distance,
    grpo_trainer,
    logged,
    need_trl,
    rollout_trainer,
    saved_model,
    trained,
    weights,
)

need_trl()
from trl import GRPOTrainer  # noqa: E402

from flatpeak.integrations.second_pass import SecondPassLoss  # noqa: E402
from flatpeak.integrations.trl import GradientRegularizationMixin, GradientRegularizedGRPOConfig  # noqa: E402

MODES = ("importance", "reuse", "importance_clipped")
CAP = 1.05
"""Of CISPO: above the ratio 1 of a first update, below some of a second's."""


def penalty_norm(directory: Path, eps: float, **settings: Any) -> float:
    """Of the second update of two on the same rollouts, at a strength too small to matter to the first."""
    trainer = grpo_trainer(
        directory, grad_reg_strength=1e-5, grad_reg_eps=eps, max_steps=2, num_iterations=2, **settings
    )
    trainer.train()
    if settings.get("loss_type") == "cispo":
        assert logged(trainer, "cispo_clip_ratio")[1] > 0
    elif settings.get("loss_type") not in ("sapo", "vespo"):
        assert logged(trainer, "clip_ratio/region_mean")[1] > 0
    return logged(trainer, "gradreg/penalty_ratio")[1] * logged(trainer, "gradreg/g1_norm")[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "settings",
    [
        {"loss_type": "grpo"},
        {"loss_type": "cispo", "epsilon_high": CAP},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.01},
        {"loss_type": "cispo", "epsilon_high": 1.01, "importance_sampling_level": "sequence"},
        {"loss_type": "sapo"},
        {"loss_type": "vespo"},
        {"loss_type": "dapo", "top_entropy_quantile": 0.5, "entropy_coef": 0.1},
        {"loss_type": "dapo", "off_policy_mask_threshold": 0.01},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_off_policy_the_penalty_does_not_depend_on_the_step(mode: str, settings: Any, tmp_path: Path) -> None:
    far = penalty_norm(tmp_path, 3e-3, grad_reg_ratio_mode=mode, **settings)
    near = penalty_norm(tmp_path, 3e-4, grad_reg_ratio_mode=mode, **settings)
    assert near == pytest.approx(far, rel=0.1)


def test_a_second_pass_that_takes_the_ratio_for_1_grows_as_the_step_shrinks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: what the tests above would not forgive."""
    stock = SecondPassLoss._coefficients

    def on_policy(self: SecondPassLoss, loss: Any, inputs: Any, without_policy: Any, micro: Any) -> Tensor:
        first = {"old_per_token_logps": micro.scores[0]}
        return stock(self, loss, {**inputs, **first}, {**without_policy, **first}, micro)

    monkeypatch.setattr(SecondPassLoss, "_coefficients", on_policy)
    far, near = (penalty_norm(tmp_path, eps, loss_type="grpo") for eps in (3e-3, 3e-4))
    assert near > 5 * far


def test_the_second_pass_uses_the_entropy_coefficient_of_the_first(tmp_path: Path) -> None:
    """It is adapted at the end of the first pass; the difference of two losses would grow as 1 / step."""
    settings = {"use_adaptive_entropy": True, "entropy_target": 4.0, "entropy_coef": 0.1, "entropy_coef_delta": 0.5}
    far, near = (
        logged(trained(grpo_trainer(tmp_path, grad_reg_eps=eps, max_steps=2, **settings)), "gradreg/penalty_ratio")[1]
        for eps in (3e-3, 3e-4)
    )
    assert near == pytest.approx(far, rel=0.1)


class OwnLoss(GRPOTrainer):
    """With a loss that is not TRL's."""

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        return 2 * super()._compute_loss(model, inputs)


def test_a_loss_of_ones_own_is_evaluated_again(tmp_path: Path) -> None:
    kind = type("Mixed", (GradientRegularizationMixin, OwnLoss), {})
    result = []
    for mode in ("importance", "importance_clipped"):
        settings = {"max_steps": 2, "num_iterations": 2, "grad_reg_ratio_mode": mode, **GRAD_REG}
        model = saved_model(tmp_path)
        trainer = trained(rollout_trainer(kind, GradientRegularizedGRPOConfig, model, tmp_path, **settings))
        result.append(weights(trainer.model))
        assert logged(trainer, "clip_ratio/region_mean")[1] > 0
    assert distance(*result) == 0
