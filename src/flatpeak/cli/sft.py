"""`flatpeak sft`."""

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


def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    resume: Resume = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    show_config: PrintConfig = False,
) -> None:
    """Fine-tune on the task's rationales, and stop there."""
    config = read_config(recipe, overrides)
    if show_config:
        print_config(config)
        return
    line = partial(last_line, "sft", since="start")
    run_and_tell(
        "sft",
        config,
        resume=resume,
        overwrite=overwrite,
        as_json=as_json,
        label="sft",
        line=line,
        again=["sft", recipe, *(overrides or ())],
    )
