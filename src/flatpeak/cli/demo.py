"""`flatpeak demo`."""

from __future__ import annotations

from functools import partial

from flatpeak.cli.running import Overrides, Resume, last_line, read_config, run_and_tell

DEMO = "flatpeak:demo"


def demo(overrides: Overrides = None, resume: Resume = False) -> None:
    """Make a small model, train it with SFT and GRPO, and report.

    From nothing, on a CPU: SFT until the model is half right, GRPO until it is right, evaluated on held-out problems
    before and after. An earlier run of the demo is overwritten, unless it is to be resumed.
    """
    config = read_config(DEMO, overrides)
    line = partial(last_line, "demo", since="sft")
    again = ["demo", *(overrides or ())]
    run_and_tell("train", config, resume=resume, overwrite=not resume, label="demo", line=line, again=again)
