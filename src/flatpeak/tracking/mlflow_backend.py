"""MLflow: a run in an experiment, on a server or in a database."""

from __future__ import annotations

import atexit
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

# Set before the import: otherwise the library sends usage reports over the network, from a separate thread, and prints
# its progress in the terminal.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
# The other trackers wait for this one, so an unreachable server must cost seconds, not minutes.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")

from mlflow.entities import Metric, Param, RunTag
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from flatpeak.tracking.backend import MetricRow, NoticeRow, RunFacts, Table
from flatpeak.tracking.config import MlflowConfig

_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)
_METRICS, _PARAMETERS = 1000, 100
"""The maximum number of metrics, and of parameters or tags, in one request."""
_LONGEST_VALUE = 500
_STATUS = {"done": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}


class MlflowBackend:
    """An MLflow run, which a resumed run continues."""

    message: str | None = None
    rows_first = True

    def __init__(self, config: MlflowConfig, facts: RunFacts, identity: str | None) -> None:
        uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        if uri.startswith("sqlite"):
            make_database(uri)
        self._client = MlflowClient(tracking_uri=uri)
        self.identity = identity or self._create(config, facts)
        self._notices = 0
        if identity is None:
            try:
                self._describe(facts)
            except Exception:
                with suppress(Exception):
                    self._client.delete_run(self.identity)  # the next attempt creates another
                raise
        else:
            self._client.update_run(identity, status="RUNNING")
            self._client.log_dict(identity, dict(facts.start), f"start_{int(time.time())}.json")

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Log the rows in as few requests as possible."""
        now = int(1000 * time.time())
        metrics = [
            Metric(metric_name(name), float(value), now, row.step)
            for row in rows
            for name, value in row.metrics.items()
        ]
        for begin in range(0, len(metrics), _METRICS):
            self._client.log_batch(self.identity, metrics=metrics[begin : begin + _METRICS], synchronous=True)

    def log_table(self, table: Table) -> None:
        """Log a table as JSON, in the layout that MLflow displays as a table."""
        content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
        text = json.dumps(content, ensure_ascii=False)
        self._client.log_text(self.identity, text, f"{_REFUSED.sub('_', table.name)}/step_{table.step:06d}.json")

    def log_notice(self, notice: NoticeRow) -> None:
        """Log a notice as a text file, because the number of tags in a run is limited."""
        self._notices += 1
        name = f"notices/step_{notice.step:06d}_{int(time.time())}_{self._notices}.txt"
        self._client.log_text(self.identity, notice.text, name)

    def log_report(self, path: Path) -> None:
        """Log the page as an artifact."""
        self._client.log_artifact(self.identity, str(path))

    def finish(self, status: str) -> None:
        """Set the status of the run."""
        self._client.set_terminated(self.identity, _STATUS[status])

    def _create(self, config: MlflowConfig, facts: RunFacts) -> str:
        tags = {"group": facts.group} if facts.group else {}
        run = self._client.create_run(self._experiment(config.experiment), run_name=facts.name, tags=tags)
        identity: str = run.info.run_id
        return identity

    def _experiment(self, name: str) -> str:
        """The id of an experiment; two runs that start together may both try to create it."""
        known = self._client.get_experiment_by_name(name)
        if known is None:
            try:
                created: str = self._client.create_experiment(name)
                return created
            except MlflowException:
                known = self._client.get_experiment_by_name(name)
                if known is None:
                    raise
        experiment: str = known.experiment_id
        return experiment

    def _describe(self, facts: RunFacts) -> None:
        """Log recipe, tags, versions and hardware, in requests of a size that MLflow accepts."""
        start = {key: facts.start[key] for key in ("versions", "commit", "hardware") if key in facts.start}
        tags = [*facts.tags.items(), *((name, str(value)) for name, value in _flat(start))]
        params = [Param(metric_name(name), str(value)[:_LONGEST_VALUE]) for name, value in _flat(facts.recipe)]
        for begin in range(0, len(params), _PARAMETERS):
            self._client.log_batch(self.identity, params=params[begin : begin + _PARAMETERS], synchronous=True)
        named = [RunTag(metric_name(name), str(value)[:_LONGEST_VALUE]) for name, value in tags]
        self._client.log_batch(self.identity, tags=named[:_PARAMETERS], synchronous=True)
        self._client.log_dict(self.identity, dict(facts.recipe), "recipe.json")
        self._client.log_dict(self.identity, dict(facts.start), "start.json")


def make_database(uri: str) -> None:
    """Create the file of an SQLite address atomically, if it does not exist.

    The library would create its tables one by one in the file. If a second process does the same, or this one ends in
    the middle, no process can open the file again.
    """
    from sqlalchemy.engine import make_url  # imported here because servers do not need it

    name = make_url(uri).database
    if not name or name == ":memory:" or Path(name).exists():
        return
    path = Path(name)
    folder = tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent)
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)  # a run that stops waiting ends this thread at any point
    try:
        temporary = Path(folder, path.name).absolute()
        MlflowClient(tracking_uri=f"sqlite:///{temporary}").search_experiments(max_results=1)
        with suppress(FileExistsError):  # another process was faster
            os.link(temporary, path)
    finally:
        remove()
        atexit.unregister(remove)


def metric_name(name: str) -> str:
    """A name that MLflow accepts: `@` becomes `_at_`, and other characters that it refuses become `_`."""
    return _REFUSED.sub("_", name.replace("@", "_at_"))


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a mapping by dotted key; lists are leaves."""
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, Mapping) and item:
            yield from _flat(item, f"{name}.")
        else:
            yield name, item
