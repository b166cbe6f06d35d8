"""trackio: rows of its local database, which `trackio show` and `trackio sync` read."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trackio import Artifact
from trackio import Table as TrackioTable
from trackio.sqlite_storage import SQLiteStorage
from trackio.utils import to_json_safe

from flatpeak.tracking.backend import MetricRow, NoticeRow, RunFacts, Table
from flatpeak.tracking.config import TrackioConfig


class TrackioBackend:
    """A run in trackio's store.

    `trackio.log` prints to standard output and hides errors. This class writes the same content to the store and raises
    errors.
    """

    message: str | None = None
    rows_first = True

    def __init__(self, config: TrackioConfig, facts: RunFacts, identity: str | None) -> None:
        self.identity = identity or uuid.uuid4().hex
        self._project = config.project
        self._name = facts.name
        created = datetime.now(UTC).isoformat()
        # Keys that begin with an underscore belong to the library, which groups runs by the last of these.
        own = {"_Username": None, "_Created": created, "_Group": facts.group}
        self._config = to_json_safe({**facts.recipe, "flatpeak": dict(facts.start), "tags": dict(facts.tags), **own})
        SQLiteStorage.validate_project_name(self._project)
        self._store = SQLiteStorage.init_db(self._project)
        self._described = False

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Add the rows in one transaction."""
        self._check()
        self._write([dict(row.metrics) for row in rows], [row.step for row in rows])

    def log_table(self, table: Table) -> None:
        """Add a table under its name."""
        self._check()
        content = TrackioTable(columns=list(table.columns), data=[list(row) for row in table.rows])
        value = content._to_dict(project=self._project, run=self._name, step=table.step)
        self._write([{table.name: value}], [table.step])

    def log_notice(self, notice: NoticeRow) -> None:
        """Add a notice as an alert."""
        self._check()
        self._alert("notice", notice.text, "warn", notice.step)

    def log_report(self, path: Path) -> None:
        """Add the page as an artifact."""
        self._check()
        artifact = Artifact(name=f"report-{self.identity}", type="report")
        artifact.add_file(path)
        SQLiteStorage.commit_artifact_version(
            project=self._project,
            name=artifact.name,
            type=artifact.type,
            description=artifact.description,
            manifest=artifact._build_manifest(self._project),
            metadata=artifact.metadata,
            aliases=[],
            run_name=self._name,
            run_id=self.identity,
        )

    def finish(self, status: str) -> None:
        """Record how the run ended as an alert, because the store has no field for it."""
        self._check()
        self._alert(f"run {status}", None, "info", 0)

    def _check(self) -> None:
        """Raise OSError if the store is gone, because the library would create an empty one instead."""
        if not self._store.exists():
            raise FileNotFoundError(f"{self._store} is gone")

    def _write(self, values: Sequence[dict[str, Any]], steps: Sequence[int]) -> None:
        """Store rows; the first call adds the configuration, which the library can store only together with rows."""
        SQLiteStorage.bulk_log(
            self._project,
            self._name,
            list(values),
            steps=list(steps),
            config=None if self._described else self._config,
            run_id=self.identity,
        )
        self._described = True

    def _alert(self, title: str, text: str | None, level: str, step: int) -> None:
        SQLiteStorage.bulk_alert(
            self._project,
            self._name,
            titles=[title],
            texts=[text],
            levels=[level],
            steps=[step],
            run_id=self.identity,
        )
