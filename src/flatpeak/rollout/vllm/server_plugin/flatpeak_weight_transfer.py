"""vLLM's half of weight transfers over sockets: a weight-transfer backend that its workers import.

`flatpeak serve` puts this directory on the server's path and names `WorkerExtension`, which vLLM imports in every
worker before it makes the backend. This runs in vLLM's environment, where there is no flatpeak. The trainer's half is
`flatpeak.rollout.vllm.weight_transfer.SocketChannel`.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

BACKEND = "flatpeak-sockets"
CONNECT_SECONDS = 10.0
"""Longest wait for a connection."""


class WorkerExtension:
    """Adds nothing to a worker: naming it imports this module, which registers the backend."""


@dataclass
class SocketInitInfo(WeightTransferInitInfo):
    """The address at which the trainer listens."""

    host: str
    port: int
    token: str
    """Sent first, so that the trainer gives its weights to its servers alone."""
    timeout: float
    """Seconds without a byte after which a transfer fails."""


@dataclass
class SocketUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of an update, in the order in which their bytes come."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class SocketWeightTransferEngine(WeightTransferEngine[SocketInitInfo, SocketUpdateInfo]):
    """Reads all weights from a connection to the trainer, one for each worker and update."""

    init_info_cls = SocketInitInfo
    update_info_cls = SocketUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        """Wait for the trainer's address."""
        super().__init__(config, vllm_config, device, model)
        self._trainer: SocketInitInfo | None = None

    def init_transfer_engine(self, init_info: SocketInitInfo) -> None:
        """Keep the trainer's address, once a connection has shown that there is a way."""
        self._trainer = init_info
        self._connect().close()

    def start_weight_update(self) -> None:
        """Prepare the layers for weights as they are in files."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Bring the weights into the layers' own layout."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read and load all weights; the copies to the device are done when this returns."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SocketUpdateInfo) -> None:
        """Read the tensors one after the other, each loaded before the next is read."""
        with self._connect() as connection:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                _receive(connection, memoryview(weight.reshape(-1).view(torch.uint8).numpy().data))
                self.model.load_weights([(name, weight.to(self.device))])

    def _connect(self) -> socket.socket:
        """A connection that the trainer accepts."""
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError("the trainer's address is not known: init_weight_transfer_engine comes first")
        connection = socket.create_connection((trainer.host, trainer.port), timeout=CONNECT_SECONDS)
        connection.settimeout(trainer.timeout)
        connection.sendall(trainer.token.encode())
        return connection

    def shutdown(self) -> None:
        """Drop the address of the trainer."""
        self._trainer = None


def _receive(connection: socket.socket, buffer: memoryview) -> None:
    """Read until the buffer is full."""
    while buffer:
        count = connection.recv_into(buffer)
        if not count:
            raise ConnectionError("the trainer broke the transfer off")
        buffer = buffer[count:]


WeightTransferEngineFactory.register_engine(BACKEND, SocketWeightTransferEngine)
