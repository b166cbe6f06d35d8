"""A wheel, installed elsewhere: its commands, and the compiled kernels that it brings."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from flatpeak.kernels.native import build
from flatpeak.kernels.native.build import UnavailableError, file_name, processor_level

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUILD = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
WIDTHS = {"x86-64-v4": 16, "x86-64-v3": 8, "armv8-a": 4}
LOAD = "from flatpeak.kernels.native.build import library; print(library()._name, library().vector_width())"


def run(*command: str, source: Path, **environment: str) -> str:
    """Run Python on another copy of the package."""
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": str(source), **environment},
        cwd=source.parent,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def install(tree: Path, site: Path) -> None:
    """What pip would install from a source tree, by the build backend where it is there."""
    if importlib.util.find_spec("hatchling") is None:
        shutil.copytree(tree / "src", site)
        return
    run("-c", BUILD, str(tree), source=tree / "src")
    (wheel,) = tree.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


@pytest.mark.skipif(not any(shutil.which(name) for name in build.COMPILERS), reason="no C++ compiler")
def test_a_wheel_brings_kernels_to_a_machine_without_a_compiler(tmp_path: Path) -> None:
    try:
        level = processor_level()
    except UnavailableError as error:
        pytest.skip(str(error))
    tree, site, home = tmp_path / "tree", tmp_path / "site", tmp_path / "home"
    home.mkdir(mode=0o700)
    ignored = shutil.ignore_patterns("__pycache__", "prebuilt")
    shutil.copytree(ROOT / "src", tree / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    folder = Path("flatpeak") / "kernels" / "native" / "prebuilt"
    (tree / "src" / folder).mkdir()
    (tree / "src" / folder / "kernels-of-an-older-version.so").touch()
    made = run("-m", "flatpeak.kernels.native.build", source=tree / "src").split()
    assert tree / "src" / folder / file_name(level) in map(Path, made)
    install(tree, site)
    assert sorted(path.name for path in (site / folder).iterdir()) == sorted(Path(path).name for path in made)
    loaded, width = run("-c", LOAD, source=site, PATH=str(home), CXX="", XDG_CACHE_HOME=str(home)).split()
    assert (Path(loaded), int(width)) == (site / folder / file_name(level), WIDTHS[level])
    assert list(home.iterdir()) == []


def test_a_wheel_in_a_new_environment_trains(tmp_path: Path) -> None:
    tree, environment = tmp_path / "tree", tmp_path / "environment"
    shutil.copytree(ROOT / "src", tree / "src", ignore=shutil.ignore_patterns("__pycache__", "prebuilt"))
    for name in ("pyproject.toml", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tree)
    run("-c", BUILD, str(tree), source=tree / "src")
    (wheel,) = tree.glob("*.whl")
    venv.create(environment, with_pip=True)
    python, command = environment / "bin" / "python", environment / "bin" / "flatpeak"
    # The dependencies are those of this environment; its own flatpeak comes after the new one.
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def call(*arguments: str | Path) -> str:
        done = subprocess.run(arguments, env=clean, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    call(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    assert Path(call(python, "-c", "import flatpeak; print(flatpeak.__file__)").strip()).is_relative_to(site)
    printed = call(command, "demo", "sft.steps=1", "training.steps=1")
    assert (tmp_path / "runs" / "demo" / "report.html").is_file()
    assert "next: flatpeak chat" in printed
