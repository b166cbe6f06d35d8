"""Which precision a regularized step is computed in: a difference of two gradients needs more than autocast leaves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import Trainer

MATMUL = torch.backends.cuda.matmul
IEEE = "ieee"


def autocasts(trainer: Trainer) -> bool:
    """Whether accelerate wraps the trainer's forward pass in autocast."""
    return bool(trainer.accelerator.native_amp)


def sharded_dtype(trainer: Trainer) -> torch.dtype | None:
    """What FSDP2 casts weights to; None where it does not, or is not used."""
    if not trainer.is_fsdp_enabled:
        return None
    policy = trainer.accelerator.state.fsdp_plugin.mixed_precision_policy
    return getattr(policy, "param_dtype", None)


def compute_dtype(trainer: Trainer, precision: str) -> torch.dtype | None:
    """What the weights are rounded to on their way into a regularized forward pass, for the guard."""
    if precision == "float32":
        return None
    return sharded_dtype(trainer) or (torch.bfloat16 if autocasts(trainer) else None)


@contextmanager
def full_precision(trainer: Trainer) -> Iterator[None]:
    """Without autocast, and without TensorFloat-32 in matrix products.

    accelerate bakes autocast into `forward` of the models it prepares and keeps the plain one beside it.
    """
    accelerator = trainer.accelerator
    models = [model for model in (trainer.model, getattr(trainer, "ref_model", None)) if model is not None]
    baked = [(model, vars(model)["forward"]) for model in models if "_original_forward" in vars(model)]
    amp, matmul = accelerator.native_amp, MATMUL.fp32_precision
    for model, _ in baked:
        model.forward = model._original_forward
    accelerator.native_amp = False
    MATMUL.fp32_precision = IEEE
    try:
        yield
    finally:
        MATMUL.fp32_precision = matmul
        accelerator.native_amp = amp
        for model, forward in baked:
            model.forward = forward
