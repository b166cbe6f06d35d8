"""Checkpoints that are complete or absent: written to a temporary directory, synced, listed with checksums, then
renamed.

```
checkpoints/step_000050/  the model in Hugging Face format  flatpeak.json  manifest.json
                          trainer/state.safetensors  trainer/state.json
            best -> step_000050   last -> step_000050
```

The trainer's state is in a separate folder because vLLM, SGLang and others load every `*.safetensors` file next to
config.json as weights.

The order of the writes makes them safe against a kill or a power cut at any point: every file is on disk before the
manifest, the manifest before the rename, and the rename before older checkpoints are pruned. No file is a pickle:
tensors are safetensors, and everything else is JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatpeak.errors import RunError, UserError
from flatpeak.runs.files import fsync_path
from flatpeak.runs.notices import warn
from flatpeak.utils.huggingface import share_weights

if TYPE_CHECKING:
    from torch import Tensor

    from flatpeak.protocols import SavesModel

JSON = Any
"""A JSON value: a string, number, boolean or None, or a list or string-keyed dictionary of JSON values."""
MANIFEST = "manifest.json"
BEST = "best"
LAST = "last"
TRAINER = "trainer"
"""The subfolder with the trainer's state."""
_TENSORS = f"{TRAINER}/state.safetensors"
_STATE = f"{TRAINER}/state.json"
TRAINING_FILES = (TRAINER, MANIFEST)
"""Everything in a checkpoint that does not belong to the model."""
_NAME = re.compile(r"step_(\d{6,})")
_TEMPORARY = ".tmp-"
_REPLACED = ".replaced-"


class CheckpointError(RunError):
    """A checkpoint could not be written; existing checkpoints are unchanged."""

    saves_nothing = True


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """The complete state of a trainer, read from a checkpoint."""

    tensors: dict[str, Tensor]
    """The trainer's tensors (optimizer moments, generator states), on the CPU, bit for bit as saved."""
    state: dict[str, JSON]
    """The trainer's state other than tensors."""
    step: int
    path: Path
    """The checkpoint's directory, which `from_pretrained` loads."""

    def free_tensors(self) -> None:
        """Free the memory of the tensors, once they are loaded."""
        self.tensors.clear()


def write_checkpoint(
    parent: Path,
    step: int,
    *,
    save_model: SavesModel,
    tensors: Mapping[str, Tensor],
    state: Mapping[str, JSON],
    texts: Mapping[str, str] | None = None,
    model_bytes: int = 0,
) -> Path:
    """Write `parent/step_000050`, replacing one of the same step, and return its path.

    `texts` are the contents of additional files, by name; `model_bytes` is the size of the model's weights. Raises
    CheckpointError if it cannot be written, for example because the disk is full; no files remain in that case.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    final = parent / checkpoint_name(step)
    temporary = parent / f"{_TEMPORARY}{final.name}"
    try:
        needed, free = model_bytes + sum(tensor.nbytes for tensor in tensors.values()), shutil.disk_usage(parent).free
        if needed > free:
            raise OSError(f"it needs {needed:,} bytes, and {free:,} are free")
        temporary.mkdir()
        _write_files(temporary, save_model=save_model, tensors=tensors, state=state)
        share_weights(temporary)
        for name, text in (texts or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")
        write_manifest(temporary, step=step)
        _rename_into_place(temporary, final)
    except Exception as error:
        # Not only OSError: safetensors reports a full disk as its own exception type.
        remove_leftovers(parent)
        raise CheckpointError(
            f"{final}: not written ({error}); free space or fix the cause, then resume: earlier checkpoints are intact"
        ) from error
    except BaseException:
        remove_leftovers(parent)
        raise
    return final


def _write_files(
    directory: Path, *, save_model: SavesModel, tensors: Mapping[str, Tensor], state: Mapping[str, JSON]
) -> None:
    from safetensors.torch import save_file

    save_model(directory)
    (directory / TRAINER).mkdir()
    save_file(_separate(tensors), directory / _TENSORS)
    (directory / _STATE).write_text(json.dumps(state, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy the tensors to the CPU without shared memory: safetensors refuses tables that bitsandbytes' states share."""
    separate: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        held = tensor.detach().cpu().contiguous()
        place = held.untyped_storage().data_ptr()
        separate[name] = held.clone() if place in seen else held
        seen.add(place)
    return separate


def _rename_into_place(temporary: Path, final: Path) -> None:
    """Rename; no call replaces one directory by another, so an existing checkpoint of the step is renamed first."""
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    fsync_path(final.parent)
    _remove(replaced)


def is_checkpoint(path: Path) -> bool:
    """Whether `write_checkpoint` wrote a directory; false for models saved in other ways."""
    return any((path / name).exists() for name in (_TENSORS, _STATE))


def verify_checkpoint(path: Path) -> None:
    """Raise UserError if a checkpoint is not as it was written; other directories pass."""
    broken = broken_file(path) if is_checkpoint(path) else None
    if broken is not None:
        raise UserError(f"{path / broken.name}: {broken.problem}; use another checkpoint of the run")


def read_checkpoint(path: Path) -> CheckpointState:
    """Verify every checksum and read the trainer's state. Raises UserError that names the damaged file."""
    broken = broken_file(path)
    if broken is not None:
        raise UserError(f"{path / broken.name}: {broken.problem}; use another checkpoint of the run")
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path / _TENSORS)
        state = json.loads((path / _STATE).read_text(encoding="utf-8"))
    except (SafetensorError, ValueError, OSError) as error:
        raise UserError(f"{path}: not a trainer's checkpoint ({error}); use another checkpoint of the run") from error
    return CheckpointState(tensors=tensors, state=state, step=read_manifest(path)["step"], path=path)


def newest_valid(parent: Path, *, notice: Callable[[str], None] = warn) -> Path | None:
    """The latest checkpoint whose checksums are all correct; None if there are no checkpoints.

    Gives a notice of each one it skips. Raises UserError if all are damaged, because starting over would delete them.
    """
    skipped: list[str] = []
    for step in reversed(checkpoint_steps(parent)):
        path = parent / checkpoint_name(step)
        broken = broken_file(path)
        if broken is None:
            for problem in skipped:
                notice(f"{problem}; an older checkpoint is used")
            return path
        skipped.append(f"{path / broken.name}: {broken.problem}")
    if skipped:
        raise UserError(
            f"no checkpoint of the run is intact ({'; '.join(skipped)}): restore one from a copy, or start over with "
            "--overwrite"
        )
    return None


def checkpoint_name(step: int) -> str:
    """The directory name of a step's checkpoint, such as `step_000050`."""
    return f"step_{step:06d}"


def checkpoint_steps(parent: Path) -> list[int]:
    """The steps that have a checkpoint, in order; empty if the directory does not exist."""
    if not parent.is_dir():
        return []
    return sorted(
        int(match[1])
        for path in parent.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    )


def link_checkpoint(parent: Path, name: str, target: Path) -> None:
    """Make `parent/name` a relative symbolic link to the checkpoint `target`, atomically."""
    temporary = parent / f"{_TEMPORARY}{name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    link = parent / name
    if link.is_dir() and not link.is_symlink():  # a copy of the run that replaced links with their targets
        _remove(link)
    temporary.replace(link)
    fsync_path(parent)


def prune(parent: Path, *, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints, and never step 0, `best` and `last`; return those deleted."""
    protected = {checkpoint_name(0)} | {(parent / name).resolve().name for name in (BEST, LAST)}
    periodic = [name for step in checkpoint_steps(parent) if (name := checkpoint_name(step)) not in protected]
    deleted = [parent / name for name in periodic[: max(0, len(periodic) - keep)]]
    for path in deleted:
        # Rename first, so that a partly deleted directory never has a checkpoint's name.
        doomed = path.with_name(f"{_TEMPORARY}{path.name}")
        path.rename(doomed)
        _remove(doomed)
    return deleted


def remove_leftovers(parent: Path) -> None:
    """Delete what a killed process left. Only for the trainer that holds the run's lock."""
    if not parent.is_dir():
        return
    for path in parent.glob(f"{_REPLACED}*"):
        final = path.with_name(path.name.removeprefix(_REPLACED))
        if final.exists():
            _remove(path)
        else:
            path.rename(final)
    for path in parent.glob(f"{_TEMPORARY}*"):
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenFile:
    """The first file of a checkpoint that differs from the manifest."""

    name: str
    """Path relative to the directory."""
    problem: str


def write_manifest(directory: Path, *, step: int) -> None:
    """Sync every file, write the manifest with their checksums, and sync it and the directories. Call this last."""
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
    """The first file that is missing, truncated or changed since the manifest was written; None if all are intact."""
    try:
        manifest = read_manifest(directory)
    except FileNotFoundError:
        return BrokenFile(name=MANIFEST, problem="missing, so the checkpoint was never finished")
    except (ValueError, KeyError, TypeError, OSError):
        return BrokenFile(name=MANIFEST, problem="damaged")
    for name, written in manifest["files"].items():
        problem = _problem(directory / name, size=written["bytes"], sha256=written["sha256"])
        if problem is not None:
            return BrokenFile(name=name, problem=problem)
    return None


def _problem(path: Path, *, size: int, sha256: str) -> str | None:
    try:
        actual = path.stat().st_size
        if actual != size:
            return f"has {actual} bytes instead of the {size} that were written"
        return None if _sha256(path) == sha256 else "damaged: its SHA-256 differs from the recorded one"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest, `{"step": ..., "files": {name: {"bytes": ..., "sha256": ...}}}`; ValueError if it was changed."""
    text = (directory / MANIFEST).read_text(encoding="utf-8")
    content: dict[str, Any] = json.loads(text)
    del content["sha256"]
    # Rendering it again also checks bytes that parsing ignores.
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
