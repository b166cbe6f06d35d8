"""rollouts/step_000001.jsonl, with every completion of a step, its tokens, rewards and advantage; and evaluations/."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flatpeak.errors import UserError, brief
from flatpeak.runs.files import fsync_path, write_atomic
from flatpeak.runs.notices import warn
from flatpeak.types import Completion, Group, Scores
from flatpeak.utils.redaction import redact

Row = dict[str, Any]
LARGE = 2**30
"""Expected bytes of a run's rollouts above which a notice is given in advance."""
_FILE = re.compile(r"step_(\d+)\.jsonl")


def rollout_rows(
    groups: Sequence[Group], scores: Scores, advantages: Sequence[Sequence[float | None]]
) -> Iterator[Row]:
    """One row per completion; `advantages` is [P][G] like `scores`. Missing and non-finite numbers become null."""
    for p, group in enumerate(groups):
        prompt, gold, texts = redact(
            [group.prompt.text, group.prompt.example.gold, [completion.transcript for completion in group.completions]],
            prose=True,
        )
        for g, (completion, text) in enumerate(zip(group.completions, texts, strict=True)):
            yield {
                "group": group.prompt.id,
                "index": g,
                "prompt": prompt,
                "prompt_token_ids": list(group.prompt.token_ids),
                "text": text,
                "token_ids": list(completion.token_ids),
                "logprobs": [_finite(value) for value in completion.logprobs],
                "finish_reason": completion.finish_reason,
                "reward": _finite(scores.total[p][g]),
                "rewards": {name: _finite(values[p][g]) for name, values in scores.parts.items()},
                "advantage": _finite(advantages[p][g]),
                "gold": gold,
                **({} if not completion.turns else _episode(completion)),
                **({} if completion.weight_version is None else {"weight_version": completion.weight_version}),
            }


def _episode(completion: Completion) -> Row:
    """The further columns of an episode: its end, its turns and calls, and which tokens are trained on."""
    trained = completion.trained or (True,) * len(completion.token_ids)
    turns: Any = redact([asdict(turn) for turn in completion.turns], prose=True)
    return {"stop_reason": completion.stop_reason, "turns": turns, "trained": [int(own) for own in trained]}


class RolloutLog:
    """Writes one file of rollouts per step; if the disk is full, it gives one notice and training continues."""

    def __init__(self, directory: Path, *, notice: Callable[[str], None] = warn) -> None:
        self.directory = directory
        self._notice = notice
        self._noticed = False
        self._size: int | None = None
        """Bytes of the latest file; None before the first."""
        self._announced = False
        self._unsynced: list[Path] = []

    def announce_size(self, step: int, *, total: int, every: int) -> None:
        """Give one notice, after the first file, if files of its size every `every` steps would add up to LARGE."""
        if self._announced or self._size is None:
            return
        self._announced = True
        expected = self._size * (1 + (total - step) // every)
        if expected >= LARGE:
            self._notice(
                f"{self.directory} may grow to {expected / 2**30:.1f} GiB by step {total}: one step's rollouts take "
                f"{self._size / 2**20:.1f} MiB; run.log_rollouts_every={10 * every} keeps a tenth of them"
            )

    def write(
        self,
        step: int,
        groups: Sequence[Group],
        scores: Scores,
        advantages: Sequence[Sequence[float | None]],
    ) -> None:
        """Write the file under a temporary name and rename it, so that readers never see an incomplete step."""
        path = self.directory / f"step_{step:06d}.jsonl"
        temporary = self.directory / f".tmp-{path.name}"
        try:
            # A lone surrogate, which UTF-8 cannot encode, becomes a JSON escape.
            with temporary.open("w", encoding="utf-8", errors="backslashreplace") as file:
                for row in rollout_rows(groups, scores, advantages):
                    file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
            self._size = temporary.stat().st_size
            temporary.replace(path)
            self._unsynced.append(path)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            if not self._noticed:
                self._noticed = True
                self._notice(f"{path}: {error.strerror}; rollouts are not logged until the disk has space again")

    def sync(self) -> None:
        """Flush the files written since the last call to the disk."""
        unsynced, self._unsynced = self._unsynced, []
        for path in unsynced:
            fsync_path(path)
        if unsynced:
            fsync_path(self.directory)


def write_answers(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows of an evaluation to a file such as evaluations/train_000010.jsonl, with secrets redacted."""
    path.parent.mkdir(exist_ok=True)
    write_atomic(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _without_secrets(list(rows))))


def answers_over_run(directory: Path, evaluations: Sequence[str], *, count: int = 3) -> list[tuple[Row, ...]]:
    """The rows of each of the first questions in the files of several evaluations of a run, such as `train_000010`.

    Empty if a file is missing or incomplete, if the questions differ, or if there are fewer than two evaluations.
    """
    if len(evaluations) < 2:
        return []
    try:
        answers = [read_rollouts(directory / f"{name}.jsonl")[:count] for name in evaluations]
    except (OSError, UserError):
        return []
    questions = list(zip(*answers, strict=False))
    return [rows for rows in questions if len({row["id"] for row in rows}) == 1 and "text" in rows[0]]


def _without_secrets(rows: Sequence[Mapping[str, Any]]) -> Iterator[Row]:
    # Mappings contain numbers by reward name, and a reward may be called `secret`. One call for all rows, because each
    # call searches the environment, which would take longer than everything else here.
    hidden = iter(redact([item for row in rows for item in row.values() if not isinstance(item, Mapping)], prose=True))
    for row in rows:
        yield {key: item if isinstance(item, Mapping) else next(hidden) for key, item in row.items()}


def read_rollouts(path: Path) -> list[Row]:
    """The rows of a step's file. Raises UserError if it is damaged, or truncated, for example by a full disk."""
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    except ValueError as error:
        raise UserError(
            f"{path} is incomplete ({brief(error)}): choose another step, or resume the run, which rewrites the steps "
            "after its last checkpoint; delete an earlier step's file"
        ) from None


def turn_rewards(row: Row) -> str:
    """The rewards of an episode's turns, such as `0, none, 1`; empty where no turn has one, and for older files."""
    rewards = [turn.get("reward") for turn in row.get("turns", ())]
    if all(reward is None for reward in rewards):
        return ""
    return ", ".join("none" if reward is None else f"{reward:.4g}" for reward in rewards)


def first_row(path: Path) -> Row:
    """The first row of a step's file, without reading the others. Raises ValueError if there is none."""
    with path.open(encoding="utf-8") as file:
        row: Row = json.loads(file.readline())
    return row


def logged_steps(directory: Path) -> dict[int, Path]:
    """The files of all logged steps, in order of steps."""
    files = {int(match[1]): path for path in directory.glob("step_*.jsonl") if (match := _FILE.fullmatch(path.name))}
    return dict(sorted(files.items()))


def truncate_rollouts(directory: Path, *, step: int) -> None:
    """Delete the files of all later steps, and incomplete files that a crash left."""
    for later, path in logged_steps(directory).items():
        if later > step:
            path.unlink()
    for temporary in directory.glob(".tmp-*"):
        temporary.unlink()


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
