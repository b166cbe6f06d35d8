"""Code that runs in a process of its own, because it may crash or hang: imports, GPUs, native kernels, the Hub.

A probe sends messages, one JSON object a line, as soon as it knows something: what it sent before its end counts.
"""

from __future__ import annotations

import gc
import json
import os
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, Final

from flatpeak.errors import brief

Send = Callable[[dict[str, Any]], None]


def run(name: str, argument: str) -> None:
    """Run the probe of that name; what libraries print goes to standard error."""
    gc.disable()  # of the seconds that imports take, a fifth
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def send(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    PROBES[name](json.loads(argument), send)
    channel.close()
    os._exit(0)  # threads and exit handlers of libraries have had their chance to hang


def import_modules(names: Sequence[str], send: Send) -> None:
    """Import modules in this order; each is announced before, for the case that it ends the process."""
    for name in names:
        send({"begin": name})
        error = raised_by = None
        try:
            import_module(name)
        except BaseException as failure:  # SystemExit too
            error, raised_by = f"{type(failure).__name__}: {brief(failure)}", _raising_package(failure)
        send({"module": name, "error": error, "raised_by": raised_by})


def _raising_package(failure: BaseException) -> str:
    """The package whose code raised an error: of those that import each other, the one at fault."""
    frames = [frame for frame, _ in traceback.walk_tb(failure.__traceback__)]
    names = [str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames]
    return next((name for name in reversed(names) if name not in ("importlib", "_frozen_importlib", "")), "")


def describe_torch(_: object, send: Send) -> None:
    """The build of torch, then the GPUs that it sees, each tried by a sum."""
    try:
        import torch
    except BaseException as failure:
        send({"error": f"{type(failure).__name__}: {brief(failure)}", "raised_by": _raising_package(failure)})
        return
    send(
        {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "capability": torch.backends.cpu.get_cpu_capability(),
        }
    )
    accelerated = torch.version.cuda is not None or torch.version.hip is not None
    if not (accelerated and _describe_devices(send)):
        with suppress(Exception):  # a build of torch without products in bfloat16
            from flatpeak.policy.precision import bfloat16_slowdown

            send({"bfloat16_slowdown": bfloat16_slowdown()})


def _describe_devices(send: Send) -> bool:
    """The GPUs that torch sees; whether there are any."""
    import torch

    send({"begin": "cuda"})
    try:
        torch.cuda.init()
        count, architectures = torch.cuda.device_count(), torch.cuda.get_arch_list()
    except BaseException as failure:
        send({"cuda_error": brief(failure)})
        return False
    send({"architectures": architectures})
    for index in range(count):
        send({"begin": f"cuda:{index}"})
        send({"device": index, **_describe_device(index)})
    return count > 0


def _describe_device(index: int) -> dict[str, Any]:
    """The name, capability and memory of a GPU, and the error of a sum on it, if there is one."""
    import torch

    facts: dict[str, Any] = {}
    try:
        properties = torch.cuda.get_device_properties(index)
        facts |= {"name": properties.name, "capability": [properties.major, properties.minor]}
        facts |= {"total": properties.total_memory}
        facts |= {"free": torch.cuda.mem_get_info(index)[0]}
        with torch.cuda.device(index):
            facts |= {"bfloat16": torch.cuda.is_bf16_supported(including_emulation=False)}
        (torch.ones(2, device=f"cuda:{index}") + 1).sum().item()
    except Exception as failure:
        facts["error"] = brief(failure)
    return facts


def describe_kernels(_: object, send: Send) -> None:
    """The native kernels that a run would use, or why there are none."""
    from flatpeak.kernels.native.build import UnavailableError, describe

    try:
        send({"kernels": describe()})
    except UnavailableError as reason:
        send({"unavailable": str(reason)})


def ask_hub(_: object, send: Send) -> None:
    """The settings of the Hub's client, without the token itself; then whether the Hub answers."""
    from huggingface_hub import constants, get_token

    from flatpeak.utils.huggingface import PATIENCE, hub_or_cache

    token = None
    with suppress(Exception):  # a file that cannot be read, say
        token = get_token()
    send(
        {
            "home": constants.HF_HOME,
            "cache": constants.HF_HUB_CACHE,
            "endpoint": constants.ENDPOINT,
            "offline": constants.HF_HUB_OFFLINE,
            "token": token is not None,
        }
    )
    if constants.HF_HUB_OFFLINE:
        return
    answers: list[str | None] = []

    def ask() -> None:
        with hub_or_cache() as problem:
            answers.append(problem)

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(PATIENCE)  # a name server that is silent heeds no limit of the client's
    send({"unreachable": answers[0] if answers else f"{constants.ENDPOINT} does not answer within {PATIENCE:g} s"})


PROBES: Final[dict[str, Callable[[Any, Send], None]]] = {
    "import": import_modules,
    "torch": describe_torch,
    "kernels": describe_kernels,
    "hub": ask_hub,
}
