"""The table of a real model's parts."""

from __future__ import annotations

from benchmarks.cpu.real_model import table
from benchmarks.cpu.real_model_worker import PARTS


def turns(cpu: float, wall: float) -> list[dict[str, float]]:
    """Two turns, of which the second is half as fast; parts after the product at half of its rate."""
    rates = {"cpu": cpu, "wall": wall}
    share = {part: 1.0 if part == "product" else 0.5 for part in PARTS}
    return [
        {f"{part} {clock}": rate * share[part] / slower for part in PARTS for clock, rate in rates.items()}
        for slower in (1, 2)
    ]


def test_rates_stand_beside_the_products_and_two_threads_beside_one() -> None:
    lines = table({"1 threads": turns(80, 60), "2 threads": turns(70, 90)}).splitlines()
    assert lines[2] == "| product, GFLOP | 60.0 (40.0 to 80.0) | 1.00 | 67.5 (45.0 to 90.0) | 1.00 | 1.50 |"
    assert lines[3] == "| decode, GFLOP | 30.0 (20.0 to 40.0) | 0.50 | 33.8 (22.5 to 45.0) | 0.50 | 1.50 |"
    assert lines[6] == "| rollout, tokens | 30.0 (20.0 to 40.0) |  | 33.8 (22.5 to 45.0) |  | 1.50 |"
    assert len(lines) == 2 + len(PARTS)
