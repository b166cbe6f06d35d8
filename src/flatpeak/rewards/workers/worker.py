"""Worker processes: their limits, signals and output, the code they run, and the fork server that starts them."""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import BytesIO
from multiprocessing import reduction
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, Literal

from flatpeak.errors import UserError
from flatpeak.utils.child_process import ChildProcess, Parent, kill_group
from flatpeak.utils.redaction import redact
from flatpeak.utils.user_code import OneLineError, load_file, one_line, user_files

SPARE_SECONDS: Final = 1.0
FORK: Final = 0
"""The request to a fork server for a new worker; any other number is the process id of a worker, to be ended."""
PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

Reason = Literal["raised", "died", "timeout", "memory", "budget", "unloadable"]
LIMITS: Final[frozenset[Reason]] = frozenset({"timeout", "memory", "budget"})
"""Reasons that a call may bring about by its cost in time or memory."""
OUTPUT_PREFIX: Final = "reward: "
"""Text before every line that a worker prints."""
_CHUNK: Final = 65536
MAX_LOADED: Final = 32
"""Functions that a worker keeps loaded."""
_OUT_OF_MEMORY: Final = pickle.dumps(("memory", "a worker process ran out of the memory it may use"))
_POLL_SECONDS: Final = 0.005
_FILES: dict[str, str] = {}
"""The user's files that may be run here, by module name."""


class WorkerError(OneLineError):
    """The failure of a call that has no result; the text gives the reason on one line."""

    def __init__(self, reason: Reason, text: str) -> None:
        super().__init__(reason, text)
        self.reason = reason
        """raised: by the function; died: its process; timeout: killed; memory: it wanted more than it may have; budget:
        not called, because the step's time was spent; unloadable: cannot travel to a process."""

    def __str__(self) -> str:
        return str(self.args[1])


def limit_waiting(pipe: Connection, seconds: float) -> None:
    """Let reading from the pipe, or writing to it, raise BlockingIOError after so many seconds from now on."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    channel = socket.socket(fileno=pipe.fileno())
    try:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            channel.setsockopt(socket.SOL_SOCKET, option, limit)
    finally:
        channel.detach()


def close_in_children(pipe: Connection) -> None:
    """Keep the pipe from all children of this process: they must not answer for it."""
    os.set_inheritable(pipe.fileno(), False)
    os.register_at_fork(after_in_child=pipe.close)


def set_limits(pipe: Connection, memory_bytes: int | None) -> None:
    """Prepare a worker process: its limits, its signals, and a pipe that its children do not have."""
    close_in_children(pipe)
    with suppress(OSError):  # where memory runs out all the same, it is not the trainer that is chosen
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        # Data, not address space: libraries reserve far more of that than they use, CUDA's by hundreds of times.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    for number in PASSED_ON:
        signal.signal(number, lambda *_: None)  # not SIG_IGN: programs that a function runs would inherit it
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)


def set_alarm(seconds: float) -> None:
    """Let the kernel end this process after so many seconds, also where the trainer is gone; 0 cancels that."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def exit_worker(pid: int) -> None:
    """End this process and its children; `pid` is the worker's, which a forked child does not have."""
    if os.getpid() == pid == os.getpgrp():
        kill_group(pid)
    os._exit(0)


def extend_path(path: Sequence[str]) -> None:
    """Search for modules in these directories too."""
    sys.path += [directory for directory in path if directory not in sys.path]


def capture_output() -> int:
    """A descriptor for a process's standard output and error; the caller closes its own copy once that has started.

    A thread passes on the output until every process that holds it has ended, to standard error, because standard
    output may be a result that a program reads. Processes that wrote to the terminal
    themselves would write into each other's lines, and into a live display.
    """
    source, sink = os.pipe()
    threading.Thread(target=_pass_on, args=(source,), name="flatpeak-reward-output", daemon=True).start()
    return sink


def _pass_on(source: int) -> None:
    rest = b""
    while chunk := os.read(source, _CHUNK):
        *lines, rest = (rest + chunk).split(b"\n")
        if lines:
            _print(lines)
    os.close(source)
    if rest:
        _print([rest])


def _print(lines: list[bytes]) -> None:
    """Write lines without their secrets, at once, because a live display redraws itself after every write."""
    printed = redact("\n".join(line.decode(errors="replace") for line in lines))
    text = "".join(f"{OUTPUT_PREFIX}{line}\n" for line in printed.split("\n"))
    # Looked up each time: a live display replaces it while it lasts. Nothing can be done where it is closed.
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def serve_forks(parent: Parent, memory_bytes: int | None) -> None:
    """Run a fork server: load one function, then fork workers, and end them."""
    pid, control = os.getpid(), parent.pipe
    functions: dict[bytes, Callable[..., Any]] = {}
    try:
        set_limits(control, memory_bytes)
        code, content = pickle.loads(control.recv_bytes())
        control.send_bytes(_load(functions, code, *content))
        gc.collect()
        gc.freeze()  # a collection in a worker would write to, and so copy, every page that it shares
        while True:
            request = pickle.loads(control.recv_bytes())
            if request == FORK:
                answer = _fork(reduction.recv_handle(control), reduction.recv_handle(control), functions)
            else:
                answer = _end(request)
            control.send_bytes(pickle.dumps(answer))
    except (EOFError, OSError):  # the trainer is gone
        _kill_descendants()
        exit_worker(pid)


def _kill_descendants() -> None:
    """Kill the workers in the middle of their calls, and what they have started, in sessions of its own too."""
    import psutil  # here alone: workers are forked from this process

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _fork(channel: int, output: int, functions: dict[bytes, Callable[..., Any]]) -> int:
    """Fork a worker; its process id. What a call raises beyond exceptions, such as SystemExit, ends the worker as it
    ends any process."""
    child = os.fork()
    if child:
        os.close(channel)
        os.close(output)
        os.setpgid(child, child)  # here as well as there: it may be killed before it has run
        return child
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    pipe = Connection(channel)
    close_in_children(pipe)
    _answer_all(os.getpid(), pipe, functions)
    os._exit(1)


def _end(pid: int) -> int:
    """The exit code of a worker, or minus its signal, once it has ended; it is killed if that takes a while."""
    started, ended, status = time.monotonic(), 0, 0
    with suppress(ChildProcessError):  # a server before this one forked it
        ended, status = os.waitpid(pid, os.WNOHANG)
        while not ended:
            if time.monotonic() - started > SPARE_SECONDS:
                kill_group(pid)
            time.sleep(_POLL_SECONDS)
            ended, status = os.waitpid(pid, os.WNOHANG)
    kill_group(pid)  # what it has started
    return os.waitstatus_to_exitcode(status)


def _answer_all(pid: int, pipe: Connection, functions: dict[bytes, Callable[..., Any]]) -> None:
    try:
        pipe.send_bytes(b"ready")
        while True:
            task, code, timeout, content = pickle.loads(pipe.recv_bytes())
            for message in content if task == "call" else [None]:
                set_alarm(timeout + SPARE_SECONDS)
                answer = _load(functions, code, *content) if message is None else _answer(functions[code], message)
                set_alarm(0)
                pipe.send_bytes(answer)
                if answer == _OUT_OF_MEMORY:
                    exit_worker(pid)
    except (EOFError, OSError):
        exit_worker(pid)


def _load(functions: dict[bytes, Callable[..., Any]], code: bytes, path: Sequence[str], files: dict[str, str]) -> bytes:
    extend_path(path)
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

    def __init__(self, function: Callable[..., Any] | None, *, memory_bytes: int | None, seconds: float) -> None:
        """`seconds` is the time limit for loading the function; None loads nothing."""
        self.code = pickle.dumps(function)
        self._memory_bytes = memory_bytes
        self._seconds = seconds
        self._child: ChildProcess | None = None
        self.loaded = False
        """Whether it can fork at once."""
        self._lock = threading.Lock()

    def ready(self) -> None:
        """Start it if it does not run. WorkerError where the function does not load, OSError or EOFError else."""
        with self._lock:
            if self._child is not None and self._child.process.poll() is None:
                return
            self._discard()
            try:
                self._start()
            except BaseException:
                self._discard()
                raise

    def fork(self, channel: socket.socket) -> int:
        """The process id of a worker that serves the channel. OSError or EOFError where the server is lost."""
        output = capture_output()
        try:
            with self._lock:
                return self._ask(FORK, channel.fileno(), output)
        finally:
            os.close(output)

    def end(self, pid: int) -> int:
        """The exit code of a worker that has closed its channel, or minus its signal; 0 where the server is lost."""
        with self._lock, suppress(EOFError, OSError):
            return self._ask(pid)
        kill_group(pid)
        return 0

    def kill(self) -> None:
        """End the server, in the middle of loading too; its workers go on."""
        child = self._child
        if child is not None:
            kill_group(child.pid)

    def close(self) -> None:
        """End the server; a later worker starts a new one."""
        self.kill()
        with self._lock:
            self._discard()

    def _ask(self, request: int, *descriptors: int) -> int:
        if self._child is None:
            raise EOFError("the process that workers are forked from is gone")
        control = self._child.pipe
        try:
            control.send_bytes(pickle.dumps(request))
            for descriptor in descriptors:
                reduction.send_handle(control, descriptor, 0)
            answer: int = pickle.loads(control.recv_bytes())
        except (EOFError, OSError):
            self._discard()
            raise
        return answer

    def _start(self) -> None:
        output = capture_output()
        # A process inherits the mask. Batch systems signal all processes of a job, and this one decides what
        # happens then; the new one unblocks them once it has its own handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, PASSED_ON)
        try:
            self._child = ChildProcess(serve_forks, self._memory_bytes, stdout=output)
        finally:
            os.close(output)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        control = self._child.pipe
        limit_waiting(control, self._seconds)
        control.send_bytes(pickle.dumps((self.code, (sys.path, user_files()))))
        outcome, text = pickle.loads(control.recv_bytes())
        if outcome != "done":
            raise WorkerError(outcome, text)
        self.loaded = True

    def _discard(self) -> None:
        child, self._child = self._child, None
        self.loaded = False
        if child is not None:
            child.close()
