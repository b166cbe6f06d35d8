"""Checks of what is installed: Python, flatpeak, its packages and extras, and whether all of them can be imported."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import flatpeak
from flatpeak.apps.doctor.bounded_process import run_probe
from flatpeak.apps.doctor.findings import Finding, note, ok, problem
from flatpeak.apps.doctor.install_commands import import_fix, install, is_memory, pip_command
from flatpeak.apps.doctor.requirements import Unmet, module_name, requirements, unmet, version
from flatpeak.runs.manifest import git_commit

if TYPE_CHECKING:
    from packaging.requirements import Requirement

PACKAGE: Final = "flatpeak"
DEVELOPMENT: Final = "dev"
"""The extra of those who work on flatpeak itself, which no run needs."""
WHOLE_RUN: Final = "flatpeak.pipeline.train"
"""The module that imports what a run uses: a package may be of an allowed version, and yet have lost a name."""
EXTRA_MODULES: Final = {"trl": "flatpeak.integrations.trl"}
"""Modules to import for an extra in place of its packages, which load what they need later."""
OFFLINE: Final = {"HF_HUB_OFFLINE": "1"}
"""bitsandbytes looks for kernels on the Hub as it is imported."""
IMPORT_SECONDS: Final = 90.0
"""The longest that all imports may take together: from a cold disk, or on a busy machine, it is tens of seconds."""


def check_python() -> Iterator[Finding]:
    """Python's version against the one that flatpeak asks for, and its environment."""
    text = f"{platform.python_version()} in {sys.prefix}"
    needed = _python_needed()
    if needed is None or _fits(platform.python_version(), needed):
        yield ok("python", text)
    else:
        fix = "in the checkout: python3.12 -m venv .venv312 && .venv312/bin/pip install -e ."
        yield problem("python", f"{text}; flatpeak needs {needed}", fix)


def check_flatpeak() -> Iterator[Finding]:
    """The version and place of flatpeak, with the commit where it is a checkout."""
    folder = Path(flatpeak.__file__).parent
    commit = git_commit(Path(flatpeak.__file__))
    text = f"{flatpeak.__version__} in {folder}" + (f", commit {_short(commit)}" if commit else "")
    installed, fix = version(PACKAGE), f"in the checkout: {pip_command()} -e ."
    if installed is None:
        yield note("flatpeak", f"{text}; it is not installed, so that what it needs is not known", fix)
    elif installed != flatpeak.__version__:
        yield note("flatpeak", f"{text}; version {installed} is installed", fix)
    else:
        yield ok("flatpeak", text)


def _short(commit: str) -> str:
    """The first digits of a commit, with its mark of changed files."""
    digits, _, dirty = commit.partition("-")
    return digits[:12] + (f"-{dirty}" if dirty else "")


def check_packages() -> Iterator[Finding]:
    """The versions of flatpeak's packages and of those of its extras."""
    if version(PACKAGE) is None:
        return
    yield from _version_findings(requirements(PACKAGE))
    extras = _extras()
    for extra in extras:
        if failures := extra.unfit:
            fix = install([one.requirement for one in failures])
            yield problem(f"extra {extra.name}", "; ".join(map(str, failures)), fix)
    if absent := [extra.name for extra in extras if extra.absent]:
        several = ", or those of them that you want" if len(absent) > 1 else ""
        fix = install([f"{PACKAGE}[{','.join(absent)}]"]) + several
        yield note("extras", f"not installed: {', '.join(absent)}", fix)


def check_imports() -> Iterator[Finding]:
    """Whether the packages of flatpeak and of its extras can be imported, and all that a run uses."""
    if version(PACKAGE) is None:
        return
    needed, complete = requirements(PACKAGE), [extra for extra in _extras() if not extra.absent]
    # torch first: when it fails, so does what imports it.
    there = sorted((one for one in needed if version(one.name) is not None), key=lambda one: one.name != "torch")
    modules = {module_name(one.name): f"{one.name}{one.specifier}" for one in there} | {WHOLE_RUN: ""}
    for extra in complete:
        modules |= {name: package for name, package in extra.modules.items() if name not in modules}
    broken, untried = import_errors(list(modules), seconds=IMPORT_SECONDS)
    yield from _import_findings(modules, broken, untried)
    unusable = {failure.module for failure in broken} | set(untried)
    usable = [one.name for one in complete if not one.unfit and unusable.isdisjoint(one.modules)]
    if usable:
        yield ok("extras", f"installed, and can be imported: {', '.join(usable)}")


def _version_findings(needed: Sequence[Requirement]) -> Iterator[Finding]:
    """The versions of flatpeak's own packages, and of those that these ask for."""
    failures = unmet(PACKAGE, needed)
    for say, direct in ((problem, True), (note, False)):
        if those := [one for one in failures if one.direct is direct]:
            yield say("packages", "; ".join(map(str, those)), install([one.requirement for one in those]))
    if not failures:
        yield ok("packages", f"{len(needed)} needed, all installed in versions that fit")


@dataclass(frozen=True, kw_only=True)
class Extra:
    """An extra of flatpeak's, such as `lora`, and the state of its packages."""

    name: str
    needed: Sequence[Requirement]

    @property
    def absent(self) -> list[str]:
        """Its packages that are not installed."""
        return [one.name for one in self.needed if version(one.name) is None]

    @property
    def unfit(self) -> list[Unmet]:
        """The requirements that are not met, where all of its packages are installed."""
        return [] if self.absent else [one for one in unmet(f"{PACKAGE}[{self.name}]", self.needed) if one.direct]

    @property
    def modules(self) -> dict[str, str]:
        """The modules that flatpeak imports of it, each with the package to reinstall where that fails."""
        modules = {module_name(one.name): f"{one.name}{one.specifier}" for one in self.needed}
        if self.name in EXTRA_MODULES:
            return dict.fromkeys([EXTRA_MODULES[self.name]], *modules.values())
        return modules


def _extras() -> list[Extra]:
    try:
        names = distribution(PACKAGE).metadata.get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return []
    return [Extra(name=name, needed=requirements(PACKAGE, name)) for name in sorted(names) if name != DEVELOPMENT]


def _import_findings(
    modules: Mapping[str, str], failures: Sequence[ImportFailure], untried: Sequence[str]
) -> Iterator[Finding]:
    """A finding per cause of failing imports, or one that all work. `modules` has the package of each, for pip."""
    for cause in dict.fromkeys(_cause(failure.error) for failure in failures):
        those = [failure for failure in failures if _cause(failure.error) == cause]
        error = those[0].error
        names = [failure.module for failure in those]
        # Of packages that import each other the one at fault; all of them where it is another.
        guilty = [name for name in names if name in {failure.raised_by for failure in those}] or names
        fix = import_fix(error, [modules[name] for name in guilty if modules[name]])
        yield problem("imports", f"{', '.join(names)} cannot be imported: {error}", fix)
    if untried:
        yield note("imports", f"not tried after that: {', '.join(untried)}")
    if not failures and not untried:
        yield ok("imports", f"{len(modules)} modules can be imported")


@dataclass(frozen=True, kw_only=True)
class ImportFailure:
    """The failure of an import."""

    module: str
    error: str
    raised_by: str = ""
    """The package whose code raised the error; empty where the process ended."""


def import_errors(modules: Sequence[str], *, seconds: float) -> tuple[list[ImportFailure], list[str]]:
    """The imports that raise, crash or hang; and the modules that are left untried.

    They are imported in one process, which is started again where a module ends it.
    """
    failures: list[ImportFailure] = []
    left, deadline = list(modules), time.monotonic() + seconds
    while left and (remaining := deadline - time.monotonic()) > 1:
        messages, outcome = run_probe("import", left, seconds=remaining, environment=OFFLINE)
        done = [one for one in messages if "module" in one]
        failures += [ImportFailure(**one) for one in done if one["error"] is not None]
        left = [name for name in left if name not in {one["module"] for one in done}]
        if not left:
            break
        culprit = _begun(messages)
        if culprit not in left:  # the process did not even begin
            raise RuntimeError(f"the process of the imports {outcome.ended or 'ended'}: {outcome.last_words}")
        error = f"the process {outcome.ended or 'ended itself'}"
        failures.append(ImportFailure(module=culprit, error=error))
        left.remove(culprit)
    return failures, left


def _begun(messages: Sequence[Mapping[str, Any]]) -> str:
    return next((one["begin"] for one in reversed(messages) if "begin" in one), "")


def _cause(error: str) -> str:
    """The error, but one cause for all the words that a lack of memory has."""
    return "too little memory" if is_memory(error) else error


def _python_needed() -> str | None:
    try:
        return distribution(PACKAGE).metadata["Requires-Python"]
    except (PackageNotFoundError, KeyError):
        return None


def _fits(installed: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(installed, prereleases=True)
