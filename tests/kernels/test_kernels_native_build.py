"""The native kernels' library: where it may lie, who may write there, and which processor gets which."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flatpeak.kernels.native import build
from flatpeak.kernels.native.build import UnavailableError, cache_folder, compile_library, library, processor_level

pytestmark = pytest.mark.slow

HAS_COMPILER = any(shutil.which(name) for name in build.COMPILERS)
needs_compiler = pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")
SANITIZED = Path(__file__).parents[1] / "support" / "sanitized_kernels.py"
V3 = "fpu avx avx2 bmi1 bmi2 f16c fma abm movbe"
V4 = f"{V3} avx512f avx512bw avx512cd avx512dq avx512vl"


def says(monkeypatch: pytest.MonkeyPatch, flags: str, *, machine: str = "x86_64", torch_has: str = "AVX512") -> None:
    """Let the processor say that it has these instructions."""
    monkeypatch.setattr(Path, "read_text", lambda *given, **named: f"processor : 0\nflags\t\t: {flags}\n")
    monkeypatch.setattr(build.platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: torch_has)


@pytest.mark.parametrize(
    ("flags", "torch_has", "level"),
    [
        (V4, "AVX512", "x86-64-v4"),
        (V4, "AVX2", "x86-64-v3"),
        (V3, "AVX2", "x86-64-v3"),
        (V4.replace("avx512dq", ""), "AVX512", "x86-64-v3"),
    ],
)
def test_the_level_is_the_best_that_processor_and_torch_allow(
    flags: str, torch_has: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, flags, torch_has=torch_has)
    assert processor_level() == level


@pytest.mark.parametrize("flags", ["fpu avx", V3.replace("fma", ""), V3.replace("movbe", "")])
def test_a_processor_without_the_instructions_gets_no_kernels(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, flags)
    with pytest.raises(UnavailableError, match="neither AVX2 nor NEON"):
        processor_level()


@needs_compiler
def test_a_library_is_compiled_once_into_a_folder_of_the_user_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = library().vector_width()
    assert width == {"x86-64-v4": 16, "x86-64-v3": 8, "armv8-a": 4}[processor_level()]
    (compiled,) = (home / "flatpeak" / "kernels").iterdir()
    assert compiled.name == build.file_name(processor_level())
    assert (compiled.stat().st_mode & 0o777, compiled.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    build._find.cache_clear()
    monkeypatch.setattr(build, "compile_library", lambda *given: pytest.fail("compiled again"))
    assert library().vector_width() == width


@needs_compiler
def test_a_library_that_is_damaged_or_lost_its_end_or_a_page_is_compiled_anew(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = cache_folder() / build.file_name(processor_level())
    compile_library(processor_level(), path)
    whole = path.read_bytes()
    monkeypatch.setattr(build, "compile_library", lambda level, target: target.replace(home / "damaged"))
    for damaged in (whole[: len(whole) * 9 // 10], whole[:8192] + bytes(4096) + whole[12288:], b"half a libra", b""):
        path.write_bytes(damaged)
        path.chmod(0o600)
        with pytest.raises(UnavailableError, match=r"cannot be loaded: .*is damaged"):
            library()
        assert (home / "damaged").read_bytes() == damaged
        build._find.cache_clear()
    path.write_bytes(whole)
    path.chmod(0o600)
    assert library().vector_width() > 0


def test_other_sources_flags_and_levels_are_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {build.file_name("x86-64-v4"), build.file_name("x86-64-v3")}
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    names.add(build.file_name("x86-64-v4"))
    monkeypatch.setattr(build, "SOURCES", build.SOURCES[:1])
    names.add(build.file_name("x86-64-v4"))
    assert len(names) == 4


@pytest.mark.parametrize("folder", ["flatpeak/kernels", "flatpeak", "."])
def test_a_folder_that_others_may_write_to_is_refused(home: Path, folder: str) -> None:
    cache_folder()
    (home / folder).chmod(0o770)
    with pytest.raises(UnavailableError, match="others may write to"):
        cache_folder()
    (home / folder).chmod(0o700)
    assert cache_folder() == home / "flatpeak" / "kernels"


def test_folders_are_the_users_own_under_a_umask_that_lets_the_group_write(home: Path) -> None:
    before = os.umask(0o002)
    try:
        folder = cache_folder()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700, 0o700]


def test_a_user_without_a_home_gets_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "expanduser", homeless)
    with pytest.raises(UnavailableError, match="this user has no home; set XDG_CACHE_HOME"):
        cache_folder()


def test_a_folder_that_cannot_be_written_is_a_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read_only(**given: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(build, "TemporaryDirectory", read_only)
    monkeypatch.setenv("CXX", sys.executable)
    with pytest.raises(UnavailableError, match=r"did not compile the kernels: .*Read-only file system"):
        library()


def test_compilers_in_containers_with_the_same_process_id_write_different_files(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, told = tmp_path / "compiler", tmp_path / "told"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho "$2" >> {told}\necho built > "$2"\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    for _ in range(2):
        compile_library("x86-64-v3", cache_folder() / "library.so")
    first, second = told.read_text().split()
    assert first != second
    assert [path.name for path in cache_folder().iterdir()] == ["library.so"]


def test_a_link_in_place_of_the_folder_or_the_file_is_refused(home: Path, tmp_path: Path) -> None:
    cache_folder().rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (home / "flatpeak" / "kernels").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnavailableError, match="others may write to"):
        cache_folder()
    (home / "flatpeak" / "kernels").unlink()
    (cache_folder() / build.file_name(processor_level())).symlink_to(tmp_path / "library.so")
    (tmp_path / "library.so").touch()
    with pytest.raises(UnavailableError, match="others may write to"):
        library()


def test_without_a_compiler_there_is_a_reason_and_it_is_looked_for_once(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(UnavailableError, match=r"no C\+\+ compiler was found"):
        library()
    monkeypatch.setattr(build, "_load", lambda level: pytest.fail("looked for again"))
    with pytest.raises(UnavailableError, match=r"no C\+\+ compiler was found"):
        library()


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ("error: no such option", "error: no such option"),
        (r"In file included from x\nx:1: error: no header\nnote", "x:1: error: no header"),
        (r"ung\374ltig \377", "ung\ufffdltig \ufffd"),
        ("", "exit code 1"),
    ],
)
def test_a_compiler_that_fails_gives_its_first_error_in_any_encoding_and_leaves_no_file(
    says: str, reason: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text(f"#!/bin/sh\nprintf '{says}' >&2\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(UnavailableError, match=f"broken did not compile the kernels: {reason}$"):
        library()
    assert list(cache_folder().iterdir()) == []


def test_a_compiler_with_an_open_quote_in_its_name_is_a_reason(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", 'g++ "-O2')
    with pytest.raises(UnavailableError, match=r'CXX=g.. "-O2 is not a command: No closing quotation'):
        library()


def test_a_shipped_library_is_taken_before_all(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PREBUILT", tmp_path)
    monkeypatch.setattr(build.ctypes, "CDLL", Path)
    shipped = tmp_path / build.file_name(processor_level())
    shipped.touch()
    assert library() == shipped
    assert not (home / "flatpeak").exists()


@needs_compiler
def test_the_kernels_are_clean_under_the_sanitizers(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Address and undefined behaviour, over random shapes and draws, two threads."""
    compiler = os.environ.get("CXX", next(name for name in build.COMPILERS if shutil.which(name)))
    found = [
        subprocess.run([compiler, f"-print-file-name=lib{name}.so"], capture_output=True, text=True, check=False)
        for name in ("asan", "ubsan")
    ]
    runtimes = [one.stdout.strip() for one in found]
    if not all(Path(runtime).is_absolute() and Path(runtime).exists() for runtime in runtimes):
        pytest.skip("the compiler has no sanitizers")
    flags = ("-std=c++17", "-O0", "-g1", "-shared", "-fPIC", "-fno-sanitize-recover=all")
    monkeypatch.setattr(build, "FLAGS", (*flags, "-fsanitize=address,undefined"))
    target = cache_folder() / "sanitized.so"
    compile_library(processor_level(), target)
    done = subprocess.run(
        [sys.executable, str(SANITIZED), str(target)],
        env=os.environ | {"LD_PRELOAD": " ".join(runtimes), "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": _paths()},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "clean", done.stderr[-3000:]


def _paths() -> str:
    return os.pathsep.join(path for path in sys.path if path)
