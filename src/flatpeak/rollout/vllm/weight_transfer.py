"""Weights sent from the trainer's memory to a server, by the server's endpoints.

vLLM determines the order of the endpoints (`vllm/distributed/weight_transfer`, 0.32). A channel carries the bytes,
depending on how the server was started: over plain sockets (`SocketChannel`; the workers' half is
`server_plugin/flatpeak_weight_transfer.py`, which `flatpeak serve` adds to vLLM), or by NCCL (`nccl_channel`).
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from typing import Any, ClassVar, Final, Protocol

import torch
from torch import Tensor

from flatpeak.errors import UserError, brief
from flatpeak.rollout.vllm.http_client import HTTPClient, LostAnswerError, ServerError, StatusError
from flatpeak.rollout.vllm.nccl_channel import NCCLChannel

RELOAD: Final = "set rollout.engine.sync=reload"
INSTEAD: Final = f"or {RELOAD}"
NCCL_DEVICE: Final = "cuda"
GRACE: Final = 5.0
"""Seconds for a server to report why a transfer failed."""
TOKEN_SECONDS: Final = 5.0
"""Timeout of the token on a new connection; meanwhile no other connection is accepted."""
_POLL_SECONDS: Final = 0.2
"""Seconds between checks for a failed server."""
_SENT_AT_ONCE: Final = 1 << 20
"""Bytes between two checks; a reader that keeps up can take a whole tensor from one call of `send`."""
Check = Callable[[], None]
"""Raises a ServerError once waiting is pointless."""


class TransferError(ServerError):
    """A transfer that failed on the trainer's side."""


class Channel(Protocol):
    """A connection for weights to all workers of a server."""

    def init_info(self) -> Mapping[str, Any]:
        """The message with which workers find the trainer."""
        ...

    def join(self, check: Check) -> None:
        """Connect to the workers, which receive the message meanwhile."""
        ...

    def send(self, weights: Sequence[tuple[str, Tensor]], check: Check) -> None:
        """Send all tensors in order to the workers, which receive meanwhile."""
        ...

    def close(self) -> None:
        """End all waiting on both sides; the channel is not used again."""
        ...


class SocketChannel:
    """Listens for the workers of one server."""

    backend: ClassVar[str] = "flatpeak-sockets"

    def __init__(self, workers: int, client: HTTPClient, *, timeout: float) -> None:
        """Listen at this machine's address as the server sees it."""
        self._workers = workers
        self._timeout = timeout
        self._token = secrets.token_hex(16)
        host, family = client.own_address()
        self._listener = socket.create_server((host, 0), family=family, backlog=workers + 8)
        self._listener.settimeout(_POLL_SECONDS)

    def init_info(self) -> Mapping[str, Any]:
        """The address, and the token for connections."""
        host, port = self._listener.getsockname()[:2]
        return {"host": host, "port": port, "token": self._token, "timeout": self._timeout}

    def join(self, check: Check) -> None:
        """Accept a test connection of each worker; updates have new connections."""
        for _ in range(self._workers):
            self._accept(check).close()

    def send(self, weights: Sequence[tuple[str, Tensor]], check: Check) -> None:
        """Send the bytes of all tensors, in order, to every worker."""
        try:
            with ExitStack() as connections:
                workers = [connections.enter_context(closing(self._accept(check))) for _ in range(self._workers)]
                for _, weight in weights:
                    content = memoryview(bytes_of(weight))
                    for worker in workers:
                        _send(worker, content, check)
        except OSError as error:
            raise LostAnswerError(f"the transfer of weights failed ({brief(error)})") from error

    def close(self) -> None:
        """Accept no more connections."""
        self._listener.close()

    def _accept(self, check: Check) -> socket.socket:
        """The connection of a worker; connections without the token are dropped."""
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
    """The bytes of a tensor as a NumPy array in host memory; not copied if it is contiguous there."""
    return weight.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _send(connection: socket.socket, content: memoryview, check: Check) -> None:
    while content:
        with suppress(TimeoutError):
            content = content[connection.send(content[:_SENT_AT_ONCE]) :]
        check()  # even while bytes flow, because the workers' request may have been abandoned


def _read(connection: socket.socket, size: int, check: Check) -> bytes:
    """The next `size` bytes, or fewer if the other side ends first or needs more than TOKEN_SECONDS in total."""
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


class WeightTransfer:
    """Transfers to one server until one fails; after that the server needs a new object."""

    def __init__(self, client: HTTPClient, backend: str | None, *, device: torch.device, timeout: float) -> None:
        """`backend` is the server's; UserError if this trainer, with weights on `device`, does not support it."""
        self._client = client
        self._timeout = timeout
        self._channel: Channel | None = None
        if backend == SocketChannel.backend:
            self._make: Callable[[int], Channel] = lambda workers: SocketChannel(workers, client, timeout=timeout)
        elif backend == NCCLChannel.backend:
            if device.type != NCCL_DEVICE:
                raise UserError(
                    f"{client.url} receives weights by NCCL, which sends them from a GPU, but the policy is on "
                    f"{device.type}: start it with flatpeak serve --transfer sockets, {INSTEAD}"
                )
            self._make = lambda workers: NCCLChannel(workers, device)
        else:
            takes = "does not receive weights" if backend is None else f"receives weights only by {backend}"
            raise UserError(
                f"{client.url} {takes} from the trainer's memory (rollout.engine.sync=endpoint): start it with "
                f'flatpeak serve, or with --weight-transfer-config \'{{"backend": "nccl"}}\', {INSTEAD}'
            )

    def open(self) -> Channel:
        """The channel to the server's workers; the first call opens it."""
        if self._channel is not None:
            return self._channel
        try:
            answer = self._client.get("/get_world_size")
        except StatusError as error:
            text = f"it does not report its number of workers ({error.text}): start it with flatpeak serve, {INSTEAD}"
            raise StatusError(error.status, text, retry_after=error.retry_after) from error
        workers = answer.get("world_size") if isinstance(answer, Mapping) else None
        if type(workers) is not int or workers < 1:
            raise TransferError(f"the server has {workers} workers")
        with suppress(StatusError):  # from an earlier trainer, which may have died
            self._client.post("/shutdown_weight_transfer_engine")
        try:
            channel = self._channel = self._make(workers)
        except OSError as error:
            raise UserError(f"{self._client.url}: its workers are unreachable ({brief(error)}): {RELOAD}") from error
        try:
            self._together("/init_weight_transfer_engine", {"init_info": dict(channel.init_info())}, channel.join)
        except StatusError as error:
            self.close()
            text = f"its workers cannot connect to the trainer ({error.text}): allow these connections, {INSTEAD}"
            raise StatusError(error.status, text, retry_after=error.retry_after) from error
        except BaseException:
            self.close()
            raise
        return channel

    def send(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Replace the server's weights; after a failure it has a mixture, and the channel is closed."""
        channel = self.open()
        info = {
            "names": [name for name, _ in weights],
            "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in weights],
            "shapes": [list(weight.shape) for _, weight in weights],
        }
        try:
            self._client.post("/start_weight_update")
            self._together("/update_weights", {"update_info": info}, lambda check: channel.send(weights, check))
            self._client.post("/finish_weight_update")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the channel to the workers, if it is open."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _together(self, path: str, body: Mapping[str, Any], act: Callable[[Check], None]) -> None:
        """Make a request that the server answers after the trainer has acted; a failure of either side ends both."""
        deadline = time.monotonic() + self._timeout
        with ThreadPoolExecutor(1, thread_name_prefix="vllm-transfer") as thread:
            answer = thread.submit(self._client.post, path, body)

            def check() -> None:
                nonlocal deadline
                if answer.done():
                    answer.result()
                    # Workers may have connected but not yet sent their token.
                    deadline = min(deadline, time.monotonic() + GRACE)
                if time.monotonic() > deadline:
                    early = f"the server answered {path} before it had received the weights"
                    late = f"the transfer of weights did not finish within {self._timeout:g} s"
                    raise TransferError(early if answer.done() else late)

            try:
                act(check)
            except BaseException as error:
                self.close()
                wait([answer], timeout=GRACE)
                while not answer.done():
                    self._client.abort()
                    wait([answer], timeout=_POLL_SECONDS)
                reason = answer.exception()
                if isinstance(error, LostAnswerError) and isinstance(reason, StatusError):
                    raise reason from None  # the server's message is more useful than a broken connection
                raise
            answer.result()


def end_unfinished_update(client: HTTPClient) -> None:
    """Finish an interrupted update of a server, whose layers count the weights that they have received.

    They then hold a mixture of weights.
    """
    with suppress(StatusError):  # refused while the update is open, for example after the death of a trainer
        client.post("/start_weight_update")
    client.post("/finish_weight_update")
