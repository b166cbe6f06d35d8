"""The commands that read recipes and run none: `plan`, `settings` and `recipes`."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatpeak.cli.common import Overrides, RecipeArgument, read_config
from flatpeak.errors import UserError
from flatpeak.utils.environment import without_collection

if TYPE_CHECKING:
    from rich.table import Table

    from flatpeak.apps.planning.advice import Advice
    from flatpeak.apps.planning.measurement import Measurement
    from flatpeak.apps.planning.run_plan import RunPlan

DOES_NOT_FIT = 3
"""The exit code for a recipe that needs more memory than there is."""
WIDTH = 100
"""Columns of tables if standard output is not a terminal."""
_NARROWEST, _WIDEST = 40, 120
"""Limits of text columns: a narrower terminal wraps lines itself, and longer lines are hard to read."""


def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    device_memory: Annotated[
        float | None,
        typer.Option(
            metavar="GB",
            help="Plan for a GPU sold with this many GB (with model.device=cpu: a computer). Default: this machine.",
        ),
    ] = None,
    measure: Annotated[bool, typer.Option("--measure", help="Run two real steps to estimate the time.")] = False,
    price: Annotated[float | None, typer.Option(metavar="PER_HOUR", help="Price per hour; with --measure.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Show what a recipe will run, its memory and disk, and whether it fits.

    Trains nothing and loads no weights. Exit codes: 0 if it fits, 3 if it does not, and 2 for a bad recipe.
    """
    if price is not None and not measure:
        raise UserError("--price needs a time to multiply: add --measure, which runs two steps")
    if price is not None and not (math.isfinite(price) and price >= 0):
        raise UserError(f"--price {price:g}: give the price of an hour, such as 2.50")
    config = read_config(recipe, overrides)
    with redirect_stdout(sys.stderr):  # what a task's code prints does not belong to the plan
        with without_collection():
            from flatpeak.apps.planning.advice import advise
            from flatpeak.apps.planning.measurement import measure_run
            from flatpeak.apps.planning.run_plan import plan_run

            planned = plan_run(config, device_memory=device_memory)
        advice = () if planned.fits else advise(planned)
        # Steps run on this machine, for any planned device; if they did not fit, they would run out of memory.
        measurable = planned.fits or device_memory is not None
        measured = measure_run(config, price=price) if measure and measurable else None
    if measure and not measurable:
        typer.echo("not measured: its steps would not fit this machine", err=as_json)
    if as_json:
        typer.echo(json.dumps({"recipe": recipe, **planned.as_json(), **_as_json(advice, measured)}))
    else:
        _show(recipe, planned, advice, measured)
    if not planned.fits:
        raise typer.Exit(DOES_NOT_FIT)


def _as_json(advice: tuple[Advice, ...], measured: Measurement | None) -> dict[str, Any]:
    from flatpeak.apps.planning.run_plan import in_gib

    return {
        "advice": [
            {
                "settings": dict(one.settings),
                "needed_gib": in_gib(one.needed),
                "saves_gib": {key: in_gib(size) for key, size in one.saves.items()},
                "fits": one.fits,
            }
            for one in advice
        ],
        "measured": None if measured is None else asdict(measured),
    }


def _show(recipe: str, planned: RunPlan, advice: tuple[Advice, ...], measured: Measurement | None) -> None:
    from rich.console import Console

    console = Console()
    width = console.width if console.is_terminal else WIDTH
    console = Console(width=width, highlight=False, markup=False)
    console.print(f"plan of {recipe}")
    for line in (*_work_lines(planned), *(f"note: {note}" for note in planned.notes), ""):
        console.print(line, soft_wrap=True)
    console.print(_memory_table(planned))
    for line in (
        *_verdict(planned),
        *_advice_lines(planned, advice),
        *_disk_lines(planned),
        *_measured_lines(measured),
    ):
        console.print(line, soft_wrap=True)


def _work_lines(planned: RunPlan) -> Iterator[str]:
    work, inventory, source = planned.work, planned.memory.inventory, planned.model.config
    name = source.path or f"a new {planned.model.shape.model_type}"
    bits = f" over a base in {source.quantization}" if source.quantization else ""
    yield (
        f"model: {name} ({planned.model.shape.model_type}), {inventory.parameters:,} parameters in {source.dtype}, "
        f"{inventory.trained_parameters:,} trained{bits}"
    )
    rows = [
        f"{n:,} {kind}" for n, kind in ((work.train_rows, "training"), (work.test_rows, "held-out")) if n is not None
    ]
    yield f"data: {work.task}, {' and '.join(rows) + ' rows' if rows else 'not at hand'}"
    if work.sft_steps:
        yield f"sft: {work.sft_steps:,} steps of {planned.config.sft.batch_size} demonstrations"
    if not work.steps:
        return
    again = f", up to {work.draws} times" if work.draws > 1 else ""
    yield (
        f"step: {len(work.prompt_lengths):,} prompts x {work.group_size} completions = {work.completions:,}{again}, at "
        f"most {work.step_tokens:,} new tokens; micro-batches of at most {planned.memory.micro_batch_tokens:,} tokens"
    )
    yield (f"run: {work.steps:,} steps, {work.updates:,} updates, at most {work.steps * work.step_tokens:,} new tokens")


def _memory_table(planned: RunPlan) -> Table:
    from rich.table import Table

    phases = planned.memory.phases
    table = Table(title="memory, GiB", title_justify="left", box=None, pad_edge=False)
    table.add_column("")
    for phase in phases:
        table.add_column(phase.name, justify="right")
    for item in dict.fromkeys(item for phase in phases for item in phase.items):
        table.add_row(item, *(_cell(phase.items, item) for phase in phases))
    table.add_row("in all", *(_size(phase.total) for phase in phases))
    return table


def _cell(items: Mapping[str, int], item: str) -> str:
    return _size(items[item]) if item in items else ""


def _size(size: int) -> str:
    from flatpeak.apps.planning.run_plan import in_gib

    gib = in_gib(size)
    return f"{gib:.2f}" if gib >= 0.01 else "<0.01"


def _verdict(planned: RunPlan) -> Iterator[str]:
    device, memory = planned.device, planned.memory
    sums = f"{_size(memory.peak)} GiB in {memory.largest.name} and {_size(device.libraries)} GiB of libraries"
    if planned.fits:
        yield f"fits {device.name}: {sums}, of {_size(device.memory)} GiB"
    else:
        yield f"does not fit {device.name}: {sums}, more than {_size(device.memory)} GiB"
    if planned.is_tight:
        yield "this is tight: gaps between blocks of memory are not counted, and may take as much as is left"
    if memory.host:
        yield f"host: at most {_size(memory.host)} GiB of memory beside the device for what is offloaded"


def _advice_lines(planned: RunPlan, advice: tuple[Advice, ...]) -> Iterator[str]:
    if planned.fits:
        return
    if not advice:
        yield "no settings make it fit"
    elif advice[0].fits:
        yield "it fits with one of these, those that cost least time first:"
    else:
        yield "no settings make it fit; it needs least with"
    for one in advice:
        yield from _option_lines(planned, one)


def _option_lines(planned: RunPlan, option: Advice) -> Iterator[str]:
    """The settings of an option, what it needs and saves, and below it what each setting saves."""
    total = _size(planned.needed - option.needed)
    yield f"  {_settings(option.settings)}  (needs {_size(option.needed)} GiB, saves {total}){_effect(option)}"
    if len(option.saves) > 1:
        yield "    of which " + ", ".join(f"{key} {_size(size)}" for key, size in option.saves.items())


def _effect(option: Advice) -> str:
    """A remark on settings that change more than memory and time."""
    if any(key.startswith(("model.lora", "model.quantization")) for key in option.settings):
        return "; trains adapters"
    changed = any(key == "model.dtype" or key.endswith("optimizer.name") for key in option.settings)
    return "; changes rounding" if changed else ""


def _settings(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else "{}" if value == {} else str(value)


def _disk_lines(planned: RunPlan) -> Iterator[str]:
    from flatpeak.runs.disk_space import too_full

    disk = planned.disk
    logs = f" and {_size(disk.logged_steps * disk.rollout_log)} GiB of rollouts" if disk.logged_steps else ""
    kept = f"run.keep_checkpoints={planned.config.run.keep_checkpoints} beside the first, the best and the last"
    size = f"{_size(disk.checkpoint)} GiB, {_size(disk.checkpoints * disk.checkpoint)} GiB in all ({kept})"
    yield f"disk: at most {disk.checkpoints} checkpoints of {size}{logs}"
    if not disk.fits:
        run = planned.config.run
        yield f"warning: {too_full(Path(run.directory) / run.name, checkpoint=disk.checkpoint, free=disk.free)}"


def _measured_lines(measured: Measurement | None) -> Iterator[str]:
    if measured is None:
        return
    rollout = "" if measured.rollout_seconds is None else f" ({measured.rollout_seconds:.2f} s of it rollouts)"
    first = measured.first_step_seconds
    yield f"measured: a step takes {measured.step_seconds:.2f} s{rollout}, the first {first:.2f} s"
    if measured.informative_fraction is not None:
        share = f"{measured.informative_fraction:.0%}"
        yield f"measured: {share} of its groups had a gradient; updates take longest where all have one"
    if measured.peak_gib is not None:
        yield f"measured: at most {measured.peak_gib:.2f} GiB of memory"
    cost = "" if measured.cost is None else f", {measured.cost:.2f} in money"
    yield f"the run: {_duration(measured.run_seconds)} without evaluations and checkpoints{cost}"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes < 1:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def settings(
    prefix: Annotated[
        str,
        typer.Argument(
            metavar="PREFIX",
            help="A section or key (rollout, optimizer.learning_rate), or a type (task.type=rows). Default: the common "
            "settings.",
            show_default=False,
        ),
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="Print all settings.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all settings as one JSON object.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all as the page docs/settings.md.")] = False,
    schema: Annotated[bool, typer.Option("--schema", help="Print a JSON schema of recipes, for editors.")] = False,
) -> None:
    """Explain the settings of a recipe: key and default, type, meaning."""
    from flatpeak.config import settings_rendering
    from flatpeak.config.settings_reference import common_settings, settings_reference

    if as_json + markdown + schema > 1:
        raise UserError("--json, --markdown and --schema are forms of the same: give one of them")
    if schema:
        typer.echo(settings_rendering.to_schema())
        return
    if as_json:
        typer.echo(settings_rendering.to_json(settings_reference(prefix)))
        return
    sections = settings_rendering.listed_once(settings_reference(prefix))
    if markdown:
        typer.echo(settings_rendering.to_markdown(sections))
    elif not prefix and not everything:
        common = common_settings()
        left_out = sum(len(section.settings) for section in sections) - sum(len(one.settings) for one in common)
        typer.echo(settings_rendering.to_summary(common, left_out=left_out, width=_width()))
    else:
        typer.echo(settings_rendering.to_text(sections, width=_width()))


def recipes(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A recipe to print (flatpeak:demo), or a folder to list (tasks, algorithms). Default: list all.",
            show_default=False,
        ),
    ] = "",
    paper: Annotated[
        str | None,
        typer.Option(metavar="ARXIV", help="The recipes of a paper, by its arXiv number.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list, or the recipe, as one JSON object.")] = False,
) -> None:
    """List the shipped recipes, or print one of them."""
    from flatpeak.config import shipped_recipes

    if name and paper is not None:
        raise UserError(f"{name} with --paper {paper}: give a recipe's name or a paper's number")
    selected = shipped_recipes.select(name) if paper is None else shipped_recipes.of_paper(paper)
    if as_json:
        typer.echo(shipped_recipes.to_json(selected))
    else:
        typer.echo(shipped_recipes.to_text(selected, width=_width()), nl=False)


def _width() -> int:
    """The columns of the terminal, or COLUMNS; 80 for output that goes elsewhere."""
    return min(_WIDEST, max(_NARROWEST, shutil.get_terminal_size().columns))
