"""Versions of the policy's weights for servers: as files that they load, or as tensors that the trainer sends.

A changed checksum of the weights makes a new version, whatever has changed them (a step of any optimizer, a restored
checkpoint), and nothing else does.
"""

from __future__ import annotations

import secrets
import shutil
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import nn

from flatpeak.errors import UserError, brief
from flatpeak.utils.scratch import ScratchDirectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flatpeak.protocols import ServedPolicy

WHOLE: Final = "flatpeak-model"
ADAPTER: Final = "flatpeak-adapter"
COLUMNS: Final = 4096
"""Words per row of a checksum."""
KEPT: Final = 2
"""Versions on disk: the current one, and the previous one, which a late server may still be reading."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightVersion:
    """A state of the weights, and how servers get it."""

    number: int
    """The number of the published state, from 1."""
    tag: str
    """The servers' name of it, unique among all runs because a server may have worked for another."""
    adapter: bool
    """Whether it is an adapter for the server's weights instead of all weights."""
    path: Path | None = None
    """The directory that servers load; None if the trainer sends the weights."""
    weights: Sequence[tuple[str, Tensor]] = ()
    """The tensors to send, by their checkpoint names."""


class WeightStore(Protocol):
    """A store for new versions of the weights."""

    def publish(self, number: int, tag: str) -> WeightVersion:
        """Make the current weights a version, without the tensors to send; UserError if that fails."""
        ...

    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """The tensors to send, with their current values."""
        ...

    def close(self) -> None:
        """Delete all written files."""
        ...


class WeightVersions:
    """Publishes a version of the weights after every change."""

    def __init__(self, policy: ServedPolicy, store: WeightStore) -> None:
        self._policy = policy
        self._store = store
        self._run = secrets.token_hex(4)
        self._checksums: list[int] | None = None
        self._current: WeightVersion | None = None

    def current(self) -> WeightVersion:
        """The version of the current weights, published if it is new.

        Its tensors are listed for each call and not kept: for a sharded model they are a whole copy, freed afterwards.
        """
        checksums = checksums_of(self._policy.saved_weights())
        if self._current is None or checksums != self._checksums:
            number = 1 if self._current is None else self._current.number + 1
            kind = ADAPTER if self._policy.adapted else WHOLE
            self._current = self._store.publish(number, f"{kind}-{self._run}-{number:06d}")
            self._checksums = checksums
        return replace(self._current, weights=self._store.tensors())

    def close(self) -> None:
        """Delete the files of all versions."""
        self._store.close()


class WeightFiles:
    """A store of files: a directory per version, complete or absent."""

    def __init__(self, policy: ServedPolicy, directory: str | None, *, head: bool = False) -> None:
        """`directory` is shared with the servers; None: a temporary directory on this machine.

        `head` also writes a tied output layer separately.
        """
        self._policy = policy
        self._head = head
        self._versions: list[Path] = []
        try:
            parent = None if directory is None else Path(directory).expanduser().absolute()
            if parent is not None:
                parent.mkdir(parents=True, exist_ok=True)
            self._scratch = ScratchDirectory("weights", parent)
        except OSError as error:
            raise UserError(
                f"you cannot write to rollout.engine.directory={directory} ({brief(error)}): set a directory that "
                "trainer and servers share"
            ) from error
        self._directory = self._scratch.path
        self._directory.chmod(0o755)  # servers may run as another user

    def publish(self, number: int, tag: str) -> WeightVersion:
        """Write the version, and delete all versions before the previous one."""
        path, temporary = self._directory / tag, self._directory / f".tmp-{tag}"
        try:
            temporary.mkdir()
            self._policy.save_weights(temporary, head=self._head)
            temporary.rename(path)
        except Exception as error:  # not only OSError: safetensors has its own error for a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"{path}: cannot write the weights for the servers ({brief(error)}): free space, or set "
                "rollout.engine.directory to another directory that trainer and servers share"
            ) from error
        self._versions.append(path)
        while len(self._versions) > KEPT:
            shutil.rmtree(self._versions.pop(0), ignore_errors=True)
        return WeightVersion(number=number, tag=tag, adapter=self._policy.adapted, path=path)

    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """No tensors, because servers load the files."""
        return ()

    def close(self) -> None:
        """Delete the files of all versions."""
        self._scratch.close()


class WeightTensors:
    """A store without files: the policy's tensors, sent while they have the published values."""

    def __init__(self, policy: ServedPolicy, *, head: bool = False) -> None:
        """`head` also sends a tied output layer separately."""
        self._policy = policy
        self._head = head

    def publish(self, number: int, tag: str) -> WeightVersion:
        """Name the version; nothing is written."""
        return WeightVersion(number=number, tag=tag, adapter=False)

    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """The policy's tensors under their names."""
        return self._policy.named_weights(head=self._head)

    def close(self) -> None:
        """Do nothing, since no files were written."""


def frozen(version: WeightVersion) -> WeightVersion:
    """The version with copies of its tensors in host memory, which updates of the policy do not change."""
    return replace(version, weights=[(name, weight.to("cpu", copy=True)) for name, weight in version.weights])


@torch.no_grad()
def checksums_of(parameters: Sequence[Tensor]) -> list[int]:
    """A 64-bit checksum of each tensor's bits, read from each device at once."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        by_device.setdefault(parameter.device, []).append(_checksum(parameter))
    return [value for group in by_device.values() for value in torch.stack(group).tolist()]


def _checksum(weight: Tensor) -> Tensor:
    """sum_ij (2 i + 1) m_j w_ij modulo 2^64, over the bits as rows i of COLUMNS 64-bit words w_ij; int64, a scalar.

    All factors are odd, so any change of one word shows, and different, so that equal changes do not cancel.
    """
    bits = weight.detach().contiguous().reshape(-1).view(torch.uint8)
    if bits.storage_offset() % 8:
        bits = bits.clone()
    whole = bits.numel() // (8 * COLUMNS) * 8 * COLUMNS
    rest = nn.functional.pad(bits[whole:], (0, whole + 8 * COLUMNS - bits.numel()))
    factors = _factors(weight.device)
    sums = [_weighted_sums(rows.view(torch.int64).view(-1, COLUMNS), factors) for rows in (bits[:whole], rest)]
    sums_R = torch.cat(sums)
    return (sums_R * torch.arange(1, 2 * len(sums_R), 2, device=weight.device)).sum()


def _weighted_sums(words_RC: Tensor, factors_C: Tensor) -> Tensor:
    """The product of a matrix and a vector of int64, which torch supports only on CPUs."""
    if words_RC.device.type == "cpu":
        return torch.mv(words_RC, factors_C)
    return torch.cat([(block * factors_C).sum(1) for block in words_RC.split(COLUMNS)])


@cache
def _factors(device: torch.device) -> Tensor:
    random = torch.randint(-(2**62), 2**62, (COLUMNS,), generator=torch.Generator().manual_seed(0))
    return (2 * random + 1).to(device)
