"""torch, driver and GPUs: made-up drivers as programs on the path, and what torch says of itself as data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatpeak.apps.doctor import accelerators, install_commands
from flatpeak.apps.doctor.accelerators import (
    SLOW_BFLOAT16,
    Driver,
    Torch,
    bfloat16_findings,
    gpu_findings,
    read_driver,
    read_torch,
    torch_finding,
)
from flatpeak.apps.doctor.bounded_process import Outcome
from flatpeak.apps.doctor.findings import Finding
from support.installations import make_program

GIB = 2**30
CPU = {"version": "2.13.0+cpu", "cuda": None, "hip": None, "capability": "AVX2"}
CUDA = CPU | {"version": "2.13.0+cu130", "cuda": "13.0"}
H200 = Driver(names=["NVIDIA H200 (139.8 GiB)"], version="580.65", cuda="13.0")
CARD: dict[str, Any] = {
    "device": 0,
    "name": "NVIDIA H200",
    "capability": [9, 0],
    "total": 140 * GIB,
    "free": 139 * GIB,
    "bfloat16": True,
}
ARCHITECTURES = ["sm_80", "sm_90", "compute_90"]
BANNER = "| NVIDIA-SMI 580.65    Driver Version: 580.65     CUDA Version: 13.0     |"
UMD_BANNER = "| NVIDIA-SMI 610.43.02     KMD Version: 610.43.02     CUDA UMD Version: 13.3     |"
ROWS = "NVIDIA H200, 580.65, 143771\nNVIDIA T4, 580.65, [N/A]"
NONE = Driver()


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_commands, "pip_command", lambda command="install": f"pip {command}")
    monkeypatch.setattr(install_commands, "version", lambda name: "2.13.0+cpu" if name == "torch" else None)
    monkeypatch.setattr(accelerators, "_torch_requirement", lambda: "torch<2.14")
    for name in ("CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"):
        monkeypatch.delenv(name, raising=False)


def only(torch: Torch, driver: Driver, *, has_card: bool = False) -> Finding:
    (finding,) = gpu_findings(torch, driver, has_card=has_card)
    return finding


def seen(**facts: Any) -> Torch:
    return Torch(build=CUDA, devices=[CARD | facts], architectures=ARCHITECTURES)


@pytest.mark.parametrize(("banner", "cuda"), [(BANNER, "13.0"), (UMD_BANNER, "13.3"), ("no banner", None)])
def test_names_memory_and_versions_are_read_off_nvidia_smi(
    banner: str, cuda: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(tmp_path / "bin", "nvidia-smi", f"case \"$1\" in --query*) echo '{ROWS}';; *) echo '{banner}';; esac")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    names = ["NVIDIA H200 (140 GiB)", "NVIDIA T4"]
    assert read_driver() == Driver(names=names, version="580.65", cuda=cuda)


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("echo 'NVIDIA-SMI has failed'; exit 9", "nvidia-smi ended with exit code 9: NVIDIA-SMI has failed"),
        ("exec sleep 60", "nvidia-smi did not answer within 1 s: no words"),
        ("kill -BUS $$", "nvidia-smi was ended by SIGBUS: no words"),
        ("echo 'No devices were found'", "nvidia-smi lists no GPU: No devices were found"),
        ("printf '\\377\\376\\n' >&2; exit 1", "nvidia-smi ended with exit code 1: \ufffd\ufffd"),
    ],
)
def test_a_driver_that_fails_or_hangs_is_a_failure_in_words(
    script: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(tmp_path / "bin", "nvidia-smi", script)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    monkeypatch.setattr(accelerators, "SMI_SECONDS", 1.0 if "sleep" in script else 20.0)
    driver = read_driver()
    assert driver.failure == failure
    broken = only(Torch(build=CUDA, cuda_error="Found no NVIDIA driver"), driver, has_card=True)
    assert (broken.status, failure in broken.text) == ("problem", True)
    assert only(Torch(build=CPU), driver).text == "none: runs go on the CPU"


def test_nvidia_smi_is_found_in_its_place_under_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_program(tmp_path / "wsl", "nvidia-smi", f"echo '{ROWS}'")
    monkeypatch.setattr(accelerators, "WSL", str(tmp_path / "wsl"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_driver().version == "580.65"


def test_without_nvidia_smi_there_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(accelerators, "WSL", str(tmp_path))
    assert read_driver() == NONE


def test_gpus_that_work_are_one_line_with_their_free_memory() -> None:
    finding = only(seen(), H200)
    assert (finding.status, finding.text) == (
        "ok",
        "NVIDIA H200 (139 GiB of 140 GiB free); driver 580.65, CUDA 13.0",
    )
    assert only(seen(), NONE).text == "NVIDIA H200 (139 GiB of 140 GiB free)"


def test_a_gpu_beside_a_cpu_build_of_torch_is_a_problem_with_the_build_to_install() -> None:
    finding = only(Torch(build=CPU), H200)
    assert finding.status == "problem"
    assert "torch 2.13.0+cpu is a build for CPUs" in finding.text
    assert finding.fix == (
        'pip uninstall torch, then install "torch<2.14" built for the highest CUDA of generation 13 or below, '
        "as https://pytorch.org/get-started/locally says"
    )


@pytest.mark.parametrize("build", [CPU, CUDA])
@pytest.mark.parametrize("value", ["", "-1", "none"])
def test_gpus_that_a_variable_hides_are_a_note(
    build: dict[str, Any], value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    error = "No CUDA GPUs are available" if build is CUDA else None
    finding = only(Torch(build=build, cuda_error=error), H200)
    assert (finding.status, finding.fix) == ("note", "unset CUDA_VISIBLE_DEVICES")


def test_a_driver_too_old_for_torchs_cuda_is_a_problem() -> None:
    old = Driver(names=["NVIDIA A100 (80.0 GiB)"], version="535.5", cuda="12.2")
    finding = only(Torch(build=CUDA, cuda_error="The NVIDIA driver on your system is too old"), old)
    assert finding.status == "problem"
    assert finding.text.startswith("driver 535.5 serves CUDA up to 12.2, and torch is built for 13.0 (The NVIDIA")
    assert finding.fix is not None
    assert finding.fix.startswith('update the driver; or pip uninstall torch, then install "torch<2.14" built for')
    # A driver serves all later CUDAs of its generation, and there is no build for 12.2 itself.
    assert "the highest CUDA of generation 12 or below" in finding.fix


def test_a_number_of_a_gpu_that_is_not_there_is_taken_back_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    finding = only(Torch(build=CUDA, cuda_error="No CUDA GPUs are available"), H200)
    assert (finding.status, finding.text.endswith("CUDA 13.0): No CUDA GPUs are available")) == ("problem", True)
    assert finding.fix is not None
    assert finding.fix.startswith("unset CUDA_VISIBLE_DEVICES, which is '7'; if that is not it, nvidia-smi")


def test_a_build_for_other_gpus_is_replaced() -> None:
    rocm = CPU | {"hip": "6.4", "version": "2.13.0+rocm6.4"}
    finding = only(Torch(build=rocm, cuda_error="No HIP GPUs are available"), H200)
    assert "torch 2.13.0+rocm6.4 is a build for ROCm 6.4" in finding.text
    assert finding.fix is not None
    assert finding.fix.startswith(
        'pip uninstall torch, then install "torch<2.14" built for the highest CUDA of generation 13'
    )
    crashed = only(Torch(build=rocm, cuda_error="at cuda:0, its process was ended by SIGABRT", crashed=True), NONE)
    assert crashed.text == "torch cannot use the GPU: at cuda:0, its process was ended by SIGABRT"


def test_a_driver_of_the_same_generation_is_not_blamed() -> None:
    newer = Driver(names=["NVIDIA A100 (80.0 GiB)"], version="580.1", cuda="13.0")
    build = CUDA | {"cuda": "13.2"}
    finding = only(Torch(build=build, cuda_error="out of memory"), newer)
    assert finding.text == "torch cannot use NVIDIA A100 (80.0 GiB) (driver 580.1, CUDA 13.0): out of memory"


@pytest.mark.parametrize(
    ("name", "capability", "which"),
    [("P40", [6, 1], "lowest"), ("B200", [10, 0], "highest"), ("5090", [12, 0], "highest")],
)
def test_a_gpu_that_torch_has_no_kernels_for_needs_a_build_for_an_older_or_a_newer_cuda(
    name: str, capability: list[int], which: str
) -> None:
    error = "CUDA error: no kernel image is available for execution on the device"
    finding = only(seen(capability=capability, name=name, error=error), H200)
    version = ".".join(map(str, capability))
    assert finding.status == "problem"
    assert finding.text == (
        f"cuda:0 {name} has compute capability {version}, and torch is built for sm_80, sm_90, compute_90"
    )
    assert finding.fix is not None
    assert finding.fix.endswith(f"built for the {which} CUDA, as https://pytorch.org/get-started/locally says")


def test_a_gpu_that_adds_two_numbers_is_served_whatever_torch_was_built_for() -> None:
    assert only(seen(capability=[9, 4]), H200).status == "ok"


def test_one_gpu_of_two_that_fails_is_named() -> None:
    broken = CARD | {"device": 1, "error": "CUDA error: out of memory"}
    torch = Torch(build=CUDA, devices=[CARD, broken], architectures=ARCHITECTURES)
    finding = only(torch, H200)
    assert finding.text == "cuda:1 NVIDIA H200 cannot add two numbers: CUDA error: out of memory"
    assert finding.status == "problem"


def test_a_gpu_without_bfloat16_is_a_note_beside_the_line_of_all() -> None:
    note, line = gpu_findings(seen(bfloat16=False), H200, has_card=True)
    assert (note.status, note.text) == ("note", "cuda:0 NVIDIA H200 has no bfloat16")
    assert line.status == "ok"


@pytest.mark.parametrize("driver", [H200, NONE])
def test_a_gpu_at_which_torch_hangs_or_crashes_is_a_problem_with_or_without_nvidia_smi(driver: Driver) -> None:
    finding = only(Torch(build=CUDA, cuda_error="at cuda:0, its process did not answer", crashed=True), driver)
    assert finding.status == "problem"
    assert finding.text.endswith(": at cuda:0, its process did not answer")


def test_a_card_without_a_driver_is_a_note_and_no_card_is_fine(tmp_path: Path) -> None:
    torch = Torch(build=CUDA, cuda_error="Found no NVIDIA driver on your system")
    assert only(torch, NONE, has_card=True).status == "note"
    assert only(torch, NONE).status == "ok"
    # In a container nvidia-smi may be missing although the driver is there: torch is then the one to replace.
    without_smi = only(Torch(build=CPU), NONE, has_card=True)
    assert without_smi.status == "note"
    assert without_smi.fix is not None
    assert 'where runs are to use it, pip uninstall torch, then install "torch<2.14" built for' in without_smi.fix
    for name, maker, kind in (
        ("gpu", "0x10de", "0x030200"),
        ("audio", "0x10de", "0x040300"),
        ("intel", "0x8086", "0x030000"),
    ):
        device = tmp_path / name / "sys/bus/pci/devices/0000:01:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{maker}\n")
        (device / "class").write_text(f"{kind}\n")
        assert accelerators._has_card(tmp_path / name) is (name == "gpu")


def test_gpus_beside_a_torch_that_cannot_be_imported_are_not_judged() -> None:
    finding = only(Torch(build={}, error="ImportError: libcudnn.so.9"), H200)
    assert finding.status == "note"


def test_a_torch_that_raises_or_crashes_is_a_problem_with_its_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch.py").write_text("raise ImportError('libcublas.so.12: undefined symbol: x')")
    finding = torch_finding(read_torch())
    assert finding.status == "problem"
    assert finding.text.endswith("cannot be imported: ImportError: libcublas.so.12: undefined symbol: x")
    assert finding.fix == (
        'install "torch==2.13.0+cpu" built for cpu, as https://pytorch.org/get-started/locally says, '
        "with --force-reinstall --no-deps"
    )
    monkeypatch.setenv("LD_LIBRARY_PATH", "/cuda")
    assert torch_finding(read_torch()).fix == f"unset LD_LIBRARY_PATH; if that is not it, {finding.fix}"
    (tmp_path / "torch.py").write_text("import damaged_library")
    (tmp_path / "damaged_library.py").write_text("1 / 0")
    assert torch_finding(read_torch()).fix == "mend damaged_library, which torch imports"
    (tmp_path / "torch.py").write_text("import os; os.abort()")
    assert torch_finding(read_torch()).text.endswith("cannot be imported: its process was ended by SIGABRT")


FAKE_TORCH = """
import os
from types import SimpleNamespace as N
__version__, version = "2.13.0+cu130", N(cuda="13.0", hip=None)
backends = N(cpu=N(get_cpu_capability=lambda: "AVX2"))
def init():
    {init}
cuda = N(init=init, device_count=lambda: 1, get_arch_list=lambda: ["sm_90"],
         get_device_properties=lambda index: N(name="H", major=9, minor=0, total_memory=8),
         mem_get_info=lambda index: (7, 8), device=lambda index: open(os.devnull),
         is_bf16_supported=lambda including_emulation: True)
def ones(count, device):
    {add}
"""


@pytest.mark.parametrize(
    ("init", "add", "expected"),
    [
        ("raise RuntimeError('driver too old')", "pass", ("driver too old", False, [])),
        ("os.abort()", "pass", ("at cuda, its process was ended by SIGABRT", True, [])),
        ("pass", "os.abort()", ("at cuda:0, its process was ended by SIGABRT", True, [])),
        ("pass", "raise RuntimeError('no kernel image')", (None, False, ["no kernel image"])),
    ],
)
def test_what_torch_says_counts_as_far_as_it_came(
    init: str, add: str, expected: tuple[object, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torch.py").write_text(FAKE_TORCH.format(init=init, add=add))
    torch = read_torch()
    assert torch.build == CUDA
    assert (torch.cuda_error, torch.crashed, [one["error"] for one in torch.devices]) == expected


def test_a_driver_at_which_torch_hangs_is_named_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    hung = Outcome(code=None, output="", errors="", seconds=60.0)
    messages = [CUDA, {"begin": "cuda"}]
    monkeypatch.setattr(accelerators, "run_probe", lambda name, seconds: (messages, hung))
    torch = read_torch()
    assert (torch.cuda_error, torch.crashed) == ("at cuda, its process did not answer within 60 s", True)


def test_the_torch_of_this_environment_is_described() -> None:
    import torch

    finding = torch_finding(read_torch())
    assert finding.status == "ok"
    assert finding.text.startswith(f"{torch.__version__}, built for ")


def test_a_cpu_that_is_slow_in_bfloat16_is_a_note_where_runs_use_it() -> None:
    (finding,) = bfloat16_findings(Torch(build=CPU, bfloat16_slowdown=8.64))
    assert (finding.status, finding.text) == ("note", "products take 8.6 times as long as in float32 on this CPU")
    assert finding.fix == "model.dtype=float32 in runs on the CPU"
    assert not list(bfloat16_findings(Torch(build=CPU, bfloat16_slowdown=1.9)))
    assert not list(bfloat16_findings(Torch(build=CUDA, devices=[CARD], bfloat16_slowdown=8.64)))


def test_the_doctor_and_a_run_call_the_same_slow() -> None:
    from flatpeak.policy.precision import SLOW_BFLOAT16 as OF_A_RUN

    assert SLOW_BFLOAT16 == OF_A_RUN
