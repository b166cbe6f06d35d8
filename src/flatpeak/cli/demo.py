"""`flatpeak demo`."""

from __future__ import annotations

from functools import partial

from flatpeak.cli.running import Overrides, last_line, read_config, run_and_tell

DEMO = "flatpeak:demo"


def demo(overrides: Overrides = None) -> None:
    """Make a small model, train it with SFT and GRPO, and report.

    From nothing, on a CPU: SFT until the model is half right, GRPO until it is right, evaluated on held-out problems
    before and after. An earlier run of the demo is overwritten.
    """
    config = read_config(DEMO, overrides)
    line = partial(last_line, "demo", since="sft")
    run_and_tell("train", config, resume=False, overwrite=True, label="demo", line=line)
