"""All that a model card is made of: a checkpoint, its record, and the files of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from flatpeak.config.run_config import RunConfig
from flatpeak.pipeline.prompt_record import PromptRecord
from flatpeak.runs.summary import RunSummary, StageEvaluation
from flatpeak.tasks.config import TaskConfig, hub_datasets

UNKNOWN_LICENSE: Final = "unknown"
"""The value of the Hub's field `license` where no one has said which it is."""
THIS: Final = "this checkpoint"


@dataclass(frozen=True, kw_only=True)
class CardSource:
    """All that a card is made of."""

    repo: str
    run_name: str
    config: RunConfig
    record: PromptRecord
    summary: RunSummary | None
    manifest: Mapping[str, Any]
    folder: Path
    """The files that will stand beside the card."""
    stage: Literal["sft", "train"]
    step: int
    adapter: bool
    license: str = UNKNOWN_LICENSE
    recorded: bool = True
    """Whether the checkpoint has a record of its own, which names what a Python caller gave."""
    needed: tuple[str, ...] = ()
    """Keys of the recipe whose values were left out as secrets or as local paths."""
    local: tuple[str, ...] = ()
    """Keys of the recipe whose values are relative paths of files that the repository does not have."""

    @property
    def is_reward_model(self) -> bool:
        """Whether the checkpoint scores answers instead of writing them."""
        return self.record.kind == "reward_model"

    @property
    def is_before_rl(self) -> bool:
        """Whether no step of RL is in the checkpoint of a run that has taken some."""
        return self.stage == "train" and self.step == 0 and not self.is_reward_model

    @property
    def tasks(self) -> list[TaskConfig]:
        """The tasks that the recipe names, a curriculum's first one too; none where the caller brought the task."""
        if "task" in self.record.objects:
            return []
        return [self.config.task, *([self.config.curriculum.task] if self.config.curriculum else [])]

    @property
    def datasets(self) -> list[str]:
        """The Hub names of the data that the run has read."""
        return list(dict.fromkeys(name for task in self.tasks for name in hub_datasets(task)))

    @property
    def evaluation(self) -> StageEvaluation | None:
        """The last evaluation of this very checkpoint, or None."""
        return self._evaluation_at(self.stage, self.step)

    def _evaluation_at(self, stage: str, step: int) -> StageEvaluation | None:
        rows = self.summary.evaluations if self.summary else ()
        own = [row for row in rows if row.stage == stage and row.step == step]
        if not own and stage == "train" and step == 0:  # the model that RL began with
            own = [row for row in rows if row.stage != "train"]
        return own[-1] if own else None

    def columns(self) -> list[tuple[str, StageEvaluation]]:
        """The evaluations of the stages side by side, each once: before training, after SFT, best, last, its own."""
        if self.summary is None:
            return []
        trained = "training" if self.is_reward_model else "RL"
        rows: list[tuple[str, StageEvaluation | None]] = [
            ("before training", self.summary.evaluation("start")),
            ("after SFT", self.summary.evaluation("sft")),
        ]
        best, last = self.summary.best_step, self.summary.evaluation("train")
        if best is not None:
            rows.append((f"best of {trained}, step {best}", self._evaluation_at("train", best)))
        rows.append((f"last of {trained}, step {last.step}" if last else "", last))
        rows.append((THIS, self.evaluation))
        labels: dict[int, list[str]] = {}
        by_id: dict[int, StageEvaluation] = {}
        for label, row in rows:
            if row is not None:
                labels.setdefault(id(row), []).append(label)
                by_id[id(row)] = row
        return [(" = ".join(names), by_id[key]) for key, names in labels.items()]
