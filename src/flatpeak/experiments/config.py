"""Configuration of a sweep, and the reading of sweep files; torch is not loaded."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from flatpeak.config.error_messages import describe_errors
from flatpeak.config.load import SHIPPED, apply_overrides, merge, parse_file
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError, did_you_mean
from flatpeak.utils.schema import StrictConfig
from flatpeak.utils.user_code import one_line

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
"""Allowed names of arms and prefix steps, because they are names of directories."""
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")

_Finite = Annotated[float, Field(allow_inf_nan=False)]

Axes = dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]]
"""Dotted keys of a recipe, each with its values."""


class PrefixStepConfig(StrictConfig):
    """A step taken once per seed, before the seed's runs: a function call, SFT, or a reward model."""

    call: str | None = None
    """`file.py:function`, relative to the sweep file, or `module:function`, called with (directory, seed, **arguments);
    its result is ignored."""
    arguments: dict[str, Any] = Field(default={})
    sft: str | None = None
    """The recipe of an SFT run, relative to the sweep file, or `flatpeak:NAME`."""
    reward_model: str | None = None
    """The recipe of a reward model's training."""
    settings: dict[str, Any] = Field(default={})
    """Changes to that recipe, with dotted keys."""

    @property
    def kind(self) -> Literal["call", "sft", "reward_model"]:
        """The kind of the step, which is the key it sets."""
        if self.call is not None:
            return "call"
        return "sft" if self.sft is not None else "reward_model"

    @model_validator(mode="after")
    def _one_kind(self) -> PrefixStepConfig:
        kinds = [name for name in ("call", "sft", "reward_model") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(
                f"a prefix step is one of call, sft and reward_model, this has {' and '.join(kinds) or 'none of them'}"
            )
        if self.call is not None and self.settings:
            raise ValueError("settings change a recipe, and a prefix step with call has none: write arguments")
        odd = _odd_key(self.arguments)
        if odd is not None:
            raise ValueError(f"arguments: the key {odd!r} arrives as text at the function; write it in quotes")
        if self.call is None and self.arguments:
            raise ValueError("arguments are those of a call: write settings to change the recipe of a prefix step")
        return self


class ArmConfig(StrictConfig):
    """An arm: a recipe merged over the sweep's recipe, settings, and axes for this arm only."""

    recipe: str | None = None
    settings: dict[str, Any] = Field(default={})
    axes: Axes = Field(default={})


class TunedOnConfig(StrictConfig):
    """The table of another sweep from which each arm's values of the axes are chosen."""

    table: str
    """table.csv or table.json of a finished sweep over other seeds, relative to the sweep file."""
    metric: str
    """A column of that table, such as `reward/gold.final`."""
    best: Literal["max", "min"] = "max"


class ThresholdConfig(StrictConfig):
    """The threshold of a metric's mean over the last `window` training steps."""

    above: _Finite | None = None
    below: _Finite | None = None
    window: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="after")
    def _one_side(self) -> ThresholdConfig:
        if (self.above is None) == (self.below is None):
            raise ValueError("a threshold of table.first has either above or below")
        return self


class TableConfig(StrictConfig):
    """The columns of the table: metrics, and how each is summarized."""

    window: Annotated[int, Field(ge=1)] = 10
    """The number of last training steps whose mean is `.final`."""
    metrics: tuple[str, ...] = ("reward/*", "eval/*")
    """Names of metrics, with `*` for any text."""
    best: dict[str, Literal["max", "min"]] = Field(default={})
    """Metrics whose best value is the smallest: `{metric: min}`."""
    first: dict[str, ThresholdConfig] = Field(default={})
    """Metrics whose first step past a threshold becomes a column."""

    @model_validator(mode="after")
    def _single_metrics(self) -> TableConfig:
        for section, metrics in (("best", self.best), ("first", self.first)):
            for name in metrics:
                if "*" in name:
                    raise ValueError(f"table.{section}.{name}: give the name of one metric; metrics alone has patterns")
        return self


class CurvesConfig(StrictConfig):
    """The metrics of curves.csv, averaged over bins of training steps."""

    metrics: Annotated[tuple[str, ...], Field(min_length=1)]
    every: Annotated[int, Field(ge=1)] = 10


class SweepConfig(StrictConfig):
    """A sweep: arms crossed with axes and seeds, over one recipe, after a prefix that all arms of a seed share."""

    name: str
    directory: str = "runs/sweeps"
    recipe: str
    """A file, relative to the sweep file, or `flatpeak:NAME`."""
    settings: dict[str, Any] = Field(default={})
    """Changes to the recipe for every run, with dotted keys."""
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    """A list, a number, or text such as `100-119` or `1-3,7`."""
    prefix: dict[str, PrefixStepConfig] = Field(default={})
    arms: dict[str, ArmConfig] = Field(default={"base": ArmConfig()}, min_length=1)
    axes: Axes = Field(default={})
    """Crossed with every arm."""
    tuned_on: TunedOnConfig | None = None
    table: TableConfig = TableConfig()
    curves: CurvesConfig | None = None
    keep: Literal["all", "last", "none"] = "last"
    """The checkpoints of a finished run to keep."""
    report: bool = False
    """Write a report page for every run, which takes about a second; `flatpeak report RUN` writes one later."""

    @field_validator("seeds", mode="before")
    @classmethod
    def _parse_seeds(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        if not isinstance(value, str):
            return value
        ranges = [_RANGE.fullmatch(one.strip()) for one in value.split(",")]
        if not all(ranges):
            raise ValueError(f"seeds={value!r}: write a list, or text such as 100-119 or 1-3,7")
        bounds = [(int(one[1]), int(one[2] or one[1])) for one in ranges if one]
        backwards = next(((first, last) for first, last in bounds if last < first), None)
        if backwards:
            first, last = backwards
            raise ValueError(f"seeds={value!r}: {first}-{last} has no seeds; write {last}-{first}")
        return tuple(seed for first, last in bounds for seed in range(first, last + 1))

    @model_validator(mode="after")
    def _consistent(self) -> SweepConfig:
        if len(set(self.seeds)) < len(self.seeds):
            twice = next(seed for seed in self.seeds if self.seeds.count(seed) > 1)
            raise ValueError(f"seeds: {twice} is given twice; give every seed once")
        parts = Path(self.name).parts
        if not parts or Path(self.name).is_absolute() or ".." in parts:
            raise ValueError(f"name={self.name!r} must be a name inside directory, such as sharp or tuning/sharp")
        if not self.name.isprintable():
            raise ValueError(f"name={self.name!r} becomes a directory: leave out what cannot be printed")
        for section, names in (("arms", self.arms), ("prefix", self.prefix)):
            for name in names:
                if not SAFE_NAME.fullmatch(name):
                    raise ValueError(
                        f"{section}.{name}: the name becomes a directory; use letters, digits and . _ + - only"
                    )
        for name in self.prefix:
            for end in (".json", ".log"):
                if f"{name}{end}" in self.prefix:
                    raise ValueError(f"prefix.{name}{end}: step {name} has a file of that name; choose another")
        for key in (*self.axes, *(key for arm in self.arms.values() for key in arm.axes)):
            if key in ("run.seed", "run.name", "run.directory"):
                raise ValueError(f"axes.{key}: the sweep sets it; give seeds, name and directory of the sweep instead")
        return self


def _odd_key(value: Any) -> Any:
    """The first key in the value that is not text, which JSON cannot pass on; None if all are text."""
    if isinstance(value, Mapping):
        odd = next((key for key in value if not isinstance(key, str)), None)
        return odd if odd is not None else _odd_key(list(value.values()))
    if isinstance(value, list | tuple):
        return next((odd for item in value if (odd := _odd_key(item)) is not None), None)
    return None


def read_sweep(path: str | Path, overrides: Sequence[str] = ()) -> SweepConfig:
    """Read and check a sweep file and those it extends, changed by `key=value` overrides; paths become absolute.

    Raises UserError: one line with the key and what would be right.
    """
    path = Path(path).expanduser()
    content = _load(path, trail=())
    if not content.keys() & {"recipe", "seeds"} and content.keys() & RunConfig.model_fields.keys():
        raise UserError(f"{path} is a recipe, not a sweep: a sweep names a recipe, seeds and arms, see docs/sweeps.md")
    content = _canonical(apply_overrides(content, overrides), path.resolve().parent)
    # An empty `axes:` or `prefix:` removes the extended file's.
    content = {key: value for key, value in content.items() if value is not None}
    for section in content.keys() & (RunConfig.model_fields.keys() - SweepConfig.model_fields.keys()):
        raise UserError(f"{path}: {section} is a section of the recipe: change it as settings.{section}.KEY")
    try:
        return SweepConfig.model_validate(content)
    except ValidationError as error:
        raise UserError(
            f"{path}: {describe_errors(error.errors(include_url=False), schema=SweepConfig, kind='a sweep')}"
        ) from None


def only_arms(config: SweepConfig, names: Sequence[str]) -> SweepConfig:
    """The sweep with these of its arms alone; UserError for one that it does not have."""
    for name in names:
        if name not in config.arms:
            hint = did_you_mean(name, config.arms)
            raise UserError(f"--arm {name}: the sweep has no such arm{hint}; its arms are {', '.join(config.arms)}")
    return config.model_copy(update={"arms": {name: config.arms[name] for name in names}})


def _load(path: Path, *, trail: tuple[Path, ...]) -> dict[str, Any]:
    """The content of a sweep file merged over the files that it extends."""
    if not path.is_file():
        origin = f" (extended by {trail[-1]})" if trail else ""
        raise UserError(f"sweep file {path} not found{origin}: give a YAML file, see docs/sweeps.md")
    path = path.resolve()
    if path in trail:
        raise UserError(f"{path}: sweep files extend each other in a circle; remove one `extends`")
    content = parse_file(path)
    content |= {key: None for key in ("axes", "prefix") if content.get(key) == {}}  # merged, it would remove nothing
    bases = content.pop("extends", None) or []
    bases = [bases] if isinstance(bases, str) else bases
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise UserError(f"{path}: extends must be the name of a sweep file or a list of names")
    merged: dict[str, Any] = {}
    for base in bases:
        merged = merge(merged, _load(path.parent / Path(base).expanduser(), trail=(*trail, path)))
    return merge(merged, _canonical(content, path.parent))


def _canonical(content: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The content with absolute paths and dotted keys of recipes, so that files merge for any spelling."""
    result = dict(content)
    for key in ("settings", "axes"):
        if isinstance(result.get(key), Mapping):
            result[key] = dotted(result[key])
    if "recipe" in result:
        result["recipe"] = _absolute(result["recipe"], directory)
    for section, keys in (("prefix", ("call", "sft", "reward_model")), ("arms", ("recipe",))):
        entries = result.get(section)
        if isinstance(entries, Mapping):
            result[section] = {name: _canonical_entry(entry, keys, directory) for name, entry in entries.items()}
    if isinstance(result.get("tuned_on"), Mapping):
        result["tuned_on"] = _canonical_entry(result["tuned_on"], ("table",), directory)
    return result


def _canonical_entry(entry: Any, paths: Sequence[str], directory: Path) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    changed = {key: _absolute(entry[key], directory) for key in paths if key in entry}
    changed |= {key: dotted(entry[key]) for key in ("settings", "axes") if isinstance(entry.get(key), Mapping)}
    return {**entry, **changed}


def _absolute(name: Any, directory: Path) -> Any:
    """A path relative to the sweep file as an absolute path; names of shipped recipes and modules stay unchanged."""
    if not isinstance(name, str) or name.startswith(SHIPPED):
        return name
    file, colon, function = name.rpartition(":")
    if colon and not file.endswith(".py"):
        return name
    return f"{directory / Path(file if colon else name).expanduser()}{colon}{function if colon else ''}"


def dotted(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys; later values of equal keys win. Lists and empty mappings are values."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat |= dotted(value, f"{path}.")
        else:
            flat[path] = value
    return flat


def check_defined(reference: str, *, where: str) -> None:
    """UserError, which begins with `where`, if the file of `file.py:name` is missing or defines no such name.

    The file is not run, and modules are not searched.
    """
    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise UserError(f"{where}={reference!r}: write file.py:function or module:function")
    if not source.endswith(".py"):
        return
    path = Path(source).expanduser()
    if not path.is_file():
        raise UserError(f"{where}: there is no file {source}; give a path that exists")
    try:
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"{where}: {source} is not Python ({one_line(error)})") from None
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names |= {node.asname or node.name for node in nodes if isinstance(node, ast.alias)}
    if name not in names and "*" not in names:
        raise UserError(f"{where}: {source} has no function {name!r}{did_you_mean(name, names)}")
