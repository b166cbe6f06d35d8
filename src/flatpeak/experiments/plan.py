"""The plan of a sweep: all prefix steps and runs, resolved and checked before anything runs; torch is not loaded."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatpeak.config.load import apply_settings, load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.launch import check_alone
from flatpeak.errors import UserError, did_you_mean, nearest
from flatpeak.experiments.config import ArmConfig, PrefixStepConfig, SweepConfig, check_defined
from flatpeak.experiments.table import TunedValues, best_values, read_tuning
from flatpeak.runs.manifest import flatten
from flatpeak.utils.machine import usable_cores
from flatpeak.utils.redaction import redact

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
RECORD = "sweep.json"
"""The sweep's file in a run's directory."""
LOG = "output.log"
"""The prints of a run."""
_OWN_KEYS = ("run.name", "run.directory", "run.seed")
_LONGEST_VALUE = 40
"""The most characters of an axis's value in a directory's name."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The work of one job of a sweep: a prefix step of a seed, or a run."""

    seed: int
    name: str
    label: str
    """Its name in messages."""
    group: str
    """The arm or the step, whose cells take about as long."""
    path: Path
    """The directory that it creates."""
    record: Path
    """The file with its outcome."""
    log: Path
    """The file with its prints."""
    recipe: RunConfig | None
    """The checked recipe; None for a call."""
    written: Mapping[str, Any] | None
    """The same recipe before its defaults are added."""
    after: PrefixStep | None
    """The prefix step that it directly follows."""
    fingerprint: str
    """A hash of everything that determines a prefix step, including earlier steps; of a run, its last step's."""
    kind: Literal["train", "sft", "reward_model", "call"] = "train"
    call: str | None = None
    """The function that is called."""


@dataclass(frozen=True, kw_only=True)
class PrefixStep(Cell):
    """One prefix step of one seed. Only the step fills its directory, so its record and its prints are beside it."""

    arguments: Mapping[str, Any]
    """Those of a call, with `${seed}` and `${prefix}` replaced."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun(Cell):
    """One run of a sweep: an arm, values of the axes, and a seed."""

    arm: str
    axes: Mapping[str, Any]
    recipe: RunConfig
    settings: Mapping[str, Any]
    """The columns of the table in which the runs of the sweep differ."""


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """Everything that a sweep makes, in the order in which it begins."""

    config: SweepConfig
    directory: Path
    columns: tuple[str, ...]
    """Dotted keys in which the runs differ, axes first."""
    steps: tuple[PrefixStep, ...]
    runs: tuple[PlannedRun, ...]
    """By arm, axes and seed."""
    processes: int
    choices: tuple[str, ...] = ()
    """A line for each arm whose values were chosen from another sweep's table."""

    @property
    def by_seed(self) -> list[Cell]:
        """Prefix steps and runs, seed by seed, so that pairs of arms are complete early."""
        cells: list[Cell] = []
        for seed in self.config.seeds:
            cells += [step for step in self.steps if step.seed == seed]
            cells += [run for run in self.runs if run.seed == seed]
        return cells


@dataclass(frozen=True, kw_only=True)
class _Variant:
    """An arm with values of the axes, before a seed is chosen."""

    arm: str
    axes: Mapping[str, Any]
    name: str
    recipe: Mapping[str, Any]


def build_plan(config: SweepConfig, *, processes: int | None = None) -> SweepPlan:
    """Resolve and check every recipe of a sweep. Raises UserError with the run's name.

    `processes` None: as many as fit onto the cores that this process may use, given `run.threads`. With several
    processes, recipes that do not set `run.threads` use one thread.
    """
    directory = Path(config.directory) / config.name
    tuned = _tuned(config)
    variants = _variants(config, tuned)
    count = process_count(variants, config, processes)
    threads = 1 if count > 1 else None
    steps: list[PrefixStep] = []
    last: dict[int, PrefixStep | None] = {}
    for seed in config.seeds:
        place = directory / "prefix" / f"seed-{seed}"
        after: PrefixStep | None = None
        for name, step in config.prefix.items():
            after = _plan_step(step, name, seed=seed, place=place, after=after, threads=threads)
            steps.append(after)
        last[seed] = after
    configs = {
        (variant.name, seed): _resolve(variant, seed, config=config, directory=directory, threads=threads)
        for variant in variants
        for seed in config.seeds
    }
    columns, settings = _differences(variants, [configs[variant.name, config.seeds[0]][1] for variant in variants])
    runs = tuple(
        _plan_run(variant, seed, directory / "runs", configs[variant.name, seed], last[seed], settings[variant.name])
        for variant in variants
        for seed in sorted(config.seeds)
    )
    return SweepPlan(
        config=config,
        directory=directory,
        columns=columns,
        steps=tuple(steps),
        runs=runs,
        processes=count,
        choices=tuple(f"arm {arm}: {values}" for arm, values in tuned.items()),
    )


def _plan_run(
    variant: _Variant,
    seed: int,
    directory: Path,
    resolved: tuple[dict[str, Any], RunConfig],
    after: PrefixStep | None,
    settings: Mapping[str, Any],
) -> PlannedRun:
    name = f"{variant.name}/seed-{seed}"
    path = directory / name
    return PlannedRun(
        seed=seed,
        name=name,
        label=name,
        group=variant.arm,
        path=path,
        record=path / RECORD,
        log=path / LOG,
        recipe=resolved[1],
        written=resolved[0],
        after=after,
        fingerprint=after.fingerprint if after else "",
        arm=variant.arm,
        axes=variant.axes,
        settings=settings,
    )


def process_count(variants: Sequence[_Variant], config: SweepConfig, processes: int | None) -> int:
    """The number of worker processes: as requested, else as the cores allow; never more than there is work for."""
    if processes is not None and processes < 1:
        raise UserError(f"--processes {processes}: give at least 1")
    work = len(variants) * len(config.seeds)
    if processes is None:
        threads = max(_threads(variant.recipe) or 1 for variant in variants)
        processes = max(1, usable_cores() // threads)
    return min(processes, work)


def _threads(recipe: Mapping[str, Any]) -> int | None:
    """The threads that a recipe sets; None if it sets none, or a value that the recipe's check will refuse."""
    run = recipe.get("run")
    value = run.get("threads") if isinstance(run, Mapping) else None
    return int(value) if isinstance(value, int) or (isinstance(value, str) and value.isdecimal()) else None


def _tuned(config: SweepConfig) -> dict[str, TunedValues]:
    """The values of each arm with axes, if they are chosen from another sweep's table."""
    if config.tuned_on is None:
        return {}
    table = read_tuning(config.tuned_on, config.seeds)
    return {
        arm: best_values(config.tuned_on, table, arm, combinations(config, section))
        for arm, section in config.arms.items()
        if config.axes or section.axes
    }


def _variants(config: SweepConfig, tuned: Mapping[str, TunedValues]) -> list[_Variant]:
    """Every arm with every combination of the axes' values, or the chosen one; by arm, in the order of the file."""
    base = apply_settings(load_recipe(config.recipe), config.settings)
    variants: list[_Variant] = []
    for arm, section in config.arms.items():
        overlay = load_recipe(section.recipe) if section.recipe else {}
        recipe = apply_settings(apply_settings(base, overlay), section.settings)
        axes_of_arm = combinations(config, section)
        if arm in tuned:
            axes_of_arm = [dict(tuned[arm].axes)]
        for axes in axes_of_arm:
            variants.append(
                _Variant(arm=arm, axes=axes, name=_variant_name(arm, axes), recipe=apply_settings(recipe, axes))
            )
    names = [variant.name for variant in variants]
    for variant in variants:
        if names.count(variant.name) > 1:
            raise UserError(
                f"two runs would be named {variant.name}: give the values of its axes once, and such that they differ "
                "in letters and digits"
            )
    return variants


def combinations(config: SweepConfig, arm: ArmConfig) -> list[dict[str, Any]]:
    """Every combination of the values of the sweep's axes and the arm's axes; the arm's values come first."""
    axes = {**config.axes, **arm.axes}
    return [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]


def _variant_name(arm: str, axes: Mapping[str, Any]) -> str:
    """`gr,strength=1`: keys by their last component if only one axis has it, values as file names."""
    ends = [key.rpartition(".")[2] for key in axes]
    labels = {key: end if ends.count(end) == 1 else key for key, end in zip(axes, ends, strict=True)}
    return "".join((arm, *(f",{labels[key]}={_file_name(value)}" for key, value in axes.items())))


def _file_name(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    safe = _UNSAFE.sub("_", text).strip("_")
    if safe and len(safe) <= _LONGEST_VALUE:
        return safe
    return f"{safe[:_LONGEST_VALUE]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _resolve(
    variant: _Variant, seed: int, *, config: SweepConfig, directory: Path, threads: int | None
) -> tuple[dict[str, Any], RunConfig]:
    """The recipe of one run, before and after its defaults are added.

    Its trackers, if it has any, group the runs of the sweep and tag them with arm and seed.
    """
    name = f"{variant.name}/seed-{seed}"
    prefix = directory / "prefix" / f"seed-{seed}" if config.prefix else None
    try:
        recipe = substitute(variant.recipe, seed=seed, prefix=prefix)
        written = _own(recipe, name=name, directory=directory / "runs", seed=seed, threads=threads)
        tracking = written.get("tracking")
        if isinstance(tracking, Mapping) and tracking:
            tags = {**(tracking.get("tags") or {}), "sweep": config.name, "arm": variant.arm, "seed": seed}
            written["tracking"] = {"group": config.name, **tracking, "tags": tags}
        resolved = parse_config(written)
        check_alone(resolved.distributed, "runs of a sweep")
        return written, resolved
    except UserError as error:
        raise UserError(f"{name}: {error}") from None


def _own(recipe: Mapping[str, Any], *, name: str, directory: Path, seed: int, threads: int | None) -> dict[str, Any]:
    """The recipe with the sweep's name, directory and seed, and its threads unless the recipe sets them."""
    own: dict[str, Any] = dict(zip(_OWN_KEYS, (name, str(directory), seed), strict=True))
    run = recipe.get("run")
    if threads is not None and not (isinstance(run, Mapping) and run.get("threads") is not None):
        own["run.threads"] = threads
    return apply_settings(recipe, own)


def _plan_step(
    step: PrefixStepConfig, name: str, *, seed: int, place: Path, after: PrefixStep | None, threads: int | None
) -> PrefixStep:
    written: dict[str, Any] | None = None
    recipe = None
    facts: dict[str, Any] = {"kind": step.kind, "seed": seed, "before": after.fingerprint if after else ""}
    try:
        step = PrefixStepConfig.model_validate(
            substitute(step.model_dump(exclude_defaults=True), seed=seed, prefix=place)
        )
        if step.call is not None:
            check_defined(step.call, where="call")
            facts |= {"call": step.call.rpartition("/")[2], "arguments": step.arguments}
        else:
            content = apply_settings(load_recipe(step.sft or step.reward_model or ""), step.settings)
            content = substitute(content, seed=seed, prefix=place)
            written = _own(content, name=name, directory=place, seed=seed, threads=threads)
            recipe = parse_config(written)
            check_alone(recipe.distributed, "runs of a sweep")
            facts["recipe"] = {key: value for key, value in written.items() if key not in ("run", "tracking")}
            if step.sft is not None and not recipe.sft.steps:
                raise UserError("sft.steps=0: there is nothing to train; set sft.steps in its recipe or settings")
    except UserError as error:
        raise UserError(f"prefix.{name}: {error}") from None
    return PrefixStep(
        seed=seed,
        name=name,
        label=f"prefix/{place.name}/{name}",
        group=f"prefix/{name}",
        path=place / name,
        record=place / f"{name}.json",
        log=place / f"{name}.log",
        recipe=recipe,
        written=written,
        after=after,
        fingerprint=hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest(),
        kind=step.kind,
        call=step.call,
        arguments=step.arguments,
    )


def substitute(value: Any, *, seed: int, prefix: Path | None) -> Any:
    """Replace `${seed}` and `${prefix}` in every string; a string that is just `${seed}` becomes the number.

    Paths from a Python caller become strings.
    """
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, Mapping):
        return {key: substitute(item, seed=seed, prefix=prefix) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [substitute(item, seed=seed, prefix=prefix) for item in value]
    if not isinstance(value, str) or "${" not in value:
        return value
    if value == "${seed}":
        return seed

    def replacement(match: re.Match[str]) -> str:
        name = match[1]
        if name == "seed":
            return str(seed)
        if name == "prefix":
            if prefix is None:
                raise UserError(f"{value!r}: the sweep has no prefix; give it one, or write the path itself")
            return prefix.as_posix()
        if nearest(name, ("seed", "prefix")):
            raise UserError(f"{value!r}: ${{{name}}} is unknown{did_you_mean(name, ('seed', 'prefix'))}")
        return match[0]

    return _PLACEHOLDER.sub(replacement, value)


def _differences(
    variants: Sequence[_Variant], configs: Sequence[RunConfig]
) -> tuple[tuple[str, ...], dict[str, dict[str, Any]]]:
    """The keys in which variants differ at one seed, axes first, and the values of each variant by its name."""
    flat = [flatten(redact(config.model_dump(mode="json"))) for config in configs]
    axes = list(dict.fromkeys(key for variant in variants for key in variant.axes))
    keys = dict.fromkeys(key for one in flat for key in one)
    differing = [
        key
        for key in keys
        if key not in (*_OWN_KEYS, *axes)
        and not key.startswith("tracking.")
        and not any(key.startswith(f"{axis}.") for axis in axes)
        and len({json.dumps(one.get(key), sort_keys=True) for one in flat}) > 1
    ]
    columns = (*axes, *differing)
    values = {
        variant.name: {key: variant.axes.get(key, one.get(key)) for key in columns}
        for variant, one in zip(variants, flat, strict=True)
    }
    return columns, values
