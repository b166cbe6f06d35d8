"""Versions, extras, imports and vLLM of made-up installations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path

import pytest

import flatpeak
from flatpeak.apps.doctor import packages
from flatpeak.apps.doctor.packages import check_imports, check_installation, check_vllm, unmet, version
from flatpeak.apps.doctor.probe import TORCH_PAGE, Finding
from flatpeak.rollout.vllm import vllm_python
from flatpeak.rollout.vllm.vllm_python import OLDEST
from support.installations import make_package, make_program

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """`install(name, version, requires=..., extras=..., code=...)`, found before what is really installed."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setitem(packages.MODULES, "flatpeak", "json")
    return lambda name, version, **rest: make_package(site, name, version, **rest)


def reported(findings: Iterable[Finding]) -> dict[str, Finding]:
    """The findings by check, attempts aside; the last of two of one check."""
    return {one.check: one for one in findings if one.status != "attempt"}


def test_versions_that_do_not_fit_name_who_needs_which(install: Install) -> None:
    install("flatpeak", "0.1.0", requires=["torch<2.14,>=2.11", "absent-thing>=2", "linux-only; sys_platform == 'no'"])
    install("torch", "2.9.1+cu128")
    finding = reported(check_installation())["packages"]
    assert finding.status == "problem"
    assert finding.text == (
        "flatpeak needs torch<2.14,>=2.11, but 2.9.1+cu128 is installed; "
        "flatpeak needs absent-thing>=2, but no version is installed"
    )
    assert finding.fix == f"install torch<2.14,>=2.11, absent-thing>=2 ({TORCH_PAGE} has the builds)"


def test_versions_that_fit_are_one_line(install: Install) -> None:
    install("flatpeak", "0.1.0", requires=["torch<2.14,>=2.11"])
    install("torch", "2.11.0+cpu")
    finding = reported(check_installation())["packages"]
    assert (finding.status, finding.text) == ("ok", "1 needed, all installed in suitable versions")


def test_what_an_extra_of_a_requirement_asks_for_is_asked_for(install: Install) -> None:
    install("flatpeak", "0.1.0", requires=["verify[fast]"])
    install("verify", "1", requires=["runtime==4.13.2; extra == 'fast'", "other; extra == 'unused'"], extras=["fast"])
    install("runtime", "4.9.3")
    assert unmet("flatpeak") == {"runtime==4.13.2": "verify needs runtime==4.13.2, but 4.9.3 is installed"}


def test_damaged_metadata_count_as_a_package_that_is_not_there(install: Install) -> None:
    install("torch", None)
    assert version("torch") is None


def test_what_flatpeak_is_really_installed_with_fits() -> None:
    assert unmet("flatpeak") == {}


def test_extras_are_installed_unfit_or_absent(install: Install) -> None:
    requires = ["apackage; extra == 'works'", "bpackage==2; extra == 'unfit'", "cpackage; extra == 'absent'"]
    requires += ["half; extra == 'absent'", "pytest; extra == 'dev'"]
    install("flatpeak", "0.1.0", requires=requires, extras=["works", "unfit", "absent", "dev"])
    for name in ("apackage", "bpackage", "half"):
        install(name, "1")
    findings = reported(check_installation())
    assert findings["packages"].text == "flatpeak needs bpackage==2, but 1 is installed"
    absent = findings["extras"]
    assert (absent.status, absent.text) == ("note", "not installed: absent")
    assert absent.fix == "install those that you need: flatpeak[absent]"


def test_a_python_older_than_the_metadata_ask_for_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reported(check_installation())["python"].status == "ok"
    monkeypatch.setattr(packages.platform, "python_version", lambda: "3.9.2")
    old = reported(check_installation())["python"]
    assert (old.status, old.text.startswith("3.9.2 in ")) == ("problem", True)
    assert old.text.endswith(f"flatpeak needs {metadata.distribution('flatpeak').metadata['Requires-Python']}")


def test_a_checkout_that_is_not_installed_is_a_note_and_nothing_else_is_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nothing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(packages, "distribution", nothing)
    findings = reported(check_installation())
    assert (findings["packages"].status, findings["packages"].fix) == ("note", "install the checkout")
    assert findings["flatpeak"].text.startswith(f"{flatpeak.__version__} in ")
    assert list(check_imports()) == []


def test_imports_that_fail_alike_are_one_problem_of_the_first(install: Install) -> None:
    install("flatpeak", "0.1.0", requires=["imports-lower", "lower-of-two", "exits-at-import", "works.at-import"])
    install("imports-lower", "1", code="import lower_of_two")
    install("lower-of-two", "1", code="raise OSError('libx.so: cannot open shared object file')")
    install("exits-at-import", "1", code="raise SystemExit('no GPU')")
    install("works-at-import", "1", code="")
    problems = [one for one in check_imports() if one.status == "problem"]
    assert [(one.text, one.fix) for one in problems] == [
        (
            "imports_lower cannot be imported: OSError: libx.so: cannot open shared object file",
            "reinstall imports-lower, or fix what the error names",
        ),
        (
            "exits_at_import cannot be imported: SystemExit: no GPU",
            "reinstall exits-at-import, or fix what the error names",
        ),
    ]


def test_imports_that_work_are_one_line_with_those_of_complete_extras(install: Install) -> None:
    requires = ["PyYAML", "fine-extra; extra == 'fine'", "half-extra; extra == 'half'", "none; extra == 'half'"]
    install("flatpeak", "0.1.0", requires=requires, extras=["fine", "half"])
    install("fine-extra", "1", code="")
    install("half-extra", "1", code="raise RuntimeError('not imported: the extra is not complete')")
    (finding,) = (one for one in check_imports() if one.status != "attempt")
    assert (finding.status, finding.text) == ("ok", "3 modules can be imported")


def test_the_extras_of_the_project_are_imported_by_the_modules_that_their_code_needs() -> None:
    modules = packages._packages_by_module()
    assert {"flatpeak.pipeline.train", "flatpeak.integrations.trl", "mlflow", "yaml", "math_verify"} <= set(modules)
    assert next(iter(modules)) == "torch"
    assert not {"pytest", "trl"} & set(modules)


def vllm(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> Finding:
    """The finding about a Python that is this script."""
    folder.mkdir()
    monkeypatch.setenv("FLATPEAK_VLLM_PYTHON", str(make_program(folder / "bin", "python", script)))
    return reported(check_vllm())["vllm"]


def test_vllm_is_there_too_old_or_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fits = vllm(monkeypatch, tmp_path / "fits", "echo 0.40.1; echo noise")
    assert (fits.status, fits.text) == ("ok", f"0.40.1 in {tmp_path}/fits")
    old = vllm(monkeypatch, tmp_path / "old", "echo 0.9.2")
    assert (old.status, old.text) == ("problem", f"0.9.2 in {tmp_path}/old: flatpeak needs {OLDEST} or newer")
    words = "ImportError: _C.abi3.so: undefined symbol"
    broken = vllm(monkeypatch, tmp_path / "broken", f"echo 0.40.1; echo '{words}' >&2; exit 1")
    assert (broken.status, broken.text.startswith(f"0.40.1 in {tmp_path}/broken cannot be")) == ("problem", True)
    assert broken.text.endswith(words)


def test_a_real_python_answers_of_its_packages_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PYTHONPATH and the working directory are those of flatpeak, not of vLLM's environment."""
    make_package(tmp_path / "site", "vllm", "0.40.1", code="")
    make_package(tmp_path / "site", "torch", "2.12.0", code="raise RuntimeError('not this one')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.chdir(tmp_path / "site")
    finding = vllm(monkeypatch, tmp_path / "real", f'exec {packages.sys.executable} "$@"')
    assert (finding.status, finding.text.startswith(f"vLLM in {tmp_path}/real cannot be")) == ("problem", True)
    assert finding.text.endswith("No module named 'vllm'")


def test_no_vllm_is_a_note_and_a_variable_that_names_none_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(vllm_python, "find_spec", lambda name: None)
    monkeypatch.delenv("FLATPEAK_VLLM_PYTHON", raising=False)
    assert reported(check_vllm())["vllm"].status == "note"
    monkeypatch.setenv("FLATPEAK_VLLM_PYTHON", "/no/python")
    with pytest.raises(ValueError, match="FLATPEAK_VLLM_PYTHON=/no/python: no such program"):
        list(check_vllm())
