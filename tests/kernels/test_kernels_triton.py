"""The Triton kernels of a decoding step and of the output layer beside plain torch."""

from __future__ import annotations

import json

import pytest
import torch

from support.triton_interpreter import has_interpreter, run

TOLERANCES = {"float32": 5e-6, "bfloat16": 2e-2}


def check(differences: dict[str, float]) -> None:
    assert len(differences) > 80
    wrong = {name: gap for name, gap in differences.items() if not gap < TOLERANCES[name.partition(" ")[0]]}
    assert wrong == {}


@has_interpreter
def test_the_interpreted_kernels_compute_what_torch_computes() -> None:
    check(json.loads(run("-m", "support.triton_kernels", TRITON_INTERPRET="1").splitlines()[-1]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_kernels_compute_what_torch_computes() -> None:
    from support.triton_kernels import differences

    check(dict(differences("cuda")))
