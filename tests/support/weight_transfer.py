"""A server's half of weight transfers in this process: flatpeak's plugin as vLLM's workers run it, and an NCCL."""

from __future__ import annotations

import base64
import ctypes
import importlib.util
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flatpeak.apps.serve import PLUGIN
from flatpeak.rollout.vllm.nccl_channel import TYPES, NCCLChannel

ELEMENT = {number: dtype for dtype, number in TYPES.items()}
IN_PROGRESS, SYSTEM_ERROR = 7, 2


class Workers:
    """The workers of a server, each with the weights that it was given last; `size` of them."""

    def __init__(self, backend: str, size: int) -> None:
        self.backend = backend
        self.loaded = [dict[str, Tensor]() for _ in range(size)]
        self.active = self.torn = False
        self._engines = [make_engine(loaded) for loaded in self.loaded]
        self._group: Group | None = None

    def init(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer."""
        if self.backend == "nccl":
            assert info["world_size"] == len(self.loaded) + info["rank_offset"]
            assert info["packed"] is False
            self._group = Group.join(base64.b64decode(info["nccl_unique_id_b64"]))
            return
        for engine in self._engines:
            engine.init_transfer_engine(engine.parse_init_info(dict(info)))

    def shutdown(self) -> None:
        """Leave the trainer."""
        if self.active:
            raise RuntimeError("Cannot release a trainer connection during a weight update")
        self._group = None

    def start(self) -> None:
        """Begin an update; layers that an earlier one has left half full count what comes now on top of it."""
        if self.active:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.active = True

    def update(self, info: Mapping[str, Any]) -> None:
        """Receive all weights in all workers."""
        if not self.active:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        before, self.active = self.torn, False
        self.torn = True
        for loaded in self.loaded:
            loaded.clear()
        if self._group is not None:
            for name, dtype, shape in zip(info["names"], info["dtype_names"], info["shapes"], strict=True):
                weight = self._group.receive().view(getattr(torch, dtype)).reshape(shape)
                for loaded in self.loaded:
                    loaded[name] = weight
        else:
            with ThreadPoolExecutor(len(self._engines)) as threads:
                list(threads.map(lambda engine: engine.update_weights(dict(info)), self._engines))
        self.active, self.torn = True, before

    def finish(self) -> None:
        """End an update; the layers count from nothing again."""
        if not self.active:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        self.active = self.torn = False


def make_engine(loaded: dict[str, Tensor]) -> Any:
    """The plugin's engine of a worker whose model puts its weights there."""
    model = SimpleNamespace(load_weights=loaded.update)
    return load_plugin().SocketWeightTransferEngine(None, SimpleNamespace(), torch.device("cpu"), model)


def load_plugin() -> Any:
    """The plugin, over the little of vLLM that it derives from and calls."""
    if "flatpeak_weight_transfer" not in sys.modules:
        vllm = {
            "vllm.distributed.weight_transfer.base": {
                "WeightTransferEngine": _Engine,
                "WeightTransferInitInfo": object,
                "WeightTransferUpdateInfo": object,
            },
            "vllm.distributed.weight_transfer.factory": {
                "WeightTransferEngineFactory": SimpleNamespace(register_engine=lambda name, engine: None)
            },
            "vllm.model_executor.model_loader.reload": {
                "initialize_layerwise_reload": None,
                "finalize_layerwise_reload": None,
            },
        }
        with pytest.MonkeyPatch.context() as patch:
            for name, content in vllm.items():
                for depth in range(1, name.count(".") + 1):
                    parent = ".".join(name.split(".")[:depth])
                    patch.setitem(sys.modules, parent, sys.modules.get(parent) or ModuleType(parent))
                patch.setitem(sys.modules, name, ModuleType(name))
                vars(sys.modules[name]).update(content)
            spec = importlib.util.spec_from_file_location(
                "flatpeak_weight_transfer", PLUGIN / "flatpeak_weight_transfer.py"
            )
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules["flatpeak_weight_transfer"] = module
            spec.loader.exec_module(module)
    return sys.modules["flatpeak_weight_transfer"]


class _Engine:
    """vLLM's base class of engines, without generics."""

    def __class_getitem__(cls, _: Any) -> type:
        return cls

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        self.config, self.device, self.model = config, device, model

    def parse_init_info(self, info: dict[str, Any]) -> Any:
        return self.init_info_cls(**info)

    def parse_update_info(self, info: dict[str, Any]) -> Any:
        return self.update_info_cls(**info)


class Group:
    """A communicator of NCCL: what the trainer has sent, and whether the workers are there."""

    all: dict[bytes, Group] = {}  # noqa: RUF012 (one NCCL for a process)

    def __init__(self) -> None:
        self.joined, self.aborted = threading.Event(), threading.Event()
        self.sent: queue.Queue[Tensor] = queue.Queue()
        self.broken = False

    @classmethod
    def join(cls, unique_id: bytes) -> Group:
        """The group of this id, with the workers in it, after their all-reduce."""
        group = cls.all[unique_id]
        group.joined.set()
        one = group.receive()
        assert (one.dtype, one.numel()) == (torch.float32, 1)
        return group

    def receive(self) -> Tensor:
        """The next tensor."""
        while True:
            try:
                return self.sent.get(timeout=0.05)
            except queue.Empty:
                if self.aborted.is_set():
                    raise RuntimeError("NCCL error: remote process exited") from None


class FakeNCCL:
    """libnccl as `NCCLChannel` calls it, with memory of the host; logs the names of calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuses = ""
        """The name of a call that fails."""
        self.stalls = ""
        """The name of a call that never gets on."""
        self._comms: dict[int, Group] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        call = {
            "ncclGetUniqueId": self._unique_id,
            "ncclCommInitRankConfig": self._init,
            "ncclCommGetAsyncError": self._state,
            "ncclAllReduce": lambda at, out, count, kind, op, comm, stream: self._send(at, count, kind, comm),
            "ncclBroadcast": lambda at, out, count, kind, root, comm, stream: self._send(at, count, kind, comm),
            "ncclCommAbort": self._abort,
            "ncclGetErrorString": lambda result: b"unhandled system error",
            "ncclGetLastError": lambda comm: b"Mismatched NCCL version detected",
        }[name]

        def logged(*arguments: Any) -> Any:
            if not name.startswith("ncclGet") and name != "ncclCommGetAsyncError":
                self.calls.append(name)
            if name == self.refuses:
                return SYSTEM_ERROR
            return call(*arguments)

        return logged

    def _unique_id(self, at: Any) -> int:
        at._obj.internal[:] = [(len(Group.all) + i) % 100 for i in range(128)]
        Group.all[bytes(at._obj)] = Group()
        return 0

    def _init(self, comm: Any, size: int, unique_id: Any, rank: int, config: Any) -> int:
        assert (rank, config._obj.blocking, config._obj.magic) == (0, 0, 0xCAFEBEEF)
        comm._obj.value = len(self._comms) + 1
        self._comms[comm._obj.value] = Group.all[bytes(unique_id)]
        return IN_PROGRESS

    def _state(self, comm: Any, state: Any) -> int:
        waits = not self._comms[comm.value].joined.is_set() or self.stalls in self.calls
        state._obj.value = SYSTEM_ERROR if self._comms[comm.value].broken else IN_PROGRESS if waits else 0
        return 0

    def _send(self, at: int, count: int, kind: int, comm: Any) -> int:
        size = count * ELEMENT[kind].itemsize
        content = torch.tensor(list(ctypes.string_at(at, size)), dtype=torch.uint8)
        self._comms[comm.value].sent.put(content.view(ELEMENT[kind]))
        return IN_PROGRESS if self.stalls in self.calls else 0

    def _abort(self, comm: Any) -> int:
        self._comms[comm.value].aborted.set()
        return 0


class _Stream:
    """A stream of a host: what was started is done."""

    cuda_stream = 0

    def __init__(self, device: Any = None) -> None:
        self.waited = False

    def wait_stream(self, other: Any) -> None:
        self.waited = True

    def record_event(self) -> Any:
        return SimpleNamespace(query=lambda: True)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exception: object) -> None:
        pass


def use_fake_nccl(patch: pytest.MonkeyPatch) -> FakeNCCL:
    """Let transfers by NCCL run in the host's memory, between the trainer and `Workers` of this process."""
    library = FakeNCCL()

    class HostChannel(NCCLChannel):
        def __init__(self, workers: int, device: torch.device) -> None:
            super().__init__(workers, torch.device("cpu"))

    patch.setattr("flatpeak.rollout.vllm.weight_transfer.NCCLChannel", HostChannel)
    patch.setattr("flatpeak.rollout.vllm.weight_transfer.NCCL_DEVICE", "cpu")
    patch.setattr("flatpeak.rollout.vllm.nccl_channel.load_library", lambda: library)
    patch.setattr(torch.cuda, "Stream", _Stream)
    patch.setattr(torch.cuda, "stream", lambda stream: stream)
    patch.setattr(torch.cuda, "device", _Stream)
    patch.setattr(torch.cuda, "default_stream", _Stream)
    return library
