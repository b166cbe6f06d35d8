"""TRL's GRPOTrainer with gradient regularization, against steps written out by hand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Trainer

from support.manual_step import Hand
from support.trl import (
    EPS,
    RATE,
    SETTINGS,
    STRENGTH,
    distance,
    grpo_trainer,
    logged,
    need_trl,
    rollout_trainer,
    saved_model,
    shift,
    stock_grpo_trainer,
    trained,
    weights,
)

need_trl()

from flatpeak.integrations.trl import (  # noqa: E402
    GradientRegularizedGRPOConfig,
    GradientRegularizedGRPOTrainer,
)

STEPS = SETTINGS["max_steps"]
MODES = ("importance", "reuse", "importance_clipped")


@dataclass(frozen=True, kw_only=True)
class Case:
    loss_type: str = "grpo"
    mode: str = "importance"
    mu: int = 1
    micro_batches: int = 1
    beta: float = 0.0
    entropy: float = 0.0
    high: float = 0.2
    sequence: bool = False

    def __str__(self) -> str:
        changed = [f"{name}={value}" for name, value in vars(self).items() if value != getattr(Case, name)]
        return " ".join(changed) or "grpo"


CAP = 1.05
"""Of CISPO: above the ratio 1 of a first update, below some of a second's."""
CASES = [
    Case(micro_batches=4),
    *[Case(loss_type=loss, mode=mode, mu=2) for loss in ("grpo", "dapo") for mode in MODES],
    *[Case(loss_type="cispo", mode=mode, mu=2, high=CAP, micro_batches=2) for mode in MODES],
    *[Case(mode=mode, mu=2, sequence=True, high=0.01) for mode in ("importance", "reuse")],
    Case(loss_type="dr_grpo", mode="importance", mu=2, micro_batches=2),
    Case(loss_type="dr_grpo", mode="reuse", micro_batches=2),
    *[Case(loss_type="dapo", mode=mode, mu=2, beta=0.3, entropy=0.1) for mode in MODES],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_three_steps_are_those_written_out_by_hand(case: Case, tmp_path: Path) -> None:
    trainer = grpo_trainer(
        tmp_path,
        loss_type=case.loss_type,
        grad_reg_ratio_mode=case.mode,
        num_iterations=case.mu,
        gradient_accumulation_steps=case.micro_batches,
        beta=case.beta,
        entropy_coef=case.entropy,
        epsilon_high=case.high,
        importance_sampling_level="sequence" if case.sequence else "token",
    )
    by_hand, reference = saved_model(tmp_path), None
    if case.beta:
        reference = saved_model(tmp_path)
        shift(reference)
        shift(trainer.ref_model)
    trainer.train()
    hand = Hand(
        loss_type=case.loss_type,
        mode=case.mode,
        high=case.high,
        beta=case.beta,
        entropy=case.entropy,
        sequence=case.sequence,
    )
    steps = list(hand.run(by_hand, steps=STEPS, strength=STRENGTH, eps=EPS, rate=RATE, mu=case.mu, reference=reference))
    moved = max(move for move, _ in steps)
    assert moved > 1e-3
    assert distance(weights(trainer.model), weights(by_hand)) <= max(1e-6, 1e-3 * moved)
    if case.mu > 1:
        assert steps[1][1] > 0


@pytest.mark.parametrize("settings", [{"num_iterations": 2, "beta": 0.1}, {"gradient_accumulation_steps": 2}])
def test_strength_0_is_trl_bit_for_bit_and_runs_nothing_twice(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_steps(monkeypatch)
    start = weights(saved_model(tmp_path))
    theirs = trained(stock_grpo_trainer(tmp_path, **settings))
    plain = len(calls)
    ours = trained(grpo_trainer(tmp_path, grad_reg_strength=0.0, **settings))
    assert len(calls) == 2 * plain
    assert distance(weights(ours.model), start) > 1e-2
    assert distance(weights(ours.model), weights(theirs.model)) == 0
    assert not any("gradreg" in name for entry in ours.state.log_history for name in entry)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each call of transformers' training_step."""
    calls: list[int] = []
    stock = Trainer.training_step

    def counting(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        calls.append(self.state.global_step)
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "training_step", counting)
    return calls


def test_warm_up_steps_are_trl_bit_for_bit_and_the_next_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = trained(stock_grpo_trainer(tmp_path, max_steps=2))
    calls = count_steps(monkeypatch)
    warm = trained(grpo_trainer(tmp_path, grad_reg_warmup=2, max_steps=2))
    assert calls == [0, 1]
    assert distance(weights(warm.model), weights(theirs.model)) == 0
    longer = trained(grpo_trainer(tmp_path, grad_reg_warmup=2, max_steps=3, grad_reg_check_every=0))
    assert calls[2:] == [0, 1, 2, 2]
    assert len(logged(longer, "gradreg/penalty_ratio")) == 1


def test_the_strength_rises_over_its_warm_up_and_follows_a_schedule(tmp_path: Path) -> None:
    ramp = trained(grpo_trainer(tmp_path, grad_reg_strength=0.2, grad_reg_strength_warmup=4))
    assert logged(ramp, "gradreg/strength") == pytest.approx([0.05, 0.1, 0.15])
    planned = trained(grpo_trainer(tmp_path, grad_reg_strength=0.2, grad_reg_scheduler=lambda step: 0.1 * step))
    assert logged(planned, "gradreg/strength") == pytest.approx([0.1, 0.2])


class Broken(GradientRegularizedGRPOTrainer):
    """Whose second pass fails after the perturbation."""

    def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
        loss = super()._compute_loss(model, inputs)
        if self.grad_reg_replaying:
            raise RuntimeError("out of memory")
        return loss


def test_at_learning_rate_0_the_weights_stay_bit_for_bit(tmp_path: Path) -> None:
    trainer = grpo_trainer(tmp_path, learning_rate=0.0, optim="adamw_torch", num_iterations=2)
    start = weights(trainer.model)
    trainer.train()
    assert len(logged(trainer, "gradreg/penalty_ratio")) == STEPS
    assert distance(weights(trainer.model), start) == 0


def test_a_second_pass_that_raises_leaves_weights_and_trainer_as_they_were(tmp_path: Path) -> None:
    trainer = rollout_trainer(
        Broken,
        GradientRegularizedGRPOConfig,
        saved_model(tmp_path),
        tmp_path,
        grad_reg_strength=STRENGTH,
        gradient_accumulation_steps=2,
    )
    start = weights(trainer.model)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert distance(weights(trainer.model), start) == 0
    assert not trainer.grad_reg_replaying
    assert trainer.accelerator.sync_gradients
    assert len(trainer._metrics["train"]["entropy"]) == 2
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())


def test_metrics_and_adaptive_entropy_are_those_of_one_pass(tmp_path: Path) -> None:
    settings = {"use_adaptive_entropy": True, "entropy_target": 4.0, "entropy_coef": 0.1, "beta": 0.1}
    settings |= {"gradient_accumulation_steps": 2, "learning_rate": 0.0}
    ours = trained(grpo_trainer(tmp_path, **settings))
    theirs = trained(stock_grpo_trainer(tmp_path, **settings))
    same = [name for name in theirs.state.log_history[0] if name not in ("step_time", "grad_norm")]
    for left, right in zip(ours.state.log_history[:STEPS], theirs.state.log_history[:STEPS], strict=True):
        assert {name: left[name] for name in same if name in right} == {n: right[n] for n in same if n in right}
    assert ours.entropy_coef == theirs.entropy_coef != 0.1


def test_the_loss_that_is_logged_is_the_first_passs(tmp_path: Path) -> None:
    made = []
    for maker in (grpo_trainer, stock_grpo_trainer):
        trainer = maker(tmp_path, learning_rate=0.0, max_steps=1, beta=0.2)
        shift(trainer.ref_model)
        made.append(trained(trainer))
    ours, theirs = made
    assert logged(ours, "loss") == logged(theirs, "loss") != [0.0]


def test_one_clip_comes_after_the_penalty(tmp_path: Path) -> None:
    """The logged norm is that of gradient and penalty together; the step is scaled to the limit."""
    limit = 0.05
    trainer = grpo_trainer(tmp_path, max_steps=1, max_grad_norm=limit)
    unlimited = grpo_trainer(tmp_path, max_steps=1)
    start = weights(trainer.model)
    trainer.train()
    unlimited.train()
    whole = logged(trainer, "grad_norm")[0]
    assert whole > 5 * limit
    for name, value in weights(trainer.model).items():
        expected = start[name] + (weights(unlimited.model)[name] - start[name]) * limit / whole
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-5)
