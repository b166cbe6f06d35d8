"""The parent's side of a measurement: worker processes, one of which works at a time, and their measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

ROOT = Path(__file__).parents[2]
Measurement = dict[str, float]
"""Numbers of one turn by name: tokens, cpu, wall, peak_mib, ..."""
QUIET = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONUNBUFFERED": "1",
}
"""One thread for each worker, and no network."""


class WorkerError(RuntimeError):
    """A worker that ended too early; the message is the end of its output."""


class Worker:
    """A process that answers each line it receives with one line."""

    def __init__(
        self,
        module: str,
        arguments: Mapping[str, Any],
        *,
        log: Path,
        python: str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.facts: dict[str, Any] = {}
        self._log = log
        search = os.pathsep.join(path for path in (os.environ.get("PYTHONPATH"), str(ROOT)) if path)
        with log.open("wb") as output:
            self._process: subprocess.Popen[str] = subprocess.Popen(
                [python, "-m", module, json.dumps(dict(arguments))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
                text=True,
                cwd=log.parent,
                env={**os.environ, **QUIET, "PYTHONPATH": search, **(environment or {})},
            )

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pipe(self._process.stdin).close()  # this ends a worker that waits for its turn
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def receive(self) -> dict[str, Any]:
        """Return the worker's next line, parsed."""
        line = self._pipe(self._process.stdout).readline()
        if not line:
            self._process.wait()
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise WorkerError(f"exit status {self._process.returncode}\n{tail}")
        message: dict[str, Any] = json.loads(line)
        return message

    def ready(self) -> Worker:
        """Wait until the worker has loaded everything; keep its first line as `facts`."""
        self.facts = self.receive()
        return self

    def turn(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Let the worker run until its next line."""
        stdin = self._pipe(self._process.stdin)
        stdin.write(json.dumps(dict(command)) + "\n")
        stdin.flush()
        return self.receive()

    @staticmethod
    def _pipe(pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe


def measure_in_turn(
    starts: Mapping[str, Callable[[], Worker]], *, uncounted: int, repeats: int, say: Callable[[str], None]
) -> tuple[dict[str, list[Measurement]], dict[str, str], dict[str, dict[str, Any]]]:
    """Run contenders in turns, round after round, once all of them are loaded.

    Returns each contender's measurements, the errors of those that failed, and each contender's report when ready.
    """
    measurements: dict[str, list[Measurement]] = {name: [] for name in starts}
    failures: dict[str, str] = {}
    facts: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        workers = {}
        for name, start in starts.items():
            worker = stack.enter_context(start())
            try:
                facts[name] = worker.ready().facts
                workers[name] = worker
            except WorkerError as error:
                failures[name] = str(error)
                say(f"  {name} failed to start: {str(error)[-400:]}")
        for number in range(uncounted + repeats):
            for name in [name for name in workers if name not in failures]:
                try:
                    reported = workers[name].turn({"round": number})
                except WorkerError as error:
                    failures[name] = str(error)
                    say(f"  {name} failed: {str(error)[-400:]}")
                    continue
                say(f"  {number} {name}: " + ", ".join(f"{key} {value:.4g}" for key, value in reported.items()))
                if number >= uncounted:
                    measurements[name].append(reported)
    return {name: counted for name, counted in measurements.items() if counted}, failures, facts
