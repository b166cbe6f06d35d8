"""The directory of a run: its paths, its lock, and the rules for starting, resuming and replacing a run in it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import yaml

from flatpeak.errors import UserError, nearest
from flatpeak.runs.checkpoints import checkpoint_steps, remove_leftovers
from flatpeak.runs.config import RunSectionConfig
from flatpeak.runs.files import write_atomic
from flatpeak.runs.manifest import DIGESTS, DigestKind, check_resumable, describe_start, flatten, last_digests
from flatpeak.runs.metrics import STAGES, read_metrics, truncate_metrics
from flatpeak.runs.notices import truncate_notices
from flatpeak.runs.rollout_log import truncate_rollouts
from flatpeak.utils.redaction import HIDDEN, redact

_LONGEST_NAME = 255
"""Maximum length, in bytes, of a file name on common file systems."""
DEFAULT_DIRECTORY = Path("runs")
"""The directory of runs unless `run.directory` names another."""
_LOCK = ".lock"
RUN_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "notices.jsonl",
    "rollouts",
    "evaluations",
    "judge",
    "calls",
    "tracking",
    "checkpoints",
    "summary.json",
    "report.html",
    "errors.log",
    "manifest.json",
)
"""Files and folders of a run, in the order in which they are deleted."""


class RunLock:
    """An exclusive lock on a run, released by `release` or, however the process ends, by the kernel.

    The file is never deleted: otherwise two trainers could lock two different files of the same name.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises UserError that names the process holding it."""
        self.path = path
        self._file: IO[str] = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            error = _held_by_another(path, self._file)
            self._file.close()
            raise error from None
        _open_locks.add(self)
        self._file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname()}, self._file)
        self._file.flush()

    def release(self) -> None:
        """Release the lock; harmless when called twice."""
        if not self._file.closed:
            self._file.truncate(0)
            self._file.close()

    def close_in_child(self) -> None:
        """Close the file in a forked process, and leave its content and the parent's lock alone."""
        self._file.close()


def check_unlocked(path: Path) -> None:
    """Raise UserError, naming the process, if the lock is held; the lock is neither taken nor created."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            raise _held_by_another(path, file) from None


_open_locks: weakref.WeakSet[RunLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_open_locks):
        lock.close_in_child()


# A forked worker shares the locked file, and would keep the run locked if it outlived a killed trainer.
os.register_at_fork(after_in_child=_close_in_child)


def _held_by_another(path: Path, file: IO[str]) -> UserError:
    return UserError(f"{path.parent} is being written by {_holder(file)}: stop it first, or choose another run.name")


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        content = json.loads(file.read())
        return f"process {content['pid']} on {content['host']}"
    except (ValueError, KeyError, TypeError):
        # A process that has just taken the lock may not have written its name yet.
        return "another process"


class RunPaths:
    """The paths in a run's directory; reading needs no lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.manifest = path / "manifest.json"
        self.metrics = path / "metrics.jsonl"
        self.notices = path / "notices.jsonl"
        self.rollouts = path / "rollouts"
        self.calls = path / "calls"
        self.evaluations = path / "evaluations"
        self.checkpoints = path / "checkpoints"
        self.sft_checkpoints = self.checkpoints / "sft"
        self.summary = path / "summary.json"
        self.report = path / "report.html"
        self.errors = path / "errors.log"

    def is_run(self) -> bool:
        """Whether a run was started here: its manifest is the first file written and the last deleted."""
        try:
            return "flatpeak" in json.loads(self.manifest.read_text(encoding="utf-8"))["versions"]
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def failed_before_first_step(self) -> bool:
        """Whether the run failed before it finished its first step, so that it has nothing to keep or resume."""
        try:
            failed = json.loads(self.summary.read_text(encoding="utf-8"))["status"] == "failed"
        except (OSError, ValueError, KeyError, TypeError):
            return False
        trained = any(self.saved_steps) or any(row["stage"] in STAGES for row in read_metrics(self.metrics))
        return failed and not trained

    @property
    def saved_steps(self) -> tuple[int, ...]:
        """The steps of all checkpoints, first of RL and then of SFT."""
        return (*checkpoint_steps(self.checkpoints), *checkpoint_steps(self.sft_checkpoints))

    def log_error(self, text: str) -> bool:
        """Append a traceback to errors.log, with secrets redacted; return whether it could be written."""
        try:
            with self.errors.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')}\n{redact(text).rstrip()}\n\n")
        except OSError:
            return False
        return True


class RunDirectory(RunPaths):
    """A run's directory, locked by its trainer from `create` to `close` (or the end of a `with` block)."""

    def __init__(self, path: Path, lock: RunLock, *, resumed: bool) -> None:
        super().__init__(path)
        self._lock = lock
        self.resumed = resumed
        """Whether this start continues an earlier start of the run."""
        self.changed: dict[DigestKind, list[str]] = {}
        """The settings whose code or data has changed since the last start of this run."""

    @classmethod
    def create(
        cls,
        config: RunSectionConfig,
        resolved: Mapping[str, Any],
        *,
        resume: bool = False,
        overwrite: bool = False,
        command: Sequence[str] | None = None,
        before: Callable[[], None] = lambda: None,
        decoder: str | None = None,
        code: Mapping[str, str] | None = None,
        data: Mapping[str, str] | None = None,
    ) -> RunDirectory:
        """Take `config.directory/config.name` and write config.yaml and manifest.json.

        `resolved` is the whole recipe as plain data. A name in use is refused without `resume` or `overwrite`. With
        `resume`, a run that does not exist yet is started, so that the same command can be repeated until the run is
        done. A run that failed before it finished its first step is replaced. `before` is called after the lock is
        taken and before anything is deleted or written, so an error in it leaves an earlier run unchanged. `decoder`,
        `code` and `data` are for the manifest. Raises UserError in these cases, if another process is writing the run,
        and if the recipe has changed.
        """
        path = _run_path(config, resume=resume, overwrite=overwrite)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = RunLock(path / _LOCK)
        except OSError as error:
            raise UserError(
                f"{path} cannot be written ({error.strerror}): choose another run.directory or run.name"
            ) from error
        try:
            run = cls(path, lock, resumed=resume and RunPaths(path).is_run())
            replaced = _replaces(run, resume=resume, overwrite=overwrite)
            before()
            if replaced:
                run._clear()
            facts = describe_start(command, decoder=decoder, code=code, data=data)
            run._start(_as_existing_files(resolved), facts)
        except BaseException:
            lock.release()
            raise
        return run

    def _clear(self) -> None:
        """Delete the files of a run and nothing else. The manifest, which marks a run's directory, is deleted last."""
        for path in _existing_files(self.path):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _start(self, resolved: dict[str, Any], facts: Mapping[str, Any]) -> None:
        start = redact(facts)
        if self.resumed:
            changed = _check_recipe(self, resolved)
            manifest = json.loads(self.manifest.read_text(encoding="utf-8"))
            for kind in DIGESTS:
                before, now = last_digests(manifest, kind), start.get(kind, {})
                self.changed[kind] = [key for key in now if before.get(key, now[key]) != now[key]]
            if self.changed["code"]:  # it may answer otherwise
                shutil.rmtree(self.calls, ignore_errors=True)
            start |= {"changed": changed, "anew": not any(self.saved_steps)}
            manifest.setdefault("resumed", []).append(start)
            remove_leftovers(self.checkpoints)
            remove_leftovers(self.sft_checkpoints)
        else:
            manifest = start
        write_atomic(self.manifest, json.dumps(manifest, indent=1, ensure_ascii=False) + "\n")
        write_atomic(self.config, yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
        self.rollouts.mkdir(exist_ok=True)
        self.checkpoints.mkdir(exist_ok=True)

    def rewind(self, step: int | None, *, stage: str = "train", evaluated: bool = True) -> None:
        """Truncate the logs after `step` of `stage`, so that they equal those of an uninterrupted run.

        None empties the logs: the run starts over. Everything in a step, including its evaluation, is logged before its
        checkpoint is written. With `evaluated` false, the checkpoint was written before the evaluation, whose rows are
        removed too.
        """
        truncate_metrics(self.metrics, step=step, stage=stage, evaluated=evaluated)
        truncate_notices(self.notices, step=step, stage=stage)
        truncate_rollouts(self.rollouts, step=step if step is not None and stage == "train" else -1)

    def discard_if_empty(self) -> bool:
        """Delete a new run that failed before its first checkpoint, so that the same command works once the cause is
        fixed.

        Returns whether it was deleted.
        """
        kept = self.resumed or bool(self.saved_steps)
        if not kept:
            self._clear()
        return not kept

    def close(self) -> None:
        """Release the lock on the directory."""
        self._lock.release()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_start(config: RunSectionConfig, resolved: Mapping[str, Any], *, resume: bool, overwrite: bool) -> None:
    """Raise UserError if `RunDirectory.create` would refuse the start, whatever the model and the task.

    Nothing is written and torch is not loaded, so that a mistake is reported before they are loaded. `create` checks
    again, once it holds the lock.
    """
    check_no_secret_missing(resolved)
    path = _run_path(config, resume=resume, overwrite=overwrite)
    run = RunPaths(path)
    if not _existing_files(path):
        return
    with suppress(PermissionError):  # `create` reports it
        check_unlocked(path / _LOCK)
    _replaces(run, resume=resume, overwrite=overwrite)
    if resume:
        _check_recipe(run, _as_existing_files(resolved))


def check_no_secret_missing(resolved: Mapping[str, Any]) -> None:
    """Raise UserError if a recipe comes from a run, where secrets were removed from it."""
    for key, value in flatten(resolved).items():
        if isinstance(value, str) and (value == HIDDEN or _lacks_a_part(key, value)):
            raise UserError(
                f"{key} was left out of the run's config.yaml because it is a secret: give it again, {key}=..."
            )


def _lacks_a_part(key: str, value: str) -> bool:
    """Whether a secret was removed from an argument or an address; a prompt may contain `[redacted]` itself."""
    return (HIDDEN in value and ".arguments." in key) or f"://{HIDDEN}@" in value


def _check_recipe(run: RunPaths, resolved: Mapping[str, Any]) -> dict[str, str]:
    """The keys that a resumed run's recipe changes; UserError if they may not change or the old recipe cannot be read.

    A run whose config.yaml was deleted continues with any recipe.
    """
    if not run.config.exists():
        return {}
    try:
        content = yaml.safe_load(run.config.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError):
        content = None
    if not isinstance(content, Mapping):
        raise UserError(
            f"{run.config} is empty or damaged, so the recipe cannot be compared: restore it from a copy, or delete it "
            "to continue with the recipe you give"
        )
    return check_resumable(redact(content), resolved)


def _as_existing_files(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe as it is in config.yaml, without secrets."""
    recipe: dict[str, Any] = redact(json.loads(json.dumps(resolved)))
    return recipe


def _replaces(run: RunPaths, *, resume: bool, overwrite: bool) -> bool:
    """Whether the new run replaces an earlier run; UserError if it may not."""
    replaced = overwrite or (not resume and run.failed_before_first_step())
    if _existing_files(run.path) and not replaced and not resume:
        raise UserError(
            f"{run.path} exists: continue it with --resume, delete it with --overwrite, or choose another run.name"
        )
    return replaced


def _existing_files(path: Path) -> list[Path]:
    return [path / name for name in RUN_FILES if (path / name).exists()]


def _run_path(config: RunSectionConfig, *, resume: bool, overwrite: bool) -> Path:
    """The run's directory; UserError for an invalid name, contradictory options, or files that are not a run's."""
    if resume and overwrite:
        raise UserError("--resume continues a run and --overwrite deletes it: give only one of them")
    parts = Path(config.name).parts
    if not parts or Path(config.name).is_absolute() or ".." in parts:
        raise UserError(f"run.name={config.name!r} must be a name inside run.directory, such as my-run or sweep/01")
    longest = max(map(len, map(os.fsencode, parts)))
    if "\0" in config.name or longest > _LONGEST_NAME:
        raise UserError(f"run.name has a part of {longest} bytes, or a NUL: use up to {_LONGEST_NAME} bytes and no NUL")
    path = Path(config.directory) / config.name
    if _existing_files(path) and not RunPaths(path).is_run():
        raise UserError(f"{path} holds files that are not a run's: choose another run.name or run.directory")
    return path


def suggested_run(name: str | Path) -> Path | None:
    """The run `runs/NAME`, or else the run in the path's directory with the most similar name; None without either."""
    path = Path(name).expanduser()
    if not path.is_absolute() and path.parts and RunPaths(DEFAULT_DIRECTORY / path).is_run():
        return DEFAULT_DIRECTORY / path
    if len(path.parts) < 2:
        return None
    try:
        beside = [other.name for other in path.parent.iterdir() if RunPaths(other).is_run()]
    except OSError:
        return None
    close = nearest(path.name, beside)
    return path.parent / close[0] if close else None


def run_hint(name: str | Path, *, after: str = ": ") -> str:
    """The hint `: did you mean runs/x?`, or nothing without a similar run."""
    suggested = suggested_run(name)
    return "" if suggested is None else f"{after}did you mean {suggested}?"
