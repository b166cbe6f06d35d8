"""Starts the processes of a run with torchrun's launcher, with one message if a process fails.

torch is imported only to start processes, so a bad recipe fails earlier.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from flatpeak.errors import UserError
from flatpeak.utils.scratch import ScratchDirectory

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from flatpeak.distributed.config import DistributedConfig

STOP_SECONDS = 600
"""Seconds after a signal for the last step and checkpoint, before the processes are killed."""
LOST_RANK_CODE = 3
"""Exit code of a process that ends because another process has ended."""


def job_rank() -> int:
    """The rank of this process if torchrun started it, else 0."""
    return int(os.environ["RANK"]) if job_size() else 0


def job_size() -> int:
    """The number of processes that torchrun started on all nodes; 0 without torchrun."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return int(os.environ["WORLD_SIZE"]) if all(os.environ.get(name) for name in names) else 0


def is_repeated() -> bool:
    """Whether this rank is not the first and all ranks have the same error, before any message between them."""
    distributed = sys.modules.get("torch.distributed")
    return job_rank() > 0 and (distributed is None or not distributed.is_initialized())


def check_processes(config: DistributedConfig) -> None:
    """UserError if the recipe's number of processes differs from the actual number."""
    wanted, started = config.processes, job_size()
    if started > 1 and wanted != started:
        raise UserError(
            f"torchrun has started {started} processes but the recipe has distributed.processes={wanted}: write "
            f"`distributed: {{processes: {started}, strategy: ddp}}` into it, or add distributed.processes={started} "
            "to the command"
        )
    if wanted > 1 and started != wanted:
        raise UserError(
            f"distributed.processes={wanted}, but this is one process: start it with `flatpeak train RECIPE`, or start "
            f"your script with torchrun --nproc-per-node {wanted} SCRIPT"
        )


def check_alone(config: DistributedConfig, what: str) -> None:
    """UserError if several processes are requested or running for training that supports only one."""
    if config.processes > 1:
        raise UserError(f"{what} are trained in one process: set distributed.processes=1")
    if job_size() > 1:
        raise UserError(
            f"{what} are trained in one process, but torchrun has started {job_size()}: do not use torchrun"
        )


def needs_launch(config: DistributedConfig) -> bool:
    """Whether a command must start the recipe's processes; UserError if other processes are already running."""
    if config.processes > 1 and not job_size():
        return True
    check_processes(config)
    return False


def launch(
    arguments: Sequence[str], config: DistributedConfig, *, say: Callable[[str], None], command: Sequence[str] = ()
) -> int:
    """Run `flatpeak ARGUMENTS` in the recipe's number of processes on this node; return the exit code of the run.

    `say` gets one message if a process ended without printing one. `command` replaces `-m flatpeak` after the
    interpreter.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    logging.disable(logging.CRITICAL)  # the launcher's failure reports would fill a screen
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    given = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}", "--no-python"]
    given += ["--local-addr=127.0.0.1", f"--nproc-per-node={config.processes}"]
    with closing(ScratchDirectory("launch")) as logs:  # torchrun would leave one of its own
        launcher, _, _ = config_from_args(parse_args([*given, f"--log-dir={logs.path}", sys.executable]))
        launcher.shutdown_timeout = STOP_SECONDS
        launcher.signals_to_handle += ",SIGUSR1"  # a batch system's warning, which would end the launcher alone
        try:
            elastic_launch(launcher, sys.executable)(*(command or ("-m", "flatpeak")), *arguments)
        except ChildFailedError as error:
            return _end(error.failures.items(), say)
        except SignalException as error:
            return 128 + int(error.sigval)
    return 0


def _end(failures: Iterable[tuple[int, ProcessFailure]], say: Callable[[str], None]) -> int:
    """The exit code of a failed run; print a message if the rank that failed first could not."""
    rank, failure = min(_seen_first(failures), key=lambda failure: _blame(failure[1].exitcode))
    code: int = failure.exitcode
    if code < 0:
        name = signal.Signals(-code).name
        say(
            f"rank {rank} (process {failure.pid}) was ended by {name}, which ended the run: continue from its last "
            "checkpoint with --resume"
        )
        return 1
    if code == LOST_RANK_CODE:
        say(f"rank {rank} lost the connection to the others: continue from the last checkpoint with --resume")
        return 1
    return code


def _seen_first(failures: Iterable[tuple[int, ProcessFailure]]) -> list[tuple[int, ProcessFailure]]:
    """The failures before torchrun ended the other processes, then the failures after that, each by rank."""
    first: list[tuple[int, ProcessFailure]] = []
    for rank, failure in failures:
        if first and rank < first[-1][0]:
            break
        first.append((rank, failure))
    return first


def _blame(code: int) -> int:
    """The order of failures as likely causes: first processes ended from outside, then those with an error.

    The first of two processes ended by SIGTERM counts, because torchrun may have sent the signal to the other. A lost
    connection comes last, because it usually results from a process that a signal has ended.
    """
    if code < 0:
        return 2 if -code == signal.SIGTERM else 0
    return 3 if code == LOST_RANK_CODE else 1
