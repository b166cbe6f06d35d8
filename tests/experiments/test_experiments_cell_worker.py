"""One job after another in a worker: outcomes, logs, and a process that is as fresh for each."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from flatpeak.experiments.cell_worker import ProcessState, run_job

pytestmark = pytest.mark.slow

SOURCE = """
import os, signal, sys


def fill(directory, seed, text):
    (directory / "file").write_text(f"{text} {seed}")
    os.write(1, b"printed\\n")


def leave(directory, seed):
    sys.exit("enough")


def fail(directory, seed):
    raise KeyError("no\\nsuch row")


def stopped(directory, seed):
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(10**7):
        pass


def change(directory, seed):
    import neighbour
    import torch
    os.environ["FLATPEAK_TEST"] = "changed"
    os.chdir(directory)
    torch.manual_seed(5)
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    neighbour.seen.append(seed)
    (directory / "seen").write_text(str(neighbour.seen))


def leak(directory, seed, token):
    print("sent", token, "hf", "hf_abcdefghijKLMNOP1234")
    print("not ended by a line", end="", flush=True)
    raise RuntimeError(f"{token} refused")


def silence(directory, seed):
    sys.stdout = open(os.devnull, "w")
    sys.stdout.close()
    raise OSError("no file \\udc80")
"""


def job(directory: Path, function: str, **arguments: Any) -> dict[str, Any]:
    (directory / "code.py").write_text(SOURCE)
    call = f"{directory / 'code.py'}:{function}"
    return {
        "kind": "call",
        "path": str(directory / "out"),
        "log": str(directory / "job.log"),
        "call": call,
        "seed": 3,
        "arguments": arguments,
    }


def test_a_call_fills_its_directory_and_its_output_is_in_its_log(tmp_path: Path) -> None:
    outcome = run_job(job(tmp_path, "fill", text="rows"))
    assert (outcome["status"], outcome["reason"]) == ("done", None)
    assert 0 <= outcome["seconds"] < 60
    assert (tmp_path / "out" / "file").read_text() == "rows 3"
    assert (tmp_path / "job.log").read_text() == "printed\n"


def test_what_a_job_prints_and_raises_has_no_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run_job(job(tmp_path, "leak", token="tok-987-abc"))
    assert outcome["reason"] == "RuntimeError: [redacted] refused"
    printed = capsys.readouterr()
    assert printed.out == "sent [redacted] hf [redacted]\nnot ended by a line"
    assert printed.err.endswith("RuntimeError: [redacted] refused\n" * 2)
    assert "tok-987-abc" not in printed.err


@pytest.mark.parametrize(
    ("function", "status", "reason"),
    [
        ("leave", "failed", "SystemExit: enough"),
        ("fail", "failed", r"KeyError: 'no\nsuch row'"),
        ("stopped", "stopped", None),
        ("fil", "failed", ...),
    ],
)
def test_whatever_a_job_raises_is_its_outcome(tmp_path: Path, function: str, status: str, reason: Any) -> None:
    outcome = run_job(job(tmp_path, function))
    assert outcome["status"] == status
    if reason is ...:
        assert "has no 'fil', did you mean 'fill'" in outcome["reason"]
    else:
        assert outcome["reason"] == reason


def test_each_job_finds_the_process_as_the_first_one_did(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("seen = []\n")
    state = ProcessState()
    threads, directory, path = torch.get_num_threads(), Path.cwd(), list(sys.path)
    for _ in range(2):
        with state.restored():
            assert torch.get_num_threads() == threads
            assert torch.initial_seed() == state.seed
            first = torch.rand(3)
            assert (first.dtype, first.device.type) == (torch.float32, "cpu")
            assert torch.is_grad_enabled()
            assert not torch.are_deterministic_algorithms_enabled()
            assert torch.get_float32_matmul_precision() == "highest"
            assert run_job(job(tmp_path, "change"))["status"] == "done"
        assert (tmp_path / "out" / "seen").read_text() == "[3]"
        assert "FLATPEAK_TEST" not in os.environ
        assert Path.cwd() == directory
        assert sys.path == path
        assert "neighbour" not in sys.modules
    with state.restored():
        assert torch.equal(torch.rand(3), first)


def test_a_module_of_the_working_directory_keeps_nothing_for_the_next_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flatpeak_test_counter").mkdir()
    (tmp_path / "flatpeak_test_counter" / "__init__.py").write_text("from flatpeak_test_counter.inner import count\n")
    (tmp_path / "flatpeak_test_counter" / "inner.py").write_text(
        "seen = []\n"
        "def count(directory, seed):\n"
        "    seen.append(seed)\n"
        "    (directory / 'n').write_text(str(len(seen)))\n"
    )
    monkeypatch.chdir(tmp_path)
    state = ProcessState()
    for _ in range(2):
        with state.restored():
            changed = job(tmp_path, "fill") | {"call": "flatpeak_test_counter:count"}
            assert run_job(changed)["status"] == "done"
        assert (tmp_path / "out" / "n").read_text() == "1"


def test_a_job_that_closes_its_standard_output_fails_alone_with_a_reason_that_can_be_printed(tmp_path: Path) -> None:
    output = sys.stdout
    outcome = run_job(job(tmp_path, "silence"))
    assert outcome["reason"] == r"OSError: no file \udc80"
    assert sys.stdout is output


def test_a_call_may_change_the_working_directory_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changed = job(tmp_path, "change") | {"path": "out"}
    (tmp_path / "neighbour.py").write_text("seen = []\n")
    state = ProcessState()
    with state.restored():
        assert run_job(changed)["status"] == "done"
    assert (tmp_path / "out" / "seen").exists()
    with state.restored():
        pass
