"""Starting processes: how a run ends when one of them does, in one message."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from flatpeak.distributed.launch import _end
from support.workers import all_end, wait_for

pytestmark = pytest.mark.slow

RANK = """
import os, signal, sys, time
rank, way = os.environ["RANK"], sys.argv[1]
assert os.environ["WORLD_SIZE"] == "2"
if way == "killed" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if way == "terminated" and rank == "1":
    os.kill(os.getpid(), signal.SIGTERM)
if way == "exits" and rank == "0":
    sys.exit(2)
if way == "lost" and rank == "1":
    sys.exit(3)
if way != "done":
    time.sleep(60)
"""
LAUNCHER = """
import json, sys, time
from flatpeak.distributed.config import DistributedConfig
from flatpeak.distributed.launch import launch
said, results = [], {}
for way in ("done", "killed", "terminated", "exits", "lost"):
    started = time.monotonic()
    code = launch([way], DistributedConfig(processes=2), say=said.append, command=[sys.argv[1]])
    results[way] = [code, said[:], time.monotonic() - started]
    said.clear()
print(json.dumps(results))
"""

LISTENING_RANK = """
import os, sys, time
from pathlib import Path
from flatpeak.distributed.ranks import stop_with_launcher
stop_with_launcher()
(Path(sys.argv[1]) / str(os.getpid())).touch()
time.sleep(60)
"""
LAUNCHED = """
import sys
from flatpeak.distributed.config import DistributedConfig
from flatpeak.distributed.launch import launch
sys.exit(launch([sys.argv[2]], DistributedConfig(processes=2), say=print, command=[sys.argv[1]]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process hears of its parent's death")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGUSR1, 138)])
def test_ranks_end_with_a_killed_launcher_and_hear_of_a_batch_system_s_warning(tmp_path, number, code):
    script, listening = tmp_path / "rank.py", tmp_path / "listening"
    script.write_text(LISTENING_RANK)
    listening.mkdir()
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHED, str(script), str(listening)])
    wait_for(lambda: len(list(listening.iterdir())) == 2, within=60)
    launcher.send_signal(number)
    assert launcher.wait() == code
    ranks = [int(path.name) for path in listening.iterdir()]
    assert all_end(ranks, within=30)  # of the 60 seconds that they would sleep


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    """By how one of two processes ends: the launcher's exit code, its messages, its seconds."""
    script: Path = tmp_path_factory.mktemp("launch") / "rank.py"
    temporary = tmp_path_factory.mktemp("temporary")
    script.write_text(RANK)
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHER, str(script)],
        env=os.environ | {"TMPDIR": str(temporary)}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.stderr == ""
    assert list(temporary.iterdir()) == []
    return json.loads(done.stdout)


def test_a_run_whose_processes_are_done_is_done(ends):
    assert ends["done"][:2] == [0, []]


def test_a_killed_rank_ends_the_run_with_one_message_that_names_it(ends):
    code, (message,), seconds = ends["killed"]
    assert code == 1
    assert message.startswith("rank 1 (process ")
    assert message.endswith(
        "was ended by SIGKILL, which ended the run: continue from its last checkpoint with --resume"
    )
    assert seconds < 30


def test_a_terminated_rank_is_named_rather_than_the_one_that_torchrun_terminates_after_it(ends):
    code, (message,), _ = ends["terminated"]
    assert code == 1
    assert message.startswith("rank 1 (process ")
    assert "was ended by SIGTERM, which ended the run" in message


def test_the_exit_code_is_that_of_the_process_that_has_printed_its_error(ends):
    assert ends["exits"][:2] == [2, []]


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a process ended, as torchrun says it."""

    exitcode: int
    pid: int = 7


@pytest.mark.parametrize(
    ("codes", "named"),
    [
        ({0: 3, 1: -signal.SIGTERM}, "rank 1 (process 7) was ended by SIGTERM"),
        ({0: -signal.SIGTERM, 1: 3}, "rank 0 (process 7) was ended by SIGTERM"),
        ({0: 3, 1: -signal.SIGKILL}, "rank 1 (process 7) was ended by SIGKILL"),
        ({0: -signal.SIGTERM, 1: -signal.SIGKILL}, "rank 1 (process 7) was ended by SIGKILL"),
        # torchrun has ended the second one.
        ({0: -signal.SIGTERM, 1: -signal.SIGTERM}, "rank 0 (process 7) was ended by SIGTERM"),
        ({1: -signal.SIGTERM, 0: -signal.SIGTERM}, "rank 1 (process 7) was ended by SIGTERM"),
        ({1: -signal.SIGTERM, 0: -signal.SIGKILL}, "rank 1 (process 7) was ended by SIGTERM"),
        ({1: 3, 0: -signal.SIGTERM}, "rank 1 lost the connection to the others: continue from the last checkpoint"),
        # These have printed their errors.
        ({0: 3, 1: 1}, None),
        ({0: -signal.SIGTERM, 1: 1}, None),
    ],
)
def test_of_processes_that_end_at_once_the_one_is_named_that_the_others_have_lost(codes, named):
    said: list[str] = []
    assert _end([(rank, Failure(exitcode=code)) for rank, code in codes.items()], said.append) == 1
    assert [message.split(",")[0].removesuffix(" with --resume") for message in said] == ([named] if named else [])


def test_a_lost_connection_is_named_where_no_process_has_died_first(ends):
    code, messages, _ = ends["lost"]
    assert code == 1
    assert messages == ["rank 1 lost the connection to the others: continue from the last checkpoint with --resume"]
