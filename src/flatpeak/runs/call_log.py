"""calls/train_000012.0.jsonl, with results of calls of tools, which a resumed run reads instead of calling again."""

from __future__ import annotations

import base64
import json
from collections import defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

from flatpeak.runs.notices import START

T = TypeVar("T")


class CallLog:
    """The results of calls since the last checkpoint, one file per step and rank; none before the first call.

    Every rank reads the files of all, since the ranks before a kill may have been others. If the disk is full, it gives
    one notice, and what it could not keep is called again.
    """

    def __init__(self, folder: Path, *, rank: int, notice: Callable[[str], None]) -> None:
        self._folder = folder
        self._rank = rank
        self._notice = notice
        self._lock = Lock()
        self.begin_step(START, 0)

    def begin_step(self, stage: str, step: int) -> None:
        """Assign the following calls, those of its evaluation too, to this step; read what is kept of it."""
        self._step = f"{stage}_{step:06d}"
        # Evaluations of one step make equal calls: their results are read in the order in which they came.
        self._kept = defaultdict[str, deque[Any]](deque)
        for path in sorted(self._folder.glob(f"{self._step}.*")):
            for line in path.read_text(encoding="utf-8").split("\n"):
                try:
                    row = json.loads(line, object_hook=_decoded)
                except ValueError:  # a line that a kill or a full disk cut short
                    continue
                self._kept[row["key"]].append(row["result"])

    def take(self, key: str) -> tuple[Any, ...]:
        """The next result that is kept under a key, in a tuple, which is empty if there is none."""
        kept = self._kept.get(key)
        return (kept.popleft(),) if kept else ()

    def keep(self, key: str, result: T) -> T:
        """Write a result, which JSON and bytes make up, and return it; for any thread."""
        # The newline comes first: it ends a line that was cut short.
        line = "\n" + json.dumps({"key": key, "result": result}, default=_encoded)
        try:
            with self._lock:
                self._folder.mkdir(exist_ok=True)
                with (self._folder / f"{self._step}.{self._rank}.jsonl").open("a", encoding="utf-8") as file:
                    file.write(line)
        except OSError as error:
            notice, self._notice = self._notice, lambda text: None
            notice(f"{self._folder}: {error.strerror}; if the run is killed, it calls tools again")
        return result

    def forget(self, *, done: str) -> None:
        """Delete the results of earlier steps than the present one, and of the step that is `done`, which are saved."""
        for path in self._folder.glob("*"):
            step = path.name.partition(".")[0]
            # A run that goes on from its first checkpoint saves it again, and needs what it kept of later steps.
            if step < self._step or step == done:
                path.unlink()


def _encoded(data: bytes) -> dict[str, str]:
    return {"base64": base64.b64encode(data).decode()}


def _decoded(row: dict[str, Any]) -> Any:
    return base64.b64decode(row["base64"]) if "base64" in row else row
