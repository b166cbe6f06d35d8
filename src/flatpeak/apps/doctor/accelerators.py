"""Checks of torch and the GPUs: whether this build of torch, this driver and these GPUs fit together."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any, Final

from flatpeak.apps.doctor.bounded_process import Outcome, merged, run_bounded, run_probe
from flatpeak.apps.doctor.findings import Finding, gib, note, ok, problem
from flatpeak.apps.doctor.install_commands import import_fix, replace_torch
from flatpeak.apps.doctor.requirements import requirements, version

TORCH_SECONDS: Final = 60.0
"""The longest that torch may take to load, and to make a context on each GPU."""
SMI_SECONDS: Final = 15.0
NVIDIA: Final = "0x10de"
"""The number of NVIDIA among the makers of PCI devices."""
WSL: Final = "/usr/lib/wsl/lib"
"""The folder of the driver's programs under Windows, which is not always on the path."""
SLOW_BFLOAT16: Final = 2.0
"""The same as that of `policy.precision`, which loads torch."""
_MIB: Final = 2**20


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The GPUs and the versions that nvidia-smi lists."""

    names: Sequence[str] = ()
    """The GPUs, by their products' names."""
    version: str = ""
    cuda: str | None = None
    """The newest CUDA that the driver serves, as `12.8`."""
    failure: str | None = None
    """The reason why nvidia-smi says nothing, where it is installed."""


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The build of torch and the GPUs that it sees, as far as its process came."""

    build: Mapping[str, Any]
    """version, cuda, hip and capability; empty where torch could not be imported."""
    devices: Sequence[Mapping[str, Any]] = ()
    architectures: Sequence[str] = ()
    error: str | None = None
    """The reason why it could not be imported."""
    raised_by: str = ""
    """The package whose code raised that error."""
    cuda_error: str | None = None
    """The reason why it has no GPUs, or why the process ended while they were tried."""
    bfloat16_slowdown: float = 0.0
    """The time of a bfloat16 product on the CPU over that of a float32 one; 0 where it was not measured."""
    crashed: bool = False
    """Whether the process was ended, by itself or for taking too long, while they were tried."""


def check_torch() -> Iterator[Finding]:
    """torch's build, and the GPUs that it can use."""
    torch, driver = read_torch(), read_driver()
    yield torch_finding(torch)
    yield from bfloat16_findings(torch)
    yield from gpu_findings(torch, driver, has_card=_has_card())


def read_torch() -> Torch:
    """torch as a process of its own sees it."""
    messages, outcome = run_probe("torch", seconds=TORCH_SECONDS)
    facts = merged(messages)
    build = next((one for one in messages if "version" in one), {})
    failure = outcome.ended and f"its process {outcome.ended} {outcome.last_words}".strip()
    if not build:
        error = facts.get("error") or failure or "its process said nothing"
        return Torch(build={}, error=error, raised_by=facts.get("raised_by", ""))
    return Torch(
        build=build,
        devices=[one for one in messages if "device" in one],
        architectures=facts.get("architectures", ()),
        cuda_error=facts.get("cuda_error") or (failure and f"at {facts.get('begin', 'its end')}, {failure}"),
        bfloat16_slowdown=facts.get("bfloat16_slowdown", 0.0),
        crashed=bool(failure),
    )


def read_driver() -> Driver:
    """The GPUs and the driver, by nvidia-smi."""
    program = shutil.which("nvidia-smi", path=os.pathsep.join([os.environ.get("PATH", os.defpath), WSL]))
    if program is None:
        return Driver()
    # Its banner has the version of CUDA, its list the names; a driver in trouble lets both hang.
    banner = run_bounded([program], seconds=SMI_SECONDS)
    if banner.ended:
        return Driver(failure=f"nvidia-smi {banner.ended}: {_first_line(banner)}")
    query = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader,nounits"]
    answer = run_bounded(query, seconds=SMI_SECONDS)
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.output.splitlines() if line.count(",") == 2]
    if answer.ended or not rows:
        return Driver(failure=f"nvidia-smi {answer.ended or 'lists no GPU'}: {_first_line(answer)}")
    names = [f"{name} ({gib(float(memory) * _MIB)})" if memory.isdigit() else name for name, _, memory in rows]
    cuda = re.search(r"CUDA(?: UMD)? Version\s*:\s*(\d+\.\d+)", banner.output)  # UMD since driver 610
    return Driver(names=names, version=rows[0][1], cuda=cuda and cuda[1])


def _first_line(outcome: Outcome) -> str:
    return next((line.strip() for line in (outcome.output + outcome.errors).splitlines() if line.strip()), "no words")


def _has_card(root: Path = Path("/")) -> bool:
    """Whether a GPU of NVIDIA's is on the bus, with or without a driver."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            maker, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if maker == NVIDIA and kind.startswith("0x03"):
            return True
    return False


def torch_finding(torch: Torch) -> Finding:
    """The build of torch, or the error of its import."""
    if torch.error is not None:
        by = torch.raised_by or "torch"
        known = by == "torch" or version(by) is not None
        fix = import_fix(torch.error, [by if by != "torch" else _torch_requirement()])
        text = f"{version('torch') or 'it'} cannot be imported: {torch.error}"
        return problem("torch", text, fix if known else f"mend {by}, which torch imports")
    build = torch.build
    return ok("torch", f"{build['version']}, built for {_kind(build)}; this CPU: {build['capability']}")


def _kind(build: Mapping[str, Any]) -> str:
    return f"CUDA {build['cuda']}" if build["cuda"] else f"ROCm {build['hip']}" if build["hip"] else "CPUs"


def bfloat16_findings(torch: Torch) -> Iterator[Finding]:
    """The note that runs on this CPU are faster in float32, where no GPU is used."""
    if not torch.devices and torch.bfloat16_slowdown >= SLOW_BFLOAT16:
        text = f"products take {torch.bfloat16_slowdown:.1f} times as long as in float32 on this CPU"
        yield note("bfloat16", text, "model.dtype=float32 in runs on the CPU")


def gpu_findings(torch: Torch, driver: Driver, *, has_card: bool) -> Iterator[Finding]:
    """The GPUs, and what keeps torch from using them. `has_card`: whether one is on the bus."""
    if torch.devices:
        yield from _visible_findings(torch, driver)
    elif driver.names or (torch.build and torch.crashed):
        yield _unused_finding(torch, driver)
    elif driver.failure is not None and has_card:
        fix = (
            "sudo modprobe nvidia, or reboot: after an update of the driver the old one stays loaded until then; "
            "in a container, start it anew with --gpus all"
        )
        yield problem("gpu", f"an NVIDIA GPU is there, but its driver does not answer: {driver.failure}", fix)
    elif has_card:
        fix = "nvidia-smi tells whether its driver works; in a container, start it with --gpus all"
        if torch.build and not torch.build["cuda"]:
            fix = f"{fix}; then, where runs are to use it, {_other_build(driver)}"
        yield note("gpu", "an NVIDIA GPU is there that torch does not see; runs go on the CPU", fix)
    else:
        yield ok("gpu", "none: runs go on the CPU")


def _unused_finding(torch: Torch, driver: Driver) -> Finding:
    """The reason why torch uses none of the GPUs that the driver lists."""
    seen = _driver_text(driver)
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and not re.match(r"\s*(\d|GPU-|MIG-)", hidden):
        return note("gpu", f"{seen}; hidden by CUDA_VISIBLE_DEVICES={hidden!r}", "unset CUDA_VISIBLE_DEVICES")
    if not torch.build:
        return note("gpu", f"{seen}; not tried, since torch cannot be imported")
    built_for = torch.build["cuda"]
    if not built_for and not torch.crashed:
        text = (
            f"{seen}; torch {torch.build['version']} is a build for {_kind(torch.build)}, so that runs leave it unused"
        )
        return problem("gpu", text, _other_build(driver))
    if built_for and driver.cuda and _generation(driver.cuda) < _generation(built_for):
        text = f"driver {driver.version} serves CUDA up to {driver.cuda}, and torch is built for {built_for}"
        return problem("gpu", f"{text} ({torch.cuda_error})", f"update the driver; or {_other_build(driver)}")
    fix = "nvidia-smi shows what uses the GPU; sudo dmesg | grep -i -e nvrm -e xid shows errors of the driver"
    if hidden is not None and not torch.crashed:
        fix = f"unset CUDA_VISIBLE_DEVICES, which is {hidden!r}; if that is not it, {fix}"
    return problem("gpu", f"torch cannot use {seen or 'the GPU'}: {torch.cuda_error or 'it sees none'}", fix)


def _visible_findings(torch: Torch, driver: Driver) -> Iterator[Finding]:
    """The GPUs that torch sees, each with what is wrong with it."""
    findings = [finding for device in torch.devices for finding in _device_findings(device, torch)]
    yield from findings
    if torch.cuda_error is not None:  # it ended at one of them
        yield _unused_finding(torch, driver)
    elif all(finding.status != "problem" for finding in findings):
        names = [f"{one['name']} ({gib(one['free'])} of {gib(one['total'])} free)" for one in torch.devices]
        by = f"; driver {driver.version}, CUDA {driver.cuda}" if driver.version else ""
        yield ok("gpu", f"{', '.join(names)}{by}")


def _device_findings(device: Mapping[str, Any], torch: Torch) -> Iterator[Finding]:
    """The problems and notes of one GPU."""
    name = f"cuda:{device['device']} {device.get('name', '')}".strip()
    if "no kernel image" in device.get("error", ""):
        major, minor = device["capability"]
        known = ", ".join(torch.architectures)
        first = min((int(one) for one in re.findall(r"_(\d+)", known)), default=0)
        # CUDA leaves out old GPUs as it goes: those have builds for older CUDAs, new ones for newer.
        which = "lowest" if 10 * major + minor < first else "highest"
        text = f"{name} has compute capability {major}.{minor}, and torch is built for {known}"
        yield problem("gpu", text, replace_torch(_torch_requirement(), f"the {which} CUDA"))
    elif "error" in device:
        fix = "nvidia-smi shows what uses it; CUDA_VISIBLE_DEVICES=N chooses another GPU"
        yield problem("gpu", f"{name} cannot add two numbers: {device['error']}", fix)
    elif not device.get("bfloat16", True):
        yield note("gpu", f"{name} has no bfloat16", "leave model.dtype at float32")


def _other_build(driver: Driver) -> str:
    """The command for a build of torch that the driver serves: all of its CUDA's generation, also later ones."""
    newest = f" of generation {_generation(driver.cuda)} or below" if driver.cuda else ""
    return replace_torch(_torch_requirement(), f"the highest CUDA{newest}")


def _torch_requirement() -> str:
    """flatpeak's own requirement of torch."""
    try:
        return next(f"{one.name}{one.specifier}" for one in requirements("flatpeak") if one.name == "torch")
    except (PackageNotFoundError, ImportError, StopIteration):  # a check of its own says so
        return "torch"


def _driver_text(driver: Driver) -> str:
    if not driver.names:
        return ""
    return f"{', '.join(driver.names)} (driver {driver.version}, CUDA {driver.cuda or 'unknown'})"


def _generation(cuda: str) -> int:
    return int(cuda.split(".")[0])
