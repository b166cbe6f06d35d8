"""Requirements of installed packages, and which of them are not met; imports nothing of flatpeak.

python -c "$(cat requirements.py)" vllm      prints them as JSON, in any Python whose environment has `packaging`
"""

from __future__ import annotations

import json
import re
import sys
from collections import deque
from dataclasses import asdict, dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, distribution
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from packaging.requirements import Requirement

MODULES = {"pyyaml": "yaml", "mlflow-skinny": "mlflow", "math-verify": "math_verify"}
"""The modules of packages whose names they do not have."""


@dataclass(frozen=True)
class Unmet:
    """A requirement that the environment does not meet."""

    requirement: str
    """The argument for pip, such as `torch<2.14,>=2.11`."""
    needed_by: str
    installed: str | None
    """The version that is there instead; None: no such package, or one whose metadata are damaged."""
    direct: bool
    """Whether the package asks for it itself, by name or through an extra; what others ask for they may do without."""

    def __str__(self) -> str:
        state = "which is not installed" if self.installed is None else f"and {self.installed} is installed"
        return f"{self.needed_by} needs {self.requirement}, {state}"


def version(name: str) -> str | None:
    """The installed version of a package; None where there is none."""
    try:
        # Damaged metadata give None here, or raise: by Python's version, or where the package importlib_metadata, which
        # puts its own classes in place of Python's, has been imported.
        return distribution(name).version or None
    except (PackageNotFoundError, FileNotFoundError, KeyError):
        return None


def requirements(name: str, extra: str = "") -> list[Requirement]:
    """The requirements of an installed package on this machine: those of an extra alone, or those of no extra."""
    from packaging.requirements import InvalidRequirement, Requirement

    parsed = []
    for line in distribution(name).requires or []:
        try:
            parsed.append(Requirement(line))
        except InvalidRequirement:  # as some old packages have them
            continue
    plain = [one for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    if not extra:
        return plain
    return [one for one in parsed if one not in plain and one.marker and one.marker.evaluate({"extra": extra})]


def unmet(needed_by: str, needed: Iterable[Requirement]) -> list[Unmet]:
    """The requirements among these, and among all that the packages ask for in turn, that are not met."""
    failures: dict[str, Unmet] = {}
    queue = deque((needed_by, one, True) for one in needed)
    seen: set[tuple[str, str]] = set()
    while queue:
        parent, one, direct = queue.popleft()
        installed = version(one.name)
        if installed is None or not one.specifier.contains(installed, prereleases=True):
            line = f"{one.name}{_extras(one)}{one.specifier}"
            failures.setdefault(line, Unmet(line, parent, installed, direct))
        if installed is None:
            continue
        for extra in ("", *sorted(one.extras)):
            if (one.name, extra) not in seen:
                seen.add((one.name, extra))
                asked = direct and bool(extra)
                queue.extend((f"{one.name} {installed}", child, asked) for child in requirements(one.name, extra))
    return list(failures.values())


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def module_name(package: str) -> str:
    """The module that a package is imported by."""
    normal = re.sub(r"[-_.]+", "-", package).lower()
    return MODULES.get(normal, normal.replace("-", "_"))


def has_pip() -> bool:
    """Whether this Python has pip. Not by find_spec: setuptools takes a search for pip as a sign that pip runs."""
    return PathFinder.find_spec("pip") is not None


def main(names: Iterable[str]) -> None:
    """Print the first of these packages that is there, its version, and what it asks for in vain, as JSON."""
    name = next((one for one in names if version(one) is not None), "")
    installed = version(name) if name else None
    missing = unmet(f"{name} {installed}", requirements(name)) if name else []
    facts = {"name": name, "version": installed, "pip": has_pip()}
    sys.stdout.write(json.dumps({**facts, "unmet": [asdict(one) for one in missing]}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
