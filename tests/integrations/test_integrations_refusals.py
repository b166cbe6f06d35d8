"""Trainers and settings that are refused, each with a reason and a fix; precision; adapters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import Trainer, TrainingArguments

from support.trl import (
    distance,
    logged,
    need_trl,
    plain_trainer,
    rollout_trainer,
    saved_model,
    shift,
    trained,
    weights,
)

need_trl()
from flatpeak.errors import UserError  # noqa: E402
from flatpeak.integrations.hf_trainer import check_trainer  # noqa: E402
from flatpeak.integrations.trl import (  # noqa: E402
    GradientRegularizationMixin,
    GradientRegularizedGRPOConfig,
    GradientRegularizedGRPOTrainer,
    GradientRegularizedTrainer,
)


def grpo(directory: Path, **settings: Any) -> Any:
    merged = {"grad_reg_strength": 0.3, "max_steps": 2, "num_iterations": 2, **settings}
    model = merged.pop("model", None) or saved_model(directory)
    return rollout_trainer(GradientRegularizedGRPOTrainer, GradientRegularizedGRPOConfig, model, directory, **merged)


class OwnLoop(Trainer):
    def train(self, *args: Any, **kwargs: Any) -> Any:
        return super().train(*args, **kwargs)


class OwnInnerLoop(Trainer):
    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        return super()._inner_training_loop(*args, **kwargs)


class OwnStep(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (OwnLoop, "OwnLoop overrides train"),
        (OwnInnerLoop, "OwnInnerLoop overrides _inner_training_loop"),
        (OwnStep, "set grad_reg_trust_training_step = True"),
    ],
)
def test_a_trainer_that_trains_its_own_way_is_refused(kind: type, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        plain_trainer(tmp_path, type("Mixed", (GradientRegularizationMixin, kind), {}))
    plain_trainer(tmp_path, type("Mixed", (GradientRegularizationMixin, kind), {}), grad_reg_strength=0.0)


def test_a_training_step_can_be_vouched_for(tmp_path: Path) -> None:
    kind = type("Mixed", (GradientRegularizationMixin, OwnStep), {"grad_reg_trust_training_step": True})
    trainer = trained(plain_trainer(tmp_path, kind, max_steps=1))
    assert len(logged(trainer, "gradreg/penalty_ratio")) == 1


def test_a_mixin_that_is_not_named_first_is_refused() -> None:
    with pytest.raises(TypeError, match=r"class Mixed\(GradientRegularizationMixin, OwnStep\)"):
        type("Mixed", (OwnStep, GradientRegularizationMixin), {})


def test_arguments_without_ours_are_refused(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    with pytest.raises(UserError, match="args=TrainingArguments has no grad_reg_ arguments"):
        GradientRegularizedTrainer(saved_model(tmp_path), args=args)


def deepspeed(trainer: Any) -> None:
    trainer.is_deepspeed_enabled = True


def fsdp1(trainer: Any) -> None:
    trainer.is_fsdp_enabled = True
    trainer.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=1, mixed_precision_policy=None)


def fsdp2_in_bfloat16(trainer: Any) -> None:
    policy = SimpleNamespace(param_dtype=torch.bfloat16)
    trainer.is_fsdp_enabled = True
    trainer.accelerator.state.fsdp_plugin = SimpleNamespace(fsdp_version=2, mixed_precision_policy=policy)


def data_parallel(trainer: Any) -> None:
    trainer.args._n_gpu = 2


def float16(trainer: Any) -> None:
    trainer.args.fp16 = True


def liger(trainer: Any) -> None:
    trainer.args.use_liger_kernel = True


def compiled_autocast(trainer: Any) -> None:
    trainer.accelerator.native_amp = True
    trainer.args.torch_compile = True


def context_parallel(trainer: Any) -> None:
    flags = {"cp_enabled": True, "sp_enabled": False, "tp_enabled": False, "sp_backend": "none"}
    trainer.accelerator.state.parallelism_config = SimpleNamespace(**flags)


def tpu(trainer: Any) -> None:
    trainer.accelerator.state.distributed_type = "DistributedType.XLA"


def fused_optimizer(trainer: Any) -> None:
    trainer.args.optim = "galore_adamw_layerwise"


@pytest.mark.parametrize(
    ("make_so", "reason"),
    [
        (deepspeed, "DeepSpeed does not give access to gradients.*use DDP or FSDP2"),
        (fsdp1, "FSDP1 flattens.*use FSDP2"),
        (fsdp2_in_bfloat16, "FSDP2 casts weights to bfloat16.*bf16=False"),
        (data_parallel, ".*nn.DataParallel.*accelerate launch"),
        (float16, "float16 scales gradients.*bf16=True"),
        (liger, "Liger's fused loss.*fused_linear_cross_entropy"),
        (compiled_autocast, ".*compiled forward pass always uses autocast.*bf16=False"),
        (context_parallel, "context, sequence and tensor parallelism.*remove"),
        (tpu, "XLA is untested"),
        (fused_optimizer, ".*steps during the first backward pass.*use adamw_torch"),
    ],
)
def test_what_cannot_be_regularized_is_refused_with_a_fix(make_so: Any, reason: str, tmp_path: Path) -> None:
    trainer = plain_trainer(tmp_path)
    check_trainer(trainer, GradientRegularizationMixin)
    state = dict(vars(trainer.accelerator.state))
    try:
        make_so(trainer)
        with pytest.raises(UserError, match=f"GradientRegularizedTrainer: {reason}"):
            check_trainer(trainer, GradientRegularizationMixin)
    finally:
        vars(trainer.accelerator.state).clear()
        vars(trainer.accelerator.state).update(state)


def test_a_set_of_parameters_that_is_empty_is_refused_when_the_trainer_is_made(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="grad_reg_perturbed: "):
        plain_trainer(tmp_path, grad_reg_perturbed="*.experts.*")
    with pytest.raises(UserError, match="grad_reg_perturbed=adapters: the model has no trainable adapter"):
        plain_trainer(tmp_path, grad_reg_perturbed="adapters")


def test_a_schedule_that_gives_no_strength_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="grad_reg_scheduler gave -1"):
        trained(plain_trainer(tmp_path, grad_reg_scheduler=lambda step: -1.0))


def test_in_float32_a_step_under_autocast_is_the_one_without(tmp_path: Path) -> None:
    """Also the sampling policy's and the reference's log-probabilities, which the loss compares with."""
    result = []
    for bf16 in (True, False):
        trainer = grpo(tmp_path, bf16=bf16, beta=0.2)
        shift(trainer.ref_model)
        forward = trainer.ref_model.forward
        trainer.train()
        assert trainer.ref_model.forward == forward
        assert trainer.accelerator.native_amp == bf16
        result.append(weights(trainer.model))
    assert distance(*result) == 0


def test_before_regularization_begins_autocast_stays_on(tmp_path: Path) -> None:
    result = [weights(trained(grpo(tmp_path, bf16=bf16, grad_reg_warmup=2)).model) for bf16 in (True, False)]
    assert distance(*result) > 1e-5


def test_the_precision_is_told_once(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="instead of the configured bfloat16 autocast") as warned:
        trained(plain_trainer(tmp_path, bf16=True, max_steps=2))
    assert len([w for w in warned if "autocast" in str(w.message)]) == 1


def test_under_autocast_the_guard_measures_what_rounding_leaves_and_refuses(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, bf16=True, grad_reg_precision="autocast", grad_reg_eps=1e-4)
    start = weights(trainer.model)
    with pytest.raises(UserError, match=r"computed in bfloat16.*raise grad_reg_eps") as raised:
        trainer.train()
    assert "gradient_regularization" not in str(raised.value)
    assert distance(weights(trainer.model), start) == 0
    large = trained(grpo(tmp_path, bf16=True, grad_reg_precision="autocast", grad_reg_eps=0.5, grad_reg_check_every=0))
    assert min(logged(large, "gradreg/perturbation_kept")) > 0.9


@pytest.mark.parametrize("precision", ["float32", "autocast"])
def test_autocast_around_the_trainer_is_left_or_measured(tmp_path: Path, precision: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = trained(grpo(tmp_path, grad_reg_precision=precision, grad_reg_eps=0.5, grad_reg_check_every=0))
    kept = min(logged(inside, "gradreg/perturbation_kept"))
    assert (kept > 0.9999) == (precision == "float32")
    if precision == "float32":
        outside = trained(grpo(tmp_path, grad_reg_eps=0.5, grad_reg_check_every=0))
        assert logged(inside, "gradreg/g1_norm")[0] == pytest.approx(logged(outside, "gradreg/g1_norm")[0], rel=1e-4)


def test_weights_in_bfloat16_are_refused(tmp_path: Path) -> None:
    trainer = grpo(tmp_path, model=saved_model(tmp_path).bfloat16(), grad_reg_eps=1e-4)
    with pytest.raises(UserError, match=r"rounding to bfloat16 swamps.*raise grad_reg_eps.*compute in float32"):
        trainer.train()


def test_with_lora_the_base_stays_bit_for_bit_and_both_adapters_move(tmp_path: Path) -> None:
    """B is 0 at the start, so the plain gradient of A is 0: what moves A in one step is the penalty."""
    lora = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", init_lora_weights=True)
    moved = {}
    for strength in (0.0, 0.3):
        trainer = grpo(tmp_path, peft_config=lora, max_steps=1, grad_reg_strength=strength, beta=0.1)
        start = weights(trainer.model)
        trainer.train()
        end = weights(trainer.model)
        moved[strength] = {name: (end[name] - start[name]).abs().max().item() for name in start}
    for strength, by_name in moved.items():
        assert all(move == 0 for name, move in by_name.items() if "lora_" not in name)
        assert all(move > 0 for name, move in by_name.items() if "lora_B" in name)
        assert all((move > 0) == (strength > 0) for name, move in by_name.items() if "lora_A" in name)
    assert logged(trainer, "gradreg/penalty_ratio")[0] > 0
