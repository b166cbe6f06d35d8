"""`flatpeak doctor` as users start it: its lines, its JSON, its exit codes, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flatpeak
from flatpeak.apps.doctor import checks
from flatpeak.apps.doctor.probe import Finding, note, ok, problem
from flatpeak.cli.main import app
from support.installations import make_package
from support.workers import all_end, wait_for

TOKEN = "hf_" + "abcdefghij" * 3


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with a home of their own, without a network, threads for one core."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "temporary").mkdir()
    unset = {"CXX": "", "MPLBACKEND": "", "FLATPEAK_VLLM_PYTHON": "", "FLATPEAK_KERNELS": "", "XDG_CACHE_HOME": ""}
    unset["CUDA_VISIBLE_DEVICES"] = ""  # a driver of this machine's, beside a torch for CPUs, would be a problem
    variables = {"HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "*", "HF_HOME": f"{home}/hf"}
    variables["TMPDIR"] = str(tmp_path / "temporary")
    return {**os.environ, **unset, **variables, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"}


def run(cwd: Path, environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from flatpeak.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, "doctor", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.mark.slow
def test_a_healthy_machine_gets_a_page_of_lines_and_nothing_is_left(tmp_path: Path, machine: dict[str, str]) -> None:
    (tmp_path / "work").mkdir()
    done = run(tmp_path / "work", machine)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert done.stderr == ""
    assert 14 <= len(lines) <= 30
    assert lines[-1].startswith("doctor: no problems, ")
    names = {line[9:24].strip() for line in lines[:-1] if line[:8].strip()}
    assert {"python", "flatpeak", "packages", "imports", "torch", "gpu", "kernels", "threads", "memory"} <= names
    assert {"runs", "cache", "hub", "extras", "vllm"} <= names
    assert not any(" -m pip " in line or "pip install" in line for line in lines)
    assert "cache          ~/hf/hub: " in done.stdout
    assert "token from HF_TOKEN" in done.stdout
    assert TOKEN not in done.stdout
    assert str(tmp_path / "home") not in done.stdout
    assert [path for folder in ("home", "work", "temporary") for path in (tmp_path / folder).rglob("*")] == []


@pytest.mark.slow
def test_several_broken_parts_are_problems_of_their_own_in_json(tmp_path: Path, machine: dict[str, str]) -> None:
    site = tmp_path / "site"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "runs").write_text("a file")
    make_package(site, "peft", "0.1", code="import os; os.abort()")
    make_package(site, "jinja2", "3.1", code="raise OSError('half of a file')")
    requires = ["markupsafe", "jinja2", "peft; extra == 'lora'"]
    make_package(site, "flatpeak", flatpeak.__version__, requires=requires, extras=["lora"])
    paths = [str(site), *(path for path in sys.path if path)]
    broken = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "4096", "FLATPEAK_VLLM_PYTHON": "/no/python"}
    done = run(tmp_path / "work", machine | broken, "--json")
    findings = [Finding(**one) for one in json.loads(done.stdout)]
    assert done.returncode == 1
    problems = {one.check: one for one in findings if one.status == "problem" and "peft" not in one.text}
    assert problems["imports"].text == "jinja2 cannot be imported: OSError: half of a file"
    assert problems["imports"].fix == "reinstall jinja2, or fix what the error names"
    (threads,) = (one for one in findings if one.check == "threads")
    assert (threads.status, (threads.fix or "").startswith("export OMP_NUM_THREADS=")) == ("note", True)
    assert "is not a directory" in problems["runs"].text
    assert "/no/python" in problems["vllm"].text
    crashed = [one for one in findings if "peft" in one.text and "killed by SIGABRT" in one.text]
    assert len(crashed) == 1
    assert {one.check for one in findings if one.status == "ok"} >= {"python", "torch", "memory"}
    assert all(one.fix for one in findings if one.status == "problem")


@pytest.mark.parametrize(
    ("findings", "code", "last"),
    [
        ([ok("a", "fine")], 0, "doctor: no problems, no notes"),
        ([note("a", "slow"), note("b", "missing", "install it")], 0, "doctor: no problems, 2 notes"),
        ([problem("a", "broken", "mend it"), note("b", "slow")], 1, "doctor: 1 problem, 1 note"),
    ],
)
def test_only_problems_make_the_exit_code_1(
    findings: list[Finding], code: int, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "examine", lambda: (one for one in findings))
    result = CliRunner().invoke(app, ["doctor"])
    assert (result.exit_code, result.output.splitlines()[-1]) == (code, last)
    as_json = CliRunner().invoke(app, ["doctor", "--json"])
    assert (as_json.exit_code, [Finding(**one) for one in json.loads(as_json.output)]) == (code, findings)


def test_a_bad_option_is_exit_code_2() -> None:
    assert CliRunner().invoke(app, ["doctor", "--fix"]).exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize("start", [["flatpeak", "doctor"], ["flatpeak.apps.doctor.checks"]])
def test_the_doctor_reports_where_typer_or_pydantic_are_damaged(
    start: list[str], tmp_path: Path, machine: dict[str, str]
) -> None:
    name = "pydantic" if "doctor" in start else "typer"
    make_package(tmp_path, name, "2.0", code="raise RuntimeError('damaged')")
    make_package(tmp_path, "flatpeak", flatpeak.__version__, requires=[name])
    paths = os.pathsep.join([str(tmp_path), *(path for path in sys.path if path)])
    command = [sys.executable, "-P", "-m", *start, "--json"]
    done = subprocess.run(
        command, env=machine | {"PYTHONPATH": paths}, cwd=tmp_path, capture_output=True, text=True, timeout=250
    )
    findings = [Finding(**one) for one in json.loads(done.stdout)]
    assert (done.returncode, done.stderr) == (1, "")
    (broken,) = (one for one in findings if one.check == "imports" and one.text.startswith(name))
    assert broken.text == f"{name} cannot be imported: RuntimeError: damaged"
    assert broken.fix == f"reinstall {name}, or fix what the error names"


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_doctor_that_is_ended_leaves_no_process_and_no_file(
    ending: signal.Signals, tmp_path: Path, machine: dict[str, str]
) -> None:
    code = "import os, pathlib, time; pathlib.Path(os.environ['PID']).write_text(str(os.getpid())); time.sleep(300)"
    make_package(tmp_path / "site", "hangs", "1.0", code=code)
    make_package(tmp_path / "site", "flatpeak", flatpeak.__version__, requires=["hangs"])
    paths = os.pathsep.join([str(tmp_path / "site"), *(path for path in sys.path if path)])
    pid = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "flatpeak", "doctor"],
        env=machine | {"PYTHONPATH": paths, "PID": str(pid)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: pid.exists() and pid.read_text(), within=120)
    process.send_signal(ending)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 128 + ending
    assert all_end([int(pid.read_text())], within=60)
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_reader_that_goes_ends_the_doctor_silently(tmp_path: Path, machine: dict[str, str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "flatpeak", "doctor"],
        env=machine,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 1


def test_its_help_says_what_it_does_and_leaves_alone() -> None:
    result = CliRunner().invoke(app, ["doctor", "--help"])
    assert result.exit_code == 0
    text = " ".join(result.output.split())
    assert "Check this machine and installation, and name a fix for each problem." in text
    assert "Changes and downloads nothing." in text
    assert "--json" in text
