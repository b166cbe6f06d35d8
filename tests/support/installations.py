"""Made-up installations: packages with metadata and code of their own, programs on the path, and what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def make_package(
    folder: Path,
    name: str,
    version: str | None,
    *,
    requires: Sequence[str] = (),
    extras: Sequence[str] = (),
    code: str | None = None,
) -> None:
    """Install a package into a folder, with its code where it has some; without a version its metadata are damaged."""
    module = name.replace("-", "_")
    metadata = folder / f"{module}-{version or '1.0'}.dist-info"
    metadata.mkdir(parents=True)
    lines = ["Metadata-Version: 2.1", f"Name: {name}", "Requires-Python: >=3.11"]
    lines += [f"Requires-Dist: {one}" for one in requires] + [f"Provides-Extra: {one}" for one in extras]
    if version is not None:
        (metadata / "METADATA").write_text("\n".join([*lines, f"Version: {version}", ""]))
    if code is not None:
        (folder / f"{module}.py").write_text(code)


def make_program(folder: Path, name: str, script: str) -> Path:
    """Write a shell script that can be run."""
    folder.mkdir(exist_ok=True)
    program = folder / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program
