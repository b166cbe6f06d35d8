"""The worker process of a sweep, and its handle: runs jobs one after the other, each as if in a new process.

The worker ends when the sweep's process is gone. It starts watching for that before it imports anything slow.
"""

from __future__ import annotations

import gc
import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from flatpeak.config.load import parse_config
from flatpeak.errors import UserError, brief
from flatpeak.experiments.records import prune_checkpoints
from flatpeak.utils.child_process import ChildProcess, Parent, ending
from flatpeak.utils.redaction import hide_secrets_of, redact
from flatpeak.utils.user_code import load_function, user_files

Job = Mapping[str, Any]
"""kind, path, log, and the arguments of the kind."""
Outcome = dict[str, Any]
"""status (done, stopped or failed), reason and seconds."""


def serve(parent: Parent) -> None:
    """Run the jobs that the sweep sends until it says to quit."""
    parent.end_with()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        fresh = ProcessState()
        while (job := parent.receive()) is not None:
            with fresh.restored():
                outcome = run_job(job)
            parent.send(outcome)
        code = 0
    except EOFError:
        pass  # the sweep is gone
    except BaseException:
        traceback.print_exc()
    finally:
        # Torch's own exit takes seconds, and threads of the user's code may never end.
        with suppress(Exception):
            sys.stderr.flush()
        os._exit(code)


class ProcessState:
    """The state of a new process that a run may change: torch's defaults, environment, the user's modules."""

    def __init__(self) -> None:
        import torch  # imported here: see above

        self.seed = torch.initial_seed()
        self._threads = torch.get_num_threads()
        self._environment = dict(os.environ)
        self._directory = Path.cwd()
        self._path = list(sys.path)
        self._modules = set(sys.modules)
        self._switches: list[tuple[Callable[[Any], object], Any]] = [
            (torch.set_default_dtype, torch.get_default_dtype()),
            (torch.set_grad_enabled, torch.is_grad_enabled()),
            (torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()),
            (torch.set_float32_matmul_precision, torch.get_float32_matmul_precision()),
        ]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """A context that starts with the state of a new process and cleans up afterwards."""
        import torch

        torch.manual_seed(self.seed)
        self._reset_torch()
        try:
            yield
        finally:
            self._reset_torch()
            os.environ.clear()
            os.environ.update(self._environment)
            os.chdir(self._directory)
            self._forget_user_code()
            sys.path[:] = self._path
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _reset_torch(self) -> None:
        import torch

        torch.set_default_device(None)
        torch.set_num_threads(self._threads)
        for switch, value in self._switches:
            switch(value)

    def _forget_user_code(self) -> None:
        """Unload the user's files and the neighbours that they imported, so that no run sees state of another."""
        files = user_files()
        folders = {Path(file).parent for file in files.values() if "site-packages" not in Path(file).parts}
        # `module:function` is found in the working directory, or in a directory added to the path.
        searched = {self._directory, *(Path(entry) for entry in sys.path if entry not in self._path)} | folders
        new = {name: module for name, module in sys.modules.items() if name not in self._modules}
        packages = {name for name, module in new.items() if "." not in name and _place(module) in searched}
        for name, module in new.items():
            file = getattr(module, "__file__", None)
            package = name.partition(".")[0]
            beside = bool(file) and Path(str(file)).parent in folders
            if name in files or beside or (package in packages and package != "flatpeak"):
                sys.modules.pop(name, None)


def _place(module: Any) -> Path | None:
    """The directory that contains a module or package."""
    file = getattr(module, "__file__", None)
    if not file:
        return None
    return Path(file).parent.parent if hasattr(module, "__path__") else Path(file).parent


def run_job(job: Job) -> Outcome:
    """Run one job, with its prints in its log. Any exception becomes its outcome."""
    started = time.perf_counter()
    hide_secrets_of(job)
    with _output_in(Path(job["log"])), _stoppable():
        try:
            status, reason = "stopped" if _CALLS[job["kind"]](job) else "done", None
        except KeyboardInterrupt:
            status, reason = "stopped", None
        except UserError as error:
            status, reason = "failed", brief(error)
        except BaseException as error:  # also SystemExit of the user's code, which ends a run but never the worker
            traceback.print_exc()
            status, reason = "failed", f"{type(error).__name__}: {brief(error)}"
        if reason is not None:
            # File names that are not text contain characters that cannot be printed.
            reason = redact(reason.encode("utf-8", "backslashreplace").decode("utf-8"))
            sys.stderr.write(f"{reason}\n")
    return {"status": status, "reason": reason, "seconds": time.perf_counter() - started}


def _train(job: Job) -> bool:
    """Train, continuing an earlier start; returns whether a signal stopped it."""
    from flatpeak.pipeline.request import CallerObjects, RunRequest  # imported here because they all load torch
    from flatpeak.pipeline.train import run_stages
    from flatpeak.pipeline.train_reward_model import run_reward_model

    request = RunRequest(
        recipe=parse_config(job["recipe"]),
        settings=None,
        progress=False,
        resume=True,
        overwrite=False,
        command=job["command"],
        report=job["report"],
    )
    if job["kind"] == "reward_model":
        result = run_reward_model(request)
    else:
        result = run_stages(request, CallerObjects(), stages=("sft", "train") if job["kind"] == "train" else ("sft",))
    if not result.exit_code and job["keep"] != "all":
        prune_checkpoints(result.path, keep=job["keep"])
    return bool(result.exit_code)


def _call(job: Job) -> bool:
    """Call a user's function with the directory to fill."""
    directory = Path(job["path"]).absolute()  # the function may change the working directory
    directory.mkdir(parents=True, exist_ok=True)
    load_function(job["call"])(directory, job["seed"], **job["arguments"])
    return False


_CALLS: dict[str, Callable[[Job], bool]] = {"train": _train, "sft": _train, "reward_model": _train, "call": _call}


@contextmanager
def _stoppable() -> Iterator[None]:
    """Let SIGTERM interrupt what comes before and after a run; the run handles signals itself."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _RedactedLines(io.TextIOBase):
    """A stream that passes on whole lines, without secrets: `print` writes each of its arguments separately."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        """Pass on the lines completed by this text."""
        with self._lock:
            lines, newline, self._begun = (self._begun + text).rpartition("\n")
            self._stream.write(redact(lines) + newline)
        return len(text)

    def flush(self) -> None:
        """Also pass on an incomplete line."""
        with self._lock:
            begun, self._begun = self._begun, ""
            self._stream.write(redact(begun))
            self._stream.flush()

    def fileno(self) -> int:
        """The descriptor, for code that writes to it directly."""
        return self._stream.fileno()


@contextmanager
def _output_in(log: Path) -> Iterator[None]:
    """Append this process's standard output and errors, and those of its children, to a file.

    Python's output is redacted; a child writes to the file directly.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    saved = [os.dup(1), os.dup(2)]
    streams = sys.stdout, sys.stderr
    with log.open("ab") as file:
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    redacted = _RedactedLines(streams[0]), _RedactedLines(streams[1])
    sys.stdout, sys.stderr = redacted
    try:
        yield
    finally:
        sys.stdout, sys.stderr = streams
        for stream in redacted:
            stream.flush()
        for number, copy in zip((1, 2), saved, strict=True):
            os.dup2(copy, number)
            os.close(copy)


class WorkerProcess:
    """A persistent process that takes one job at a time."""

    def __init__(self, index: int, *, log: Path, gpu: str | None = None) -> None:
        """Start it; `gpu` is the value of CUDA_VISIBLE_DEVICES; None keeps the environment's value."""
        self.index = index
        self.gpu = gpu
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ | ({} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu})
        with log.open("ab") as output:
            self._child = ChildProcess(serve, stdout=output, environment=environment)
        self.pid = self._child.pid
        self.connection = self._child.pipe

    def is_alive(self) -> bool:
        """Whether the process can take a job."""
        return self._child.process.poll() is None

    def send(self, job: Job | None) -> None:
        """Send a job, or None to let the process end; if it is already dead, `receive` notices."""
        with suppress(OSError):
            self._child.send(job)

    def receive(self) -> Outcome | None:
        """The outcome of the job, or None if there is none yet. EOFError with the reason if the process has died."""
        try:
            waiting = self.is_alive() and not self.connection.poll()
            outcome: Outcome | None = None if waiting else self._child.receive()
        except (EOFError, OSError):
            raise EOFError(self._death()) from None
        return outcome

    def _death(self) -> str:
        """The way in which the process ended."""
        code = self._child.end(5.0)
        if code >= 0:
            return f"the worker process ended with {ending(code)} (see {self.log})"
        hint = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        return f"the worker process was {ending(code)}{hint}"

    def interrupt(self) -> None:
        """Ask the run to stop with a checkpoint."""
        self._child.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once, with the processes of its group."""
        self._child.close()

    def close(self) -> None:
        """Let an idle process end, or kill it; then wait for it."""
        self.send(None)
        self._child.end(10.0)
        self._child.close()
