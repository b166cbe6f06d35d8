"""Weights & Biases: online, or offline as files to upload later."""

from __future__ import annotations

import netrc
import os
import socket
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import wandb

from flatpeak.tracking.backend import MetricRow, NoticeRow, RunFacts, Table, check_writable
from flatpeak.tracking.config import WandbConfig

REACH = 3.0
"""Seconds to wait for the server to answer."""
OPENING = 30.0
"""Seconds to wait for a server that accepts a run but does not answer. The library makes the process wait for the same
time at its end, so a value above the wait at the end of a run would only delay the process."""
_LONGEST_NAME = 128


class WandbBackend:
    """A run in Weights & Biases, which a resumed run continues."""

    rows_first = False

    def __init__(self, config: WandbConfig, facts: RunFacts, identity: str | None) -> None:
        self.identity = identity or uuid.uuid4().hex[:12]
        directory = Path(config.directory) if config.directory else facts.folder
        directory.mkdir(parents=True, exist_ok=True)
        mode, reason = _mode(config)
        self._run = wandb.init(
            project=config.project,
            entity=config.entity,
            id=self.identity,
            name=facts.name[:_LONGEST_NAME],
            group=facts.group,
            tags=[f"{name}={value}" for name, value in facts.tags.items()],
            config={**facts.recipe, "flatpeak": dict(facts.start)},
            dir=str(directory),
            mode=mode,
            resume="allow",
            reinit="create_new",  # leaves the caller's own run alone
            # Its metadata contains the command line and its console log the output; either may contain keys.
            settings=wandb.Settings(
                console="off",
                silent=True,
                x_disable_meta=True,
                disable_git=True,
                disable_code=True,
                save_code=False,
                init_timeout=OPENING,
            ),
        )
        self._directory = Path(self._run.settings.sync_dir) if mode != "disabled" else directory
        self.message: str | None = None
        if mode == "offline" and reason:
            self.message = f"tracking.wandb is offline ({reason}): send the run later with wandb sync {self._directory}"

    def log_rows(self, rows: Sequence[MetricRow]) -> None:
        """Log one step for each row."""
        check_writable(self._directory)
        for row in rows:
            self._run.log(dict(row.metrics), step=row.step)

    def log_table(self, table: Table) -> None:
        """Log a table under its name."""
        check_writable(self._directory)
        rows = [list(row) for row in table.rows]
        self._run.log(
            {table.name: wandb.Table(columns=list(table.columns), data=rows, allow_mixed_types=True)}, step=table.step
        )

    def log_notice(self, notice: NoticeRow) -> None:
        """Send an alert if a server is used, and store the text in the run's summary."""
        notices = self._run.summary.get("notices") or []
        self._run.summary["notices"] = [*notices, f"step {notice.step}: {notice.text}"]
        if not self._run.offline:
            self._run.alert(title=notice.text[:60], text=notice.text)

    def log_report(self, path: Path) -> None:
        """Log the page as an artifact."""
        check_writable(self._directory)
        artifact = wandb.Artifact(f"report-{self.identity}", type="report")
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self, status: str) -> None:
        """End the run, marked as failed if it failed."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)
        check_writable(self._directory)


def _mode(config: WandbConfig) -> tuple[Literal["online", "offline", "disabled"], str | None]:
    """The mode of the run, and the reason if it is offline. Raises RuntimeError for online mode without a key.

    Otherwise the library would ask for the key in the terminal.
    """
    address = urlsplit(wandb.setup().settings.base_url)
    chosen = os.environ.get("WANDB_MODE", "auto") if config.mode == "auto" else config.mode
    if chosen == "disabled":
        return "disabled", None
    if chosen == "offline":
        return "offline", "as WANDB_MODE says" if config.mode == "auto" else "as tracking.wandb.mode says"
    if not _has_key(address.hostname or ""):
        reason = "no key: set WANDB_API_KEY or call wandb login"
        if chosen == "online":
            raise RuntimeError(reason)
        return "offline", reason
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), timeout=REACH).close()
    except OSError:
        return "offline", f"{address.hostname} cannot be reached"
    return "online", None


def _has_key(host: str) -> bool:
    """Whether the environment, or the file that `wandb login` writes, has a key for this host."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        return host in netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
