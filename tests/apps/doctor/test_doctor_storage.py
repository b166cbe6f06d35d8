"""Directories, limits and the Hub: full, read-only, unreadable and missing ones; nothing is written while looking."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flatpeak.apps.doctor import storage
from flatpeak.apps.doctor.bounded_process import Outcome, run_bounded
from flatpeak.apps.doctor.findings import Finding
from flatpeak.apps.doctor.storage import (
    check_hub,
    check_limits,
    check_runs,
    check_shared_memory,
    check_temporary_files,
)

GIB = 2**30
TOKEN = "hf_" + "abcdefghij" * 3


def room(monkeypatch: pytest.MonkeyPatch, free: float, *, files: int = 1000, total: float = 100) -> None:
    """Let every file system have this many GiB free."""
    status = SimpleNamespace(
        f_bavail=int(free * GIB), f_blocks=int(total * GIB), f_frsize=1, f_files=1000, f_favail=files
    )
    monkeypatch.setattr(storage.os, "statvfs", lambda path: status)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory, in which nothing may be there afterwards that was not before."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    room(monkeypatch, 50)
    yield folder
    assert not (folder / "runs").is_dir()


def only(findings: Iterator[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_a_directory_with_room_is_fine_although_it_is_not_there_yet(here: Path) -> None:
    assert only(check_runs()) == Finding(check="runs", status="ok", text=f"{here}/runs: 50.0 GiB free")


@pytest.mark.parametrize(
    ("free", "files", "status", "words"),
    [
        (0.0, 10, "problem", "0.00 GiB free: the disk is full"),
        (0.2, 10, "problem", "0.20 GiB free: the disk is full"),
        (50, 0, "problem", "50.0 GiB free, no files either: the disk is full"),
        (3, 10, "note", "3.0 GiB free: little for checkpoints and models"),
    ],
)
def test_a_disk_that_is_full_is_a_problem_and_one_with_little_room_a_note(
    free: float, files: int, status: str, words: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room(monkeypatch, free, files=files)
    finding = only(check_runs())
    assert (finding.status, finding.text) == (status, f"{here}/runs: {words}")
    assert finding.fix is not None
    assert finding.fix.endswith("df -h")


def test_a_file_system_that_counts_no_files_is_not_full(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = SimpleNamespace(f_bavail=50 * GIB, f_blocks=0, f_frsize=1, f_files=0, f_favail=0)
    monkeypatch.setattr(storage.os, "statvfs", lambda path: status)
    assert only(check_runs()).status == "ok"


def test_a_directory_that_cannot_be_written_is_a_problem(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no(path: Path, mode: int) -> bool:
        asked.append((path, mode))
        return False

    monkeypatch.setattr(storage.os, "access", no)  # the tests may run as root, who may do all
    finding = only(check_runs())
    assert (finding.status, finding.text) == ("problem", f"{here}/runs cannot be written (nor {here})")
    assert asked == [(here, os.R_OK | os.W_OK | os.X_OK)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_that_cannot_be_entered_is_a_problem(here: Path) -> None:
    (here / "runs").mkdir(mode=0o000)
    try:
        assert only(check_runs()).status == "problem"
    finally:
        (here / "runs").rmdir()


def test_a_file_or_a_broken_link_in_place_of_a_directory_is_a_problem(here: Path) -> None:
    (here / "runs").write_text("")
    assert only(check_runs()).text == f"{here}/runs cannot be made: {here}/runs is no directory"
    (here / "runs").unlink()
    (here / "runs").symlink_to(here / "gone")
    assert only(check_runs()).status == "problem"


def test_little_shared_memory_is_a_note_and_a_system_without_it_has_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert list(check_shared_memory(tmp_path / "none")) == []
    room(monkeypatch, 0.0625, total=0.0625)  # that of a container
    finding = only(check_shared_memory(tmp_path))
    assert (finding.status, "0.06 GiB of 0.06 GiB free" in finding.text) == ("note", True)
    assert finding.fix is not None
    assert "--shm-size" in finding.fix
    room(monkeypatch, 8)
    assert only(check_shared_memory(tmp_path)).status == "ok"


def test_no_directory_for_temporary_files_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(storage.tempfile, "gettempdir", none)
    finding = only(check_temporary_files())
    assert (finding.status, finding.fix) == ("problem", "export TMPDIR=DIRECTORY, one that you can write to")


def test_settings_of_plots_that_cannot_be_written_are_a_note(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "file" / "matplotlib"))
    note, temporary = check_temporary_files()
    assert (note.status, note.check, temporary.status) == ("note", "temporary", "ok")
    assert note.fix is not None
    assert note.fix.startswith("export MPLCONFIGDIR=")
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path))
    assert only(check_temporary_files()).status == "ok"


@pytest.mark.parametrize(
    ("limits", "expected", "fix"),
    [
        ((256, None), ["note open files", "ok limits"], "ulimit -n 4096"),
        ((256, 512), ["note open files", "ok limits"], "ulimit -n 512"),
        ((256, 256), ["note open files", "ok limits"], "ask the administrator for a higher limit"),
        ((20000, 20000), ["ok limits"], None),
        ((None, None), ["ok limits"], None),
    ],
)
def test_few_open_files_are_a_note_with_what_may_be_set(
    limits: tuple[int | None, int | None], expected: list[str], fix: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage.locale, "getpreferredencoding", lambda switch: "UTF-8")
    monkeypatch.setattr(storage, "_open_files", lambda: limits)
    findings = list(check_limits())
    assert [f"{one.status} {one.check}" for one in findings] == expected
    assert findings[0].fix == fix


def test_a_user_without_a_home_has_no_settings_of_plots(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is run under a number of its own."""

    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", none)
    for name in ("MPLCONFIGDIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert only(check_temporary_files()).status == "ok"


def test_another_encoding_than_utf_8_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage.locale, "getpreferredencoding", lambda switch: "ISO-8859-1")
    finding = list(check_limits())[-1]
    assert (finding.check, finding.status, finding.fix) == ("locale", "note", "export PYTHONUTF8=1")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the Hub's client, no token, no variables, and a machine that nothing listens on."""
    for name in (*storage.OFFLINE_VARIABLES, "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_CACHE", "HF_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "*")
    return tmp_path / "hf"


def test_a_hub_that_cannot_be_reached_is_a_note_that_names_the_variables(hub: Path) -> None:
    cache, finding = check_hub()
    assert (cache.check, cache.text.split(":")[0]) == ("cache", str(hub / "hub"))
    assert (finding.status, "http://127.0.0.1:9 cannot be reached" in finding.text) == ("note", True)
    assert "no token" in finding.text
    assert finding.fix is not None
    assert "HF_HUB_OFFLINE=1" in finding.fix
    assert not hub.exists()


@pytest.mark.slow
def test_a_hub_that_is_silent_is_not_waited_for(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are taken and never answered: the client's own limit, or the probe's, ends the wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        _, finding = check_hub()
    assert finding.status == "note"
    assert "models and data come from the cache alone" in finding.text


def test_a_hub_that_answers_is_fine_and_the_token_is_never_shown(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        _, finding = check_hub()
    assert (finding.status, finding.text) == ("ok", f"{endpoint} answers; token by HF_TOKEN")


def test_a_token_of_a_login_is_known_by_its_file(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.mkdir()
    (hub / "token").write_text(TOKEN)
    _, finding = check_hub()
    assert "token by hf auth login" in finding.text
    assert TOKEN not in finding.text


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"])
def test_an_offline_variable_is_a_note_and_nothing_is_asked(
    variable: str, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "1")
    _, finding = check_hub()
    assert (finding.status, finding.fix) == ("note", f"unset {variable}")
    assert finding.text.startswith(f"offline by {variable}=1: ")


def test_a_client_that_cannot_be_imported_is_a_problem(
    hub: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "huggingface_hub.py").write_text("raise RuntimeError('half installed')")
    monkeypatch.syspath_prepend(tmp_path)
    finding = only(check_hub())
    assert (finding.status, finding.text) == (
        "problem",
        "huggingface_hub ended with exit code 1: RuntimeError: half installed",
    )
    installed = metadata.version("huggingface_hub")  # another one may not be what transformers takes
    assert (finding.fix or "").endswith(f' install --force-reinstall --no-deps "huggingface_hub=={installed}"')


def test_a_cache_that_cannot_be_written_is_a_problem(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {"cache": str(hub), "offline": True, "token": False, "endpoint": "https://huggingface.co"}
    outcome = Outcome(code=0, output="", errors="", seconds=1.0)
    monkeypatch.setattr(storage, "run_probe", lambda name, seconds: ([facts], outcome))
    monkeypatch.setattr(storage, "_is_writable", lambda path: False)
    cache, _ = check_hub()
    assert (cache.check, cache.status, cache.fix) == (
        "cache",
        "problem",
        "export HF_HOME=DIRECTORY, one that you can write to",
    )


def test_a_cache_that_is_read_only_is_enough_offline(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.mkdir()
    facts: dict[str, Any] = {"cache": str(hub), "offline": True, "token": False, "endpoint": "https://huggingface.co"}
    outcome = Outcome(code=0, output="", errors="", seconds=1.0)
    monkeypatch.setattr(storage, "run_probe", lambda name, seconds: ([facts], outcome))
    monkeypatch.setattr(storage, "_is_writable", lambda path: False)
    cache, _ = check_hub()
    assert (cache.status, cache.text) == ("ok", f"{hub}: read only, which is enough offline")


def test_a_working_directory_that_is_gone_is_the_one_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    finding = only(check_runs())
    assert (finding.status, finding.fix) == ("problem", "cd to a directory that exists")
    assert run_bounded(["pwd"], seconds=20).output == "/\n"
