"""Processes that share a gloo process group and run one function after another, started once for many tests."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

WORLD = 2
COLLECTIVE_SECONDS = 120
"""Seconds that a rank waits for another in a collective before gloo raises."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


class RankError(AssertionError):
    """A job raised on some rank, or did not come back in time; the message holds the ranks' tracebacks."""


class Ranks:
    """Runs a module-level function on every rank: `ranks(function, *args)` gives their results, rank 0 first.

    Spawned, never forked: a fork of a process in which OpenMP has started threads may hang. A job that raises or hangs
    ends the processes, and the next job starts new ones, so that no test sees what another left behind.
    """

    def __init__(self, world: int = WORLD) -> None:
        self.world = world
        self.workers: list[tuple[SpawnProcess, Connection]] = []
        self.folder = Path()

    def __call__(self, job: Callable[..., Any], *args: Any, timeout: float = 240.0, **settings: Any) -> list[Any]:
        if not self.workers:
            self._start()
        for _, pipe in self.workers:
            pipe.send_bytes(pickle.dumps((job, args, settings)))
        try:
            answers = self._wait(time.monotonic() + timeout)
        except BaseException:
            self.close()
            raise
        failed = "\n".join(f"rank {rank}:\n{text}" for rank, (done, text) in enumerate(answers) if not done)
        if failed:
            self.close()
            raise RankError(failed)
        return [result for _, result in answers]

    def close(self) -> None:
        """End the processes of all ranks."""
        for process, pipe in self.workers:
            process.kill()
            process.join()
            pipe.close()
        if self.workers:
            shutil.rmtree(self.folder)
        self.workers = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        for rank in range(self.world):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.world, str(self.folder / "store"), there), daemon=True
            )
            process.start()
            there.close()
            self.workers.append((process, here))

    def _wait(self, deadline: float) -> list[tuple[bool, Any]]:
        """Collect every rank's answer, also after an error: the error of one is often why another waits."""
        answers: list[tuple[bool, Any]] = []
        for process, pipe in self.workers:
            try:
                came = pipe.poll(max(0.0, deadline - time.monotonic()))
                answers.append(pickle.loads(pipe.recv_bytes()) if came else (False, "did not come back in time"))
            except EOFError:
                process.join()
                answers.append((False, f"died with exit code {process.exitcode}"))
        return answers


def _serve(rank: int, world: int, store: str, pipe: Connection) -> None:
    """One rank's life: join the group, then answer every job with (whether it went well, its result or traceback)."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    while True:
        try:
            job, args, settings = pickle.loads(pipe.recv_bytes())
        except EOFError:  # the tests are over, however they ended
            return
        try:
            answer: tuple[bool, Any] = (True, job(*args, **settings))
        except Exception:
            answer = (False, traceback.format_exc())
        # Plain bytes: a tensor sent through a pipe would live in shared memory that ends with this process.
        pipe.send_bytes(pickle.dumps(answer))
