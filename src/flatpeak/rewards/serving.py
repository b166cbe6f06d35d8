"""What a worker process runs: it loads functions, calls them, and answers with results or why there are none."""

from __future__ import annotations

import gc
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from io import BytesIO
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from flatpeak.errors import UserError
from flatpeak.rewards import processes
from flatpeak.rewards.processes import FORK

_KEPT: Final = 32
_OUT_OF_MEMORY: Final = pickle.dumps(("memory", "a worker process ran out of the memory it may use"))
_FILES: dict[str, str] = {}


def serve(descriptor: int, memory_bytes: int | None) -> None:
    """What a worker runs: answer one request after another until the other end of the pipe is closed."""
    pid, pipe = os.getpid(), Connection(descriptor)
    processes.settle(pipe, memory_bytes)
    _answer_all(pid, pipe, {})


def serve_forks(descriptor: int, memory_bytes: int | None) -> None:
    """What a fork server runs: load one function, then fork workers and report how they ended.

    Of a worker that was asked about and has ended, nothing is kept, so that its process id may be used again.
    """
    from multiprocessing import reduction

    pid, control = os.getpid(), Connection(descriptor)
    functions: dict[bytes, Callable[..., Any]] = {}
    try:
        processes.settle(control, memory_bytes)
        control.send_bytes(b"ready")
        code, content = pickle.loads(control.recv_bytes())
        control.send_bytes(_load(functions, code, *content))
        gc.collect()
        gc.freeze()  # a collection in a worker would write to, and so copy, every page that it shares
        while True:
            asked = pickle.loads(control.recv_bytes())
            if asked == FORK:
                control.send_bytes(pickle.dumps(_fork(reduction.recv_handle(control), functions)))
            else:
                ended, status = os.waitpid(asked, os.WNOHANG)
                control.send_bytes(pickle.dumps(os.waitstatus_to_exitcode(status) if ended else None))
    except (EOFError, OSError):
        processes.leave(pid)


def _fork(channel: int, functions: dict[bytes, Callable[..., Any]]) -> int:
    child = os.fork()
    if child:
        os.close(channel)
        os.setpgid(child, child)  # here as well as there: it may be killed before it has run
        return child
    try:
        os.setpgid(0, 0)
        pipe = Connection(channel)
        processes.keep_to_itself(pipe)
        _answer_all(os.getpid(), pipe, functions)
    finally:
        os._exit(1)


def _answer_all(pid: int, pipe: Connection, functions: dict[bytes, Callable[..., Any]]) -> None:
    try:
        pipe.send_bytes(b"ready")
        while True:
            task, code, timeout, content = pickle.loads(pipe.recv_bytes())
            for message in content if task == "call" else [None]:
                processes.alarm(timeout + processes.SPARE_SECONDS)
                answer = _load(functions, code, *content) if message is None else _answer(functions[code], message)
                processes.alarm(0)
                pipe.send_bytes(answer)
                if answer == _OUT_OF_MEMORY:
                    processes.leave(pid)
    except (EOFError, OSError):
        processes.leave(pid)


def _load(functions: dict[bytes, Callable[..., Any]], code: bytes, path: Sequence[str], files: dict[str, str]) -> bytes:
    processes.extend_path(path)
    _FILES.update(files)
    try:
        remember(functions, code, _loads(code))
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
    except Exception as error:
        from flatpeak.rewards.calls import one_line  # loads asyncio, which few workers need

        return pickle.dumps(("raised", one_line(error)))


class _Unpickler(pickle.Unpickler):
    """Runs a file of the user's where a name in it is asked for."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module in _FILES and module not in sys.modules:
            from flatpeak.rewards.functions import load_file

            load_file(Path(_FILES[module]))
        return super().find_class(module, name)


def _loads(message: bytes) -> Any:
    return _Unpickler(BytesIO(message)).load()


def remember(table: dict[bytes, Any], code: bytes, value: object) -> None:
    """Keep what was loaded last; both ends of a pipe forget the same."""
    if len(table) == _KEPT:
        del table[next(iter(table))]
    table[code] = value
