"""The arguments: from the command line, through JSON and checkpoints, and what is said of bad ones."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import HfArgumentParser

from support.trl import need_trl

need_trl()
from trl import TrlParser  # noqa: E402

from flatpeak.errors import UserError  # noqa: E402
from flatpeak.integrations.trl import (  # noqa: E402
    GradientRegularizationArguments,
    GradientRegularizedGRPOConfig,
)


def halves(step: int) -> float:
    """A schedule that a command line can name."""
    return 0.5**step


def config(**arguments: Any) -> Any:
    return GradientRegularizationArguments(**arguments).grad_reg_config()


def test_nothing_is_on_by_default() -> None:
    arguments = GradientRegularizationArguments()
    assert not arguments.grad_reg_enabled
    assert not arguments.grad_reg_config().enabled


def test_arguments_are_the_configuration_by_other_names() -> None:
    made = config(
        grad_reg_strength="ratio:0.3",
        grad_reg_eps=1e-3,
        grad_reg_warmup=4,
        grad_reg_strength_warmup=5,
        grad_reg_ratio_mode="reuse",
        grad_reg_perturbed=["*.mlp.*"],
        grad_reg_penalty="norm",
        grad_reg_direction="gradient",
        grad_reg_difference="central",
        grad_reg_every=2,
        grad_reg_min_perturbation_kept=0.5,
        grad_reg_g1_clip=3.0,
    )
    assert made.model_dump(exclude_defaults=True) == {
        "strength": "ratio:0.3",
        "step": 1e-3,
        "step_scale": "absolute",
        "delay_updates": 4,
        "warmup_updates": 5,
        "ratio_mode": "reuse",
        "perturbed": ("*.mlp.*",),
        "penalty": "norm",
        "difference": "central",
        "every": 2,
        "min_perturbation_kept": 0.5,
    }


def test_a_random_direction_is_an_argument_too() -> None:
    assert config(grad_reg_strength=0.1, grad_reg_direction="random").direction == "random"
    with pytest.raises(UserError, match=r"direction=random draws a direction in every update.* set every=1"):
        config(grad_reg_strength=0.1, grad_reg_direction="random", grad_reg_every=2)
    with pytest.raises(UserError, match="grad_reg_direction needs grad_reg_behavior=corrected"):
        config(grad_reg_strength=0.1, grad_reg_direction="random", grad_reg_behavior="published")


def test_without_eps_the_step_is_relative() -> None:
    assert config(grad_reg_strength=0.1).step_scale == "relative"
    assert config(grad_reg_strength=0.1).step is None


LINE = shlex.split(
    "--grad_reg_strength ratio:0.3 --grad_reg_eps 1e-3 --grad_reg_perturbed *.mlp.*,*.self_attn.* "
    "--grad_reg_every 2 --grad_reg_ratio_mode reuse --use_cpu --report_to none"
)


@pytest.mark.parametrize("parser", [HfArgumentParser, TrlParser])
def test_the_command_line_of_both_parsers_is_read(parser: Any, tmp_path: Path) -> None:
    reader = parser(GradientRegularizedGRPOConfig)
    line = ["--output_dir", str(tmp_path), *LINE]
    parsed = (
        reader.parse_args_into_dataclasses(line) if parser is HfArgumentParser else reader.parse_args_and_config(line)
    )
    made = parsed[0].grad_reg_config()
    assert (made.strength, made.step, made.every, made.ratio_mode) == ("ratio:0.3", 1e-3, 2, "reuse")
    assert made.perturbed == ("*.mlp.*", "*.self_attn.*")


def test_numbers_and_schedules_come_from_the_command_line_too(tmp_path: Path) -> None:
    parser = HfArgumentParser(GradientRegularizationArguments)
    (parsed,) = parser.parse_args_into_dataclasses(
        ["--grad_reg_strength", "0.25", "--grad_reg_perturbed", "all", "--grad_reg_scheduler", f"{__name__}:halves"]
    )
    assert parsed.grad_reg_config().strength == 0.25
    assert parsed.grad_reg_config().perturbed == "all"
    assert parsed.grad_reg_schedule()(2) == 0.25


def test_every_argument_has_a_help_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        HfArgumentParser(GradientRegularizationArguments).parse_args_into_dataclasses(["--help"])
    displayed = capsys.readouterr().out
    for field in GradientRegularizationArguments.__dataclass_fields__.values():
        assert field.metadata["help"]
        assert f"--{field.name}" in displayed


BAD = [
    ({"grad_reg_strength": -1.0}, "grad_reg_strength=-1.0: give a finite strength of at least 0"),
    ({"grad_reg_strength": "ratio:zero"}, "grad_reg_strength=ratio:zero: give a number, ratio:0.3 or calibrated:0.3"),
    ({"grad_reg_strength": float("nan")}, "grad_reg_strength=nan"),
    ({"grad_reg_eps": 0.0}, "grad_reg_eps=0.0: Input should be greater than 0"),
    ({"grad_reg_warmup": -1}, "grad_reg_warmup=-1"),
    ({"grad_reg_strength_warmup": -1}, "grad_reg_strength_warmup=-1"),
    ({"grad_reg_ratio_mode": "is"}, "grad_reg_ratio_mode=is: Input should be 'importance', 'reuse'"),
    ({"grad_reg_perturbed": []}, "grad_reg_perturbed is empty: name a pattern"),
    ({"grad_reg_perturbed": "block"}, "grad_reg_perturbed=block"),
    ({"grad_reg_penalty": "l1"}, "grad_reg_penalty=l1"),
    ({"grad_reg_difference": "backward"}, "grad_reg_difference=backward: give one of forward, central"),
    ({"grad_reg_difference": "exact"}, "grad_reg_difference=exact: the trainer runs backward"),
    ({"grad_reg_every": 0}, "grad_reg_every=0"),
    ({"grad_reg_min_perturbation_kept": 2.0}, "grad_reg_min_perturbation_kept=2.0"),
    ({"grad_reg_behavior": "paper"}, "grad_reg_behavior=paper: give one of corrected, published"),
    ({"grad_reg_precision": "bf16"}, "grad_reg_precision=bf16: give one of float32, autocast"),
    ({"grad_reg_scheduler": 3.0}, "grad_reg_scheduler=3.0: give a function of the step"),
    ({"grad_reg_scheduler": "nowhere:f"}, "grad_reg_scheduler=nowhere:f: "),
    ({"grad_reg_scheduler": "math:pi"}, "grad_reg_scheduler=math:pi is not a function"),
    ({"grad_reg_exclude": ["head"]}, "grad_reg_exclude needs grad_reg_behavior=published"),
    ({"fp32_gradreg": False}, "fp32_gradreg=False"),
    ({"grad_reg_behavior": "published", "grad_reg_every": 2}, "grad_reg_every needs grad_reg_behavior=corrected"),
    ({"grad_reg_g1_clip": 0.0}, "grad_reg_g1_clip=0.0: give a norm above 0"),
    ({"grad_reg_behavior": "published", "grad_reg_g2_clip": -1.0}, "grad_reg_g2_clip=-1.0: give a norm above 0"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD, ids=lambda value: str(value)[:60])
def test_bad_values_give_one_error_that_names_the_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        GradientRegularizationArguments(**arguments)
    assert "gradient_regularization." not in str(raised.value)


def test_a_trainers_config_checks_them_too(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="grad_reg_every=0"):
        GradientRegularizedGRPOConfig(output_dir=str(tmp_path), use_cpu=True, grad_reg_every=0)


def test_a_schedule_survives_json_and_pickling_by_its_name(tmp_path: Path) -> None:
    arguments = GradientRegularizedGRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none", grad_reg_scheduler=lambda step: 0.1
    )
    assert arguments.grad_reg_enabled
    assert json.loads(arguments.to_json_string())["grad_reg_scheduler"].endswith("<lambda>")
    torch.save(arguments, tmp_path / "training_args.bin")
    assert torch.load(tmp_path / "training_args.bin", weights_only=False).learning_rate == arguments.learning_rate
    assert callable(arguments.grad_reg_schedule())


def test_without_trl_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the parts for transformers' own trainer are there."""
    monkeypatch.setitem(sys.modules, "trl", None)
    for name in [name for name in sys.modules if name.startswith("flatpeak.integrations.")]:
        monkeypatch.delitem(sys.modules, name)
    assert importlib.import_module("flatpeak.integrations.hf_trainer").GradientRegularizedTrainer
    with pytest.raises(ImportError, match=re.escape("needs TRL: pip install flatpeak[trl]")):
        importlib.import_module("flatpeak.integrations.trl")
