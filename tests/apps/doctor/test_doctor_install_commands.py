"""Commands for packages: what they put in the place of what, by which program, and for which error."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flatpeak.apps.doctor import install_commands
from flatpeak.apps.doctor.install_commands import import_fix, install, pip_command, reinstall, replace_torch
from support.installations import make_package

PAGE = "https://pytorch.org/get-started/locally"
Put = Callable[..., None]


@pytest.fixture
def put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Put:
    """`put(name, version, requires=...)` makes metadata that are found before those of what is really installed."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setattr(install_commands, "pip_command", lambda command="install": f"pip {command}")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    return lambda name, version, **rest: make_package(tmp_path / "site", name, version, **rest)


@pytest.mark.parametrize(
    ("installed", "command"),
    [
        ("2.9.1+cpu", f'install "torch<2.14,>=2.11" built for cpu, as {PAGE} says, then pip install peft'),
        ("2.9.1", 'pip install "torch<2.14,>=2.11" && pip install peft'),
        ("2.9.1+cu126", f'install "torch<2.14,>=2.11" built for cu126, as {PAGE} says, then pip install peft'),
        ("2.9.0a0+50eac811a6.nv25.09", 'pip install "torch<2.14,>=2.11" && pip install peft'),
    ],
)
def test_another_version_of_torch_is_of_the_same_build_and_comes_before_what_would_bring_another(
    installed: str, command: str, put: Put
) -> None:
    put("torch", installed)
    assert install(["peft", "torch<2.14,>=2.11"]) == command


def test_packages_are_installed_anew_in_the_versions_that_are_there(put: Put) -> None:
    put("tokenizers", "0.21.0")
    assert reinstall(["tokenizers"]) == 'pip install --force-reinstall --no-deps "tokenizers==0.21.0"'
    # One that does not fit is no version to keep.
    assert reinstall(["tokenizers>=0.22"]) == 'pip install --force-reinstall --no-deps "tokenizers>=0.22"'


def test_what_is_not_there_is_installed_with_what_it_needs(put: Put) -> None:
    assert reinstall(["no-such-package>=1"]) == 'pip install "no-such-package>=1"'


@pytest.mark.parametrize(
    ("installed", "command"),
    [
        (
            "2.13.0+cpu",
            f'install "torch==2.13.0+cpu" built for cpu, as {PAGE} says, with --force-reinstall --no-deps',
        ),
        ("2.13.0+cu126", f'install "torch==2.13.0+cu126" built for cu126, as {PAGE} says, with --force-reinstall'),
    ],
)
def test_torch_is_installed_anew_with_the_libraries_that_its_build_has(installed: str, command: str, put: Put) -> None:
    put("torch", installed)
    assert reinstall(["torch<2.14"]) == command


def test_what_conda_installed_is_left_to_conda(put: Put, tmp_path: Path) -> None:
    for name, version in (("torch", "2.9.1"), ("math-verify", "0.8"), ("peft", "0.18")):
        put(name, version)
    for name in ("torch-2.9.1", "math_verify-0.8"):
        (tmp_path / "site" / f"{name}.dist-info" / "INSTALLER").write_text("conda\n")
    assert install(["peft", "torch>=2.11", "math-verify[antlr4]"]) == (
        'conda install "pytorch>=2.11" math-verify && pip install peft'
    )
    assert install(["math-verify>=0.8"], "--upgrade") == "conda update math-verify"
    assert replace_torch("torch<2.14", "the highest NNN") == "conda install \"pytorch[version='<2.14',build='cuda*']\""


def test_pip_is_the_one_of_this_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_commands.sys, "executable", "/env/bin/python")
    monkeypatch.setattr(install_commands.shutil, "which", lambda name: "/other/bin/pip")
    assert install(["flatpeak[lora]"]) == '/env/bin/python -m pip install "flatpeak[lora]"'
    monkeypatch.setattr(install_commands.shutil, "which", lambda name: "/env/bin/pip")
    assert install(["numpy", "scipy<2"], "--no-deps") == 'pip install --no-deps numpy "scipy<2"'
    assert pip_command("uninstall") == "pip uninstall -y"


def test_looking_for_pip_leaves_setuptools_as_it_was() -> None:
    """Its finder takes a search for pip as a sign that pip runs, and then setuptools cannot be imported any more."""
    code = (
        "import sys; from flatpeak.apps.doctor.install_commands import install; install(['numpy']); "
        "import setuptools; print('imported')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("imported\n", "")


def test_an_environment_without_pip_is_one_of_uv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install_commands.sys, "executable", "/env/bin/python")
    monkeypatch.setattr(install_commands, "has_pip", lambda: False)
    assert install(["numpy"]) == "uv pip install --python /env/bin/python numpy"
    assert pip_command("uninstall") == "uv pip uninstall --python /env/bin/python"


@pytest.mark.parametrize(
    ("error", "needed", "fix"),
    [
        ("ModuleNotFoundError: No module named 'lower_part'", ["upper"], 'pip install "lower-part>=2"'),
        ("ModuleNotFoundError: No module named 'cv2'", ["upper"], "install the package that has the module cv2"),
        (
            "ModuleNotFoundError: No module named 'upper.part'",
            ["upper"],
            'pip install --force-reinstall --no-deps "upper==1"',
        ),
        ("ModuleNotFoundError: No module named '_lzma'", ["upper"], "install another Python: this one lacks _lzma"),
        ("ImportError: cannot import name 'Cache' from 'transformers'", ["upper<3"], 'pip install --upgrade "upper<3"'),
        ("AttributeError: module 'numpy' has no attribute 'bool'", ["upper"], "pip install --upgrade upper"),
        ("ImportError: cannot import name 'x' from 'upper.part'", ["upper"], "pip install --force-reinstall --no-deps"),
        ("the process was ended by SIGKILL", ["upper"], "end other programs, or allow more memory"),
        (
            "ImportError: x.so: failed to map segment from shared object: Operation not permitted",
            ["upper"],
            "pip install",
        ),
        ("the process did not answer within 90 s", ["upper"], "try again, as a slow disk may be all; if the same"),
        (
            "SyntaxError: source code cannot contain null bytes",
            ["upper"],
            'pip install --force-reinstall --no-deps "up',
        ),
        ("ImportError: cannot import name 'x' from 'y'", [], "report it"),
    ],
)
def test_the_fix_of_an_import_goes_by_its_error(error: str, needed: list[str], fix: str, put: Put) -> None:
    put("upper", "1", requires=["lower-part>=2", "numpy"])
    assert import_fix(error, needed).startswith(fix)


def test_libraries_on_the_path_are_the_first_suspect_and_not_the_last(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("upper", "1")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/usr/local/cuda/lib64")
    assert import_fix("ImportError: x.so: undefined symbol: y", ["upper"]) == (
        'unset LD_LIBRARY_PATH; if that is not it, pip install --force-reinstall --no-deps "upper==1"'
    )
    assert import_fix("RuntimeError: damaged", ["upper"]).startswith("pip install --force-reinstall")
