"""The plan of a sweep: all prefix steps and runs, resolved and checked before anything runs; torch is not loaded."""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatpeak.config.load import apply_settings, load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.launch import check_alone
from flatpeak.errors import UserError, did_you_mean, nearest
from flatpeak.experiments.config import ArmConfig, PrefixStepConfig, SweepConfig
from flatpeak.experiments.tuning import TunedValues, best_values, read_tuning
from flatpeak.runs.manifest import flatten
from flatpeak.utils.machine import usable_cores
from flatpeak.utils.redaction import redact

_PLACEHOLDER = re.compile(r"\$\{(\w+)\}")
_UNSAFE = re.compile(r"[^A-Za-z0-9._+-]+")
_OWN_KEYS = ("run.name", "run.directory", "run.seed")
_LONGEST_VALUE = 40
"""The most characters of an axis's value in a directory's name."""


@dataclass(frozen=True, kw_only=True)
class PrefixStep:
    """One prefix step of one seed."""

    seed: int
    name: str
    config: PrefixStepConfig
    """The step in the sweep file, with `${seed}` and `${prefix}` replaced."""
    path: Path
    """The directory that the step creates."""
    recipe: RunConfig | None
    """The checked recipe of SFT or of a reward model."""
    written: Mapping[str, Any] | None
    """The same recipe before its defaults are added."""
    fingerprint: str
    """A hash of everything that determines its result, including earlier steps."""

    @property
    def label(self) -> str:
        """The name of the step in messages."""
        return f"prefix/{self.path.parent.name}/{self.name}"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of a sweep: an arm, values of the axes, and a seed."""

    arm: str
    axes: Mapping[str, Any]
    seed: int
    name: str
    """Its name within the sweep, such as `gr,strength=1/seed-100`."""
    path: Path
    recipe: RunConfig
    written: Mapping[str, Any]
    """The resolved recipe before its defaults are added."""
    prefix: str
    """The fingerprint of the seed's last prefix step; empty without a prefix."""
    settings: Mapping[str, Any]
    """The columns of the table in which the runs of the sweep differ."""

    @property
    def label(self) -> str:
        """The name of the run in messages."""
        return self.name


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
    def by_seed(self) -> list[PrefixStep | PlannedRun]:
        """Prefix steps and runs, seed by seed, so that pairs of arms are complete early."""
        cells: list[PrefixStep | PlannedRun] = []
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
    last: dict[int, str] = {}
    for seed in config.seeds:
        place = directory / "prefix" / f"seed-{seed}"
        before = ""
        for name, step in config.prefix.items():
            steps.append(_plan_step(step, name, seed=seed, place=place, before=before, threads=threads))
            before = steps[-1].fingerprint
        last[seed] = before
    configs = {
        (variant.name, seed): _resolve(variant, seed, config=config, directory=directory, threads=threads)
        for variant in variants
        for seed in config.seeds
    }
    columns, settings = _differences(variants, [configs[variant.name, config.seeds[0]][1] for variant in variants])
    runs = tuple(
        PlannedRun(
            arm=variant.arm,
            axes=variant.axes,
            seed=seed,
            name=f"{variant.name}/seed-{seed}",
            path=directory / "runs" / variant.name / f"seed-{seed}",
            recipe=configs[variant.name, seed][1],
            written=configs[variant.name, seed][0],
            prefix=last[seed],
            settings=settings[variant.name],
        )
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
        choices=tuple(_choice(arm, values, config) for arm, values in tuned.items()),
    )


def _choice(arm: str, values: TunedValues, config: SweepConfig) -> str:
    axes = ", ".join(f"{key}={value}" for key, value in values.axes.items())
    metric = config.tuned_on.metric if config.tuned_on else ""
    return (
        f"arm {arm}: {axes}, best of {values.candidates} by {metric} "
        f"({values.mean:.4g} over {len(values.seeds)} tuning seeds)"
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
    """The recipe of one run, before and after its defaults are added."""
    name = f"{variant.name}/seed-{seed}"
    prefix = directory / "prefix" / f"seed-{seed}" if config.prefix else None
    try:
        recipe = substitute(variant.recipe, seed=seed, prefix=prefix)
        written = _own(recipe, name=name, directory=directory / "runs", seed=seed, threads=threads)
        written = _with_group(written, sweep=config.name, arm=variant.arm, seed=seed)
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


def _with_group(recipe: Mapping[str, Any], *, sweep: str, arm: str, seed: int) -> dict[str, Any]:
    """The recipe with the sweep as the group of its trackers, if it has any, and with tags for arm and seed."""
    tracking = recipe.get("tracking")
    if not isinstance(tracking, Mapping) or not tracking:
        return dict(recipe)
    tags = tracking.get("tags")
    own = {"sweep": sweep, "arm": arm, "seed": seed}
    return {**recipe, "tracking": {"group": sweep, **tracking, "tags": {**(tags or {}), **own}}}


def _plan_step(
    step: PrefixStepConfig, name: str, *, seed: int, place: Path, before: str, threads: int | None
) -> PrefixStep:
    label = f"prefix.{name}"
    written: dict[str, Any] | None = None
    recipe = None
    facts: dict[str, Any] = {"kind": step.kind, "seed": seed, "before": before}
    try:
        step = PrefixStepConfig.model_validate(
            substitute(step.model_dump(exclude_defaults=True), seed=seed, prefix=place)
        )
        if step.call is not None:
            _check_call(step.call)
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
        raise UserError(f"{label}: {error}") from None
    fingerprint = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    return PrefixStep(
        seed=seed, name=name, config=step, path=place / name, recipe=recipe, written=written, fingerprint=fingerprint
    )


def _check_call(call: str) -> None:
    """UserError if the file of a call is missing or defines no such name; the file is not run."""
    source, _, function = call.rpartition(":")
    if not source or not function:
        raise UserError(f"call={call!r}: write file.py:function or module:function")
    if not source.endswith(".py"):
        return
    if not Path(source).is_file():
        raise UserError(f"call: there is no file {source}; give a path relative to the sweep file")
    try:
        tree = ast.parse(Path(source).read_text(encoding="utf-8"))
    except (SyntaxError, ValueError) as error:
        raise UserError(f"call: {source} is not Python ({error})") from None
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    names |= {target.id for node in ast.walk(tree) if isinstance(node, ast.Assign) for target in _names(node)}
    names |= {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    if function not in names and "*" not in names:
        raise UserError(f"call: {source} has no function {function!r}{did_you_mean(function, names)}")


def _names(node: ast.Assign) -> list[ast.Name]:
    return [target for target in node.targets if isinstance(target, ast.Name)]


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
