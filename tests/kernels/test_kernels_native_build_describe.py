"""The description of the kernels that a run would use: truthful, and without compiling or leaving them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from flatpeak.kernels.native import build
from flatpeak.kernels.native.build import UnavailableError, describe, processor_level
from support.installations import make_program

HAS_COMPILER = any(shutil.which(name) for name in build.COMPILERS)
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
WRITES = 'while [ "$1" != -o ]; do shift; done; echo built > "$2"'


def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    program = make_program(tmp_path / "bin", "compiler", script)
    monkeypatch.setenv("CXX", str(program))
    return program


@needs_compiler
def test_the_compiler_at_hand_can_compile_what_the_kernels_need(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    name = next(name for name in build.COMPILERS if shutil.which(name))
    assert describe().startswith(f"{processor_level()}, to be compiled at first use by {name}")
    assert list(home.iterdir()) == []


def test_a_compiler_without_openmp_is_named_with_what_that_means(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiler(tmp_path, monkeypatch, f'case "$*" in *-fopenmp*) exit 1;; esac; {WRITES}')
    expected = f"{processor_level()}, to be compiled at first use by {program} without OpenMP: one thread"
    assert describe() == expected


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (
            "echo 'trial.cpp:1: error: no <vector>' >&2; exit 1",
            "did not compile the kernels: trial.cpp:1: error: no <v",
        ),
        ("exit 1", "did not compile the kernels: exit code 1"),
    ],
)
def test_a_compiler_that_fails_is_a_reason(
    script: str, reason: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(tmp_path, monkeypatch, script)
    with pytest.raises(UnavailableError, match=reason):
        describe()


def test_a_compiler_that_hangs_is_a_reason(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(build, "TRIAL_SECONDS", 0.5)
    with pytest.raises(UnavailableError, match=r"did not compile the kernels: it did not finish within 0\.5 s"):
        describe()


def test_no_compiler_is_a_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(UnavailableError, match=r"no C\+\+ compiler was found"):
        describe()


def compiled(home: Path, content: bytes) -> Path:
    """A file in place of a compiled library, with the checksum of one."""
    path = build.cache_folder() / build.file_name(processor_level())
    path.write_bytes(content + build._checksum(content))
    path.chmod(0o600)
    return path


def test_what_was_compiled_before_or_is_shipped_is_said_to_be(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build.ctypes, "CDLL", Path)
    compiled(home, b"library")
    assert describe() == f"{processor_level()}, compiled before"
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    (tmp_path / build.file_name(processor_level())).touch()
    assert describe() == f"{processor_level()}, shipped with the package"


def test_a_library_that_is_damaged_is_one_that_a_run_compiles(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiler(tmp_path, monkeypatch, WRITES)
    path = compiled(home, b"library")
    path.write_bytes(b"damaged")
    assert describe() == f"{processor_level()}, to be compiled at first use by {program}"
    assert path.read_bytes() == b"damaged"


def test_folders_that_no_library_may_lie_in_are_reasons(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build.os, "access", lambda path, mode: False)
    with pytest.raises(UnavailableError, match=f"{home} cannot be written; set XDG_CACHE_HOME"):
        describe()
    monkeypatch.setattr(build.os, "access", lambda path, mode: True)
    monkeypatch.setattr(build.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    with pytest.raises(UnavailableError, match=f"from {home}, mounted noexec; set XDG_CACHE_HOME"):
        describe()
    home.chmod(0o770)
    with pytest.raises(UnavailableError, match="others may write to"):
        describe()


def test_a_cache_that_is_a_link_to_another_disk_is_fine(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = compiler(tmp_path, monkeypatch, WRITES)
    link = tmp_path / "link"
    link.symlink_to(home)
    monkeypatch.setenv("XDG_CACHE_HOME", str(link))
    assert describe() == f"{processor_level()}, to be compiled at first use by {program}"
