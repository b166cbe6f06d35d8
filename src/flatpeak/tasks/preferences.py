"""Preference data: a prompt with a chosen and a rejected answer, for reward models and for RLHF rollouts.

Two formats, recognized by their columns:

- AlpacaFarm (Dubois et al. 2023, arXiv 2305.14387): `instruction`, `input`, `output_1`, `output_2`, and `preference`,
  the number of the better output;
- pairs: `chosen` and `rejected`, with or without `prompt`, each a text or a list of chat messages. Without the column
  `prompt`, the prompt is their common beginning: the messages they share, or a transcript up to the last `Assistant:`
  (Bai et al. 2022, arXiv 2204.05862).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from flatpeak.errors import UserError
from flatpeak.tasks.conversations import conversation_text, read_messages
from flatpeak.tasks.data_files import ExampleTask, Row, SeededConfig, fetch_file, read_file, read_hub
from flatpeak.tasks.decontamination import is_held_out, question_key
from flatpeak.types import Example, Message

MAX_UNUSABLE: Final = 0.01
"""The largest share of rows without a prompt or a chosen answer, which are dropped; more is an error."""
_ANSWER_MARK: Final = "\n\nAssistant:"
_TIES: Final = (0, 1.5)
"""Values of AlpacaFarm's `preference` that prefer neither output."""
_FORMATS: Final = (
    "instruction, output_1, output_2 and preference (AlpacaFarm), or chosen and rejected, with or without prompt"
)


class PreferencesConfig(SeededConfig):
    """Preference pairs in AlpacaFarm's format, or with columns chosen and rejected, from files or the Hub."""

    type: Literal["preferences"] = "preferences"
    name: str = "preferences"
    """The task's name, in metrics as `eval/<name>/...`."""
    path: str | None = None
    """A JSONL, JSON or CSV file; null: load from the Hub."""
    test_path: str | None = None
    """With `path`: a file with held-out pairs; null: see `test_fraction`."""
    hub: str = "tatsu-lab/alpaca_farm"
    """The name of a Hub data set, read if `path` is null."""
    hub_file: str | None = "alpaca_human_preference.json"
    """One file of that data set; null: read its splits. AlpacaFarm's splits come from a script, which `datasets`
    refuses to run since version 4."""
    hub_config: str | None = None
    """The configuration of the Hub data set; null: its default."""
    split: str = "train"
    """With hub_file=null: the Hub split to train on."""
    test_split: str | None = None
    """With hub_file=null: the Hub split of held-out pairs; null: see `test_fraction`."""
    test_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """The share of prompts held out, by a seeded hash, if there is neither a test file nor a test split."""

    def load(self) -> ExampleTask:
        """Read the task for RLHF: one example per prompt, whose gold answer is the first chosen one."""
        preferences = load_preferences(self)
        return ExampleTask(
            name=self.name,
            train=_examples(preferences.train),
            test=_examples(preferences.test),
            notices=preferences.notices,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PreferencePair:
    """Two answers to one prompt, the preferred answer and the rejected one."""

    id: str
    """Unique among the pairs of a data set."""
    prompt: str
    """The prompt as text. A conversation of several messages has one paragraph per message, `role: content`."""
    chosen: str
    """The preferred answer."""
    rejected: str
    """The rejected answer, never equal to `chosen`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The unprocessed row, with `messages`, the prompt as chat messages, if the row has them."""
    messages: tuple[Message, ...] = ()
    """The prompt as chat messages; empty if it is a text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preferences:
    """The training and held-out pairs, and what was left out."""

    train: tuple[PreferencePair, ...]
    """The pairs that a reward model is trained on."""
    test: tuple[PreferencePair, ...]
    """The held-out pairs, whose prompts do not occur in `train`."""
    notices: tuple[str, ...]
    """Counts of ties, duplicates and contradictions, as sentences; empty if there are none."""


def load_preferences(config: PreferencesConfig) -> Preferences:
    """Read both sides and count what is left out. UserError with the line of a bad row.

    If there are two published files or splits, they are the sides; if a prompt is in both, its training pairs are
    dropped. Otherwise a hash of the prompt decides which prompts are held out, with all their pairs. Ties and repeated
    pairs are dropped; pairs that contradict each other are kept and counted.
    """
    sources = _sources(config)
    sides = [_without_repeats(_read(rows, prefix=f"{side}/" if len(sources) > 1 else "")) for side, rows in sources]
    kept = [pairs for pairs, _ in sides]
    notices = [notice for _, counts in sides for notice in counts]
    if len(kept) == 2:
        test_prompts = {question_key(pair.prompt) for pair in kept[1]}
        train = tuple(pair for pair in kept[0] if question_key(pair.prompt) not in test_prompts)
        test = kept[1]
        if len(train) < len(kept[0]):
            notices.append(f"{len(kept[0]) - len(train)} training pairs dropped: their prompts are held out")
    else:
        train, test = _split(kept[0], config)
    if not train or not test:
        raise UserError(
            f"the preference data gives {len(train)} training and {len(test)} held-out pairs: "
            f"{_reason_for_empty_side(kept)}"
        )
    return Preferences(train=train, test=test, notices=tuple(notices))


def _reason_for_empty_side(sides: Sequence[Sequence[PreferencePair]]) -> str:
    """The reason why one side has no pairs, and the fix."""
    if not any(sides):
        return "there are no rows in the files, or ties only"
    if len(sides) == 2:
        return "check both files; training pairs whose prompts are held out do not count"
    return (
        "if their prompts are the training prompts of a task.type=rows, which holds out by the same hash, they all "
        "fall on the training side under the same task.seed: set another one; else change task.test_fraction"
    )


def _examples(pairs: Iterable[PreferencePair]) -> tuple[Example, ...]:
    first: dict[str, PreferencePair] = {}
    for pair in pairs:
        first.setdefault(pair.prompt, pair)
    return tuple(
        Example(
            id=pair.id,
            question=prompt,
            gold=pair.chosen,
            columns=pair.columns,
            messages=pair.messages if len(pair.messages) > 1 and pair.messages[-1]["role"] == "user" else (),
        )
        for prompt, pair in first.items()
    )


def _sources(config: PreferencesConfig) -> list[tuple[str, Iterator[Row]]]:
    if config.path is not None:
        files = {"train": ("task.path", config.path), "test": ("task.test_path", config.test_path)}
        return [(side, read_file(path, option=option)) for side, (option, path) in files.items() if path is not None]
    if config.test_path is not None:
        raise UserError(f"task.test_path={config.test_path} without task.path: give both files, or neither for the Hub")
    if config.hub_file is not None:
        if config.test_split is not None:
            raise UserError(f"task.test_split={config.test_split} with a task.hub_file: set task.hub_file=null")
        file = fetch_file(
            config.hub,
            config.hub_file,
            path_option="task.path (or read its splits, with task.hub_file=null)",
        )
        return [("train", read_file(str(file), option="task.hub_file"))]
    splits = {"train": config.split, "test": config.test_split}
    return [
        (side, read_hub(config.hub, config=config.hub_config, split=split, path_option="task.path, a file"))
        for side, split in splits.items()
        if split is not None
    ]


def _read(rows: Iterable[Row], *, prefix: str) -> Iterator[PreferencePair | str | None]:
    """Per row a pair, None for a tie, or an error message if the prompt or the chosen answer is empty."""
    for index, row in enumerate(rows):
        if "preference" in row.values and "output_1" in row.values:
            comparison = _alpaca_farm(row)
        elif "chosen" in row.values and "rejected" in row.values:
            comparison = _chosen_rejected(row)
        else:
            raise UserError(f"{row.where}: columns {', '.join(row.values)}; preference rows have {_FORMATS}")
        prompt, chosen, rejected, extra = comparison
        empty = next((name for name, text in (("prompt", prompt), ("chosen answer", chosen)) if not text.strip()), None)
        if chosen == rejected:
            yield None
        elif empty:
            yield f"{row.where}: the {empty} is empty; repair or remove the row"
        else:
            columns = {**row.values, **extra}
            yield PreferencePair(
                id=f"{prefix}{index}",
                prompt=prompt,
                chosen=chosen,
                rejected=rejected,
                columns=columns,
                messages=tuple(extra.get("messages", ())),
            )


_Comparison = tuple[str, str, str, dict[str, Any]]
"""Prompt, chosen answer, rejected answer, additional columns; the two answers of a tie are equal."""


def _alpaca_farm(row: Row) -> _Comparison:
    instruction, first, second = (_text(row, column) for column in ("instruction", "output_1", "output_2"))
    prompt = f"{instruction}\n\n{_text(row, 'input')}" if row.values.get("input") else instruction
    label = row.values["preference"]
    try:
        number = float(label)
    except (TypeError, ValueError):
        number = None
    if number in _TIES:
        return prompt, first, first, {}
    if number not in (1, 2):
        raise UserError(f"{row.where}: preference is {label!r}; it names the better output, 1 or 2")
    return (prompt, first, second, {}) if number == 1 else (prompt, second, first, {})


def _chosen_rejected(row: Row) -> _Comparison:
    chosen, rejected, prompt = (row.values.get(column) for column in ("chosen", "rejected", "prompt"))
    if isinstance(chosen, str) and isinstance(rejected, str):
        if prompt is not None:
            text, extra = _prompt(row, prompt)
            return text, chosen, rejected, extra
        return *_transcripts(row, chosen, rejected), {}
    conversations = [_messages(row, column) for column in ("chosen", "rejected")]
    before = _messages(row, "prompt") if isinstance(prompt, list | tuple) else None
    if before is None and isinstance(prompt, str):
        # Whole conversations, or only the answers: in both cases the last message is the answer.
        answers = [_last_answer(row, messages) for messages in conversations]
        return prompt, answers[0], answers[1], {}
    if before is None:
        before = _shared(conversations[0][:-1], conversations[1][:-1])
        if not before or any(len(messages) != len(before) + 1 for messages in conversations):
            raise UserError(
                f"{row.where}: chosen and rejected do not share all messages but their last; give the prompt by itself"
            )
    text = conversation_text(before)
    return text, _last_answer(row, conversations[0]), _last_answer(row, conversations[1]), {"messages": before}


def _prompt(row: Row, prompt: Any) -> tuple[str, dict[str, Any]]:
    if isinstance(prompt, str):
        return prompt, {}
    messages = _messages(row, "prompt")
    return conversation_text(messages), {"messages": messages}


def _transcripts(row: Row, chosen: str, rejected: str) -> tuple[str, str, str]:
    """The common prompt of two transcripts that are equal up to their last `Assistant:`, and both answers."""
    prompts, answers = zip(*(_split_transcript(text) for text in (chosen, rejected)), strict=True)
    if prompts[0] is None or prompts[0] != prompts[1]:
        raise UserError(
            f"{row.where}: no column 'prompt', and chosen and rejected do not share a transcript that ends with "
            "`Assistant:`; add a column prompt"
        )
    return prompts[0], answers[0], answers[1]


def _split_transcript(transcript: str) -> tuple[str | None, str]:
    head, mark, answer = transcript.rpartition(_ANSWER_MARK)
    return ((head + mark).strip() if mark else None), answer.strip()


def _messages(row: Row, column: str) -> list[Message]:
    return list(read_messages(row.values.get(column), where=f"{row.where}: column {column!r}"))


def _shared(first: Sequence[Message], second: Sequence[Message]) -> list[Message]:
    return list(first) if list(first) == list(second) else []


def _last_answer(row: Row, messages: Sequence[Message]) -> str:
    if messages[-1]["role"] != "assistant":
        raise UserError(f"{row.where}: the last message is by {messages[-1]['role']!r}; an answer is the assistant's")
    return messages[-1]["content"]


def _text(row: Row, column: str) -> str:
    value = row.values.get(column)
    if not isinstance(value, str):
        raise UserError(f"{row.where}: no text in column {column!r}; preference rows have {_FORMATS}")
    return value


def _without_repeats(pairs: Iterable[PreferencePair | str | None]) -> tuple[tuple[PreferencePair, ...], list[str]]:
    """The distinct pairs, and notices about pairs that were dropped or contradict another. UserError if more than
    `MAX_UNUSABLE` of the rows are empty."""
    distinct: dict[tuple[str, str, str], PreferencePair] = {}
    ties = repeats = total = 0
    unusable: list[str] = []
    for pair in pairs:
        total += 1
        if pair is None:
            ties += 1
        elif isinstance(pair, str):
            unusable.append(pair)
        elif (key := (pair.prompt, pair.chosen, pair.rejected)) in distinct:
            repeats += 1
        else:
            distinct[key] = pair
    if len(unusable) > MAX_UNUSABLE * total:
        raise UserError(unusable[0])
    contradicted = sum((prompt, rejected, chosen) in distinct for prompt, chosen, rejected in distinct)
    counts = {
        "ties dropped (no preference, or equal answers)": ties,
        "repeated pairs dropped": repeats,
        "pairs without a prompt or a chosen answer dropped": len(unusable),
        "pairs kept although others prefer the opposite": contradicted,
    }
    return tuple(distinct.values()), [f"{count} {description}" for description, count in counts.items() if count]


def _split(
    pairs: Sequence[PreferencePair], config: PreferencesConfig
) -> tuple[tuple[PreferencePair, ...], tuple[PreferencePair, ...]]:
    sides: tuple[list[PreferencePair], list[PreferencePair]] = ([], [])
    for pair in pairs:
        sides[is_held_out(question_key(pair.prompt), fraction=config.test_fraction, seed=config.seed)].append(pair)
    return tuple(sides[0]), tuple(sides[1])
