"""Checks of directories and limits: runs, shared memory, the Hub's cache, temporary files, open files, the locale."""

from __future__ import annotations

import locale
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from flatpeak.apps.doctor.bounded_process import merged, run_probe
from flatpeak.apps.doctor.findings import GIB, Finding, gib, note, ok, problem, shell_path
from flatpeak.apps.doctor.install_commands import import_fix

RUNS: Final = Path("runs")
"""`run.directory` of a recipe that does not set it."""
SHARED_MEMORY: Final = Path("/dev/shm")
TOO_FULL: Final = GIB // 4
"""A file system with less room is as good as full."""
LITTLE_ROOM: Final = 10 * GIB
"""A checkpoint of half a billion parameters, with its optimizer's state, takes about 8 GB."""
LITTLE_SHARED_MEMORY: Final = GIB
"""Containers have 64 MiB by default; NCCL and rollouts ahead take more."""
FEW_FILES: Final = 1024
"""Connections to servers, worker processes and files of a sweep together stay below."""
HUB_SECONDS: Final = 60.0
OFFLINE_VARIABLES: Final = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")


def check_runs() -> Iterator[Finding]:
    """The directory that runs are written to by default."""
    try:
        folder = Path.cwd() / RUNS
    except OSError as error:
        yield problem("runs", f"the working directory is gone ({error})", "cd to a directory that exists")
        return
    yield from _directory_findings("runs", folder, "cd to a directory of yours, or set run.directory=PATH")


def check_shared_memory(path: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """The file system in memory by which processes share tensors."""
    if not path.is_dir():
        return
    status = os.statvfs(path)
    total, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    text = f"{path}: {gib(free)} of {gib(total)} free"
    fix = "docker run --shm-size=8g ..., or a larger tmpfs there"
    if free < LITTLE_SHARED_MEMORY:
        yield note("shared memory", f"{text}; several processes on GPUs, and rollout.staleness=1, need more", fix)
    elif not os.access(path, os.W_OK):
        yield note("shared memory", f"{path} cannot be written", fix)
    else:
        yield ok("shared memory", text)


def check_temporary_files() -> Iterator[Finding]:
    """The directory for temporary files, and that of matplotlib's settings."""
    try:
        folder = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        yield problem("temporary", f"{error}", "export TMPDIR=DIRECTORY, one that you can write to")
        return
    settings = _plot_settings()
    if settings is not None and not _is_writable(settings):
        text = f"matplotlib's settings cannot be written to {settings}: each report takes longer"
        yield note("temporary", text, f"export MPLCONFIGDIR={shell_path(folder / 'matplotlib')}")
    yield from _directory_findings("temporary", folder, "export TMPDIR=DIRECTORY, one with more room", room=GIB)


def _plot_settings() -> Path | None:
    """The directory of matplotlib's settings; None for a user without a home, for whom it takes a temporary one."""
    if own := os.environ.get("MPLCONFIGDIR"):
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "matplotlib"
    except RuntimeError:
        return None


def check_limits() -> Iterator[Finding]:
    """The limit of open files, and the encoding of texts."""
    files, most = _open_files()
    if files is not None and files < FEW_FILES:
        more = FEW_FILES * 4 if most is None else min(FEW_FILES * 4, most)
        fix = f"ulimit -n {more}" if more > files else "ask the administrator for a higher limit"
        yield note("open files", f"at most {files}, few for workers and servers", fix)
    encodings = {locale.getpreferredencoding(False), getattr(sys.stdout, "encoding", None) or "utf-8"}
    strange = sorted(name for name in encodings if name.lower().replace("_", "-") not in ("utf-8", "utf8"))
    if strange:
        text = f"texts are in {', '.join(strange)}: completions with other characters cannot be printed"
        yield note("locale", text, "export PYTHONUTF8=1")
    else:
        yield ok("limits", f"UTF-8; {'any number of' if files is None else f'at most {files}'} open files")


def _open_files() -> tuple[int | None, int | None]:
    """The most files that may be open, and the most that this may be set to; None for no limit."""
    import resource

    soft, hard = (None if one == resource.RLIM_INFINITY else one for one in resource.getrlimit(resource.RLIMIT_NOFILE))
    return soft, hard


def check_hub() -> Iterator[Finding]:
    """The Hugging Face cache, token and settings, and whether the Hub answers."""
    messages, outcome = run_probe("hub", seconds=HUB_SECONDS)
    facts = merged(messages)
    if "cache" not in facts:
        text = f"huggingface_hub {outcome.ended or 'said nothing'}: {outcome.last_words}"
        yield problem("hub", text, import_fix(text, ["huggingface_hub"]))
        return
    cache = Path(facts["cache"])
    if facts["offline"] and cache.is_dir() and not _is_writable(cache):  # as clusters share one
        yield ok("cache", f"{cache}: read only, which is enough offline")
    else:
        yield from _directory_findings("cache", cache, "export HF_HOME=DIRECTORY, one that you can write to")
    yield _hub_finding(facts)


def _hub_finding(facts: Mapping[str, Any]) -> Finding:
    """The Hub by what its client says; nothing here has the token itself."""
    source = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "hf auth login"
    token = f"token by {source}" if facts["token"] else "no token (gated models and flatpeak push need one)"
    set_variables = [name for name in OFFLINE_VARIABLES if os.environ.get(name)]
    if facts["offline"]:
        by = ", ".join(f"{name}={os.environ[name]}" for name in set_variables) or "HF_HUB_OFFLINE"
        text = f"offline by {by}: models and data come from the cache alone; {token}"
        return note("hub", text, f"unset {' '.join(set_variables) or 'HF_HUB_OFFLINE'}")
    unreachable = facts.get("unreachable", "its process ended first")
    if unreachable is not None:
        text = f"{unreachable}; models and data come from the cache alone; {token}"
        fix = "export HF_HUB_OFFLINE=1 spares the attempt at each load; HF_ENDPOINT=URL names a mirror"
        return note("hub", text, fix)
    offline = f"; {', '.join(set_variables)} set" if set_variables else ""
    return ok("hub", f"{facts['endpoint']} answers; {token}{offline}")


def _directory_findings(check: str, path: Path, fix: str, *, room: int = LITTLE_ROOM) -> Iterator[Finding]:
    """A directory that is written to, or would be made: whether it can be, and how much room there is."""
    nearest = _nearest(path)
    if not nearest.is_dir():
        yield problem(check, f"{path} cannot be made: {nearest} is no directory", fix)
        return
    if not _is_writable(path):
        yield problem(check, f"{path} cannot be written" + ("" if nearest == path else f" (nor {nearest})"), fix)
        return
    status = os.statvfs(nearest)
    free = status.f_bavail * status.f_frsize
    text = f"{path}: {gib(free)} free"
    if free < TOO_FULL or (status.f_files and not status.f_favail):
        files = ", no files either" if status.f_files and not status.f_favail else ""
        yield problem(check, f"{text}{files}: the disk is full", f"{fix}; df -h")
    elif free < room:
        yield note(check, f"{text}: little for checkpoints and models", f"{fix}; df -h")
    else:
        yield ok(check, text)


def _nearest(path: Path) -> Path:
    """The path itself, or the nearest one above it that exists."""
    return next((one for one in (path, *path.parents) if os.path.lexists(one)), Path("/"))


def _is_writable(path: Path) -> bool:
    nearest = _nearest(path)
    # Without writing: a file system that is read-only says so to root too.
    return nearest.is_dir() and os.access(nearest, os.R_OK | os.W_OK | os.X_OK)
