"""Weight transfer by NCCL: a communicator of the trainer, as rank 0, and the workers of one server.

The code calls the library that torch has loaded, as declared in nccl.h. The communicator never blocks the process:
every call is polled, so a failing server ends a transfer instead of blocking it. vLLM's half is
`NCCLWeightTransferEngine` (vllm/distributed/weight_transfer/nccl_engine.py, nccl_common.py, 0.32). The protocol: the
unique id over HTTP, an all-reduce of one float32, then a broadcast of each tensor in its own type.
"""

from __future__ import annotations

import base64
import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from flatpeak.errors import UserError, brief
from flatpeak.rollout.vllm.http_client import ServerError

LIBRARY: Final = "libnccl.so.2"
TYPES: Final = {
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
"""Values of ncclDataType_t."""
SUCCESS, IN_PROGRESS, SUM = 0, 7, 0
_POLL: Final = 0.001


class UniqueId(ctypes.Structure):
    """The type ncclUniqueId of nccl.h."""

    _fields_ = (("internal", ctypes.c_byte * 128),)


class Config(ctypes.Structure):
    """The type ncclConfig_t of NCCL 2.14; later versions accept it by its version field."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
    )


class NCCLError(ServerError):
    """An NCCL call that failed."""


class NCCLChannel:
    """A communicator, from `join` to `close`."""

    backend: ClassVar[str] = "nccl"

    def __init__(self, workers: int, device: torch.device) -> None:
        """`device` is the trainer's GPU; no worker may use it."""
        self._size = workers + 1
        self._device = device
        self._nccl = load_library()
        self._comm = ctypes.c_void_p()
        # A separate stream, so that a failing server does not block transfers to other servers.
        self._stream = torch.cuda.Stream(device)
        self._handle = self._stream.cuda_stream
        self._id = UniqueId()
        self._check(self._nccl.ncclGetUniqueId(ctypes.byref(self._id)))

    def init_info(self) -> Mapping[str, Any]:
        """The unique id, and the first rank of the workers, 1."""
        return {
            "nccl_unique_id_b64": base64.b64encode(bytes(self._id)).decode(),
            "rank_offset": 1,
            "world_size": self._size,
            "packed": False,
        }

    def join(self, check: Callable[[], None]) -> None:
        """Create the communicator, and run the all-reduce that vLLM's workers start with."""
        config = Config(size=ctypes.sizeof(Config), magic=0xCAFEBEEF, version=21400, blocking=0)
        nccl, stream = self._nccl, self._stream
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            made = nccl.ncclCommInitRankConfig(ctypes.byref(self._comm), self._size, self._id, 0, ctypes.byref(config))
            self._start(made, check)
            one = torch.zeros(1, device=self._device)
            self._start(
                nccl.ncclAllReduce(one.data_ptr(), one.data_ptr(), 1, TYPES[one.dtype], SUM, self._comm, self._handle),
                check,
            )
            self._finish(check)

    def send(self, weights: Sequence[tuple[str, Tensor]], check: Callable[[], None]) -> None:
        """Broadcast all tensors, one after the other."""
        stream = self._stream
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream(self._device))  # the optimizer's stream
            for name, weight in weights:
                if weight.dtype not in TYPES:
                    raise UserError(f"{name} is {weight.dtype}, which NCCL lacks: set rollout.engine.sync=reload")
                # Memory of a copy freed here is reused only by later work on this stream.
                content = weight.detach().to(self._device).contiguous()
                at, count, kind = content.data_ptr(), content.numel(), TYPES[content.dtype]
                self._start(self._nccl.ncclBroadcast(at, at, count, kind, 0, self._comm, self._handle), check)
            self._finish(check)

    def close(self) -> None:
        """Abort the communicator, including its work on the GPU."""
        if self._comm:
            with torch.cuda.device(self._device):
                self._nccl.ncclCommAbort(self._comm)
            self._comm = ctypes.c_void_p()

    def _start(self, result: int, check: Callable[[], None]) -> None:
        """Wait until a call has started, because it returns earlier."""
        state = ctypes.c_int(result)
        while state.value == IN_PROGRESS:
            check()
            time.sleep(_POLL)
            self._check(self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
        self._check(state.value)

    def _finish(self, check: Callable[[], None]) -> None:
        """Wait until the GPU has finished the started work."""
        event, state = self._stream.record_event(), ctypes.c_int(SUCCESS)
        while not event.query():
            check()
            self._check(self._nccl.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
            self._check(state.value)
            time.sleep(_POLL)

    def _check(self, result: int) -> None:
        if result not in (SUCCESS, IN_PROGRESS):
            # Only here does NCCL report different versions, or a GPU that both sides use.
            words = (self._nccl.ncclGetErrorString(result), self._nccl.ncclGetLastError(self._comm))
            text = ": ".join(word.decode("utf-8", "replace") for word in words if word)
            raise NCCLError(
                f"NCCL failed ({brief(Exception(text))}): trainer and server need the same NCCL, separate GPUs and a "
                "connection between them, or rollout.engine.sync=reload"
            )


def load_library() -> Any:
    """The process's NCCL; UserError if it cannot be loaded."""
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise UserError(
            f"rollout.engine.sync=endpoint: the servers receive weights by NCCL, but this process cannot load it "
            f"({brief(error)}): set rollout.engine.sync=reload, or start them with flatpeak serve --transfer sockets"
        ) from error
    for name in ("ncclGetErrorString", "ncclGetLastError"):
        getattr(library, name).restype = ctypes.c_char_p
    # Without argument types, ctypes would not pass the id by value.
    comm, id_, size = ctypes.c_void_p, UniqueId, ctypes.c_size_t
    library.ncclCommInitRankConfig.argtypes = [ctypes.POINTER(comm), ctypes.c_int, id_, ctypes.c_int, ctypes.c_void_p]
    library.ncclAllReduce.argtypes = [comm, comm, size, ctypes.c_int, ctypes.c_int, comm, comm]
    library.ncclBroadcast.argtypes = [comm, comm, size, ctypes.c_int, ctypes.c_int, comm, comm]
    library.ncclCommAbort.argtypes = [comm]
    return library
