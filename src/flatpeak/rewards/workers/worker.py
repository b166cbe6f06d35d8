"""The code that worker processes run, and the fork server, which starts them with a function already loaded."""

from __future__ import annotations

import gc
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Lock
from typing import Any, Final

from flatpeak.errors import UserError
from flatpeak.rewards.workers import process as processes
from flatpeak.rewards.workers.process import FORK, WorkerError
from flatpeak.utils.child_process import kill_group
from flatpeak.utils.user_code import load_file, one_line, user_files

MAX_LOADED: Final = 32
"""Functions that a worker keeps loaded."""
_OUT_OF_MEMORY: Final = pickle.dumps(("memory", "a worker process ran out of the memory it may use"))
_POLL_SECONDS: Final = 0.005
_FILES: dict[str, str] = {}
"""The user's files that may be run here, by module name."""


def serve(descriptor: int, memory_bytes: int | None) -> None:
    """Run a worker: answer one request after another until the other end of the pipe is closed."""
    pid, pipe = os.getpid(), Connection(descriptor)
    processes.set_limits(pipe, memory_bytes)
    _answer_all(pid, pipe, {})


def serve_forks(descriptor: int, memory_bytes: int | None) -> None:
    """Run a fork server: load one function, then fork workers and report their exit codes.

    A worker that has ended is dropped with the answer that says so, and its process id may be used again.
    """
    pid, control = os.getpid(), Connection(descriptor)
    functions: dict[bytes, Callable[..., Any]] = {}
    try:
        processes.set_limits(control, memory_bytes)
        control.send_bytes(b"ready")
        code, content = pickle.loads(control.recv_bytes())
        control.send_bytes(_load(functions, code, *content))
        gc.collect()
        gc.freeze()  # a collection in a worker would write to, and so copy, every page that it shares
        while True:
            request = pickle.loads(control.recv_bytes())
            if request == FORK:
                control.send_bytes(pickle.dumps(_fork(reduction.recv_handle(control), functions)))
            else:
                ended, status = os.waitpid(request, os.WNOHANG)
                control.send_bytes(pickle.dumps(os.waitstatus_to_exitcode(status) if ended else None))
    except (EOFError, OSError):
        processes.exit_worker(pid)


def _fork(channel: int, functions: dict[bytes, Callable[..., Any]]) -> int:
    child = os.fork()
    if child:
        os.close(channel)
        os.setpgid(child, child)  # here as well as there: it may be killed before it has run
        return child
    try:
        os.setpgid(0, 0)
        pipe = Connection(channel)
        processes.close_in_children(pipe)
        _answer_all(os.getpid(), pipe, functions)
    finally:
        os._exit(1)


def _answer_all(pid: int, pipe: Connection, functions: dict[bytes, Callable[..., Any]]) -> None:
    try:
        pipe.send_bytes(b"ready")
        while True:
            task, code, timeout, content = pickle.loads(pipe.recv_bytes())
            for message in content if task == "call" else [None]:
                processes.set_alarm(timeout + processes.SPARE_SECONDS)
                answer = _load(functions, code, *content) if message is None else _answer(functions[code], message)
                processes.set_alarm(0)
                pipe.send_bytes(answer)
                if answer == _OUT_OF_MEMORY:
                    processes.exit_worker(pid)
    except (EOFError, OSError):
        processes.exit_worker(pid)


def _load(functions: dict[bytes, Callable[..., Any]], code: bytes, path: Sequence[str], files: dict[str, str]) -> bytes:
    processes.extend_path(path)
    _FILES.update(files)
    try:
        add_loaded(functions, code, _loads(code))
        return pickle.dumps(("done", None))
    except MemoryError:
        return _OUT_OF_MEMORY
    except Exception as error:  # imports run anything
        return pickle.dumps(("unloadable", f"{type(error).__name__}: {error}"))


def _answer(function: Callable[..., Any], message: bytes) -> bytes:
    try:
        arguments = _loads(message)
    except MemoryError:
        return _OUT_OF_MEMORY
    except Exception as error:
        return pickle.dumps(("unloadable", f"{type(error).__name__}: {error}"))
    try:
        return pickle.dumps(("done", function(*arguments)))
    except UserError as error:
        return pickle.dumps(("refused", str(error)))
    except MemoryError:
        return _OUT_OF_MEMORY
    except (Exception, KeyboardInterrupt) as error:  # the function's own: signals interrupt no worker
        return pickle.dumps(("raised", one_line(error)))


class _Unpickler(pickle.Unpickler):
    """Unpickles names in files of the user's, which it runs for that."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module in _FILES and module not in sys.modules:
            load_file(Path(_FILES[module]))
        return super().find_class(module, name)


def _loads(message: bytes) -> Any:
    return _Unpickler(BytesIO(message)).load()


def add_loaded(table: dict[bytes, Any], code: bytes, value: object) -> None:
    """Add a loaded function, and drop the oldest of `MAX_LOADED`; both ends of a pipe drop the same."""
    if len(table) == MAX_LOADED:
        del table[next(iter(table))]
    table[code] = value


class ForkServer:
    """Forks workers that have `function` loaded. It starts with the first of them, and anew where it was lost.

    The function must start no threads when it loads: a fork has none of them. A worker is a child of the server, with a
    process group of its own, and so are its limits; the server itself calls nothing, so no answer can harm it.
    """

    def __init__(self, function: Callable[..., Any], *, memory_bytes: int | None, seconds: float) -> None:
        """`seconds` is the time limit for loading the function."""
        self.code = pickle.dumps(function)
        self._memory_bytes = memory_bytes
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._starts = 0
        self.loaded = False
        """Whether it can fork at once."""
        self._lock = Lock()

    def ready(self) -> None:
        """Start it if it does not run. WorkerError where the function does not load, OSError or EOFError else."""
        with self._lock:
            if self._process is not None and self._process.poll() is None:
                return
            self._discard()
            try:
                self._start()
            except BaseException:
                self._discard()
                raise

    def fork(self, channel: socket.socket) -> ForkedProcess:
        """A worker that serves the channel. OSError or EOFError where the server is lost."""
        with self._lock:
            pid = self._ask(FORK, channel)
            return ForkedProcess(self, pid, self._starts)

    def status(self, pid: int, starts: int) -> int | None:
        """The exit code of a worker, or minus its signal; None while it runs. It can be had once.

        OSError or EOFError where the server that forked it, its `starts`th process, is lost.
        """
        with self._lock:
            if starts != self._starts:
                raise EOFError("another process forked this worker")
            code: int | None = self._ask(pid)
            return code

    def kill(self) -> None:
        """End the server, in the middle of loading too; its workers go on."""
        if self._process is not None:
            kill_group(self._process)

    def close(self) -> None:
        """End the server; a later worker starts a new one."""
        self.kill()
        with self._lock:
            self._discard()

    def _ask(self, question: int, channel: socket.socket | None = None) -> Any:
        if self._control is None:
            raise EOFError("the process that workers are forked from is gone")
        try:
            self._control.send_bytes(pickle.dumps(question))
            if channel is not None:
                reduction.send_handle(self._control, channel.fileno(), 0)
            return pickle.loads(self._control.recv_bytes())
        except (EOFError, OSError):
            self._discard()
            raise

    def _start(self) -> None:
        self._starts += 1
        ours, theirs = socket.socketpair()
        self._control = control = Connection(ours.detach())
        with theirs:
            self._process = processes.start(serve_forks, theirs, self._memory_bytes)
        processes.limit_waiting(control, self._seconds)
        control.recv_bytes()
        control.send_bytes(pickle.dumps((self.code, (sys.path, user_files()))))
        outcome, text = pickle.loads(control.recv_bytes())
        if outcome != "done":
            raise WorkerError(outcome, text)
        self.loaded = True

    def _discard(self) -> None:
        process, self._process = self._process, None
        self.loaded = False
        if self._control is not None:
            self._control.close()
            self._control = None
        if process is not None:
            kill_group(process)
            process.wait()


class ForkedProcess:
    """A worker of a fork server, with the methods of `subprocess.Popen`."""

    def __init__(self, server: ForkServer, pid: int, starts: int) -> None:
        self.pid = pid
        self._server = server
        self._starts = starts
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the signal; None while it runs."""
        if self._code is None:
            try:
                self._code = self._server.status(self.pid, self._starts)
            except (EOFError, OSError):  # its exit code is lost with the server
                kill_group(self)
                self._code = 0
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        """The exit code once it has ended; subprocess.TimeoutExpired where that takes longer."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            time.sleep(_POLL_SECONDS)
        return code
