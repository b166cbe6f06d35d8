"""Weights over plain sockets: the trainer listens, and every worker of a server connects for each update.

The workers' half is `server_plugin/flatpeak_weight_transfer.py`, which `flatpeak serve` adds to vLLM.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from flatpeak.errors import brief
from flatpeak.rollout.vllm.http_client import HTTPClient, LostAnswerError

TOKEN_SECONDS: Final = 5.0
"""Longest wait for the whole token of a new connection; no other is accepted meanwhile."""
_POLL_SECONDS: Final = 0.2
"""Seconds between two checks whether the server has failed."""


class SocketChannel:
    """A listener for the workers of one server."""

    backend: ClassVar[str] = "flatpeak-sockets"

    def __init__(self, workers: int, client: HTTPClient, *, timeout: float) -> None:
        """Listen at the address that this machine has on the way to the server."""
        self._workers = workers
        self._timeout = timeout
        self._token = secrets.token_hex(16)
        host, family = client.own_address()
        self._listener = socket.create_server((host, 0), family=family, backlog=workers + 8)
        self._listener.settimeout(_POLL_SECONDS)

    def init_info(self) -> Mapping[str, Any]:
        """The address, and the token that opens it."""
        host, port = self._listener.getsockname()[:2]
        return {"host": host, "port": port, "token": self._token, "timeout": self._timeout}

    def join(self, check: Callable[[], None]) -> None:
        """Accept one connection of every worker, as a proof that they can connect; each update has connections of its own."""
        for _ in range(self._workers):
            self._accept(check).close()

    def send(self, weights: Sequence[tuple[str, Tensor]], check: Callable[[], None]) -> None:
        """Send the bytes of all tensors, one after the other, to every worker."""
        try:
            with ExitStack() as connections:
                workers = [connections.enter_context(closing(self._accept(check))) for _ in range(self._workers)]
                for _, weight in weights:
                    content = memoryview(bytes_of(weight))
                    for worker in workers:
                        _send(worker, content, check)
        except OSError as error:
            raise LostAnswerError(f"the transfer of weights broke off ({brief(error)})") from error

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self, check: Callable[[], None]) -> socket.socket:
        """The connection of a worker; those without the token are dropped."""
        while True:
            check()
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                raise LostAnswerError(f"no worker of the server can connect ({brief(error)})") from error
            with suppress(OSError):
                if hmac.compare_digest(_read(connection, len(self._token), check), self._token.encode()):
                    connection.settimeout(_POLL_SECONDS)
                    return connection
            connection.close()


def bytes_of(weight: Tensor) -> Any:
    """The bytes of a tensor as a NumPy array, in host memory: of one that lies there in order, its own."""
    return weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _send(connection: socket.socket, content: memoryview, check: Callable[[], None]) -> None:
    while content:
        with suppress(TimeoutError):
            content = content[connection.send(content) :]
        check()  # also while bytes flow: the request of these workers may have been abandoned


def _read(connection: socket.socket, size: int, check: Callable[[], None]) -> bytes:
    """The next `size` bytes, or fewer where the other side ends first or takes longer than TOKEN_SECONDS for all."""
    content, deadline = b"", time.monotonic() + TOKEN_SECONDS
    connection.settimeout(_POLL_SECONDS)
    while len(content) < size and time.monotonic() < deadline:
        try:
            piece = connection.recv(size - len(content))
        except TimeoutError:
            check()
            continue
        if not piece:
            break
        content += piece
    return content
