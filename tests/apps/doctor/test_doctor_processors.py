"""Kernels, threads and memory: made-up control groups, variables and kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatpeak.apps.doctor import processors
from flatpeak.apps.doctor.bounded_process import Outcome
from flatpeak.apps.doctor.findings import Finding
from flatpeak.apps.doctor.processors import cgroup_cores, check_kernels, check_memory, check_threads, memory

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def threads(monkeypatch: pytest.MonkeyPatch, *, cores: int, quota: float | None = None, **variables: str) -> Finding:
    monkeypatch.setattr(processors, "_affinity", lambda: cores)
    monkeypatch.setattr(processors, "cgroup_cores", lambda: quota)
    for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (finding,) = check_threads()
    return finding


def test_as_many_threads_as_cores_are_fine(monkeypatch: pytest.MonkeyPatch) -> None:
    for asked in ("4", "2", "4,2", ""):
        assert threads(monkeypatch, cores=4, OMP_NUM_THREADS=asked).status == "ok"
    assert threads(monkeypatch, cores=4, quota=4.0).text == "4 cores; OMP_NUM_THREADS unset, OMP_WAIT_POLICY unset"


@pytest.mark.parametrize(
    ("cores", "quota", "asked", "fix"),
    [
        (4, None, "8", "export OMP_NUM_THREADS=4"),
        (64, 4.0, None, "export OMP_NUM_THREADS=4"),
        (64, 1.5, None, "export OMP_NUM_THREADS=2"),
        (64, 0.5, "2", "export OMP_NUM_THREADS=1"),
        (4, None, "many", "export OMP_NUM_THREADS=4"),
        (4, None, "0", "export OMP_NUM_THREADS=4"),
    ],
)
def test_more_threads_than_cores_or_than_a_container_allows_are_a_note(
    cores: int, quota: float | None, asked: str | None, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {} if asked is None else {"OMP_NUM_THREADS": asked}
    finding = threads(monkeypatch, cores=cores, quota=quota, **variables)
    # A container's limit is no fault: runs work, and slower. A number that is none was meant to be one.
    assert (finding.status, finding.fix) == ("problem" if asked in ("many", "0") else "note", fix)


def test_threads_that_spin_while_they_wait_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = threads(monkeypatch, cores=4, OMP_WAIT_POLICY="active")
    assert (finding.status, finding.fix) == ("note", "unset OMP_WAIT_POLICY")


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        # A limit above counts too, and the smallest wins.
        (
            {
                "proc/self/cgroup": "0::/jobs/one\n",
                "sys/fs/cgroup/jobs/cpu.max": "200000 100000\n",
                "sys/fs/cgroup/jobs/one/cpu.max": "max 100000\n",
            },
            2.0,
        ),
        # Version 1, in a container that is shown the host's path.
        (
            {
                "proc/self/cgroup": "5:memory:/m\n4:cpu,cpuacct:/docker/abc\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "damaged"}, None),
        ({}, None),
    ],
)
def test_the_cores_of_a_control_group_are_its_quota(files: dict[str, str], cores: float | None, tmp_path: Path) -> None:
    assert cgroup_cores(write(tmp_path, files)) == cores


MEMINFO = f"MemTotal: {16 * 2**20} kB\nMemFree: 1 kB\nMemAvailable: {12 * 2**20} kB\nHugePages_Total:\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (16 * GIB, 12 * GIB)),
        (
            {
                "sys/fs/cgroup/memory.max": str(4 * GIB),
                "sys/fs/cgroup/memory.current": str(3 * GIB),
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            (4 * GIB, 2 * GIB),
        ),
        ({"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5"}, (16 * GIB, 12 * GIB)),
    ],
)
def test_memory_is_what_the_machine_or_the_container_leaves(
    files: dict[str, str], expected: tuple[int, int], tmp_path: Path
) -> None:
    root = write(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"} | files)
    assert memory(root) == expected


def test_memory_of_a_group_of_version_1_is_read_from_its_controller(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "7:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
        "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB // 2),
    }
    assert memory(write(tmp_path, files)) == (2 * GIB, 3 * GIB // 2)


@pytest.mark.parametrize(
    ("known", "status", "text"),
    [
        ((16 * GIB, 12 * GIB), "ok", "12.0 GiB of 16.0 GiB free"),
        ((16 * GIB, GIB), "note", "1.0 GiB of 16.0 GiB free: little more than loading torch takes"),
        ((None, None), "ok", "this system does not say how much is free"),
    ],
)
def test_little_memory_is_a_note(
    known: tuple[int | None, int | None], status: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "memory", lambda: known)
    (finding,) = check_memory()
    assert (finding.status, finding.text) == (status, text)


def kernels(monkeypatch: pytest.MonkeyPatch, setting: str, *messages: dict[str, str], code: int = 0) -> Finding:
    outcome = Outcome(code=code, output="", errors="Illegal instruction\n", seconds=1.0)
    monkeypatch.setattr(processors, "run_probe", lambda name, seconds: (list(messages), outcome))
    monkeypatch.setenv("FLATPEAK_KERNELS", setting)
    (finding,) = check_kernels()
    return finding


def test_kernels_are_named_with_the_width_of_their_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = kernels(monkeypatch, "", {"kernels": "x86-64-v3, compiled before"})
    assert (finding.status, finding.text) == ("ok", "x86-64-v3, compiled before (AVX2, 8 numbers at a time)")


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("no C++ compiler was found (c++, g++, clang++), and no compiled kernels fit", "install a C++ compiler"),
        ("g++ did not compile the kernels: x.cpp:1: error: no <vector>", "CXX=NAME"),
        ("others may write to /x: compiled kernels are kept where only this user can", "export XDG_CACHE_HOME"),
        ("no library can be loaded from /x, mounted noexec; set XDG_CACHE_HOME", "export XDG_CACHE_HOME"),
        ("the processor has neither AVX2 nor NEON instructions", None),
    ],
)
def test_kernels_that_are_not_there_are_a_note_unless_they_were_asked_for(
    reason: str, fix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    finding = kernels(monkeypatch, "auto", {"unavailable": reason})
    assert (finding.status, reason in finding.text) == ("note", True)
    assert (finding.fix or "").startswith(fix or "")
    asked = kernels(monkeypatch, "native", {"unavailable": reason})
    assert (asked.status, asked.fix is not None) == ("problem", True)


def test_settings_of_the_kernels_are_named_and_wrong_ones_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    off = kernels(monkeypatch, "torch", {"kernels": "x86-64-v4, shipped with the package"})
    assert (off.status, off.fix) == ("note", "unset FLATPEAK_KERNELS")
    wrong = kernels(monkeypatch, "fast")
    assert (wrong.status, wrong.text) == ("problem", "FLATPEAK_KERNELS=fast: a run takes auto, torch or native")


def test_kernels_whose_process_crashes_are_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = kernels(monkeypatch, "auto", code=-4)
    assert finding.text.endswith("their process was ended by SIGILL: Illegal instruction")
