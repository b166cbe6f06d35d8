"""The library of native kernels: shipped with the package, or compiled at first use.

    python -m flatpeak.kernels.native.build      compiles the libraries that a wheel ships, into prebuilt/

The name of a library contains a hash of source, flags and instruction set. It is compiled for one of a few levels of
instruction sets, chosen by what the processor reports: machines that share a cache load each other's library only if
they have the same level. It has a plain C interface, and uses neither Python nor torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

SOURCES = ("vectors.h", "products.h", "decode.cpp", "training_pass.cpp")
LEVELS = {
    "x86-64-v4": (
        "x86_64",
        "AVX512",
        "avx512f avx512bw avx512cd avx512dq avx512vl avx avx2 bmi1 bmi2 f16c fma abm movbe",
    ),
    "x86-64-v3": ("x86_64", "AVX", "avx avx2 bmi1 bmi2 f16c fma abm movbe"),
    "armv8-a": ("aarch64", "", "asimd"),
}
"""Instruction sets by the compiler's names, best first: machine, prefix of torch's name for it, processor flags."""
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-shared", "-fPIC")
THREADS = ("-fopenmp",)
"""Flags that are omitted if the compiler lacks OpenMP; kernels then run on one thread."""
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 600
"""Limit of the compiler's wall-clock time: on a busy machine it has taken over 120 s."""
TRIAL_SECONDS = 20
CHECKSUM = 16
"""Bytes of the checksum at the end of a compiled library; the loader ignores it."""
TRIAL = """#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>
extern "C" double sum(const double* values, long count) {
    double total = 0;
#pragma omp parallel for reduction(+ : total)
    for (long i = 0; i < count; ++i) total += std::sqrt(values[i]);
    return total;
}
"""
"""A source that tests the compiler for what the kernels need: the standard library, threads, shared libraries."""
_FOLDER = Path(__file__).parent
PREBUILT = _FOLDER / "prebuilt"
"""The libraries shipped with a wheel."""


class UnavailableError(RuntimeError):
    """Raised if the kernels cannot run on a machine; the text is the reason."""


def library() -> ctypes.CDLL:
    """The kernels for this processor; UnavailableError if there are none."""
    result = _find()
    if isinstance(result, str):
        raise UnavailableError(result)
    return result


def record(**values: Any) -> Any:
    """A C structure with these values in this order (see `_converted`), which keeps its tensors alive."""
    converted = {name: _converted(value) for name, value in values.items()}
    result: Any = _kind(tuple((name, type(value)) for name, value in converted.items()))(*converted.values())
    result.kept = values
    return result


def call(name: str, *arguments: Any) -> None:
    """Call a kernel with structures, contiguous tensors and numbers."""
    function = getattr(library(), name)
    function.restype = None
    function(*map(_converted, arguments))


def _converted(value: Any) -> Any:
    """A value as an argument in C: int64_t, float, or the address of a tensor or structure, which may be null."""
    if isinstance(value, int):
        return ctypes.c_int64(value)
    if isinstance(value, float):
        return ctypes.c_float(value)
    if isinstance(value, ctypes.Structure):
        return ctypes.c_void_p(ctypes.addressof(value))
    return ctypes.c_void_p(None if value is None else value.data_ptr())


@cache
def _kind(fields: tuple[tuple[str, Any], ...]) -> type[ctypes.Structure]:
    return type("Structure", (ctypes.Structure,), {"_fields_": fields})


def library_name() -> str:
    """The instruction set, version and compiler of the kernels, which together determine the bits of a result."""
    compiler = library().compiler
    compiler.restype = ctypes.c_char_p
    return f"{file_name(processor_level()).removesuffix('.so')} ({compiler().decode()})"


@cache
def _find() -> ctypes.CDLL | str:
    """The library, or the reason why there is none; cached after the first call."""
    try:
        return _load(processor_level())
    except UnavailableError as error:
        return str(error)


def _load(level: str) -> ctypes.CDLL:
    shipped = PREBUILT / file_name(level)
    if shipped.is_file():
        with suppress(OSError):  # built for another C library: compile instead
            return ctypes.CDLL(str(shipped))
    path = cache_folder() / shipped.name
    failure: OSError | None = None
    for compiled in (False, True):  # the existing file may be damaged or built for another C library
        if compiled:
            compile_library(level, path)
        try:
            if path.exists():
                _check_owner(path.lstat(), path)
                return _open(path)
        except OSError as error:
            failure = error
    raise UnavailableError(f"the compiled kernels cannot be loaded: {failure}")


def _open(path: Path) -> ctypes.CDLL:
    """Load a compiled library; OSError if it is damaged.

    A truncated file, for example after a full disk or a power failure, would crash the process in the loader.
    """
    content = path.read_bytes()
    if content[-CHECKSUM:] != _checksum(content[:-CHECKSUM]):
        raise OSError(f"{path} is damaged")
    return ctypes.CDLL(str(path))


def _checksum(content: bytes) -> bytes:
    return blake2b(content, digest_size=CHECKSUM).digest()


def processor_level() -> str:
    """The best level whose instructions this processor has and torch may use."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        raise UnavailableError("this system does not report the processor's instruction sets") from None
    names = ("flags", "Features")
    flags = next((set(line.split()) for line in text.splitlines() if line.startswith(names)), set())
    capability = torch.backends.cpu.get_cpu_capability()
    for level, (machine, allowed, needed) in LEVELS.items():
        if platform.machine() == machine and capability.startswith(allowed) and flags.issuperset(needed.split()):
            return level
    raise UnavailableError("the processor has neither AVX2 nor NEON instructions")


def file_name(level: str) -> str:
    """The name of the library for a level, with a hash of everything that determines the code."""
    digest = blake2b(digest_size=10)
    for text in (*FLAGS, *THREADS, level, *((_FOLDER / name).read_text(encoding="utf-8") for name in SOURCES)):
        digest.update(f"{len(text)}:{text}".encode())
    return f"kernels-{level}-{digest.hexdigest()}.so"


def describe() -> str:
    """The kernels that a run would use, as text; UnavailableError if there are none. It leaves no files behind.

    If no library exists yet, this compiles a short test source with the compiler and flags of the kernels.
    """
    level = processor_level()
    shipped = PREBUILT / file_name(level)
    if shipped.is_file():
        with suppress(OSError):
            ctypes.CDLL(str(shipped))
            return f"{level}, shipped with the package"
    path = _cache_path() / shipped.name
    try:
        nearest = next(folder for folder in (path.parent, *path.parent.parents) if folder.exists())
        _check_folder(nearest, exists=nearest == path.parent)
        if path.exists():
            _check_owner(path.lstat(), path)
            with suppress(OSError):  # if it is damaged, a run compiles it again
                _open(path)
                return f"{level}, compiled before"
    except OSError as error:
        raise UnavailableError(f"no folder for compiled kernels: {path.parent}: {error.strerror}") from None
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UnavailableError(f"no folder for compiled kernels: {nearest} cannot be written; set XDG_CACHE_HOME")
    if os.statvfs(nearest).f_flag & getattr(os, "ST_NOEXEC", 0):
        raise UnavailableError(f"no library can be loaded from {nearest}, mounted noexec; set XDG_CACHE_HOME")
    with TemporaryDirectory() as scratch:
        source = Path(scratch) / "trial.cpp"
        source.write_text(TRIAL, encoding="utf-8")
        threads = _compile([str(source)], level, Path(scratch) / "trial.so", seconds=TRIAL_SECONDS)
    return f"{level}, to be compiled at first use by {_compiler()[0]}{'' if threads else ' without OpenMP: one thread'}"


def cache_folder() -> Path:
    """The folder of compiled libraries, created if needed; UnavailableError if others could put a library there."""
    folder = _cache_path()
    try:
        for directory in (*reversed(folder.parents), folder):  # `parents=True` would take permissions from the umask
            directory.mkdir(mode=0o700, exist_ok=True)
        _check_folder(folder)
    except OSError as error:
        raise UnavailableError(f"no folder for compiled kernels: {folder}: {error.strerror}") from None
    return folder


def _cache_path() -> Path:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    except RuntimeError:  # a user without a home directory
        raise UnavailableError("no folder for compiled kernels: this user has no home; set XDG_CACHE_HOME") from None
    return home / "flatpeak" / "kernels"


def _check_folder(folder: Path, *, exists: bool = True) -> None:
    """UnavailableError if others could put a library into the folder, or replace the folder.

    If the folder does not exist yet, its nearest existing parent is checked, which may be shared or a link.
    """
    _check_owner(folder.lstat() if exists else folder.stat(), folder, shared=not exists)
    for parent in folder.resolve().parents:  # whoever may rename a parent folder may replace its contents
        _check_owner(parent.stat(), parent, shared=True)


def compile_library(level: str, path: Path) -> None:
    """Compile the kernels for a level and write the file atomically."""
    sources = [str(_FOLDER / name) for name in SOURCES if name.endswith(".cpp")]
    compiler = _compiler()
    try:
        with TemporaryDirectory(prefix=".", dir=path.parent) as scratch:  # process ids are not unique across containers
            target = Path(scratch) / path.name
            _compile(sources, level, target)
            target.write_bytes(target.read_bytes() + _checksum(target.read_bytes()))
            target.chmod(0o600)
            target.replace(path)
    except OSError as error:
        raise UnavailableError(f"{compiler[0]} did not compile the kernels: {error}") from None


def _compile(sources: list[str], level: str, target: Path, *, seconds: float = SECONDS) -> bool:
    """Compile a library from the sources; return whether the compiler has OpenMP, which is then used."""
    compiler, last = _compiler(), ""
    try:
        for threads in (THREADS, ()):
            command = [*compiler, *FLAGS, *threads, f"-march={level}", "-o", str(target), *sources]
            done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
            if done.returncode == 0:
                return bool(threads)
            last = _reason(done.stderr) or f"exit code {done.returncode}"
    except OSError as error:
        last = str(error)
    except subprocess.TimeoutExpired:
        last = f"it did not finish within {seconds:g} s"
    raise UnavailableError(f"{compiler[0]} did not compile the kernels: {last}")


def _reason(output: bytes) -> str:
    """The first line with an error in a compiler's output, else its first line; output may be in any encoding."""
    lines = output.decode(errors="replace").strip().splitlines()
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")


def compile_shipped() -> list[Path]:
    """Compile the wheel's libraries for every processor of this kind of machine, and delete all others."""
    PREBUILT.mkdir(exist_ok=True)
    levels = [level for level, (machine, *_) in LEVELS.items() if machine == platform.machine()]
    paths = {level: PREBUILT / file_name(level) for level in levels}
    for other in set(PREBUILT.iterdir()) - set(paths.values()):
        other.unlink()
    for level, path in paths.items():
        if not path.exists():
            compile_library(level, path)
            path.chmod(0o644)
    return list(paths.values())


def _compiler() -> list[str]:
    """The command of the compiler: $CXX, or the first that exists."""
    try:
        named = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise UnavailableError(f"CXX={os.environ['CXX']} is not a command: {error}") from None
    chosen = named or [name for name in COMPILERS if shutil.which(name)][:1]
    if not chosen or shutil.which(chosen[0]) is None:
        raise UnavailableError(
            f"no C++ compiler was found ({chosen[0] if chosen else ', '.join(COMPILERS)}), and no compiled kernels fit"
        )
    return chosen


def _check_owner(status: os.stat_result, path: Path, *, shared: bool = False) -> None:
    """UnavailableError if users other than this one and root could change the file or folder.

    All users may write to a `shared` folder if only the owner of an entry can remove it (as in /tmp).
    """
    kept = shared and status.st_mode & stat.S_ISVTX
    writable = not kept and status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    if status.st_uid not in (os.geteuid(), 0) or writable or stat.S_ISLNK(status.st_mode):
        raise UnavailableError(f"others may write to {path}: compiled kernels need a folder that others cannot change")


if __name__ == "__main__":
    for made in compile_shipped():
        sys.stdout.write(f"{made}\n")
