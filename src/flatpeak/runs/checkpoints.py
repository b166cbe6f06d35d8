"""Checkpoints that are whole or absent: written aside, synced, listed with checksums, then renamed into place.

```
checkpoints/step_000050/  the model in Hugging Face format  flatpeak.json  manifest.json
                          trainer/state.safetensors  trainer/state.json
            best -> step_000050   last -> step_000050
```

The trainer's state has a folder of its own because vLLM, SGLang and others load every `*.safetensors` file beside
config.json as weights.

The order of a write is what makes it safe against a kill or a power cut at any point: every file is on disk before the
manifest, the manifest before the rename, and the rename before the older checkpoints are pruned. There is no pickle:
tensors are safetensors, everything else is JSON.
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
"""A JSON value: text, numbers, booleans, None, and lists and text-keyed dictionaries of them."""
MANIFEST = "manifest.json"
BEST = "best"
LAST = "last"
TRAINER = "trainer"
"""The subfolder of the trainer's own state."""
_TENSORS = f"{TRAINER}/state.safetensors"
_STATE = f"{TRAINER}/state.json"
TRAINING_FILES = (TRAINER, MANIFEST)
"""Everything in a checkpoint that is no part of its model."""
_NAME = re.compile(r"step_(\d{6,})")
_TEMPORARY = ".tmp-"
_REPLACED = ".replaced-"


class CheckpointError(RunError):
    """The failure to write a checkpoint; those already there are untouched."""

    saves_nothing = True


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointState:
    """The whole state of a trainer, read from a checkpoint."""

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
) -> Path:
    """Write `parent/step_000050`, replacing one of the same step, and return its path.

    `texts` are the contents of further files beside the model's, by their names.
    Raises CheckpointError where it cannot be written (a full disk, say); nothing is left behind then.
    """
    parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(parent)
    final = parent / checkpoint_name(step)
    temporary = parent / f"{_TEMPORARY}{final.name}"
    temporary.mkdir()
    try:
        _write_files(temporary, save_model=save_model, tensors=tensors, state=state)
        share_weights(temporary)
        for name, text in (texts or {}).items():
            (temporary / name).write_text(text, encoding="utf-8")
        write_manifest(temporary, step=step)
        _rename_into_place(temporary, final)
    except Exception as error:
        # Not only OSError: safetensors reports a full disk as an error of its own.
        remove_leftovers(parent)
        raise CheckpointError(
            f"{final}: not written ({error}); free space or fix the cause, then resume: earlier checkpoints are whole"
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
    """The tensors on the CPU, each in memory of its own: safetensors refuses tables that bitsandbytes' states share."""
    separate: dict[str, Tensor] = {}
    seen = set()
    for name, tensor in tensors.items():
        held = tensor.detach().cpu().contiguous()
        place = held.untyped_storage().data_ptr()
        separate[name] = held.clone() if place in seen else held
        seen.add(place)
    return separate


def _rename_into_place(temporary: Path, final: Path) -> None:
    """Rename; a directory cannot replace another in one call, so an older one of the same step is renamed first."""
    replaced = final.with_name(f"{_REPLACED}{final.name}")
    if final.exists():
        final.rename(replaced)
    temporary.rename(final)
    fsync_path(final.parent)
    _remove(replaced)


def is_checkpoint(path: Path) -> bool:
    """Whether a directory was written by `write_checkpoint`; a model saved by other means is none."""
    return any((path / name).exists() for name in (_TENSORS, _STATE))


def verify_checkpoint(path: Path) -> None:
    """Raise UserError where a checkpoint is not as it was written; any other directory passes."""
    broken = broken_file(path) if is_checkpoint(path) else None
    if broken is not None:
        raise UserError(f"{path / broken.name}: {broken.problem}; use another checkpoint of the run")


def read_checkpoint(path: Path) -> CheckpointState:
    """Verify every checksum and read the trainer's state. Raises UserError naming the file that is broken."""
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
    """The checkpoint of the latest step whose checksums all hold; None where there are no checkpoints.

    A notice is given of each that is skipped. Raises UserError where none is whole: to start anew would delete what
    there is.
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
            f"no checkpoint of the run is whole ({'; '.join(skipped)}): put one back from a copy, or start anew with "
            "--overwrite"
        )
    return None


def checkpoint_name(step: int) -> str:
    """The directory name of a step's checkpoint, such as `step_000050`."""
    return f"step_{step:06d}"


def checkpoint_steps(parent: Path) -> list[int]:
    """The steps that have a checkpoint, in order; none where there is no such directory."""
    if not parent.is_dir():
        return []
    return sorted(
        int(match[1])
        for path in parent.iterdir()
        if (match := _NAME.fullmatch(path.name)) and path.is_dir() and not path.is_symlink()
    )


def link_checkpoint(parent: Path, name: str, target: Path) -> None:
    """Make `parent/name` a relative symbolic link to the checkpoint `target`; a reader sees the old one or the new."""
    temporary = parent / f"{_TEMPORARY}{name}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    link = parent / name
    if link.is_dir() and not link.is_symlink():  # in a copy of the run that has followed its links
        _remove(link)
    temporary.replace(link)
    fsync_path(parent)


def prune(parent: Path, *, keep: int) -> list[Path]:
    """Delete all but the newest `keep` checkpoints, never step 0, `best` and `last`; returns the deleted."""
    protected = {checkpoint_name(0)} | {(parent / name).resolve().name for name in (BEST, LAST)}
    periodic = [name for step in checkpoint_steps(parent) if (name := checkpoint_name(step)) not in protected]
    deleted = [parent / name for name in periodic[: max(0, len(periodic) - keep)]]
    for path in deleted:
        # Renamed first: a directory half deleted never goes by a checkpoint's name.
        doomed = path.with_name(f"{_TEMPORARY}{path.name}")
        path.rename(doomed)
        _remove(doomed)
    return deleted


def remove_leftovers(parent: Path) -> None:
    """Clear away the leftovers of a killed process. Only for the trainer that holds the run's lock."""
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
    """Sync every file, write the manifest with their checksums, and sync it and the directories: nothing may follow."""
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
    """The first file that is missing, cut or changed since the manifest was written; None if all is well."""
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
            return f"has {actual} bytes, was written with {size}"
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
