"""A directory's manifest: size and SHA-256 of every file in it, written last, so that it vouches for all of them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatpeak.runs.files import fsync_path

MANIFEST = "manifest.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenFile:
    """The first file found that is not as it was sealed."""

    name: str
    """Relative to the directory."""
    problem: str


def seal(directory: Path, *, step: int) -> None:
    """Sync every file, then write the manifest and sync it, then the directories. Nothing may be written after."""
    files = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            fsync_path(path)
            files[path.relative_to(directory).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    with (directory / MANIFEST).open("w", encoding="utf-8") as file:
        file.write(_render({"step": step, "files": files}))
        file.flush()
        os.fsync(file.fileno())
    for path in [*(path for path in directory.rglob("*") if path.is_dir()), directory]:
        fsync_path(path)


def broken_file(directory: Path) -> BrokenFile | None:
    """The first file that is missing, cut or changed since the directory was sealed; None if all is well."""
    try:
        manifest = read_manifest(directory)
    except FileNotFoundError:
        return BrokenFile(name=MANIFEST, problem="missing, so the checkpoint was never finished")
    except (ValueError, KeyError, TypeError, OSError):
        return BrokenFile(name=MANIFEST, problem="damaged")
    for name, sealed in manifest["files"].items():
        problem = _problem(directory / name, size=sealed["bytes"], sha256=sealed["sha256"])
        if problem is not None:
            return BrokenFile(name=name, problem=problem)
    return None


def _problem(path: Path, *, size: int, sha256: str) -> str | None:
    try:
        found = path.stat().st_size
        if found != size:
            return f"has {found} bytes, was written with {size}"
        return None if _sha256(path) == sha256 else "damaged: its SHA-256 is not the one it was written with"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, `{"step": ..., "files": {name: {"bytes": ..., "sha256": ...}}}`; ValueError if it was changed."""
    text = (directory / MANIFEST).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    del content["sha256"]
    # Rendering it again also checks the bytes that parsing ignores.
    if _render(content) != text:
        raise ValueError(f"{directory / MANIFEST}: changed since it was written")
    return content


def _render(content: dict[str, Any]) -> str:
    """The manifest's text, with its own checksum in it."""
    own = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return json.dumps(content | {"sha256": own}, indent=1, sort_keys=True) + "\n"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
