"""The checkup as a whole: checks that fail or hang, and findings without secrets or homes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flatpeak.apps.doctor import findings
from flatpeak.apps.doctor.checkup import CHECKS, examine
from flatpeak.apps.doctor.findings import Finding, gib, lines, note, ok, presentable, shell_path

TOKEN = "hf_" + "abcdefghij" * 3


def good() -> Iterator[Finding]:
    yield ok("good", "fine")


def broken() -> Iterator[Finding]:
    yield ok("broken", "first")
    raise ZeroDivisionError("one by zero")


def quits() -> Iterator[Finding]:
    raise SystemExit(3)
    yield


def hangs() -> Iterator[Finding]:
    yield ok("hangs", "first")
    time.sleep(300)


def test_a_check_that_fails_is_a_problem_of_its_own_and_the_others_go_on() -> None:
    report = list(examine({"broken": broken, "quits": quits, "good": good}))
    assert [(one.check, one.status, one.text) for one in report] == [
        ("broken", "ok", "first"),
        ("broken", "problem", "this check failed itself: ZeroDivisionError: one by zero"),
        ("quits", "problem", "this check failed itself: SystemExit: 3"),
        ("good", "ok", "fine"),
    ]


def test_packaging_by_which_requirements_are_read_is_to_be_installed_where_it_is_gone() -> None:
    def reads() -> Iterator[Finding]:
        raise ModuleNotFoundError("No module named 'packaging'", name="packaging")
        yield

    (finding,) = examine({"packages": reads})
    assert (finding.status, finding.fix is not None and finding.fix.endswith(" install packaging")) == ("problem", True)


def test_a_check_that_hangs_is_a_problem_and_what_it_had_to_say_is_kept() -> None:
    report = list(examine({"hangs": hangs, "good": good}, seconds=1))
    assert [(one.check, one.status) for one in report] == [("hangs", "ok"), ("hangs", "problem"), ("good", "ok")]
    assert report[1].text == "this check does not come to an end"


def test_each_finding_is_given_as_soon_as_it_is_there() -> None:
    """The second finding comes after the first was received, which could not be were they handed on together."""
    received = threading.Event()

    def waits() -> Iterator[Finding]:
        yield ok("waits", "first")
        assert received.wait(60)
        yield ok("waits", "second")

    findings = examine({"waits": waits})
    assert next(findings).text == "first"
    received.set()
    assert [one.text for one in findings] == ["second"]


def test_checks_are_side_by_side() -> None:
    """A second check lets the first one end, which could not be were they one after another."""
    met = threading.Event()

    def waits() -> Iterator[Finding]:
        assert met.wait(60)
        yield ok("waits", "met")

    def meets() -> Iterator[Finding]:
        met.set()
        return iter(())

    assert [one.status for one in examine({"waits": waits, "meets": meets})] == ["ok"]


def test_secrets_and_homes_are_not_in_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    monkeypatch.setenv("COMPANY_API_KEY", "plainlookingkey")
    text = (
        f"{tmp_path}/me/x and {tmp_path}/me; not {tmp_path}/melon\n  but {TOKEN} plainlookingkey http://u:pw@proxy:80"
    )
    finding = presentable(note("hub", text, f"rm {tmp_path}/me/y"))
    assert finding.text == (f"~/x and ~; not {tmp_path}/melon but [redacted] [redacted] http://[redacted]@proxy:80")
    assert finding.fix == "rm ~/y"


@pytest.mark.parametrize("text", ["see {}.", "file://{}/x", "'{}/y'", "PATH={}:/bin"])
def test_a_home_is_hidden_whatever_stands_around_it(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert presentable(ok("runs", text.format(tmp_path / "me"))).text == text.format("~")


@pytest.mark.parametrize("home", ["/", ""])
def test_a_home_that_is_the_root_hides_nothing(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", home)
    assert presentable(ok("runs", "/data/runs: 5 GiB")).text == "/data/runs: 5 GiB"


def test_paths_are_words_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "_homes", lambda: ["/home/me"])
    assert shell_path("/home/me/a b/c") == "~/'a b/c'"
    assert shell_path("/home/me/.venv/bin/python") == "~/.venv/bin/python"
    assert shell_path("/home/melon") == "/home/melon"
    assert shell_path("/x y") == "'/x y'"


@pytest.mark.parametrize(("count", "text"), [(0, "0.00"), (2**26, "0.06"), (3.5 * 2**30, "3.5"), (240 * 2**30, "240")])
def test_sizes_are_in_gib(count: float, text: str) -> None:
    assert gib(count) == f"{text} GiB"


def test_a_finding_is_a_line_and_its_fix_another() -> None:
    assert lines(ok("gpu", "none")) == ["ok       gpu            none"]
    assert lines(note("hub", "offline", "unset X")) == [
        "note     hub            offline",
        "                        fix: unset X",
    ]


def test_every_check_has_a_name_and_a_sentence() -> None:
    assert len(CHECKS) == 14
    assert all(check.__doc__ and check.__name__.startswith("check_") for check in CHECKS.values())
