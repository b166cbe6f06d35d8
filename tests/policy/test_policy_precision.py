"""The notice of a model in bfloat16 on a CPU that computes in float32 faster."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flatpeak.policy import precision
from flatpeak.policy.precision import bfloat16_slowdown, slow_dtype_notices

BF16 = torch.bfloat16


SLOW = "bfloat16 products take over 2 times as long as float32 products on this CPU: use float32"
"""The same text at each start, or a resumed run would log it again."""


@pytest.mark.parametrize(
    ("dtype", "slowdown", "said"),
    [
        (BF16, 8.64, [SLOW]),
        (BF16, 2.3, [SLOW]),
        (BF16, 1.9, []),
        (torch.float32, 8.64, []),
    ],
    ids=str,
)
def test_bfloat16_on_a_cpu_that_is_slow_with_it_is_a_notice(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, slowdown: float, said: list[str]
) -> None:
    seconds = {BF16: slowdown * 4e-4, torch.float32: 4e-4}
    monkeypatch.setattr(precision, "_product_seconds", seconds.__getitem__)
    notices = slow_dtype_notices(nn.Linear(2, 2).to(dtype))
    assert [notice.partition(", as")[0] for notice in notices] == said


def test_the_slowdown_is_measured_without_a_trace() -> None:
    before = torch.get_rng_state()
    assert 0.01 < bfloat16_slowdown() < 100
    assert torch.equal(torch.get_rng_state(), before)
