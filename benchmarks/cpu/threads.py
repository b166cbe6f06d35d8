"""The cost of idle threads: updates of a small network on one and two threads, on an idle and a busy machine.

    python -m benchmarks.cpu.threads [--seconds 4] [--rounds 3] [--load 2] [--width 128]

A waiting OpenMP thread sleeps at once (OMP_WAIT_POLICY=PASSIVE, which the command line sets), spins for a bounded time
(GOMP_SPINCOUNT), or spins for long (the default of GNU's OpenMP). `--load` is the number of endless loops that run at
the same time; 0 is an idle machine. Times are medians over the rounds, in turns: wall and CPU milliseconds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from statistics import median

WAYS: dict[str, dict[str, str]] = {
    "1 thread": {"OMP_NUM_THREADS": "1"},
    "2 threads, sleep at once (PASSIVE)": {"OMP_WAIT_POLICY": "PASSIVE"},
    "2 threads, spin 1,000": {"GOMP_SPINCOUNT": "1000"},
    "2 threads, spin 10,000": {"GOMP_SPINCOUNT": "10000"},
    "2 threads, OpenMP's default": {},
}
BUSY_LOOP = "while True: pass"


def main() -> None:
    """Measure every setting in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of one measurement (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=int, default=0, help="endless loops at the same time (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="width of the network (%(default)s)")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        measure_updates(given.seconds, given.width)
        return
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(given.load)]
    try:
        times = [{way: run_worker(way, given.seconds, given.width) for way in WAYS} for _ in range(given.rounds)]
    finally:
        for loop in loops:
            loop.kill()
    print(f"| Width {given.width}, {given.load} endless loops | Update, ms | CPU per update, ms |\n|---|---|---|")
    for way in WAYS:
        wall, cpu = (sorted(measured[way][index] for measured in times) for index in (0, 1))
        print(f"| {way} | {median(wall):.1f} ({wall[0]:.1f} to {wall[-1]:.1f}) | {median(cpu):.1f} |")


def run_worker(way: str, seconds: float, width: int) -> tuple[float, float]:
    """Median wall time and mean CPU time of an update, in milliseconds."""
    unset = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    command = [sys.executable, __file__, "--worker", "--seconds", str(seconds), "--width", str(width)]
    environment = {"OMP_NUM_THREADS": "2", **unset, **WAYS[way]}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    wall, cpu = done.stdout.split()
    return float(wall), float(cpu)


def measure_updates(seconds: float, width: int) -> None:
    """Updates of six MLP blocks on 640 rows, similar to an update of the demo."""
    import torch
    from torch import nn

    blocks = [
        layer
        for _ in range(6)
        for layer in (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width))
    ]
    model, rows = nn.Sequential(*blocks), torch.randn(640, width)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    walls: list[float] = []
    cpu, end = time.process_time(), time.perf_counter() + seconds
    while time.perf_counter() < end or len(walls) < 3:
        started = time.perf_counter()
        optimizer.zero_grad()
        model(rows).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        walls.append(1e3 * (time.perf_counter() - started))
    print(median(walls), 1e3 * (time.process_time() - cpu) / len(walls))


if __name__ == "__main__":
    main()
