"""The model card of a run's checkpoint: README.md in the Hub's format; every figure comes from the run's files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from pprint import pformat
from typing import Any, Final, Literal

from flatpeak.config.algorithm_name import algorithm_name
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import plural
from flatpeak.pipeline.prompt_record import PromptRecord
from flatpeak.report.evaluations import cell, meaning
from flatpeak.rewards.sequence_classifier import COMPLETION, PROMPT, read_record
from flatpeak.runs.checkpoints import checkpoint_name
from flatpeak.runs.summary import RunSummary, StageEvaluation
from flatpeak.tasks.arithmetic import ArithmeticConfig
from flatpeak.tasks.config import TaskConfig, hub_datasets, is_generated
from flatpeak.tasks.prompts import CHAT, PLACEHOLDER
from flatpeak.training.objective_config import is_reference
from flatpeak.utils.huggingface import is_self_contained
from flatpeak.utils.redaction import without_local_paths

RECIPE: Final = "recipe.yaml"
"""The file of the resolved recipe next to the card."""
UNKNOWN_LICENSE: Final = "unknown"
"""The value of the Hub's field `license` if it is not set."""
QUESTION: Final = "What is 12 + 30?"
"""The question of the snippet if the task's questions are not available."""
_FIRST: Final = ("accuracy", "sampled/accuracy", "extraction_failed", "sampled/extraction_failed", "reward")
_HEADLINES: Final = re.compile(r"(sampled/)?accuracy|reward|(pass|maj)@.*")
"""The metrics for the Hub's leaderboards."""
_FALLIBLE: Final = {
    "judge": "an LLM judge",
    "reward_model": "a reward model",
    "function": "a function of the user's own",
}
"""Rewards whose scores are verdicts that may be wrong, instead of rules."""


@dataclass(frozen=True, kw_only=True)
class CardSource:
    """Everything that a card is made from: a checkpoint, its record, and the files of its run."""

    repo: str
    run_name: str
    config: RunConfig
    record: PromptRecord
    summary: RunSummary | None
    manifest: Mapping[str, Any]
    folder: Path
    """The files that will be next to the card."""
    stage: Literal["sft", "train"]
    step: int
    adapter: bool
    license: str = UNKNOWN_LICENSE
    needed: tuple[str, ...] = ()
    """Keys of the recipe whose values were left out because they are secrets or local paths."""
    local: tuple[str, ...] = ()
    """Keys of the recipe whose values are relative paths of files that the repository lacks."""

    @property
    def is_reward_model(self) -> bool:
        """Whether the checkpoint scores answers instead of writing them."""
        return self.record.kind == "reward_model"

    @property
    def is_before_rl(self) -> bool:
        """Whether the checkpoint contains no step of RL although its run has taken some."""
        return self.stage == "train" and self.step == 0 and not self.is_reward_model

    @property
    def base(self) -> str:
        """The base model and its revision."""
        revision = self.record.base_revision
        return code_span(self.record.base_model) + (f" at {code_span(revision)}" if revision else "")

    @property
    def question(self) -> str:
        """A held-out question of a generated task, else a question for any model."""
        task = self.config.main_tasks[0]
        if isinstance(task, ArithmeticConfig) and "task" not in self.record.objects:
            return task.load().test[0].question
        return QUESTION

    @property
    def shots(self) -> int:
        """The worked examples before each question."""
        return 0 if "task" in self.record.objects else getattr(self.config.main_tasks[0], "shots", 0)

    @property
    def tokenizer_class(self) -> str:
        """The class of transformers that loads the tokenizer."""
        return "PreTrainedTokenizerFast" if is_self_contained(str(self.folder)) else "AutoTokenizer"

    @property
    def tasks(self) -> list[TaskConfig]:
        """The tasks in the recipe, including a curriculum's first task; empty if the caller passed the task."""
        if "task" in self.record.objects:
            return []
        return [*self.config.main_tasks, *([self.config.curriculum.task] if self.config.curriculum else [])]

    @property
    def data(self) -> list[dict[str, Any]]:
        """The name, type and data sets of each task."""
        rows: list[dict[str, Any]] = []
        for task in self.tasks:
            row = {"name": getattr(task, "name", task.type), "type": task.type, "datasets": hub_datasets(task)}
            row["generated"] = is_generated(task)
            if row not in rows:
                rows.append(row)
        return rows

    @property
    def datasets(self) -> list[str]:
        """The Hub names of the data that the run has read."""
        return list(dict.fromkeys(name for task in self.tasks for name in hub_datasets(task)))

    @property
    def fallible_rewards(self) -> list[str]:
        """The kinds of reward behind the checkpoint that may be wrong."""
        if self.stage != "train" or self.is_reward_model or "reward" in self.record.objects:
            return []
        return sorted({_FALLIBLE[one.type] for one in self.config.rewards.values() if one.type in _FALLIBLE})

    @property
    def evaluation(self) -> StageEvaluation | None:
        """The last evaluation of exactly this checkpoint, or None."""
        return self._evaluation_at(self.stage, self.step)

    def _evaluation_at(self, stage: str, step: int | None) -> StageEvaluation | None:
        evaluations = self.summary.evaluations if self.summary else ()
        rows = [row for row in evaluations if row.stage == stage and row.step == step]
        if not rows and stage == "train" and step == 0:  # the model at the start of RL
            rows = [row for row in evaluations if row.stage != "train"]
        return rows[-1] if rows else None

    def columns(self) -> list[tuple[str, StageEvaluation]]:
        """The evaluations of the stages side by side, each once: before training, after SFT, best, last, this."""
        if self.summary is None:
            return []
        trained = "training" if self.is_reward_model else "RL"
        best, last = self.summary.best_step, self.summary.evaluation("train")
        labelled = {
            "before training": self.summary.evaluation("start"),
            "after SFT": self.summary.evaluation("sft"),
            f"best of {trained}, step {best}": self._evaluation_at("train", best),
            f"last of {trained}, step {last.step if last else 0}": last,
            "this checkpoint": self.evaluation,
        }
        columns: list[tuple[list[str], StageEvaluation]] = []
        for label, evaluation in labelled.items():
            shared = next((labels for labels, other in columns if other is evaluation), None)
            if shared is not None:
                shared.append(label)
            elif evaluation is not None:
                columns.append(([label], evaluation))
        return [(" = ".join(labels), evaluation) for labels, evaluation in columns]


def write_card(source: CardSource) -> str:
    """The text of README.md: the Hub's metadata, then what a reader needs before using the model."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "code_span": code_span,
        "fenced": fenced,
        "plural": plural,
        "python_text": lambda text: pformat(text, width=100),
        "repr": repr,
        "short": "{:g}".format,
    }
    columns = source.columns()
    versions = source.manifest.get("versions") or {}
    return environment.get_template("card.md.jinja").render(
        CHAT=CHAT,
        COMPLETION=COMPLETION,
        PLACEHOLDER=PLACEHOLDER,
        PROMPT=PROMPT,
        QUESTION=QUESTION,
        RECIPE=RECIPE,
        is_reference=is_reference,
        without_local_paths=without_local_paths,
        card=source,
        config=source.config,
        record=source.record,
        summary=source.summary,
        manifest=source.manifest,
        metadata=metadata(source).to_yaml(),
        algorithm=algorithm_name(source.config),
        checkpoint=checkpoint_name(source.step),
        texts=read_record(source.folder) if source.is_reward_model else None,
        table=_results_table(columns, unit="pairs" if source.is_reward_model else "questions"),
        subsets=sorted({name for _, evaluation in columns for name in evaluation.subsets}),
        versions={name: version for name, version in versions.items() if version},
    )


def metadata(source: CardSource) -> Any:
    """The card's metadata in the Hub's fields, a `huggingface_hub.ModelCardData`."""
    from huggingface_hub import ModelCardData

    base = source.record.base_model
    results = _evaluation_results(source)
    relation = "adapter" if source.adapter else "finetune"
    return ModelCardData(
        library_name="peft" if source.adapter else "transformers",
        pipeline_tag="text-classification" if source.is_reward_model else "text-generation",
        license=source.license,
        base_model=base,
        base_model_relation=None if base is None else relation,
        datasets=source.datasets or None,
        tags=_tags(source),
        model_name=source.repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )


def _evaluation_results(source: CardSource) -> list[Any]:
    from huggingface_hub import EvalResult

    evaluation = source.evaluation
    if evaluation is None:
        return []
    return [
        EvalResult(
            task_type="text-classification" if source.is_reward_model else "text-generation",
            dataset_type=source.datasets[0] if source.datasets else evaluation.task,
            dataset_name=f"{evaluation.task}, held-out",
            metric_type=name.replace("sampled/", ""),
            metric_name=name,
            metric_value=value,
        )
        for name, value in evaluation.metrics.items()
        if _HEADLINES.fullmatch(name) and value is not None and math.isfinite(value)
    ]


def _tags(source: CardSource) -> list[str]:
    config = source.config
    tags = ["flatpeak", "reward-model" if source.is_reward_model else "text-generation"]
    if source.stage == "sft" or (source.is_before_rl and config.sft.steps):
        tags.append("sft")
    elif not source.is_before_rl and not source.is_reward_model:
        tags += ["reinforcement-learning", algorithm_tag(algorithm_name(config))]
        if config.gradient_regularization.enabled:
            tags.append("gradient-regularization")
    if source.adapter:
        tags.append("lora" if config.model.quantization is None else "qlora")
    return tags


def algorithm_tag(name: str) -> str:
    """The tag of an algorithm: `dr-grpo`, and `grpo` for a variant of GRPO."""
    return "-".join(re.findall(r"[a-z]+", name.partition(" with ")[0].lower()))


def _results_table(columns: list[tuple[str, StageEvaluation]], *, unit: str) -> list[list[str]]:
    """The rows of the table, with the header first; empty without an evaluation."""
    if not columns:
        return []
    evaluations = [evaluation for _, evaluation in columns]
    names = list(dict.fromkeys(name for evaluation in evaluations for name in evaluation.metrics))
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    table = [
        ["Metric", *(label for label, _ in columns)],
        ["task", *(code_span(evaluation.task) for evaluation in evaluations)],
        [f"held-out {unit}", *(str(evaluation.size) for evaluation in evaluations)],
    ]
    for name in names:
        label = ", ".join(filter(None, (code_span(name), meaning(name))))
        table.append([label, *(cell(evaluation, name) or "not measured" for evaluation in evaluations)])
    return table


def fenced(text: str, language: str = "") -> str:
    """A fenced block whose fence is longer than any run of backticks in the text."""
    fence = "`" * max(3, _longest_ticks(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def code_span(text: object) -> str:
    """An inline code span of any text, in one line."""
    line = " ".join(str(text).split())
    ticks = "`" * (_longest_ticks(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}" if line else "(empty)"


def _longest_ticks(text: str) -> int:
    return max((len(run) for run in re.findall(r"`+", text)), default=0)
