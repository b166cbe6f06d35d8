"""Starting the processes of a run with torchrun's launcher, with one message if a process fails.

torch is loaded only to start processes, so a bad recipe fails earlier.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from flatpeak.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from flatpeak.distributed.config import DistributedConfig

STOP_SECONDS = 600
"""Seconds after a signal that a run has for its last step and checkpoint, before its processes are killed."""
LOST_RANK_CODE = 3
"""Exit code of a process that ends because another process has ended."""


def job_rank() -> int:
    """The rank of this process if torchrun started it, else 0."""
    return int(os.environ["RANK"]) if job_size() else 0


def job_size() -> int:
    """The number of processes that torchrun has started, on all nodes; 0 if it has not."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return int(os.environ["WORLD_SIZE"]) if all(os.environ.get(name) for name in names) else 0


def is_repeated() -> bool:
    """Whether all ranks have the same error, before their first message, and this is not the first rank."""
    distributed = sys.modules.get("torch.distributed")
    return job_rank() > 0 and (distributed is None or not distributed.is_initialized())


def check_processes(config: DistributedConfig) -> None:
    """UserError if a recipe asks for a different number of processes than there is."""
    wanted, started = config.processes, job_size()
    if started > 1 and wanted != started:
        raise UserError(
            f"torchrun has started {started} processes and the recipe has distributed.processes={wanted}: write "
            f"`distributed: {{processes: {started}, strategy: ddp}}` into it, or add distributed.processes={started} "
            "to the command"
        )
    if wanted > 1 and started != wanted:
        raise UserError(
            f"distributed.processes={wanted}, and this is one process: start it with `flatpeak train RECIPE`, or a "
            f"script of your own with torchrun --nproc-per-node {wanted} SCRIPT"
        )


def check_alone(config: DistributedConfig, what: str) -> None:
    """UserError if several processes are requested or started for something that is trained in one process."""
    if config.processes > 1:
        raise UserError(f"{what} are trained in one process: set distributed.processes=1")
    if job_size() > 1:
        raise UserError(f"{what} are trained in one process, and torchrun has started {job_size()}: leave torchrun out")


def needs_launch(config: DistributedConfig) -> bool:
    """Whether a command has to start the recipe's processes; UserError if other processes are already running."""
    if config.processes > 1 and not job_size():
        return True
    check_processes(config)
    return False


def launch(
    arguments: Sequence[str], config: DistributedConfig, *, say: Callable[[str], None], command: Sequence[str] = ()
) -> int:
    """Run `flatpeak ARGUMENTS` in as many processes as the recipe asks for, on this node; the exit code of the run.

    `say` gets one message if a process ended without a message of its own. `command` replaces `-m flatpeak` after the
    interpreter.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    logging.disable(logging.CRITICAL)  # the launcher's reports of a failure would fill a screen
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    given = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}", "--no-python"]
    given += ["--local-addr=127.0.0.1", f"--nproc-per-node={config.processes}", sys.executable]
    launcher, _, _ = config_from_args(parse_args(given))
    launcher.shutdown_timeout = STOP_SECONDS
    try:
        elastic_launch(launcher, sys.executable)(*(command or ("-m", "flatpeak")), *arguments)
    except ChildFailedError as error:
        return _end(error.failures.items(), say)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _end(failures: Iterable[tuple[int, ProcessFailure]], say: Callable[[str], None]) -> int:
    """The exit code of a failed run; prints a message if the rank that failed first could not."""
    rank, failure = min(_seen_first(failures), key=lambda failure: _blame(failure[1].exitcode))
    code: int = failure.exitcode
    if code < 0:
        name = signal.Signals(-code).name
        say(
            f"rank {rank} (process {failure.pid}) was ended by {name}, and the run with it: go on from its last "
            "checkpoint with --resume"
        )
        return 1
    if code == LOST_RANK_CODE:
        say(f"rank {rank} lost the connection to the others: go on from the last checkpoint with --resume")
        return 1
    return code


def _seen_first(failures: Iterable[tuple[int, ProcessFailure]]) -> list[tuple[int, ProcessFailure]]:
    """The failures before torchrun ended the other processes, whose ends follow; each part is in the order of ranks."""
    first: list[tuple[int, ProcessFailure]] = []
    for rank, failure in failures:
        if first and rank < first[-1][0]:
            break
        first.append((rank, failure))
    return first


def _blame(code: int) -> int:
    """The order of failures as likely causes: first a process ended from outside, then one with its own error.

    Of two processes ended by SIGTERM the first counts, because the other may have got it from torchrun. A lost
    connection comes last: it is most likely a consequence of a process that a signal has ended.
    """
    if code < 0:
        return 2 if -code == signal.SIGTERM else 0
    return 3 if code == LOST_RANK_CODE else 1
