"""Programs under a limit of time: what they say, how they end, and that nothing of them is left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from flatpeak.apps.doctor import bounded_process
from flatpeak.apps.doctor.bounded_process import run_bounded, run_probe
from support.installations import ends


def test_a_program_that_ends_well_gives_its_output():
    outcome = run_bounded(["sh", "-c", "echo a; echo b >&2"], seconds=20)
    assert (outcome.code, outcome.output, outcome.errors, outcome.ended) == (0, "a\n", "b\n", None)


@pytest.mark.parametrize(
    ("script", "ended", "words"),
    [
        ("echo why >&2; echo >&2; exit 3", "ended with exit code 3", "why"),
        ("kill -SEGV $$", "was ended by SIGSEGV", ""),
        ("sleep 60", "did not answer within 0 s", ""),
    ],
)
def test_the_way_in_which_a_program_fails_is_put_into_words(script, ended, words):
    seconds = 0.3 if "sleep" in script else 20
    outcome = run_bounded(["sh", "-c", script], seconds=seconds)
    assert (outcome.ended, outcome.last_words) == (ended, words)


@pytest.mark.parametrize("program", ["/no/such/program", "/", "nul\0"])
def test_a_program_that_cannot_be_started_is_an_outcome(program):
    assert run_bounded([program], seconds=5).ended.startswith("cannot be started (")


def test_what_a_program_leaves_behind_is_killed_and_its_pipe_not_waited_for(tmp_path):
    pid = tmp_path / "pid"
    outcome = run_bounded(["sh", "-c", f"sleep 300 & echo $! > {pid}; echo done"], seconds=20)
    assert outcome.output == "done\n"
    assert ends(int(pid.read_text()))


def test_a_program_that_cannot_be_killed_is_left_behind(monkeypatch):
    started = []

    class Unkillable(subprocess.Popen):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            started.append(self)

    monkeypatch.setattr(bounded_process.subprocess, "Popen", Unkillable)
    monkeypatch.setattr(bounded_process, "_kill_group", lambda number: None)
    monkeypatch.setattr(bounded_process, "_AFTER_KILL", 0.1)
    outcome = run_bounded(["sh", "-c", "echo a; exec sleep 60"], seconds=2)
    monkeypatch.undo()
    assert (outcome.code, outcome.output) == (None, "a\n")
    os.killpg(started[0].pid, signal.SIGKILL)
    started[0].wait()


def test_output_without_end_is_cut_and_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(bounded_process, "_MOST_BYTES", 1000)
    outcome = run_bounded(["sh", "-c", "yes | head -n 100000"], seconds=60)
    assert outcome.output == "y\n" * 500


def test_messages_that_were_sent_before_the_end_count(tmp_path, monkeypatch):
    (tmp_path / "fine.py").write_text("print('noise')")
    (tmp_path / "ends.py").write_text("import os; os.abort()")
    monkeypatch.syspath_prepend(tmp_path)
    messages, outcome = run_probe("import", ["fine", "ends", "never"], seconds=60)
    assert [(one.get("begin"), one.get("module"), one.get("error")) for one in messages] == [
        ("fine", None, None),
        (None, "fine", None),
        ("ends", None, None),
    ]
    assert outcome.ended == "was ended by SIGABRT"


def test_a_probe_that_cannot_be_started_is_no_fault_of_what_it_would_try(monkeypatch):
    monkeypatch.setattr(bounded_process.sys, "executable", "/no/python")
    with pytest.raises(OSError, match=r"Python cannot be started \(.*/no/python"):
        run_probe("torch", seconds=5)


def test_a_probe_that_is_ended_leaves_no_temporary_files(tmp_path, monkeypatch):
    code = "import os, pathlib, tempfile; pathlib.Path(tempfile.gettempdir(), 'x').touch(); os.abort()"
    (tmp_path / "leaves.py").write_text(code)
    (tmp_path / "temporary").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(bounded_process.tempfile, "tempdir", str(tmp_path / "temporary"))
    assert run_probe("import", ["leaves"], seconds=60)[1].ended == "was ended by SIGABRT"
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
def test_a_probe_whose_doctor_is_killed_ends_by_itself(tmp_path, monkeypatch):
    note = f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))"
    (tmp_path / "hangs.py").write_text(f"import os, pathlib, time\n{note}\ntime.sleep(300)")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from flatpeak.apps.doctor.bounded_process import run_probe\n"
        "run_probe('import', ['hangs'], seconds=4)"
    )
    doctor = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)})
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    doctor.kill()
    doctor.wait()
    assert ends(int((tmp_path / "pid").read_text()))
