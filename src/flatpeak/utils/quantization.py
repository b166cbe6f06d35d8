"""A base in 4 bits under adapters (QLoRA), by bitsandbytes: NF4 with double quantization."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from flatpeak.errors import UserError
from flatpeak.utils.adapters import silence_bitsandbytes


def loading_options(
    quantization: str | None, *, dtype: torch.dtype, device: torch.device, done: bool = False
) -> dict[str, Any]:
    """The arguments of `from_pretrained` that quantize a model as it is loaded; empty for null.

    Products are computed in `dtype`. `done` says that the files are already quantized.
    """
    if quantization is None:
        return {}
    silence_bitsandbytes()
    try:
        import bitsandbytes  # noqa: F401  # an extra, which transformers would miss in a long error
    except ImportError as error:
        raise UserError(
            f'model.quantization={quantization} needs bitsandbytes: pip install "flatpeak[qlora]"'
        ) from error
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantization,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )
    return {"device_map": {"": device}} | ({} if done else {"quantization_config": config})


def disable_repacking(model: nn.Module) -> None:
    """Switch off bitsandbytes' weight layout for CPUs with AVX512-BF16.

    At the first pass without gradients it would repack the weights in place and permanently: they would then be
    multiplied in bfloat16, and give their input no gradient.
    """
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
