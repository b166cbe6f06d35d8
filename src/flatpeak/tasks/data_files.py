"""Data sets: rows from files or the Hub, each with its position for error messages, and tasks made from them."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import zipfile
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from flatpeak.errors import UnreachableDataError, UserError, check_characters, did_you_mean
from flatpeak.tasks.bad_rows import BadRowLog
from flatpeak.types import Example
from flatpeak.utils.huggingface import hub_or_cache
from flatpeak.utils.schema import StrictConfig

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_ENDINGS = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")


@dataclass(frozen=True, kw_only=True)
class ExampleTask:
    """A task whose examples are in memory, or created on access by a sequence."""

    name: str
    """Names the task in metrics: `eval/<name>/accuracy`."""
    train: Sequence[Example]
    """The examples to train on."""
    test: Sequence[Example]
    """The held-out examples."""
    notices: tuple[str, ...] = ()
    """Messages about what loading left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row of a data set, unprocessed."""

    where: str
    """Its position for error messages: `train.jsonl line 7`."""
    values: dict[str, Any]
    """The cells by column name."""


class SeededConfig(StrictConfig):
    """A task that draws at random."""

    seed: int = 0
    """The seed of all that the task draws: its problems, the order of rows and of options, the held-out rows."""


class SizesConfig(StrictConfig):
    """A published data set that may be cut to a number of rows."""

    train_size: Annotated[int, Field(ge=1)] | None = None
    """The number of training rows, after they are shuffled by `seed` if the task has one; null: all."""
    test_size: Annotated[int, Field(ge=1)] | None = None
    """The number of test rows, after they are shuffled by `seed` if the task has one; null: all."""


class RowsSourceConfig(StrictConfig):
    """A source of rows: either a file (its ending gives the format: JSONL, JSON, CSV, Parquet) or a Hub data set."""

    path: str | None = None
    """A JSONL, JSON, CSV or Parquet file; null: `hub`."""
    hub: str | None = None
    """The name of a Hub data set; null: `path`."""
    hub_config: str | None = None
    """The configuration of the Hub data set; null: its default."""
    split: str = "train"
    """Hub split; ignored for files."""
    id: str | None = None
    """A column with unique ids; null numbers the rows."""


class SourceConfig(RowsSourceConfig):
    """A source of rows and the meaning of its columns."""

    question: str = "question"
    """A column, a path into one (`extra_info.question`), or a format string over columns such as "{Body} {Question}". A
    column may hold chat messages; an assistant's message at their end is the rationale."""
    answer: str | None = "answer"
    """The column, path or format string of the gold answer; a list holds several, any of which is right. null: none,
    for rewards that need none."""
    answer_pattern: str | None = None
    """A regular expression whose first group (or whole match, without groups) is the gold answer in that column; null:
    the whole column."""
    rationale: str | None = None
    """A column or format string for the SFT target (fields: columns, and `gold`); null: no rationale."""


def cell_of(row: Row, column: str, *, option: str) -> Any:
    """The cell of a column, or the value at a path into it: `extra_info.answer`, `messages.0.content`.

    UserError if there is no such column or value.
    """
    if column in row.values:
        return row.values[column]
    value: Any = row.values
    done: list[str] = []
    for name in column.split("."):
        if isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        elif isinstance(value, Mapping) and name in value:
            value = value[name]
        else:
            missing = f"{name!r} in {'.'.join(done)!r}" if done else f"column {column!r}"
            known = list(value) if isinstance(value, Mapping) else []
            holds = f"it has {', '.join(map(repr, known))}" if known else f"that is a {type(value).__name__}"
            raise UserError(f"{row.where}: no {missing} ({option}){did_you_mean(name, known)}; {holds}")
        done.append(name)
    return value


def read_source(source: RowsSourceConfig, *, option: str, bad_rows: BadRowLog | None = None) -> Iterator[Row]:
    """The rows of a source's file or Hub data set. UserError unless it names exactly one of them."""
    if source.path is not None and source.hub is not None:
        raise UserError(f"{option} has both a path and a hub name; set {option}.hub=null to read the file")
    if source.path is not None:
        return read_file(source.path, option=f"{option}.path", bad_rows=bad_rows)
    if source.hub is not None:
        return read_hub(
            source.hub,
            config=source.hub_config,
            split=source.split,
            path_option=f"{option}.path with {option}.hub=null",
        )
    raise UserError(f"{option} names no data: give {option}.path=FILE or {option}.hub=NAME")


def read_file(path: str, *, option: str, bad_rows: BadRowLog | None = None) -> Iterator[Row]:
    """The rows of a JSONL, JSON, CSV or Parquet file, by its ending.

    UserError with the file and line of a bad row, unless `bad_rows` skips it.
    """
    bad_rows = bad_rows or BadRowLog()
    file = Path(path).expanduser()
    if not file.is_file():
        problem = "is a directory" if file.is_dir() else "does not exist"
        raise UserError(f"{option}={path}: {problem}; name a .jsonl, .json, .csv or .parquet file")
    match file.suffix.lower():
        case ".jsonl" | ".ndjson":
            return read_jsonl(file, bad_rows)
        case ".json":
            return _read_json(file, bad_rows)
        case ".csv":
            return _read_csv(file, bad_rows)
        case ".parquet":
            return _read_parquet(file)
        case suffix:
            raise UserError(
                f"{option}={path}: cannot read {suffix or 'a file without an ending'}; use .jsonl, .json, .csv or "
                ".parquet"
            )


def directory(path: str, *, option: str) -> Path:
    """The directory that an option names. UserError if it does not exist."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        problem = f"is a file; name the directory {folder.parent}" if folder.is_file() else "there is no such directory"
        raise UserError(f"{option}={path}: {problem}")
    return folder


def read_split(path: str, split: str, *, option: str) -> Iterator[Row]:
    """The rows of one split in a directory: `SPLIT.jsonl` (or .json, .csv, .parquet), or files in the Hub's layout,
    `SPLIT-00000-of-00001.parquet` and so on, in the directory or its `data/`."""
    folder = directory(path, option=option)
    for ending in _ENDINGS:
        file = folder / f"{split}{ending}"
        if file.is_file():
            return read_file(str(file), option=option)
    for parent in (folder, folder / "data"):
        shards = sorted(parent.glob(f"{split}-*.parquet"))
        if shards:
            return (row for shard in shards for row in _read_parquet(shard))
    raise UserError(
        f"{option}={path}: no {split}.jsonl in it (nor .json, .csv, .parquet, {split}-*.parquet); put it there"
    )


def read_objects(path: str, *, option: str) -> Iterator[Row]:
    """The rows of a directory or .zip archive that holds one JSON object per .json file, at any depth, in natural order
    of their names (2.json before 10.json). `where` is the file's path in it."""
    root = Path(path).expanduser()
    if root.is_dir():
        names = sorted((file.relative_to(root).as_posix() for file in root.rglob("*.json")), key=_natural_order)
        contents: Iterator[tuple[str, bytes]] = ((name, (root / name).read_bytes()) for name in names)
    elif zipfile.is_zipfile(root):
        contents = _unzipped(root)
    else:
        raise UserError(f"{option}={path}: neither a directory nor a .zip archive; name one that holds .json files")
    return _objects(contents, root)


def _objects(contents: Iterator[tuple[str, bytes]], root: Path) -> Iterator[Row]:
    for name, data in contents:
        where = f"{root}/{name}"
        yield Row(where=where, values=_object(_parse(_decode(data, where=where), where=where), where=where))


def _unzipped(file: Path) -> Iterator[tuple[str, bytes]]:
    with zipfile.ZipFile(file) as archive:
        # An archive made on a Mac contains a hidden companion of every file.
        names = [n for n in archive.namelist() if n.endswith(".json") and not n.startswith("__MACOSX/")]
        for name in sorted(names, key=_natural_order):
            try:
                yield name, archive.read(name)
            except (zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
                raise UserError(f"{file}/{name}: cannot be unpacked ({error}); fetch the archive again") from error


def _natural_order(name: str) -> list[tuple[int, str]]:
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"([0-9]+)", name)]


def read_jsonl(file: Path, bad_rows: BadRowLog | None = None) -> Iterator[Row]:
    """The rows of a file with one JSON object per line; blank lines are skipped."""
    bad_rows = bad_rows or BadRowLog()
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{file} line {number}"
            with bad_rows:
                text = _decode(line, where=where)
                if text.strip():
                    yield Row(where=where, values=_object(_parse(text, where=where), where=where))


def _read_json(file: Path, bad_rows: BadRowLog) -> Iterator[Row]:
    rows = _parse(_decode(file.read_bytes(), where=str(file)), where=str(file))
    if not isinstance(rows, list):
        raise UserError(f"{file}: a .json file holds one list of objects; name it .jsonl if it has one object per line")
    for number, row in enumerate(rows, start=1):
        where = f"{file} row {number}"
        with bad_rows:
            yield Row(where=where, values=_object(row, where=where))


def read_csv_cells(file: Path, *, columns: Sequence[str]) -> Iterator[Row]:
    """The rows of a CSV file without a header line; the cells are `columns` in order."""
    return _read_csv(file, BadRowLog(), columns=columns)


def _read_parquet(file: Path) -> Iterator[Row]:
    # Imported here because it is slow; it is installed with `datasets`, which uses this format.
    from pyarrow import ArrowException  # type: ignore[import-untyped]
    from pyarrow.parquet import ParquetFile  # type: ignore[import-untyped]

    number = 0
    try:
        with ParquetFile(file) as table:
            for batch in table.iter_batches():
                for values in batch.to_pylist():
                    number += 1
                    yield Row(where=f"{file} row {number}", values=values)
    except (ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{file}: not a readable Parquet file ({reason}); fetch it again") from error


def _read_csv(file: Path, bad_rows: BadRowLog, *, columns: Sequence[str] | None = None) -> Iterator[Row]:
    text = _decode(file.read_bytes(), where=str(file))
    csv.field_size_limit(max(csv.field_size_limit(), len(text) + 1))
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = list(columns) if columns is not None else next(reader, [])
        if len(set(header)) < len(header) or not all(header):
            raise UserError(f"{file} line 1: the header needs a distinct name for every column, not {header}")
        for cells in reader:
            where = f"{file} line {reader.line_num}"
            with bad_rows:
                if cells and len(cells) != len(header):
                    raise UserError(
                        f"{where}: {len(cells)} cells under {len(header)} columns; quote cells that hold commas"
                    )
                if cells:
                    yield Row(where=where, values=dict(zip(header, cells, strict=True)))
    except csv.Error as error:
        raise UserError(f"{file} line {reader.line_num}: not valid CSV ({error}); repair or remove it") from error


def read_hub(name: str, *, config: str | None, split: str, path_option: str) -> Iterator[Row]:
    """The rows of a data set on the Hugging Face Hub; `path_option` is the option for a local copy."""
    from datasets import load_dataset  # imported here: slow, and a run on local files never needs it

    with hub_or_cache() as problem:
        try:
            dataset = load_dataset(name, config, split=split)
        except (OSError, ValueError, RuntimeError) as error:
            reason = problem or (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            check = "the network" if problem else "the name and the network"
            selection = f"split {split}" if config is None else f"config {config}, split {split}"
            raise UnreachableDataError(
                f"{name} ({selection}) cannot be loaded from the Hub: {reason}; check {check}, or "
                f"give a local copy as {path_option}"
            ) from error
    for number, values in enumerate(dataset, start=1):
        yield Row(where=f"{name} {split} row {number}", values=values)


def fetch_file(repository: str, file: str, *, path_option: str) -> Path:
    """The local path of one file of a Hub data set, downloaded unless cached; `path_option` as in `read_hub`."""
    from huggingface_hub import hf_hub_download  # imported here: slow, and a run on local files never needs it
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    with hub_or_cache() as problem:
        try:
            return Path(hf_hub_download(repository, file, repo_type="dataset"))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
            reason = problem or (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            raise UnreachableDataError(
                f"{file} of {repository} cannot be fetched from the Hub: {reason}; check the network, or give a local "
                f"copy as {path_option}"
            ) from error


def _decode(data: bytes, *, where: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text; save the file as UTF-8") from error


class _RepeatedKeyError(Exception):
    """A JSON object has a key twice."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKeyError(repr(next(key for key in keys if keys.count(key) > 1)))
    return values


def _parse(text: str, *, where: str) -> Any:
    try:
        value = json.loads(text, object_pairs_hook=_distinct)
    except _RepeatedKeyError as error:
        raise UserError(f"{where}: the column {error} occurs twice in one object; keep one of them") from error
    except json.JSONDecodeError as error:
        problem = error.msg.removesuffix(" at")
        raise UserError(
            f"{where}: not valid JSON ({problem} at its line {error.lineno}, column {error.colno}); repair it"
        ) from error
    except ValueError as error:
        raise UserError(f"{where}: a whole number with too many digits; write it as a text, in quotes") from error
    except RecursionError as error:
        raise UserError(f"{where}: lists or objects are nested too deeply to be read; flatten them") from error
    if _SURROGATE.search(text):  # a whole pair is one character by now
        check_characters(json.dumps(value, ensure_ascii=False), where=where)
    return value


def _object(value: Any, *, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected an object with named columns, found {type(value).__name__}")
    return value


def slug(name: str) -> str:
    """A subset's name without case, spaces and signs; `Counting & Probability` becomes `counting_and_probability`."""
    return "_".join(re.findall(r"[a-z0-9]+", name.casefold().replace("&", " and ")))


def known_slugs(names: Iterable[str], known: Collection[str], *, option: str) -> frozenset[str]:
    """The slugs of the named subsets; empty means all. UserError for a name that is not known."""
    slugs = {slug(name): name for name in known}
    for name in names:
        if slug(name) not in slugs:
            choices = f"; choose from {', '.join(sorted(slugs))}"
            raise UserError(f"{option}: there is no {name!r}{did_you_mean(slug(name), slugs) or choices}")
    return frozenset(map(slug, names))


def shuffled(examples: Sequence[Example], size: int | None, *, seed: int, option: str) -> tuple[Example, ...]:
    """The examples in a seeded random order, cut to `size`.

    Published files are sorted by subject; in random order, the first rows, which periodic evaluations use, represent
    all subjects. UserError if there are fewer than `size`.
    """
    if not examples:
        raise UserError(
            f"{option.removesuffix('_size')}: no row is left; the files are empty, or nothing in them is of the "
            "subsets that the task is limited to"
        )
    if size is not None and size > len(examples):
        raise UserError(f"{option}={size}: there are only {len(examples)} rows; use null for all")
    order = sorted(range(len(examples)), key=lambda index: examples[index].id)
    random.Random(seed).shuffle(order)
    return tuple(examples[index] for index in order[:size])
