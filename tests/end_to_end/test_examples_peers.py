"""examples/peers: flatpeak in other trainers, run against stand-ins of their extension points."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

PEERS = Path(__file__).parents[2] / "examples" / "peers"
RATIO = [1.5, 0.5, 5.0, 1.0]
ADVANTAGES = [1.0, 1.0, -1.0, 2.0]


def code(name: str) -> str:
    return (PEERS / name).read_text(encoding="utf-8")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`install("a.b", name=value)`: a stand-in of a module that is not here."""

    def install(path: str, **names: Any) -> None:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for name, value in names.items():
            setattr(sys.modules[path], name, value)

    return install


def token_mean(*, loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, **batch: int) -> Tensor:
    """verl's aggregation of losses in the mode token-mean."""
    assert loss_agg_mode == "token-mean"
    return (loss_mat * loss_mask).sum() / batch["batch_num_tokens"] * batch["dp_size"]


def test_the_loss_for_verl_is_registered_and_clips_as_it_says(install):
    registered: dict[str, Any] = {}
    install(
        "verl.trainer.ppo.core_algos",
        agg_loss=token_mean,
        register_policy_loss=lambda name: lambda function: registered.setdefault(name, function),
    )
    exec(code("verl_loss.py"), {})
    config = SimpleNamespace(global_batch_info={"dp_size": 2, "batch_num_tokens": 8})
    log_prob, old = torch.tensor([RATIO]).log(), torch.zeros(1, 4)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
    loss, metrics = registered["dapo_dual_clip"](
        old_log_prob=old, log_prob=log_prob, advantages=torch.tensor([ADVANTAGES]), response_mask=mask, config=config
    )
    # 1.5 is clipped to 1.28, 0.5 is not (the advantage is positive), 5 with a negative advantage is bounded by 3.
    assert float(loss) == pytest.approx((-1.28 - 0.5 + 3.0) / 8 * 2)
    assert metrics == {}


def test_the_loss_for_prime_rl_sums_over_the_mask_with_its_weights(install):
    @dataclass
    class LossInputs:
        trainer_logprobs: Tensor
        inference_logprobs: Tensor
        ref_logprobs: Tensor | None
        advantages: Tensor
        loss_mask: Tensor
        loss_weights: Tensor | None = None

    @dataclass
    class LossOutputs:
        loss: Tensor
        metrics: dict[str, Tensor]

    install("prime_rl.trainer.rl.loss", LossInputs=LossInputs, LossOutputs=LossOutputs)
    names: dict[str, Any] = {}
    exec(code("prime_rl_loss.py"), names)
    inputs = LossInputs(
        trainer_logprobs=torch.tensor(RATIO).log(),
        inference_logprobs=torch.zeros(4),
        ref_logprobs=None,
        advantages=torch.tensor(ADVANTAGES),
        loss_mask=torch.tensor([True, True, False, True]),
        loss_weights=torch.tensor([1.0, 2.0, 1.0, 1.0]),
    )
    outputs = names["dapo"](inputs, clip_high=0.28)
    assert float(outputs.loss) == pytest.approx(-1.28 - 2 * 0.5 - 2.0)
    assert float(outputs.metrics["outside_clip"]) == pytest.approx(2 / 3)


def test_the_engine_for_verl_leaves_the_regularized_gradient(install):
    class Engine:
        """The part of verl's engine that accumulates a gradient: here of a cubic, whose curvature is known."""

        def __init__(self) -> None:
            self.module = nn.Linear(3, 1, bias=False)
            with torch.no_grad():
                self.module.weight.copy_(torch.tensor([[1.0, 2.0, -1.0]]))
            self.module.double()

        def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool = False) -> str:
            if not forward_only:
                for micro_batch in data:
                    loss_function(self.module.weight, micro_batch).backward()
            return "outputs"

    install("verl.workers.engine.fsdp.transformer_impl", FSDPEngineWithLMHead=Engine)
    changed = code("verl_gradient_regularization.py").replace(
        'strength="calibrated:3"', 'strength=0.1, step=1e-4, perturbed="all", difference="central"'
    )
    exec(changed, {})
    engine = Engine()
    assert engine.forward_backward_batch([1.0], None, True) == "outputs"
    assert engine.module.weight.grad is None
    outputs = engine.forward_backward_batch([1.0, 2.0], lambda weight, scale: scale * (weight**3).sum())
    assert outputs == "outputs"
    weight = engine.module.weight.detach()
    gradient, curvature = 9 * weight**2, 18 * weight  # of 3 (w1^3 + w2^3 + w3^3)
    assert engine.module.weight.grad is not None
    torch.testing.assert_close(engine.module.weight.grad, gradient + 0.1 * curvature * gradient, rtol=1e-5, atol=0)
