"""All checks and their report: one line for each problem, however broken the installation is.

`python -m flatpeak.apps.doctor.checks [--json]` prints it even if the `flatpeak` command itself does not start.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from typing import Final

from flatpeak.apps.doctor import packages, system
from flatpeak.apps.doctor.probe import ENDING, Check, Finding, Probe, problem
from flatpeak.utils.redaction import redact

CHECKS: Final[tuple[Check, ...]] = (
    packages.check_installation,
    system.check_machine,
    system.check_torch,
    system.check_kernels,
    system.check_hub,
    packages.check_vllm,
    packages.check_imports,
)
"""The checks, in the order of the report; slow checks come last."""
_CHECK_WIDTH: Final = 14


def examine(checks: Sequence[Check] = CHECKS) -> Generator[Finding, None, None]:
    """Run all checks in parallel and yield their findings in order, each as soon as it is available."""
    with ExitStack() as stack:
        # Delay signals until the stack, which ends all processes, has every process that was started.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
        environment, failures = _scratch(stack)
        probes = []
        for check in checks:
            try:
                probes.append(Probe(check, environment))
            except OSError as error:
                failures.append(problem("doctor", f"{check.__name__} does not start: {error}", "end other programs"))
            else:
                stack.callback(probes[-1].kill)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for findings in (failures, *(probe.findings() for probe in probes)):
            yield from map(_presentable, findings)


def _scratch(stack: ExitStack) -> tuple[dict[str, str], list[Finding]]:
    """The environment of the probes, with a temporary folder that libraries may write to; a problem if there is
    none."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="flatpeak-doctor-", ignore_cleanup_errors=True)
    except OSError as error:
        return {**os.environ}, [problem("temporary", str(error), "export TMPDIR=DIRECTORY, with free space")]
    variables = dict.fromkeys(["MPLCONFIGDIR", "TRACKIO_DIR", "TMPDIR"], stack.enter_context(folder))
    return {**os.environ, **variables}, []


def _presentable(finding: Finding) -> Finding:
    """The finding on single lines, without secrets, and with `~` for the user's home directory."""
    fix = None if finding.fix is None else _hidden(finding.fix)
    return replace(finding, text=_hidden(finding.text), fix=fix)


def _hidden(text: str) -> str:
    text = str(redact(" ".join(text.split())))
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home raises for a user without a home directory
    for path in {home, os.path.realpath(home)} - {"/", "~"}:
        text = re.sub(rf"(?<![\w.~-]){re.escape(path)}(?![\w-]|\.\w)", "~", text)
    return text


def lines(finding: Finding) -> str:
    """The finding as a line of text, and the fix as a second line."""
    line = f"{finding.status:<8} {finding.check:<{_CHECK_WIDTH}} {finding.text}"
    return line if finding.fix is None else f"{line}\n{'':<8} {'':<{_CHECK_WIDTH}} fix: {finding.fix}"


def report(*, as_json: bool = False) -> int:
    """Print the findings as lines as soon as they are available, or as a JSON list; return the exit code."""
    reported = []
    with closing(examine()) as findings:
        for finding in findings:
            reported.append(finding)
            if not as_json:
                _write(lines(finding))
    problems, notes = (sum(one.status == status for one in reported) for status in ("problem", "note"))
    if as_json:
        _write(json.dumps([asdict(finding) for finding in reported], indent=1))
    else:
        _write(f"doctor: {_count(problems, 'problem')}, {_count(notes, 'note')}")
    return 1 if problems else 0


def _count(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _write(text: str) -> None:
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # for example in `flatpeak doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discard the rest of the buffer
        sys.exit(1)


def main(*, as_json: bool) -> int:
    """Report; a signal ends this process like an exit, so that every process it has started is ended too."""

    def leave(received: int, _: object) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # a second signal must not interrupt the cleanup
        sys.exit(128 + received)

    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, leave)
    return report(as_json=as_json)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(main(as_json="--json" in sys.argv[1:]))
