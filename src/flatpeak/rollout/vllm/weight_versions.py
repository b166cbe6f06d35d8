"""The policy's weights as versions that servers get: as files that they load, or as tensors that are sent to them.

A version is a checksum of all weights away from the last one: whatever changes them (a step of any optimizer,
a restored checkpoint) makes a new version, and nothing else does.
"""

from __future__ import annotations

import secrets
import shutil
import tempfile
import weakref
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

import torch
from torch import nn

from flatpeak.errors import UserError, brief

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from flatpeak.protocols import ServedPolicy

WHOLE: Final = "flatpeak-model"
ADAPTER: Final = "flatpeak-adapter"
COLUMNS: Final = 4096
"""Words in a row of a checksum."""
KEPT: Final = 2
"""Versions that stay on disk: the current one, and the one that a late server may still be reading."""


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightVersion:
    """One state of the weights, and where servers get it from."""

    number: int
    """Counts the states that were published, from 1."""
    tag: str
    """The name that servers give it: unique among all runs, since a server may have served another."""
    adapter: bool
    """Whether it is an adapter beside the server's own weights rather than all weights."""
    path: Path | None = None
    """The directory that servers load; None where the weights are sent to them."""
    weights: Sequence[tuple[str, Tensor]] = ()
    """The tensors that are sent, under the names of a checkpoint."""


class WeightStore(Protocol):
    """A place for new versions of the weights."""

    def publish(self, number: int, tag: str) -> WeightVersion:
        """Make the weights of now a version, without the tensors that are sent; UserError where that fails."""
        ...

    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """The tensors that are sent, as they are now."""
        ...

    def close(self) -> None:
        """Delete what was written."""
        ...


class WeightVersions:
    """Publishes a version of the weights whenever they have changed."""

    def __init__(self, policy: ServedPolicy, store: WeightStore) -> None:
        self._policy = policy
        self._store = store
        self._run = secrets.token_hex(4)
        self._checksums: list[int] | None = None
        self._current: WeightVersion | None = None

    def current(self) -> WeightVersion:
        """The version of the weights as they are now, published if it is new.

        Its tensors are listed for each call and not kept: those of a sharded model are a whole copy, freed after it.
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
    """A store of files: a directory per version, whole or absent."""

    def __init__(self, policy: ServedPolicy, directory: str | None, *, head: bool = False) -> None:
        """`directory` is shared with the servers; None: a temporary one on this machine.

        `head` writes a tied output layer by itself too.
        """
        self._policy = policy
        self._head = head
        self._versions: list[Path] = []
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

    def publish(self, number: int, tag: str) -> WeightVersion:
        """Write the version, and delete those before the last."""
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
        self._versions.append(path)
        while len(self._versions) > KEPT:
            shutil.rmtree(self._versions.pop(0), ignore_errors=True)
        return WeightVersion(number=number, tag=tag, adapter=self._policy.adapted, path=path)

    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """No tensors: servers load the files."""
        return ()

    def close(self) -> None:
        """Delete the files of all versions."""
        self._delete()


class WeightTensors:
    """A store without files: the policy's own tensors, to be sent while they are as they were published."""

    def __init__(self, policy: ServedPolicy, *, head: bool = False) -> None:
        """`head` sends a tied output layer by itself too."""
        self._policy = policy
        self._head = head

    def publish(self, number: int, tag: str) -> WeightVersion:
        """Give the version its name; nothing is written."""
        return WeightVersion(number=number, tag=tag, adapter=False)

    def tensors(self) -> Sequence[tuple[str, Tensor]]:
        """The policy's tensors under their names."""
        return self._policy.named_weights(head=self._head)

    def close(self) -> None:
        """Return at once: nothing was written."""


def frozen(version: WeightVersion) -> WeightVersion:
    """The version with copies of its tensors in host memory, which stay as they are while the policy is updated."""
    return replace(version, weights=[(name, weight.to("cpu", copy=True)) for name, weight in version.weights])


@torch.no_grad()
def checksums_of(parameters: Sequence[Tensor]) -> list[int]:
    """A 64-bit checksum of every tensor's bits, read from each device at once."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for parameter in parameters:
        by_device.setdefault(parameter.device, []).append(_checksum(parameter))
    return [value for group in by_device.values() for value in torch.stack(group).tolist()]


def _checksum(weight: Tensor) -> Tensor:
    """sum_ij (2 i + 1) m_j w_ij modulo 2^64, over the bits as rows i of COLUMNS 64-bit words w_ij; int64, a scalar.

    All factors are odd, so that a change of one word always shows, and unlike, so that equal changes do not cancel.
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
    """The product of a matrix and a vector of int64, which torch has on CPUs alone."""
    if words_RC.device.type == "cpu":
        return torch.mv(words_RC, factors_C)
    return torch.cat([(block * factors_C).sum(1) for block in words_RC.split(COLUMNS)])


@cache
def _factors(device: torch.device) -> Tensor:
    random = torch.randint(-(2**62), 2**62, (COLUMNS,), generator=torch.Generator().manual_seed(0))
    return (2 * random + 1).to(device)
