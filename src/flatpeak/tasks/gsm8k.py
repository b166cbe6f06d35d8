"""GSM8K (Cobbe et al. 2021, arXiv 2110.14168): grade-school word problems with worked solutions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from flatpeak.errors import UserError
from flatpeak.tasks.config import GSM8KConfig
from flatpeak.tasks.sources import Row, directory, read_hub, read_jsonl
from flatpeak.types import Example
from flatpeak.utils.answers import is_number, normalize_gold

HUB_NAME = "openai/gsm8k"
HUB_CONFIG = "main"
_LOCAL = "task.path, a directory with train.jsonl and test.jsonl"


def gsm8k_examples(config: GSM8KConfig) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    """Train and test, the published splits, each cut to its size. The rationale is the whole published answer.

    With `shots`, questions are worded as the lm-evaluation-harness task gsm8k words them: `Question: ...\\nAnswer:`
    after so many worked examples. Those are the first training rows, which then are not trained on.
    """
    if not config.shots:
        return _split(config, "train", config.train_size), _split(config, "test", config.test_size)
    size = None if config.train_size is None else config.train_size + config.shots
    train, test = _split(config, "train", size), _split(config, "test", config.test_size)
    if len(train) <= config.shots:
        raise UserError(f"task.shots={config.shots}: the train split has only {len(train)} rows; lower task.shots")
    shots = tuple(f"{_cued(example)} {example.rationale}\n\n" for example in train[: config.shots])
    worded = (tuple(_shown(example, shots) for example in side) for side in (train[config.shots :], test))
    return next(worded), next(worded)


def _cued(example: Example) -> str:
    return f"Question: {example.question}\nAnswer:"


def _shown(example: Example, shots: tuple[str, ...]) -> Example:
    return replace(example, question=_cued(example), rationale=f" {example.rationale}", shots=shots)


def gsm8k_gold(answer: str) -> str | None:
    """The number after the last `####`, without `$`, commas and a final dot; None where there is no such number."""
    _, mark, tail = answer.rpartition("####")
    words = tail.replace("$", "").split()
    gold = normalize_gold(words[0].replace(",", "")) if mark and words else ""
    return gold if is_number(gold) else None


def _split(config: GSM8KConfig, split: str, size: int | None) -> tuple[Example, ...]:
    if size is not None and size < 1:
        raise UserError(f"task.{split}_size={size}: give at least 1, or null for all rows")
    examples = tuple(_example(row, f"{split}/{index}") for index, row in enumerate(islice(_rows(config, split), size)))
    if not examples:
        raise UserError(f"task.path={config.path}: the {split} split has no rows; fetch the files again")
    if size is not None and len(examples) < size:
        raise UserError(f"task.{split}_size={size}: the {split} split has only {len(examples)} rows; use null for all")
    return examples


def _rows(config: GSM8KConfig, split: str) -> Iterable[Row]:
    if config.path is None:
        return read_hub(HUB_NAME, config=HUB_CONFIG, split=split, path_option=_LOCAL)
    file = directory(config.path, option="task.path") / f"{split}.jsonl"
    if not file.is_file():
        raise UserError(f"task.path={config.path}: no {file.name} in it; put train.jsonl and test.jsonl there")
    return read_jsonl(file)


def _example(row: Row, id: str) -> Example:
    question, answer = (row.values.get(column) for column in ("question", "answer"))
    for column, value in (("question", question), ("answer", answer)):
        if not isinstance(value, str) or not value.strip():
            raise UserError(f"{row.where}: no text in column {column!r}; GSM8K rows have question and answer")
    gold = gsm8k_gold(str(answer))
    if gold is None:
        raise UserError(f"{row.where}: the answer has no number after `####`; end it with a line such as `#### 18`")
    return Example(id=id, question=str(question).strip(), gold=gold, rationale=str(answer), columns=row.values)
