"""Worker processes that end on their own: the reasons that the sweep is given."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from flatpeak.experiments.cell_worker import WorkerProcess
from flatpeak.utils import child_process

START = (
    "import json, sys, os, time; from multiprocessing.connection import Connection; "
    "link = Connection(json.loads(sys.argv[1])[2]); "
)


def reason_of(worker: WorkerProcess) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            assert worker.receive() is None
        except EOFError as death:
            worker.close()
            return str(death)
        time.sleep(0.01)
    raise AssertionError("the death was not noticed")


def is_running(pid: int) -> bool:
    """Whether a process that is no child of this one goes on; it may wait for its new parent as a zombie."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("sys.exit(3)", "the worker process ended with exit code 3 (see {log})"),
        ("os.abort()", "the worker process was killed by SIGABRT"),
        ("os.write(link.fileno(), bytes(2)); os._exit(0)", "the worker process ended with exit code 0 (see {log})"),
    ],
)
def test_the_reason_of_a_death_names_the_exit_code_or_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    monkeypatch.setattr(child_process, "_BOOT", START + code)
    worker = WorkerProcess(0, log=tmp_path / "logs" / "worker-0.log")
    worker.send({"kind": "call"})
    assert reason_of(worker) == reason.format(log=tmp_path / "logs" / "worker-0.log")


def test_a_worker_is_a_session_of_its_own_with_its_gpu_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "job = json.loads(link.recv_bytes()); "
        "answer = dict(job, gpu=os.environ['CUDA_VISIBLE_DEVICES'], session=os.getsid(0) == os.getpid()); "
        "link.send_bytes(json.dumps(answer).encode()); time.sleep(60)"
    )
    monkeypatch.setattr(child_process, "_BOOT", START + code)
    worker = WorkerProcess(0, log=tmp_path / "worker-0.log", gpu="GPU-b")
    worker.send({"kind": "x" * 100_000})
    outcome = None
    while outcome is None:
        outcome = worker.receive()
        time.sleep(0.01)
    assert outcome == {"kind": "x" * 100_000, "gpu": "GPU-b", "session": True}
    os.kill(worker.pid, signal.SIGKILL)
    assert reason_of(worker) == "the worker process was killed by SIGKILL, as the system does when memory runs out"


def test_the_children_of_a_worker_that_was_killed_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import subprocess; child = subprocess.Popen(['sleep', '600']); "
        "link.send_bytes(b'%d' % child.pid); time.sleep(600)"
    )
    monkeypatch.setattr(child_process, "_BOOT", START + code)
    worker = WorkerProcess(0, log=tmp_path / "worker-0.log")
    child = None
    while child is None:
        child = worker.receive()
        time.sleep(0.01)
    os.kill(worker.pid, signal.SIGKILL)
    assert "killed by SIGKILL" in reason_of(worker)
    deadline = time.monotonic() + 60
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(child)


def test_a_worker_that_fails_ends_although_threads_of_the_users_code_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "import threading; from contextlib import nullcontext; *_, sys.path = json.loads(sys.argv[1]); "
        "import flatpeak.experiments.cell_worker as worker; from flatpeak.utils.child_process import Parent; "
        "threading.Thread(target=time.sleep, args=(90,)).start(); "
        "worker.ProcessState = type('State', (), {'restored': lambda self: nullcontext()}); "
        "worker.run_job = lambda job: 1 / 0; worker.serve(Parent(link.fileno(), os.getppid()))"
    )
    monkeypatch.setattr(child_process, "_BOOT", START + code)
    worker = WorkerProcess(0, log=tmp_path / "worker-0.log")
    worker.send({"kind": "call"})
    assert reason_of(worker) == f"the worker process ended with exit code 1 (see {tmp_path / 'worker-0.log'})"
    assert "ZeroDivisionError" in (tmp_path / "worker-0.log").read_text()
