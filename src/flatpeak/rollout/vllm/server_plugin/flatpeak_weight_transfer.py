"""vLLM's half of weight transfers over sockets: a weight-transfer backend for its workers.

`flatpeak serve` puts this directory on the server's path and sets `WorkerExtension`, which vLLM imports in every worker
before it creates the backend. This code runs in vLLM's environment, without flatpeak. The trainer's half is
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


class WorkerExtension:
    """Adds nothing to a worker: its import registers the backend."""


@dataclass
class SocketInitInfo(WeightTransferInitInfo):
    """The address at which the trainer listens."""

    host: str
    port: int
    token: str
    """Sent first, so that the trainer gives its weights only to its own servers."""
    timeout: float
    """Seconds without a byte after which a transfer fails."""


@dataclass
class SocketUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of an update, in the order of their bytes."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class SocketWeightTransferEngine(WeightTransferEngine[SocketInitInfo, SocketUpdateInfo]):
    """Reads all weights from a connection to the trainer, one per worker and update."""

    init_info_cls = SocketInitInfo
    update_info_cls = SocketUpdateInfo

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        """Start without the trainer's address."""
        super().__init__(config, vllm_config, device, model)
        self._trainer: SocketInitInfo | None = None

    def init_transfer_engine(self, init_info: SocketInitInfo) -> None:
        """Keep the trainer's address after a test connection."""
        self._trainer = init_info
        self._connect().close()

    def start_weight_update(self) -> None:
        """Prepare the layers for weights in the layout of files."""
        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """Convert the weights to the layers' layout."""
        finalize_layerwise_reload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Read and load all weights; returns when the copies to the device are done."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: SocketUpdateInfo) -> None:
        """Read the tensors one after the other; load each before reading the next."""
        with self._connect() as connection:
            for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
                weight = torch.empty(shape, dtype=getattr(torch, dtype))
                _receive(connection, memoryview(weight.reshape(-1).view(torch.uint8).numpy().data))
                self.model.load_weights([(name, weight.to(self.device))])

    def _connect(self) -> socket.socket:
        """A connection that the trainer has accepted."""
        trainer = self._trainer
        if trainer is None:
            raise RuntimeError("the trainer's address is unknown: call init_weight_transfer_engine first")
        connection = socket.create_connection((trainer.host, trainer.port), timeout=CONNECT_SECONDS)
        connection.settimeout(trainer.timeout)
        connection.sendall(trainer.token.encode())
        return connection

    def shutdown(self) -> None:
        """Drop the address of the trainer."""
        self._trainer = None


def _receive(connection: socket.socket, buffer: memoryview) -> None:
    while buffer:
        count = connection.recv_into(buffer)
        if not count:
            raise ConnectionError("the trainer ended the transfer")
        buffer = buffer[count:]


WeightTransferEngineFactory.register_engine(BACKEND, SocketWeightTransferEngine)
