"""`flatpeak train`."""

from __future__ import annotations

from functools import partial

from flatpeak.cli.running import (
    AsJson,
    Overrides,
    Overwrite,
    PrintConfig,
    Recipe,
    Resume,
    last_line,
    print_config,
    read_config,
    run_and_tell,
)


def train(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    show_config: PrintConfig = False,
) -> None:
    """Train by reinforcement learning, after SFT if the recipe has it."""
    config = read_config(recipe, overrides)
    if show_config:
        print_config(config)
        return
    line = partial(last_line, "train", since="start")
    run_and_tell(
        "train",
        config,
        resume=resume,
        overwrite=overwrite,
        as_json=as_json,
        label="train",
        line=line,
        again=["train", recipe, *(overrides or ())],
    )
