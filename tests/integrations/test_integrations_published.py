"""Published behavior by name: its formula by hand, and its own script with only the import changed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor

from flatpeak.gradreg.config import PublishedBehavior
from support.manual_step import Hand, gradient_of, move, norm, tokens
from support.models import letter_tokenizer
from support.trl import LIMIT, distance, logged, need_trl, rollout_trainer, saved_model, trained, weights

need_trl()
from flatpeak.integrations.trl import GradientRegularizedGRPOConfig, GradientRegularizedGRPOTrainer  # noqa: E402

RATE = 0.5
GAMMA, EPS = 0.02, 0.01
EXCLUDED = ("embed", "lm_head")
"""Of the published words, those that a Qwen2's names contain."""
G1_CLIP, G2_CLIP = 0.4, 0.35
"""Below the norms of this model's gradients."""


def published(directory: Path, **settings: Any) -> Any:
    merged = {"learning_rate": RATE, "grad_reg_strength": GAMMA, "grad_reg_eps": EPS, "num_iterations": 2, **settings}
    merged = {"grad_reg_behavior": "published", "max_steps": 2, **merged}
    model = saved_model(directory)
    return rollout_trainer(GradientRegularizedGRPOTrainer, GradientRegularizedGRPOConfig, model, directory, **merged)


def clipped(gradient: dict[str, Tensor], limit: float) -> dict[str, Tensor]:
    factor = min(1.0, limit / (norm(gradient) + 1e-6))
    return {name: factor * grad for name, grad in gradient.items()}


def published_steps(model: Any, *, g1_clip: float, g2_clip: float) -> list[tuple[float, float]]:
    """Two updates on one batch, as the authors' code makes them; gives the norms of both gradients."""
    hand = Hand(loss_type="dapo", mode="importance_clipped")
    old_T = tokens(model)[0].detach()
    norms = []
    for _ in range(2):
        loss = partial(lambda: hand.first(*tokens(model), old_T, None))
        raw1 = gradient_of(model, loss)
        g1 = clipped(raw1, g1_clip)
        inside = {name for name in g1 if not any(word in name for word in EXCLUDED)}
        before = weights(model)
        move(model, {name: g1[name] for name in inside}, EPS)
        raw2 = gradient_of(model, loss)
        g2 = clipped(raw2, g2_clip)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(before[name])
        move(model, {name: g1[name] + GAMMA / EPS * (g2[name] - g1[name]) for name in inside}, -RATE)
        move(model, {name: raw2[name] for name in g1 if name not in inside}, -RATE)
        norms.append((norm(raw1), norm(raw2)))
    return norms


@pytest.mark.parametrize("limits", [(G1_CLIP, G2_CLIP), (None, None)], ids=["clipped", "default limits"])
def test_updates_are_the_published_ones_by_hand(limits: tuple[Any, Any], tmp_path: Path) -> None:
    trainer = trained(published(tmp_path, grad_reg_g1_clip=limits[0], grad_reg_g2_clip=limits[1]))
    by_hand = saved_model(tmp_path)
    norms = published_steps(by_hand, g1_clip=limits[0] or 10.0, g2_clip=limits[1] or 10.0)
    if limits[0]:
        assert norms[0][0] > G1_CLIP
        assert norms[0][1] > G2_CLIP
    assert distance(weights(trainer.model), weights(by_hand)) <= 1e-6
    corrected = trained(published(tmp_path, grad_reg_behavior="corrected"))
    assert distance(weights(corrected.model), weights(by_hand)) > 1e-4


def test_the_default_step_is_the_published_one_and_excluded_names_can_be_given(tmp_path: Path) -> None:
    trainer = published(tmp_path, grad_reg_eps=None, grad_reg_exclude=["embed", "lm_head", "mlp"])
    config = trainer._grad_reg.config
    assert (config.step, config.step_scale) == (1e-3, "absolute")
    assert trainer._grad_reg.regularizer.behavior == PublishedBehavior(
        g1_clip=10.0, g2_clip=10.0, outside="g2", replay_randomness=False
    )
    chosen = set(map(id, trainer._grad_reg.regularizer.parameters))
    names = {name for name, p in trainer.model.named_parameters() if id(p) in chosen}
    assert "model.layers.0.self_attn.q_proj.weight" in names
    assert "model.norm.weight" in names
    assert not any("mlp" in name or "embed" in name or "lm_head" in name for name in names)


def test_dropout_is_not_replayed(tmp_path: Path) -> None:
    """So that the quotient is of two losses, and grows as the step shrinks."""
    settings = {"loss_type": "grpo", "num_iterations": 1, "max_steps": 1, "disable_dropout": False}
    ratios = []
    for eps in (3e-3, 3e-4):
        trainer = rollout_trainer(
            GradientRegularizedGRPOTrainer,
            GradientRegularizedGRPOConfig,
            saved_model(tmp_path, attention_dropout=0.3),
            tmp_path,
            grad_reg_strength=GAMMA,
            grad_reg_behavior="published",
            grad_reg_eps=eps,
            **settings,
        )
        ratios += logged(trained(trainer), "gradreg/penalty_ratio")
    assert ratios[1] > 5 * ratios[0]


@pytest.mark.parametrize("behavior", ["corrected", "published"])
def test_the_published_script_trains_with_only_its_import_changed(behavior: str, tmp_path: Path) -> None:
    args = GradientRegularizedGRPOConfig(
        grad_reg_strength=1e-2,
        grad_reg_eps=1e-3,
        grad_reg_warmup=0,
        grad_reg_g1_clip=10.0,
        grad_reg_g2_clip=10.0,
        learning_rate=1e-6,
        num_generations=8,
        epsilon=3e-4,
        # What a run of seconds on a CPU needs besides.
        grad_reg_behavior=behavior,
        grad_reg_min_perturbation_kept=0.0,
        output_dir=str(tmp_path / "run"),
        use_cpu=True,
        max_completion_length=LIMIT,
        max_steps=2,
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        save_strategy="no",
    )
    model = saved_model(tmp_path)
    start = weights(model)
    with pytest.warns(UserWarning) as warned:
        trainer = GradientRegularizedGRPOTrainer(
            model=model,
            args=args,
            reward_funcs=lambda completions, **columns: [float(len(set(text))) for text in completions],
            train_dataset=Dataset.from_list([{"prompt": word} for word in ("abba", "acid")]),
            processing_class=letter_tokenizer(),
        )
    said = " ".join(str(warning.message) for warning in warned)
    assert "regularized steps run in float32" in said
    assert ("grad_reg_g1_clip and grad_reg_g2_clip have no effect" in said) == (behavior == "corrected")
    trainer.train()
    assert len(logged(trainer, "gradreg/penalty_ratio")) == 2
    assert 0 < distance(weights(trainer.model), start) < 1e-4
