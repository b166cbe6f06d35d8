"""Checks of the machine: cores, memory, directories, torch and the GPUs, native kernels, the Hub."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any, Final

from flatpeak.apps.doctor.probe import REPORT_IT, TORCH_PAGE, Finding, ask, attempt, failed, note, ok, problem

GIB: Final = 2**30
LITTLE_MEMORY: Final = 2 * GIB
"""Free memory below this gives a note: each process of a run loads 0.4 GiB before the model."""
TOO_FULL: Final = GIB // 4
"""A file system with less free space counts as full."""
WSL: Final = "/usr/lib/wsl/lib"
"""The folder of the driver's programs under Windows; PATH may lack it."""
GPU_FIX: Final = f"nvidia-smi shows what uses the GPU; {TORCH_PAGE} has builds for older and newer drivers and GPUs"
NVIDIA: Final = "0x10de"
PCI_DEVICES: Final = Path("/sys/bus/pci/devices")
DRIVER_FIX: Final = "reboot after an update of the driver; start a container with --gpus all; nvidia-smi must work"
KERNELS_VARIABLE: Final = "FLATPEAK_KERNELS"
KERNELS_FIX: Final = "a C++ compiler such as g++ (CXX=NAME for another); XDG_CACHE_HOME=DIRECTORY, writable only by you"
WIDTHS: Final = {"x86-64-v4": "AVX-512, 16", "x86-64-v3": "AVX2, 8", "armv8-a": "NEON, 4"}


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


def check_machine() -> Iterator[Finding]:
    """The run directory, and the cores and memory that this process may use."""
    yield attempt("runs", "the working directory does not exist", "cd to a directory that exists")
    yield _directory_finding("runs", Path.cwd() / "runs", "cd to a directory of yours, or set run.directory=PATH")
    yield attempt("threads", "it cannot read cores and memory", "reinstall psutil")
    from flatpeak.utils.machine import affinity, host_memory, usable_cores

    yield from _thread_findings(affinity(), usable_cores())
    memory = host_memory()
    text = f"{_gib(memory.free)} of {_gib(memory.total)} free"
    if memory.free < LITTLE_MEMORY:
        fix = "end other programs, or give the container more; flatpeak plan shows how much a run needs"
        yield note("memory", f"{text}: little more than torch needs", fix)
    else:
        yield ok("memory", text)


def _thread_findings(cores: int, usable: int) -> Iterator[Finding]:
    """Compare the cores that this process may use with the threads that torch will start."""
    limit = f"{cores} cores" + (f", limited to {usable}" if usable < cores else "")
    asked = os.environ.get("OMP_NUM_THREADS")
    fix = f"export OMP_NUM_THREADS={usable}"
    yield attempt("threads", f"OMP_NUM_THREADS={asked} is not a number of threads", fix)
    if (int(asked.split(",")[0]) if asked else cores) > usable:
        source = f"OMP_NUM_THREADS={asked}" if asked else "torch's default of one thread per core"
        yield note("threads", f"{limit}; {source} makes threads wait for each other", fix)
    else:
        policy = os.environ.get("OMP_WAIT_POLICY", "unset")
        yield ok("threads", f"{limit}; OMP_NUM_THREADS {asked or 'unset'}, OMP_WAIT_POLICY {policy}")


def _directory_finding(check: str, path: Path, fix: str) -> Finding:
    """Whether a directory can be written or created, and its free space. Writes nothing."""
    nearest = next(one for one in (path, *path.parents) if os.path.lexists(one))
    if not nearest.is_dir():
        return problem(check, f"{path} cannot be created: {nearest} is not a directory", fix)
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK):
        return problem(check, f"you cannot write to {path}", fix)
    free = shutil.disk_usage(nearest).free
    if free < TOO_FULL:
        return problem(check, f"{path}: {_gib(free)} free: the disk is full", fix)
    return ok(check, f"{path}: {_gib(free)} free")


def check_torch() -> Iterator[Finding]:
    """The build of torch, a small computation on each GPU, and the speed of bfloat16 if runs use the CPU."""
    yield attempt("torch", "it cannot be imported", f"reinstall torch in the build for your machine: {TORCH_PAGE}")
    import torch

    cuda, hip = torch.version.cuda, torch.version.hip
    build = "CPUs"
    if cuda:
        build = f"CUDA {cuda}"
    elif hip:
        build = f"ROCm {hip}"
    yield ok("torch", f"{torch.__version__}, built for {build}; this CPU: {torch.backends.cpu.get_cpu_capability()}")
    attempted = attempt("gpu", f"torch, built for {build}, cannot start CUDA", GPU_FIX)
    yield attempted
    try:
        torch.cuda.init()
    except Exception as error:
        yield from _unused_findings(failed(attempted, error))
        yield from _bfloat16_findings()
        return
    for index in range(torch.cuda.device_count()):
        yield from _device_findings(torch, index)


def _device_findings(torch: Any, index: int) -> Iterator[Finding]:
    """The memory of a GPU, after a test addition."""
    facts, known = torch.cuda.get_device_properties(index), ", ".join(torch.cuda.get_arch_list())
    name = f"cuda:{index} {facts.name}"
    text = f"{name}, compute capability {facts.major}.{facts.minor}, fails with torch built for {known}"
    yield attempt("gpu", text, GPU_FIX)
    (torch.ones(2, device=f"cuda:{index}") + 1).sum().item()
    yield ok("gpu", f"{name} ({_gib(torch.cuda.mem_get_info(index)[0])} of {_gib(facts.total_memory)} free)")


def _unused_findings(unused: Finding) -> Iterator[Finding]:
    """The reason why torch uses no GPU. `unused`: the problem to report if the driver works."""
    program = shutil.which("nvidia-smi", path=os.pathsep.join([os.environ.get("PATH", os.defpath), WSL]))
    command = [program or "", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    yield attempt("gpu", "nvidia-smi does not answer", DRIVER_FIX)
    output, failure = ask(command) if program else ("", None)
    gpus = "; ".join(line for line in output.splitlines() if "," in line)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if failure and _has_nvidia_device():
        yield problem("gpu", f"this machine has an NVIDIA GPU, but its driver does not answer: {failure}", DRIVER_FIX)
    elif failure:
        yield note("gpu", f"nvidia-smi fails: {failure}; runs use the CPU", DRIVER_FIX)
    elif not gpus and _has_nvidia_device():
        yield note("gpu", "this machine has an NVIDIA GPU but no nvidia-smi; runs use the CPU", DRIVER_FIX)
    elif not gpus:
        yield ok("gpu", "none: runs use the CPU; a container needs --gpus all to see GPUs")
    elif hidden is not None:
        yield note("gpu", f"{gpus}; hidden by CUDA_VISIBLE_DEVICES={hidden!r}", "unset CUDA_VISIBLE_DEVICES")
    else:
        yield replace(unused, text=f"{unused.text}; nvidia-smi lists {gpus}")


def _has_nvidia_device() -> bool:
    """Whether an NVIDIA device is on the bus, even without a driver."""
    return any(path.read_text().strip() == NVIDIA for path in PCI_DEVICES.glob("*/vendor"))


def _bfloat16_findings() -> Iterator[Finding]:
    """A note if runs on this CPU are faster in float32."""
    yield attempt("bfloat16", "the speed test failed", REPORT_IT)
    from flatpeak.policy.precision import SLOW_BFLOAT16, bfloat16_slowdown

    slowdown = bfloat16_slowdown()
    if slowdown >= SLOW_BFLOAT16:
        text = f"matrix products take {slowdown:.1f} times as long as in float32 on this CPU"
        yield note("bfloat16", text, "set model.dtype=float32 in runs on the CPU")


def check_kernels() -> Iterator[Finding]:
    """The native kernels for CPUs: shipped, compiled, to be compiled, or the reason why there are none."""
    setting = os.environ.get(KERNELS_VARIABLE) or "auto"
    yield attempt("kernels", "none, so runs on a CPU are slower", f"{KERNELS_VARIABLE}=torch turns them off")
    from flatpeak.kernels.native.build import UnavailableError, describe

    try:
        described = describe()
    except UnavailableError as error:
        say = problem if setting == "native" else note
        yield say("kernels", f"none, so runs on a CPU are slower: {error}", KERNELS_FIX)
        return
    if setting == "torch":
        off = f"turned off by {KERNELS_VARIABLE}=torch; available: {described}"
        yield note("kernels", off, f"unset {KERNELS_VARIABLE}")
    else:
        yield ok("kernels", f"{described} ({WIDTHS[described.split(',')[0]]} numbers at a time)")


def check_hub() -> Iterator[Finding]:
    """The Hugging Face cache, the token, and whether the Hub answers."""
    yield attempt("hub", "huggingface_hub does not work", "reinstall huggingface_hub")
    from huggingface_hub import constants, get_token

    from flatpeak.utils.huggingface import PATIENCE, hub_or_cache

    source = "HF_TOKEN" if os.environ.get("HF_TOKEN") else "hf auth login"
    token = f"token from {source}" if get_token() else "no token (gated models and flatpeak push need one)"
    cached = f"models and data come only from the cache; {token}"
    if constants.HF_HUB_OFFLINE:
        yield ok("cache", f"{constants.HF_HUB_CACHE}: read-only because offline")
        yield note("hub", f"off by a variable: {cached}", "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE")
        return
    cache = Path(constants.HF_HUB_CACHE)
    yield _directory_finding("cache", cache, "export HF_HOME=DIRECTORY, which you can write to")
    fix = "export HF_HUB_OFFLINE=1 to skip the Hub, or HF_ENDPOINT=URL to use a mirror"
    answers: list[str | None] = [f"{constants.ENDPOINT} does not answer within {PATIENCE:g} s"]

    def request() -> None:
        with hub_or_cache() as unreachable:
            answers.append(unreachable)

    thread = Thread(target=request, daemon=True)
    thread.start()
    thread.join(PATIENCE)  # DNS lookups ignore the client's timeout
    if answers[-1] is None:
        yield ok("hub", f"{constants.ENDPOINT} answers; {token}")
    else:
        yield note("hub", f"{answers[-1]}; {cached}", fix)
