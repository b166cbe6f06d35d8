"""Whole runs with gradient regularization: what is logged, saved and resumed, and what failures leave."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.gradreg import schedule
from flatpeak.integrations.hf_trainer import GradientRegularizationMixin, GradientRegularizedTrainer
from support.trl import STRENGTH, distance, logged, plain_trainer, saved_model, trained, weights


def test_all_metrics_are_means_since_the_last_log(tmp_path: Path) -> None:
    often = trained(plain_trainer(tmp_path, max_steps=4))
    seldom = trained(plain_trainer(tmp_path, max_steps=4, logging_steps=2))
    names = ("penalty_ratio", "cosine", "g1_norm", "perturbation_kept", "strength", "skipped")
    for name in names:
        values = logged(often, f"gradreg/{name}")
        means = [sum(values[start : start + 2]) / 2 for start in (0, 2)]
        assert logged(seldom, f"gradreg/{name}") == pytest.approx(means, rel=1e-6)
    assert all(0 < share < 1 for share in logged(seldom, "gradreg/time_share"))


def test_dropout_masks_are_those_of_the_first_pass_and_no_numbers_are_drawn(tmp_path: Path) -> None:
    """Other masks would make the difference of two losses, which grows as 1 / step."""
    model = partial(saved_model, tmp_path, "gpt2", resid_pdrop=0.2, embd_pdrop=0.2)
    far, near = (trained(plain_trainer(tmp_path, model=model(), grad_reg_eps=eps, max_steps=1)) for eps in (3e-3, 3e-4))
    assert logged(near, "gradreg/penalty_ratio") == pytest.approx(logged(far, "gradreg/penalty_ratio"), rel=0.1)
    drawn = torch.get_rng_state()
    trained(plain_trainer(tmp_path, model=model(), grad_reg_strength=0.0, max_steps=1))
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("strength", ["ratio:0.5", "calibrated:0.5"])
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, strength: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "CALIBRATION_UPDATES", 2)  # the updates of steps 1 and 3
    settings: dict[str, Any] = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 6}
    settings |= {"grad_reg_strength": strength, "grad_reg_every": 2, "save_strategy": "steps", "save_steps": 3}
    model = partial(saved_model, tmp_path, "gpt2", resid_pdrop=0.1, embd_pdrop=0.1)
    whole = trained(plain_trainer(tmp_path, model=model(), **settings))
    checkpoint = tmp_path / "run" / "checkpoint-3"
    kept = {path.name for path in checkpoint.iterdir() if path.name.startswith("gradient_regularization")}
    assert kept == {"gradient_regularization", "gradient_regularization.json"}
    assert [path.name for path in checkpoint.glob("*.safetensors")] == ["model.safetensors"]
    resumed = plain_trainer(tmp_path, model=model(), **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert logged(resumed, "gradreg/strength") == logged(whole, "gradreg/strength")
    assert len(logged(resumed, "gradreg/strength")) == 6
    assert len(set(logged(resumed, "gradreg/strength")[2:])) == (1 if strength == "calibrated:0.5" else 2)
    assert distance(weights(resumed.model), weights(whole.model)) == 0


def test_random_directions_come_from_the_trainers_seed_and_number_of_updates(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"grad_reg_direction": "random", "save_strategy": "steps", "save_steps": 2}
    model = partial(saved_model, tmp_path)
    whole = trained(plain_trainer(tmp_path, model=model(), **settings))
    again = plain_trainer(tmp_path, model=model(), **settings)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert distance(weights(again.model), weights(whole.model)) == 0
    for changes in ({"seed": 1, "data_seed": 42}, {"grad_reg_direction": "gradient"}):
        other = trained(plain_trainer(tmp_path, model=model(), **settings | changes))
        assert logged(other, "gradreg/g1_norm")[0] == logged(whole, "gradreg/g1_norm")[0]
        assert logged(other, "gradreg/cosine")[0] != pytest.approx(logged(whole, "gradreg/cosine")[0], abs=1e-3)


def test_a_plain_checkpoint_is_taken_up_at_its_step(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "grad_reg_warmup": 3}
    trained(plain_trainer(tmp_path, grad_reg_strength=0.0, **settings))
    resumed = plain_trainer(tmp_path, **{**settings, "max_steps": 5})
    with pytest.warns(UserWarning, match="written without gradient regularization"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert [entry["step"] for entry in resumed.state.log_history if "gradreg/strength" in entry] == [4, 5]


def test_training_again_begins_again(tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path, grad_reg_warmup=1)
    trainer.train()
    trainer.train()
    assert [e["step"] for e in trainer.state.log_history if "gradreg/strength" in e] == [2]


class Exploding(GradientRegularizedTrainer):
    """Whose second update's loss is not finite, in one of the passes."""

    when_replaying = False

    def compute_loss(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().compute_loss(*args, **kwargs)
        bad = self.state.global_step == 1 and self.grad_reg_replaying == self.when_replaying
        return loss * float("nan") if bad else loss


class ExplodingLater(Exploding):
    when_replaying = True


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_leaves_the_weights(tmp_path: Path) -> None:
    one_step = weights(trained(plain_trainer(tmp_path, max_steps=1)).model)
    trainer = plain_trainer(tmp_path, Exploding, max_steps=2)
    with pytest.warns(UserWarning, match="step 2: the gradient is not finite"):
        trainer.train()
    assert distance(weights(trainer.model), one_step) == 0
    assert logged(trainer, "gradreg/skipped") == [0.0, 1.0]
    assert trainer.grad_reg_skipped_updates == 1
    longer = trained(plain_trainer(tmp_path, Exploding, max_steps=3))
    assert 0 < distance(weights(longer.model), one_step) < 1


def test_a_second_pass_that_is_not_finite_leaves_the_plain_gradient(tmp_path: Path) -> None:
    trainer = trained(plain_trainer(tmp_path, ExplodingLater, max_steps=2))
    one_penalty = trained(
        plain_trainer(tmp_path, max_steps=2, grad_reg_scheduler=lambda step: 0.0 if step else STRENGTH)
    )
    assert distance(weights(trainer.model), weights(one_penalty.model)) == 0
    assert logged(trainer, "gradreg/skipped") == [0.0, 1.0]


def test_an_update_that_passes_the_regularizer_by_is_refused(tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path, grad_reg_warmup=1)
    stock = super(GradientRegularizationMixin, trainer).training_step
    trainer.training_step = lambda *args: stock(*args)
    with pytest.raises(ValueError, match="about to update without gradient regularization"):
        trainer.train()


def test_central_differences_sam_and_looksam_train(tmp_path: Path) -> None:
    forward, central = (
        logged(trained(plain_trainer(tmp_path, max_steps=1, grad_reg_difference=d)), "gradreg/penalty_ratio")[0]
        for d in ("forward", "central")
    )
    assert central == pytest.approx(forward, rel=0.2)
    assert central != forward
    settings = {"grad_reg_penalty": "norm", "grad_reg_every": 2}
    trainer = trained(plain_trainer(tmp_path, max_steps=4, learning_rate=0.01, **settings))
    assert len(logged(trainer, "gradreg/perturbation_kept")) == 2
    assert len(logged(trainer, "gradreg/penalty_ratio")) == 4
