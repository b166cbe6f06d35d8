"""Torch, driver and GPUs, kernels, threads, memory, directories and the Hub: made-up and broken ones."""

from __future__ import annotations

import os
import socket
import sys
import threading
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatpeak.apps.doctor import system
from flatpeak.apps.doctor.probe import Finding
from flatpeak.apps.doctor.system import GIB, check_hub, check_kernels, check_machine, check_torch
from flatpeak.kernels.native import build
from flatpeak.kernels.native.build import UnavailableError
from flatpeak.policy import precision
from flatpeak.utils import machine
from flatpeak.utils.machine import Memory
from support.installations import make_program

TOKEN = "hf_" + "abcdefghij" * 3


def reported(findings: Iterable[Finding]) -> dict[str, Finding]:
    """The findings by check, attempts aside."""
    return {one.check: one for one in findings if one.status != "attempt"}


def room(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """Let every file system have this many GiB free."""
    monkeypatch.setattr(system.shutil, "disk_usage", lambda path: SimpleNamespace(free=free * GIB))


def threads(monkeypatch: pytest.MonkeyPatch, *, cores: int, usable: int, asked: str | None = None) -> Finding:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    return reported(system._thread_findings(cores, usable))["threads"]


@pytest.mark.parametrize("asked", ["4", "2", "4,2", "", None])
def test_as_many_threads_as_cores_are_fine(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = threads(monkeypatch, cores=4, usable=4, asked=asked)
    assert finding.status == "ok"
    assert finding.text == f"4 cores; OMP_NUM_THREADS {asked or 'unset'}, OMP_WAIT_POLICY unset"


@pytest.mark.parametrize(
    ("cores", "usable", "asked", "text"),
    [
        (4, 4, "8", "4 cores; OMP_NUM_THREADS=8 makes threads wait for each other"),
        (
            64,
            4,
            None,
            "64 cores, limited to 4; torch's default of one thread per core makes threads wait for each other",
        ),
    ],
)
def test_more_threads_than_cores_or_than_a_container_allows_are_a_note(
    cores: int, usable: int, asked: str | None, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = threads(monkeypatch, cores=cores, usable=usable, asked=asked)
    assert (finding.status, finding.text, finding.fix) == ("note", text, "export OMP_NUM_THREADS=4")


@pytest.mark.parametrize(
    ("free", "status", "text"),
    [
        (12, "ok", "12.0 GiB of 16.0 GiB free"),
        (1, "note", "1.0 GiB of 16.0 GiB free: little more than torch needs"),
    ],
)
def test_little_memory_is_a_note(free: int, status: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "host_memory", lambda: Memory(total=16 * GIB, free=free * GIB))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    finding = reported(check_machine())["memory"]
    assert (finding.status, finding.text) == (status, text)


def test_a_directory_of_runs_is_fine_full_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    room(monkeypatch, 50)
    fine = reported(check_machine())["runs"]
    assert (fine.status, fine.text) == ("ok", f"{tmp_path}/runs: 50.0 GiB free")
    assert list(tmp_path.iterdir()) == []
    room(monkeypatch, 0.2)
    full = reported(check_machine())["runs"]
    assert (full.status, full.text) == ("problem", f"{tmp_path}/runs: 0.2 GiB free: the disk is full")
    with monkeypatch.context() as denied:
        denied.setattr(system.os, "access", lambda path, mode: (path, mode) != (tmp_path, os.R_OK | os.W_OK | os.X_OK))
        assert reported(check_machine())["runs"].text == f"you cannot write to {tmp_path}/runs"
    (tmp_path / "runs").write_text("a file")
    occupied = reported(check_machine())["runs"]
    assert occupied.text == f"{tmp_path}/runs cannot be created: {tmp_path}/runs is not a directory"


def raising(error: Exception) -> Any:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


def fake_torch(*, init: Any = lambda: None, add: Any = None, count: int = 1) -> SimpleNamespace:
    """A torch built for CUDA 13.0, with GPUs of which the last adds by `add`."""
    properties = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 * GIB)

    class Sum:
        def __add__(self, other: int) -> Sum:
            return self

        def sum(self) -> SimpleNamespace:
            return SimpleNamespace(item=lambda: 4.0)

    return SimpleNamespace(
        __version__="2.13.0+cu130",
        version=SimpleNamespace(cuda="13.0", hip=None),
        backends=SimpleNamespace(cpu=SimpleNamespace(get_cpu_capability=lambda: "AVX2")),
        cuda=SimpleNamespace(
            init=init,
            device_count=lambda: count,
            get_arch_list=lambda: ["sm_80", "sm_90"],
            get_device_properties=lambda index: properties,
            mem_get_info=lambda index: (139 * GIB, 140 * GIB),
        ),
        ones=lambda size, device: add() if add and device == f"cuda:{count - 1}" else Sum(),
    )


@pytest.fixture
def no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for programs, which is the whole path; no variable that hides GPUs."""
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    monkeypatch.setattr(system, "WSL", str(tmp_path / "wsl"))
    monkeypatch.setattr(system, "PCI_DEVICES", tmp_path / "bus")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(system, "_bfloat16_findings", lambda: iter(()))
    return tmp_path / "programs"


def gpu(monkeypatch: pytest.MonkeyPatch, torch: SimpleNamespace) -> list[Finding]:
    monkeypatch.setitem(sys.modules, "torch", torch)
    return [one for one in check_torch() if one.check == "gpu" and one.status != "attempt"]


def test_each_gpu_that_adds_two_numbers_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = gpu(monkeypatch, fake_torch(count=2))
    assert [(one.status, one.text) for one in findings] == [
        ("ok", f"cuda:{index} NVIDIA H200 (139.0 GiB of 140.0 GiB free)") for index in range(2)
    ]


def test_a_gpu_that_torch_has_no_kernels_for_is_attempted_with_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(add=raising(RuntimeError("no kernel image")), count=2))
    findings = []
    with pytest.raises(RuntimeError, match="no kernel image"):
        for finding in check_torch():
            findings.append(finding)
    # The probe makes a problem of it, with the error's words.
    assert (findings[-1].status, findings[-1].check) == ("attempt", "gpu")
    assert findings[-1].text == "cuda:1 NVIDIA H200, compute capability 9.0, fails with torch built for sm_80, sm_90"


def test_a_driver_too_old_for_torch_is_a_problem_with_torchs_words(
    no_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(no_gpu, "nvidia-smi", "echo 'NVIDIA A100, 535.5'")
    (finding,) = gpu(monkeypatch, fake_torch(init=raising(RuntimeError("The NVIDIA driver is too old"))))
    assert (finding.status, finding.text) == (
        "problem",
        "torch, built for CUDA 13.0, cannot start CUDA: RuntimeError: The NVIDIA driver is too old; "
        "nvidia-smi lists NVIDIA A100, 535.5",
    )


def test_gpus_that_a_variable_hides_are_a_note(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_program(no_gpu, "nvidia-smi", "echo 'NVIDIA A100, 535.5'")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (finding,) = gpu(monkeypatch, fake_torch(init=raising(RuntimeError("No CUDA GPUs are available"))))
    assert (finding.status, finding.fix) == ("note", "unset CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize("folder", ["programs", "wsl"])
def test_a_driver_that_fails_is_a_note_wherever_its_program_is(
    folder: str, no_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(no_gpu.parent / folder, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    (finding,) = gpu(monkeypatch, fake_torch(init=raising(RuntimeError("No CUDA GPUs are available"))))
    assert finding.status == "note"
    assert finding.text == "nvidia-smi fails: exit code 9: NVIDIA-SMI has failed; runs use the CPU"


def test_a_driver_that_does_not_answer_is_a_problem_where_a_gpu_is_on_the_bus(
    no_gpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = tmp_path / "bus" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    missing = fake_torch(init=raising(RuntimeError("No CUDA GPUs are available")))
    (finding,) = gpu(monkeypatch, missing)
    assert (finding.status, finding.text) == (
        "note",
        "this machine has an NVIDIA GPU but no nvidia-smi; runs use the CPU",
    )
    make_program(no_gpu, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    (finding,) = gpu(monkeypatch, missing)
    assert finding.status == "problem"
    assert finding.text.startswith(
        "this machine has an NVIDIA GPU, but its driver does not answer: exit code 9: NVIDIA-SMI has"
    )


def test_no_gpu_and_no_driver_is_fine(no_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = gpu(monkeypatch, fake_torch(init=raising(AssertionError("Torch not compiled with CUDA enabled"))))
    assert (finding.status, finding.text.startswith("none: runs use the CPU")) == ("ok", True)


def test_a_cpu_that_is_slow_in_bfloat16_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precision, "bfloat16_slowdown", lambda: 8.64)
    finding = reported(system._bfloat16_findings())["bfloat16"]
    assert (finding.status, finding.text) == (
        "note",
        "matrix products take 8.6 times as long as in float32 on this CPU",
    )
    assert finding.fix == "set model.dtype=float32 in runs on the CPU"
    monkeypatch.setattr(precision, "bfloat16_slowdown", lambda: 1.9)
    assert reported(system._bfloat16_findings()) == {}


@pytest.mark.parametrize(
    ("setting", "status", "text"),
    [
        ("", "ok", "x86-64-v3, compiled before (AVX2, 8 numbers at a time)"),
        ("torch", "note", "turned off by FLATPEAK_KERNELS=torch; available: x86-64-v3, compiled before"),
    ],
)
def test_kernels_are_named_with_the_width_of_their_vectors(
    setting: str, status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATPEAK_KERNELS", setting)
    monkeypatch.setattr(build, "describe", lambda: "x86-64-v3, compiled before")
    finding = reported(check_kernels())["kernels"]
    assert (finding.status, finding.text) == (status, text)


@pytest.mark.parametrize(("setting", "status"), [("auto", "note"), ("native", "problem")])
def test_kernels_that_are_not_there_are_a_note_unless_they_were_asked_for(
    setting: str, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLATPEAK_KERNELS", setting)
    monkeypatch.setattr(build, "describe", raising(UnavailableError("no C++ compiler was found")))
    finding = reported(check_kernels())["kernels"]
    assert (finding.status, finding.fix is not None) == (status, True)
    assert finding.text == "none, so runs on a CPU are slower: no C++ compiler was found"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the Hub's client that is not there yet, no token, and a machine that nothing listens on."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "*")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "hub"


def test_a_hub_that_cannot_be_reached_is_a_note_that_names_the_variables(hub: Path) -> None:
    findings = reported(check_hub())
    assert findings["cache"].text.startswith(f"{hub}: ")
    assert (findings["hub"].status, "127.0.0.1:9 cannot be reached" in findings["hub"].text) == ("note", True)
    assert "no token" in findings["hub"].text
    assert "HF_HUB_OFFLINE=1" in (findings["hub"].fix or "")
    assert not hub.exists()


def test_a_hub_that_is_silent_is_not_waited_for(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flatpeak.utils import huggingface

    forever = threading.Event()
    monkeypatch.setattr(huggingface, "PATIENCE", 0.05)
    monkeypatch.setattr(huggingface, "hub_or_cache", lambda: forever.wait() and nullcontext())
    finding = reported(check_hub())["hub"]
    forever.set()
    assert finding.status == "note"
    assert "does not answer within 0.05 s; models and data come only from the cache" in finding.text


def test_a_hub_that_answers_is_fine_and_the_token_is_never_shown(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        finding = reported(check_hub())["hub"]
    assert (finding.status, finding.text) == ("ok", f"{endpoint} answers; token from HF_TOKEN")


def test_offline_is_a_note_and_a_cache_to_read_is_enough(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    findings = reported(check_hub())
    assert findings["cache"].status == "ok"
    assert findings["hub"].text.startswith("off by a variable: models and data come only from the cache")
    assert findings["hub"].fix == "unset HF_HUB_OFFLINE and TRANSFORMERS_OFFLINE"
