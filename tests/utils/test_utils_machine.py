"""Memory and cores of made-up machines and control groups."""

from __future__ import annotations

import mmap
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatpeak.utils import machine
from flatpeak.utils.machine import Memory, host_memory, resident_memory, usable_cores
from support.tables import read_tables

TABLES = read_tables(__file__)

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(("files", "cores"), TABLES["cores"])
def test_the_cores_are_the_quota_of_a_control_group_where_that_is_less(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "affinity", lambda: 8)
    assert usable_cores(write(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("files", "total", "free"),
    [
        ({}, 16 * GIB, 12 * GIB),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": str(4 * GIB),
                "sys/fs/cgroup/memory.current": str(3 * GIB),
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            },
            4 * GIB,
            2 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": "max\n",
                "sys/fs/cgroup/memory.current": "5",
            },
            16 * GIB,
            12 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "7:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB // 2),
            },
            2 * GIB,
            3 * GIB // 2,
        ),
    ],
)
def test_memory_is_what_the_machine_or_the_container_leaves(
    files: dict[str, str], total: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = SimpleNamespace(total=16 * GIB, available=12 * GIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: there)
    assert host_memory(write(tmp_path, files)) == Memory(total=total, free=free)


def test_a_block_that_was_written_to_is_in_memory() -> None:
    before = resident_memory()
    block = mmap.mmap(-1, 64 * 2**20)  # not of pages that the process has already
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    assert 60 * 2**20 < resident_memory() - before < 100 * 2**20
