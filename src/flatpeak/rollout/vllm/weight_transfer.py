"""Weights sent into a server by its own endpoints, from the trainer's memory.

The order of the endpoints is vLLM's (`vllm/distributed/weight_transfer`, 0.32). A channel carries the bytes: over
sockets (`socket_channel`) or by NCCL (`nccl_channel`), as the server was started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from flatpeak.errors import UserError, brief
from flatpeak.rollout.vllm.http_client import HTTPClient, LostAnswerError, ServerError, StatusError
from flatpeak.rollout.vllm.nccl_channel import NCCLChannel
from flatpeak.rollout.vllm.socket_channel import SocketChannel

RELOAD: Final = "set rollout.engine.sync=reload"
INSTEAD: Final = f"or {RELOAD}"
NCCL_DEVICE: Final = "cuda"
GRACE: Final = 5.0
"""Seconds that a server has to report why a transfer broke off."""
_POLL_SECONDS: Final = 0.2
Check = Callable[[], None]
"""Raises a ServerError once waiting is pointless."""


class TransferError(ServerError):
    """A transfer that broke off on the trainer's side."""


class Channel(Protocol):
    """The way of the weights to all workers of one server."""

    def init_info(self) -> Mapping[str, Any]:
        """The message by which the workers find the trainer."""
        ...

    def join(self, check: Check) -> None:
        """Connect to the workers, which get that message meanwhile."""
        ...

    def send(self, weights: Sequence[tuple[str, Tensor]], check: Check) -> None:
        """Send all tensors in their order to the workers, which are receiving."""
        ...

    def close(self) -> None:
        """End all waiting on both sides; the channel is not used again."""
        ...


class WeightTransfer:
    """Transfers to one server, until one of them fails; the server then needs a new object."""

    def __init__(self, client: HTTPClient, backend: str | None, *, device: torch.device, timeout: float) -> None:
        """`backend` is the server's; UserError where it is none that this trainer, with weights on `device`, speaks."""
        self._client = client
        self._timeout = timeout
        self._channel: Channel | None = None
        if backend == SocketChannel.backend:
            self._make: Callable[[int], Channel] = lambda workers: SocketChannel(workers, client, timeout=timeout)
        elif backend == NCCLChannel.backend:
            if device.type != NCCL_DEVICE:
                raise UserError(
                    f"{client.url} takes weights by NCCL, which sends them from a GPU, and the policy is on "
                    f"{device.type}: start it with flatpeak serve --transfer sockets, {INSTEAD}"
                )
            self._make = lambda workers: NCCLChannel(workers, device)
        else:
            takes = "takes no weights" if backend is None else f"takes weights by {backend} alone"
            raise UserError(
                f"{client.url} {takes} from the trainer's memory (rollout.engine.sync=endpoint): start it with "
                f'flatpeak serve, or with --weight-transfer-config \'{{"backend": "nccl"}}\', {INSTEAD}'
            )

    def open(self) -> Channel:
        """The channel to the server's workers, opened by the first call."""
        if self._channel is not None:
            return self._channel
        try:
            answer = self._client.get("/get_world_size")
        except StatusError as error:
            text = f"it does not say how many workers it has ({error.text}): start it with flatpeak serve, {INSTEAD}"
            raise StatusError(error.status, text, retry_after=error.retry_after) from error
        workers = answer.get("world_size") if isinstance(answer, Mapping) else None
        if type(workers) is not int or workers < 1:
            raise TransferError(f"the server has {workers} workers")
        with suppress(StatusError):  # of an earlier trainer, which may have died
            self._client.post("/shutdown_weight_transfer_engine")
        try:
            channel = self._channel = self._make(workers)
        except OSError as error:
            raise UserError(f"{self._client.url}: its workers cannot be reached ({brief(error)}): {RELOAD}") from error
        try:
            self._together("/init_weight_transfer_engine", {"init_info": dict(channel.init_info())}, channel.join)
        except StatusError as error:
            self.close()
            text = f"its workers do not reach the trainer ({error.text}): let them, {INSTEAD}"
            raise StatusError(error.status, text, retry_after=error.retry_after) from error
        except BaseException:
            self.close()
            raise
        return channel

    def send(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Replace the server's weights; a failure leaves it with a mixture and closes the channel."""
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
        """Make a request that the server answers once the trainer has acted; a failure of either side ends both."""
        deadline = time.monotonic() + self._timeout
        with ThreadPoolExecutor(1, thread_name_prefix="vllm-transfer") as thread:
            answer = thread.submit(self._client.post, path, body)

            def check() -> None:
                nonlocal deadline
                if answer.done():
                    answer.result()
                    # Workers may have connected without having sent their token yet.
                    deadline = min(deadline, time.monotonic() + GRACE)
                if time.monotonic() > deadline:
                    early = f"{path} was answered before the weights were taken"
                    late = f"a transfer of weights was not over after {self._timeout:g} s"
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
                    raise reason from None  # the server's message says more than a broken connection
                raise
            answer.result()


def end_unfinished_update(client: HTTPClient) -> None:
    """Finish the last update of a server, which broke off: its layers count the weights that they received.

    They then hold a mixture of weights.
    """
    with suppress(StatusError):  # refused while the update is still open, as after the death of a trainer
        client.post("/start_weight_update")
    client.post("/finish_weight_update")
