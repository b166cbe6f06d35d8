"""The policy's weights as files that servers load: a directory per version, whole or absent.

A version is a checksum of all weights away from the last one: whatever changes them (a step of any optimizer,
a restored checkpoint) makes a new version, and nothing else does.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from flatpeak.errors import UserError, brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flatpeak.protocols import ServedPolicy

WHOLE: Final = "flatpeak-model"
ADAPTER: Final = "flatpeak-adapter"
KEPT: Final = 2
"""Versions that stay on disk: the current one, and the one that a late server may still be reading."""


@dataclass(frozen=True, kw_only=True)
class WeightVersion:
    """One state of the weights, and where servers find it."""

    number: int
    """Counts the states that were published, from 1."""
    tag: str
    """The name that servers give it: unique among all runs, since a server may have served another."""
    path: Path
    adapter: bool
    """Whether it is an adapter beside the server's own weights rather than all weights."""


class WeightFiles:
    """Writes a version of the weights whenever they have changed."""

    def __init__(self, policy: ServedPolicy, directory: str | None, *, head: bool = False) -> None:
        """`directory` is shared with the servers; None: a temporary one on this machine.

        `head` writes a tied output layer by itself too.
        """
        self._policy = policy
        self._head = head
        self._run = secrets.token_hex(4)
        self._checksums: list[int] | None = None
        self._versions: list[WeightVersion] = []
        self._number = 0
        try:
            if directory is not None:
                Path(directory).expanduser().mkdir(parents=True, exist_ok=True)
            parent = None if directory is None else str(Path(directory).expanduser().absolute())
            self._directory = Path(tempfile.mkdtemp(prefix="flatpeak-weights-", dir=parent))
        except OSError as error:
            raise UserError(
                f"rollout.engine.directory={directory} cannot be written ({brief(error)}): name a directory that "
                "trainer and servers share"
            ) from error
        self._directory.chmod(0o755)  # a server may run as another user
        self._delete = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)

    def current(self) -> WeightVersion:
        """The version of the weights as they are now, written if it is new."""
        checksums = checksums_of(self._policy.saved_weights())
        if checksums != self._checksums:
            self._versions.append(self._write())
            self._checksums = checksums
            while len(self._versions) > KEPT:
                shutil.rmtree(self._versions.pop(0).path, ignore_errors=True)
        return self._versions[-1]

    def close(self) -> None:
        """Delete the files of all versions."""
        self._delete()

    def _write(self) -> WeightVersion:
        self._number += 1
        tag = f"{ADAPTER if self._policy.adapted else WHOLE}-{self._run}-{self._number:06d}"
        path, temporary = self._directory / tag, self._directory / f".tmp-{tag}"
        try:
            temporary.mkdir()
            self._policy.save_weights(temporary, head=self._head)
            temporary.rename(path)
        except Exception as error:  # not only OSError: safetensors reports a full disk as an error of its own
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"{path}: the weights cannot be written for the servers ({brief(error)}): free space, or set "
                "rollout.engine.directory to another directory that trainer and servers share"
            ) from error
        return WeightVersion(number=self._number, tag=tag, path=path, adapter=self._policy.adapted)


@torch.no_grad()
def checksums_of(parameters: Sequence[Tensor]) -> list[int]:
    """A 64-bit checksum of every tensor's bits, read from each device at once."""
    sums = [torch.hash_tensor(parameter).view(torch.int64) for parameter in parameters]
    by_device: dict[torch.device, list[Tensor]] = {}
    for checksum in sums:
        by_device.setdefault(checksum.device, []).append(checksum)
    return [value for group in by_device.values() for value in torch.stack(group).tolist()]
