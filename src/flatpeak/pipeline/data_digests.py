"""Digests of the files of data that a recipe names, by which a resumed run sees that they have changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from flatpeak.config.run_config import RunConfig
from flatpeak.runs.manifest import flatten

_SECTIONS: Final = {"task", "curriculum", "prompt", "rewards", "reward_model"}
_SETTINGS: Final = ("path", "test_path", "math500_path", "hub", "rubric", "template")
"""The last components of the settings that may name a file; arguments of the user's functions may too."""
_SPLITS: Final = (
    *("train", "test", "dev", "val", "auxiliary_train", "data", "math500"),
    *("biology", "chemistry", "physics", "Dr_SCI"),
)
"""Beginnings of the names of files and folders that tasks read in a directory."""
_ENDINGS: Final = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".zip")


def data_digests(config: RunConfig) -> dict[str, str]:
    """The start of the SHA-256 of each file, or of a task's directory, by its setting: rows, rubrics, templates.

    Files are read in pieces; a gigabyte takes about a second.
    """
    recipe = flatten(config.model_dump(mode="json", include=_SECTIONS))
    named = {key: value for key, value in recipe.items() if isinstance(value, str) and _may_name_data(key)}
    digests = {
        key: _digest(value, in_task=key.startswith(("task.", "curriculum.task."))) for key, value in named.items()
    }
    return {key: digest for key, digest in digests.items() if digest is not None}


def _may_name_data(key: str) -> bool:
    return key.rpartition(".")[2] in _SETTINGS or ".arguments." in key


def _digest(name: str, *, in_task: bool) -> str | None:
    """The digest of what a setting names; None where that is no file, nor a directory of a task's data."""
    path = Path(name).expanduser()
    try:
        if path.is_file():
            return _digest_of_files([path], path.parent)
        return _digest_of_files(_data_files(path), path) if in_task and path.is_dir() else None
    except (OSError, ValueError):  # a name that is too long or holds a NUL; a file that cannot be read
        return None


def _data_files(directory: Path) -> Iterator[Path]:
    """The files that a task may read in a directory, and not a run or an environment that lies beside them."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith(_SPLITS):
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            yield from (file for file in files if file.suffix in _ENDINGS and file.is_file())


def _digest_of_files(files: Iterable[Path], root: Path) -> str:
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.relative_to(root).as_posix()}\n{digest}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()[:16]
