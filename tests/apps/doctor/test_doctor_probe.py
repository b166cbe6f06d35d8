"""Checks in processes: what they send before they crash or hang, what is left of them, and the report of all."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from flatpeak.apps.doctor import checks, probe
from flatpeak.apps.doctor.checks import CHECKS, examine, lines
from flatpeak.apps.doctor.probe import Check, Finding, Probe, note, ok
from support.workers import all_end, wait_for

TOKEN = "hf_" + "abcdefghij" * 3
MakeCheck = Callable[..., Check]


@pytest.fixture
def make_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> MakeCheck:
    """`make_check(code)`: the check `check_it` whose body this is."""
    (tmp_path / "site").mkdir()
    monkeypatch.syspath_prepend(tmp_path / "site")

    def make(*code: str) -> Check:
        name = f"made_up_{abs(hash(request.node.name))}_{len(list((tmp_path / 'site').iterdir()))}"
        head = "import os, subprocess, sys, time\nfrom pathlib import Path\nfrom flatpeak.apps.doctor.probe import *\n"
        body = "".join(f"    {line}\n" for line in code)
        (tmp_path / "site" / f"{name}.py").write_text(f"{head}\ndef check_it():\n{body}")
        check: Check = import_module(name).check_it
        return check

    return make


TRIES = "yield attempt('gpu', 'torch cannot use it', 'mend it')"


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("raise KeyError('x')", "torch cannot use it: KeyError: 'x'"),
        ("os.write(2, b'Illegal\\n'); os.abort()", "torch cannot use it: killed by SIGABRT Illegal"),
        ("sys.stderr.write('a\\nno GPU\\n'); sys.exit(3)", "torch cannot use it: exit code 3 no GPU"),
    ],
)
def test_findings_before_a_crash_count_and_what_was_attempted_is_the_problem(
    code: str, text: str, make_check: MakeCheck
) -> None:
    check = make_check("print('noise')", "yield ok('torch', 'fine')", TRIES, code)
    first, second = Probe(check, os.environ).findings()
    assert first == ok("torch", "fine")
    assert second == Finding(check="gpu", status="problem", text=text, fix="mend it")


def test_a_check_that_fails_before_an_attempt_is_to_be_reported(make_check: MakeCheck) -> None:
    (finding,) = Probe(make_check("1 / 0", "yield"), os.environ).findings()
    assert (finding.check, finding.status, finding.fix) == ("it", "problem", "report it, with this output")
    assert finding.text == "this check failed: ZeroDivisionError: division by zero"


@pytest.mark.slow
def test_a_check_that_hangs_is_a_problem_after_what_it_found(
    make_check: MakeCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "begun").touch()
    code = [f"Path('{tmp_path}/begun').unlink()", "yield ok('torch', 'fine')", TRIES, "time.sleep(300)"]
    hangs = Probe(make_check(*code), os.environ)
    while (tmp_path / "begun").exists():
        time.sleep(0.01)
    # Its lines come right after the file has gone; a deadline in the past would end it before.
    hangs._deadline = time.monotonic() + 5
    first, second = hangs.findings()
    assert first.text == "fine"
    assert second.text == "torch cannot use it: it did not answer within 180 s"


def test_what_a_check_leaves_behind_is_killed(make_check: MakeCheck, tmp_path: Path) -> None:
    left = "subprocess.Popen(['sleep', '300'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid"
    check = make_check(f"Path('{tmp_path}/pid').write_text(str({left}))", "yield ok('it', 'done')")
    assert [one.text for one in Probe(check, os.environ).findings()] == ["done"]
    assert all_end([int((tmp_path / "pid").read_text())], within=60)


@pytest.mark.slow
def test_a_check_whose_doctor_is_killed_ends_by_itself(make_check: MakeCheck, tmp_path: Path) -> None:
    check = make_check(f"Path('{tmp_path}/pid').write_text(str(os.getpid()))", "time.sleep(300)", "yield")
    code = (
        "import os, sys; from importlib import import_module\n"
        "from flatpeak.apps.doctor import probe; probe.SECONDS = 0\n"
        "from flatpeak.apps.doctor.probe import run_check\n"
        "if os.fork(): os._exit(0)\n"  # the doctor that is gone
        "run_check(None, *sys.argv[1:])"
    )
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code, check.__module__, check.__name__], env=paths, check=True)
    wait_for(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text(), within=60)
    assert all_end([int((tmp_path / "pid").read_text())], within=60)


def test_checks_run_side_by_side_and_a_broken_one_leaves_the_others(make_check: MakeCheck, tmp_path: Path) -> None:
    """Each of the first two lets the other end, which could not be were they one after another."""
    wait = ["while not Path('{0}/{1}').exists(): time.sleep(0.01)", "yield ok('{2}', 'met')"]
    texts = []
    for mine, other in (("a", "b"), ("b", "a")):
        texts.append([f"Path('{tmp_path}/{mine}').touch()", *(line.format(tmp_path, other, mine) for line in wait)])
    report = list(examine([make_check(*texts[0]), make_check(*texts[1]), make_check("os.abort()", "yield")]))
    assert [(one.check, one.status) for one in report] == [("a", "ok"), ("b", "ok"), ("it", "problem")]


def test_temporary_files_of_checks_are_removed(
    make_check: MakeCheck, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    code = "import tempfile; Path(tempfile.gettempdir(), 'x').touch(); os.abort()"
    (finding,) = examine([make_check(code, "yield")])
    assert "SIGABRT" in finding.text
    assert list((tmp_path / "temporary").iterdir()) == []


def test_no_room_for_temporary_files_is_a_line(make_check: MakeCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(checks.tempfile, "TemporaryDirectory", full)
    first, second = examine([make_check("yield ok('it', 'done')")])
    assert (first.check, first.status, first.text) == ("temporary", "problem", "No usable temporary directory found")
    assert second == ok("it", "done")


def test_a_report_that_is_given_up_kills_what_is_left(make_check: MakeCheck, tmp_path: Path) -> None:
    hangs = make_check(f"Path('{tmp_path}/pid').write_text(str(os.getpid()))", "time.sleep(300)", "yield")
    waits = make_check(f"while not Path('{tmp_path}/pid').exists(): time.sleep(0.01)", "yield ok('it', 'done')")
    report = examine([waits, hangs])
    assert next(report).text == "done"
    report.close()
    assert all_end([int((tmp_path / "pid").read_text() or 0)], within=60)


def test_secrets_and_homes_are_not_in_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("COMPANY_API_KEY", "plainlookingkey")
    text = (
        f"{tmp_path}/me/x and {tmp_path}/me; not {tmp_path}/melon\n  but {TOKEN} plainlookingkey http://u:pw@proxy:80"
    )
    finding = checks._presentable(note("hub", text, f"rm {tmp_path}/me/y"))
    assert finding.text == (f"~/x and ~; not {tmp_path}/melon but [redacted] [redacted] http://[redacted]@proxy:80")
    assert finding.fix == "rm ~/y"


@pytest.mark.parametrize("text", ["see {}.", "file://{}/x", "'{}/y'", "PATH={}:/bin"])
def test_a_home_is_hidden_whatever_stands_around_it(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert checks._hidden(text.format(tmp_path / "me")) == text.format("~")


@pytest.mark.parametrize("home", ["/", ""])
def test_a_home_that_is_the_root_hides_nothing(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    assert checks._hidden("/data/runs: 5 GiB") == "/data/runs: 5 GiB"


def test_a_finding_is_a_line_and_its_fix_another() -> None:
    assert lines(ok("gpu", "none")) == "ok       gpu            none"
    assert lines(note("hub", "offline", "unset X")) == (
        "note     hub            offline\n                        fix: unset X"
    )


def test_every_check_has_a_name_and_a_sentence() -> None:
    assert all(check.__doc__ and check.__name__.startswith("check_") for check in CHECKS)
    assert signal.SIGINT in probe.ENDING
