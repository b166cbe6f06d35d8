"""The database of MLflow, made by several processes at once or by one that ends in the middle; and failed starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlflow", reason="pip install -e '.[dev]'")

from mlflow.entities import ViewType
from mlflow.tracking import MlflowClient
from sqlalchemy import text

from flatpeak.tracking.backend import RunFacts
from flatpeak.tracking.config import MlflowConfig
from flatpeak.tracking.mlflow_backend import MlflowBackend

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from pathlib import Path
import flatpeak.tracking.mlflow_backend as tested
from flatpeak.tracking.backend import RunFacts
from flatpeak.tracking.config import MlflowConfig

print("ready", flush=True)
sys.stdin.readline()
facts = RunFacts(name=sys.argv[2], directory=Path("."), recipe={}, start={}, group=None, tags={})
tested.MlflowBackend(MlflowConfig(uri=sys.argv[1]), facts, None)
"""


def facts(directory: Path, **recipe: Any) -> RunFacts:
    return RunFacts(name="one", directory=directory, recipe=recipe, start={}, group=None, tags={})


def starting(directory: Path, name: str) -> subprocess.Popen[str]:
    """A process that has loaded the library, and makes the database and a run when it is given a line."""
    paths = [str(Path(__file__).parents[1]), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, f"sqlite:///{directory}/mlflow.db", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=directory,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def run_names(directory: Path) -> list[str]:
    client = MlflowClient(tracking_uri=f"sqlite:///{directory}/mlflow.db")
    experiments = [one.experiment_id for one in client.search_experiments(view_type=ViewType.ALL)]
    return sorted(run.info.run_name for run in client.search_runs(experiments))


def test_processes_that_make_one_database_at_once_all_have_their_runs(tmp_path: Path) -> None:
    processes = [starting(tmp_path, name) for name in ("one", "two")]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    assert run_names(tmp_path) == ["one", "two"]
    assert [path.name for path in tmp_path.glob("*mlflow.db*")] == ["mlflow.db"]


def test_an_end_while_the_database_is_made_leaves_none_that_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = MlflowConfig(uri=f"sqlite:///{tmp_path}/mlflow.db")

    def end(engine: Any) -> None:
        with engine.begin() as connection:  # as the library's migrations leave it
            connection.execute(text("CREATE TABLE _alembic_tmp_metrics (key TEXT)"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("mlflow.store.db.utils._initialize_tables", end)
        with pytest.raises(KeyboardInterrupt):
            MlflowBackend(config, facts(tmp_path), None)
    MlflowBackend(config, facts(tmp_path), None)
    assert run_names(tmp_path) == ["one"]


ABANDONED = """
import sys, threading
import flatpeak.tracking.mlflow_backend as tested

making, end = threading.Event(), threading.Event()

def make(engine):
    with engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE begun (key TEXT)")
        making.set()
        end.wait()

import mlflow.store.db.utils
mlflow.store.db.utils._initialize_tables = make
threading.Thread(target=tested.make_database, args=[sys.argv[1]], daemon=True).start()
making.wait(60)
"""


def test_an_end_of_the_process_while_the_database_is_made_leaves_no_files(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ABANDONED, f"sqlite:///{tmp_path}/mlflow.db"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    assert list(tmp_path.iterdir()) == []


def test_attempts_that_fail_to_describe_a_run_leave_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = MlflowConfig(uri=f"sqlite:///{tmp_path}/mlflow.db")

    def refuse(*arguments: object) -> None:
        raise PermissionError("read-only")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_dict", refuse)
        for _ in range(2):
            with pytest.raises(PermissionError):
                MlflowBackend(config, facts(tmp_path), None)
    assert run_names(tmp_path) == []
    MlflowBackend(config, facts(tmp_path), None)
    assert run_names(tmp_path) == ["one"]
