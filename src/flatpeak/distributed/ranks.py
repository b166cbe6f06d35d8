"""The ranks of a run and their communication: values, errors, stop signals, averages of gradients.

All ranks run the same program on the same data, so a result that all ranks compute needs no message. Work for one rank
(grading, writing files) goes through `first`; work that the ranks divide goes through `gather`.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flatpeak.distributed.config import DistributedConfig
from flatpeak.distributed.launch import check_processes
from flatpeak.errors import LostRankError, ReportedElsewhereError, RunError, StoppedError, UserError
from flatpeak.runs.signals import REQUEST, StopSignals
from flatpeak.utils.buckets import in_buckets

Value = TypeVar("Value")
PATIENCE = timedelta(days=7)
"""Limit of a collective: a judge may be down for hours while the first rank waits. Dead ranks are detected earlier."""
PR_SET_PDEATHSIG = 1
"""prctl(2): sets the signal for a process whose parent dies."""
BUCKET = 2**24
"""The most numbers per collective when averaging."""
_BACKENDS_WORDS = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe|clients joined")
ALIKE_SECONDS = 5.0
"""Seconds within which all ranks must arrive at an error that they all raise."""
SAME_SIGNAL_SECONDS = 2.0
"""Signals within this many seconds count as one: a launcher repeats signals that the terminal has sent."""

PASSED_ON_SECONDS = 0.2
"""Seconds after which a signal to all ranks has reached every rank."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """All ranks of a run, from the view of one. With a single rank, every method is the identity."""

    rank: int = 0
    size: int = 1
    sent: dict[str, int] = field(default_factory=dict)
    """Bytes of tensors in this rank's collectives, by purpose."""
    session: str = ""
    """A name unique among the runs of this process group."""
    _known: list[BaseException] = field(default_factory=list)
    """Errors of this rank that the other ranks know."""

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files, grades and prints."""
        return self.rank == 0

    def gather(self, value: Value) -> list[Value]:
        """The values of all ranks, ordered by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with lost_ranks_named():
            dist.all_gather_object(values, value)
        return values

    def first(self, make: Callable[[], Value]) -> Value:
        """The value that the first rank makes; if that raises, all ranks raise."""
        if self.size == 1:
            return make()
        answer: list[Any] = [None, None]
        if self.is_first:
            try:
                answer[0] = make()
            except Exception as error:
                answer[1] = _as_reported(error, self.rank)
                self._known.append(error)
                self._broadcast(answer)
                raise
        self._broadcast(answer)
        if answer[1] is not None:
            raise answer[1]
        return cast(Value, answer[0])

    def _broadcast(self, answer: list[Any]) -> None:
        with lost_ranks_named():
            dist.broadcast_object_list(answer, src=0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """A context for work without communication; afterwards all ranks raise if one did."""
        if self.size == 1:
            yield
            return
        failed: Exception | None = None
        try:
            yield
        except Exception as error:
            failed = error
        errors = self.gather(None if failed is None else _as_reported(failed, self.rank))
        earliest = next(((rank, error) for rank, error in enumerate(errors) if error is not None), None)
        if earliest is None:
            return
        if failed is not None and earliest[0] == self.rank:
            self._known.append(failed)
            raise failed
        raise earliest[1]

    def stop_signals(self) -> StopSignals:
        """Stop signals on which all ranks agree."""
        return StopSignals() if self.size == 1 else SharedStopSignals(self)

    def knows(self, error: BaseException) -> bool:
        """Whether all ranks are about to end by this error, so that they still communicate."""
        causes = [error, error.__cause__]
        shared = isinstance(error, ReportedElsewhereError | StoppedError)
        return self.size == 1 or shared or any(cause is known for cause in causes for known in self._known)

    def raise_alike(self, error: BaseException) -> bool:
        """Whether all ranks are ending by the same flatpeak error, and can still write a checkpoint together.

        They ask the store of the process group, because a rank without the error would not answer a collective. Other
        errors may have occurred between two collectives that only some ranks have entered.
        """
        if self.size == 1 or not isinstance(error, UserError) or isinstance(error, LostRankError):
            return self.size == 1
        keys = [f"{self.session}/error/{rank}" for rank in range(self.size)]
        try:
            store = dist.distributed_c10d._get_default_store()
            store.set(keys[self.rank], f"{type(error).__name__}: {error}")
            try:
                store.wait(keys, timedelta(seconds=ALIKE_SECONDS))
                verdict = "alike" if len({store.get(key) for key in keys}) == 1 else "unlike"
            except RuntimeError:  # not all ranks in time
                verdict = "unlike"
            # The first verdict holds for all: if one rank gives up, later ranks must give up too.
            return bool(store.compare_set(f"{self.session}/verdict", "", verdict) == b"alike")
        except RuntimeError:  # the process with the store has ended
            return False

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace gradients by their mean over the ranks; a missing gradient counts as 0."""
        if self.size == 1:
            return
        held = list(parameters)
        if not held:
            return
        present = torch.tensor([parameter.grad is not None for parameter in held], device=held[0].device)
        self.sum(present := present.int(), purpose="flags")
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter, count in zip(held, present.tolist(), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter)
        for alike in by_dtype.values():
            for bucket in in_buckets(alike, Tensor.numel, most=BUCKET):
                self._average([cast(Tensor, parameter.grad) for parameter in bucket])

    def average(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors that all ranks have by their means over the ranks."""
        if self.size > 1:
            for bucket in in_buckets(tensors, Tensor.numel, most=BUCKET):
                self._average(bucket)

    def _average(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        self.sum(flat, purpose="gradients")
        flat /= self.size
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, mean in zip(gradients, parts, strict=True):
            gradient.copy_(mean.view_as(gradient))

    def sum(self, tensor: Tensor, *, purpose: str) -> None:
        """Replace a tensor by its sum over the ranks."""
        if self.size == 1:
            return
        self.sent[purpose] = self.sent.get(purpose, 0) + tensor.nbytes
        with lost_ranks_named():
            dist.all_reduce(tensor)


ALONE = Ranks()
"""The single process of a run without distributed training."""


def _as_reported(error: Exception, rank: int) -> Exception:
    """The error that the other ranks raise if one rank has this error."""
    if isinstance(error, StoppedError | LostRankError):
        return type(error)(str(error))
    return ReportedElsewhereError(
        f"rank {rank}: {type(error).__name__}: {error}",
        saves_nothing=isinstance(error, RunError) and error.saves_nothing,
    )


@contextmanager
def lost_ranks_named() -> Iterator[None]:
    """A context that raises LostRankError instead of a backend's error if another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if not _BACKENDS_WORDS.search(str(error)):
            raise
        raise LostRankError(f"another rank has ended ({str(error).strip().splitlines()[0]})") from error


class SharedStopSignals(StopSignals):
    """Stop signals on which all ranks agree at the end of a step, so that they stop at the same step.

    `received` is this rank's signal. After the death of a rank, a launcher sends SIGTERM to the others; they have
    nothing to wait for, so LostRankError is raised at once.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self.ranks = ranks
        self.received: int | None = None
        self._at = 0.0
        hosts = ranks.gather((socket.gethostname(), os.getpid()))
        self._neighbours = {
            rank: pid for rank, (host, pid) in enumerate(hosts) if host == socket.gethostname() and rank != ranks.rank
        }

    @property
    def asked(self) -> bool:
        """Whether a signal asks this rank to stop, possibly before the others know of it; not for a mere `request`."""
        return bool(self.received)

    def request(self) -> None:
        """Ask all ranks to stop at the next step boundary, without a signal."""
        if self.received is None:
            self.received = REQUEST

    def agree(self) -> None:
        """Make a signal that any rank has received the signal of all ranks."""
        by_rank = self._by_rank()
        if by_rank and len(by_rank) < self.ranks.size:
            time.sleep(PASSED_ON_SECONDS)
            by_rank = self._by_rank()
        if by_rank:
            self.signal = max(by_rank.values())
            self.rank = next(iter(by_rank)) if len(by_rank) == 1 else None

    def _by_rank(self) -> dict[int, int]:
        received = self.ranks.gather(self.received)
        return {rank: number for rank, number in enumerate(received) if number is not None}

    def _receive(self, number: int, frame: FrameType | None) -> None:
        dead = [rank for rank, pid in self._neighbours.items() if _is_dead(pid)]
        if dead:
            raise LostRankError(f"rank {dead[0]} has ended")
        now = time.monotonic()
        if self.received and now - self._at > SAME_SIGNAL_SECONDS:
            raise KeyboardInterrupt
        self.received, self._at = number, now
        self._interrupt()


def _is_dead(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:  # noqa: PTH123
        return file.read().rpartition(")")[2].split()[0] in ("Z", "X")
    return False


@contextmanager
def open_ranks(config: DistributedConfig) -> Iterator[Ranks]:
    """A context with the process group of a run; a single process needs none.

    If an error is raised inside, one rank raises it and prints it; the others raise ReportedElsewhereError.
    """
    check_processes(config)
    if config.processes == 1:
        yield ALONE
        return
    started = not dist.is_initialized()  # a caller who created the group also ends it
    if started:
        _start_group()
    ranks = Ranks(rank=dist.get_rank(), size=dist.get_world_size())
    ranks = replace(ranks, session=ranks.first(lambda: uuid.uuid4().hex))
    try:
        yield ranks
        with ranks.together():  # otherwise the first rank to leave disconnects the others
            pass
    except (ReportedElsewhereError, LostRankError):
        raise
    except Exception as error:
        if not ranks.knows(error) and not _is_first_to_report(ranks.session):
            raise ReportedElsewhereError(str(error)) from error
        raise
    if started:
        dist.destroy_process_group()


def _start_group() -> None:
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    backend = "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        backend = "cpu:gloo,cuda:nccl"
    stop_with_launcher()
    with lost_ranks_named():
        dist.init_process_group(backend, timeout=PATIENCE)


def stop_with_launcher() -> None:
    """Request SIGTERM for the death of the launcher: otherwise its ranks would keep training in the background."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def _is_first_to_report(session: str) -> bool:
    """Whether this rank is the first to report an error: several ranks may have the same error."""
    try:
        return bool(dist.distributed_c10d._get_default_store().add(f"{session}/reported", 1) == 1)
    except Exception:  # the process with the store has ended
        return True
