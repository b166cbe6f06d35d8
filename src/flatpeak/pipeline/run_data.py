"""The data of a run: its tasks, their prompts, the demonstrations of SFT, and digests of the files of all these."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, cast

from flatpeak.config.run_config import RunConfig
from flatpeak.episodes.build import demonstrated, episode_prompts, episode_renderer, read_environment, with_tools
from flatpeak.errors import UserError
from flatpeak.pipeline.evaluators import longest_prompt
from flatpeak.policy.model import Policy
from flatpeak.protocols import Progress, Task
from flatpeak.rollout.randomness import derive_seed
from flatpeak.runs.manifest import flatten
from flatpeak.tasks.config import TaskConfig, build_task
from flatpeak.tasks.custom import check_task
from flatpeak.tasks.mixture import check_names, leaks, mix, named
from flatpeak.tasks.prompts import CHAT, build_prompts
from flatpeak.training.curriculum import MixedStream, Stream
from flatpeak.training.sft import Demonstration, demonstrations
from flatpeak.types import Example, Prompt
from flatpeak.utils.control_tokens import TextEncoder, notice_of_control_tokens
from flatpeak.utils.huggingface import notice_of_unknown_characters

_SECTIONS: Final = {"task", "tasks", "curriculum", "prompt", "rewards", "reward_model", "evaluation"}
_TASKS: Final = ("task.", "tasks.", "curriculum.task.", "evaluation.sets.")
"""Beginnings of the keys of tasks."""
_SETTINGS: Final = ("path", "test_path", "math500_path", "hub", "rubric", "template")
"""The last components of the settings that may name a file; arguments of the user's functions may too."""
_SPLITS: Final = (
    *("train", "test", "dev", "val", "auxiliary_train", "data", "math500"),
    *("biology", "chemistry", "physics", "Dr_SCI"),
)
"""Beginnings of the names of files and folders that tasks read in a directory."""
_ENDINGS: Final = (".jsonl", ".ndjson", ".json", ".csv", ".parquet", ".zip")


@dataclass(frozen=True, kw_only=True)
class RunTasks:
    """The task of a run or its mixture of tasks, the first task of its curriculum, and its evaluation sets."""

    main: Task
    first: Task | None
    sets: Mapping[str, Sequence[Example]]
    shares: Mapping[str, float] = field(default_factory=dict)
    """The share of each task of a mixture; empty for a single task."""

    @property
    def examples(self) -> list[Example]:
        """The examples whose texts the tokenizer of a new model is made of."""
        first = self.first.train if self.first else ()
        return [
            *self.main.train,
            *self.main.test,
            *first,
            *(one for examples in self.sets.values() for one in examples),
        ]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The prompts and demonstrations of a run."""

    main: Stream[Prompt]
    first: Stream[Prompt] | None
    """Those of the curriculum's first task."""
    check: tuple[Prompt, ...]
    """Training prompts that are set aside for `sft.stop_at`."""
    test: tuple[Prompt, ...]
    sets: Mapping[str, tuple[Prompt, ...]]
    """The questions of each further evaluation set."""
    demonstrations: Stream[Demonstration]


def open_tasks(config: RunConfig, own: Task | None = None) -> RunTasks:
    """The recipe's tasks; `own` is the caller's in place of the main one."""
    if own and config.tasks:
        raise UserError("a task from Python beside tasks: both are the data to train on; leave one of them out")
    shares: Mapping[str, float] = {}
    if config.tasks:
        built = [_build(item.task, where=f"tasks.{index}.task") for index, item in enumerate(config.tasks)]
        mixture = mix([(item.name, item.weight, task) for item, task in zip(config.tasks, built, strict=True)])
        main, shares = cast("Task", mixture), mixture.shares
    else:
        main = check_task(own, where="task") if own else build_task(config.task)
    first = build_task(config.curriculum.task) if config.curriculum else None
    sets = {
        name: named(name, _build(section, where=f"evaluation.sets.{name}").test)
        for name, section in (config.evaluation.sets or {}).items()
    }
    check_names([main.name, *shares, *sets])
    return RunTasks(main=main, first=first, sets=sets, shares=shares)


def _build(section: TaskConfig, *, where: str) -> Task:
    """The task of a section; an error names the section, since its own keys begin with `task`."""
    try:
        return build_task(section)
    except UserError as error:
        worded = re.sub(r"(?<![.\w])task\.", f"{where}.", str(error))
        error.args = (worded if where in worded else f"{where}: {worded}",)
        raise


def make_data(config: RunConfig, tasks: RunTasks, policy: Policy, progress: Progress) -> RunData:
    """The prompts and demonstrations for this policy, with notices of those that do not fit."""
    name = tasks.main.name
    train, test = (
        make_prompts(config, examples, policy, progress, split=f"{name} {split}")
        for examples, split in ((tasks.main.train, "train"), (tasks.main.test, "test"))
    )
    check_size = config.sft.check_size if config.sft.steps and config.sft.stop_at is not None else 0
    if check_size and check_size >= len(train):
        raise UserError(
            f"sft.check_size={check_size} sets all {len(train)} training rows aside for sft.stop_at: "
            "lower sft.check_size"
        )
    main, first = _main_stream(train, config, tasks.shares), None
    demonstrated = train[check_size:]
    if config.curriculum and tasks.first:
        first_train = make_prompts(config, tasks.first.train, policy, progress, split=f"{tasks.first.name} train")
        first = _stream(first_train, config, "first")
        demonstrated = (*demonstrated, *first_train) if config.curriculum.in_sft else demonstrated
    return RunData(
        main=main,
        sets=make_sets(config, tasks, policy, progress),
        first=first,
        check=train[:check_size],
        test=test,
        demonstrations=_demonstrations(config, demonstrated, policy, progress),
    )


def make_sets(config: RunConfig, tasks: RunTasks, policy: Policy, progress: Progress) -> dict[str, tuple[Prompt, ...]]:
    """The prompts of the evaluation sets, with notices of training questions among them."""
    for notice in leaks(tasks.main.train, tasks.sets) if tasks.sets else ():
        progress.notice(notice)
    return {name: make_prompts(config, one, policy, progress, split=name) for name, one in tasks.sets.items()}


def make_prompts(
    config: RunConfig, examples: Iterable[Example], policy: Policy, progress: Progress, *, split: str
) -> tuple[Prompt, ...]:
    """The prompts of examples, with notices of those that do not fit, or that the tokenizer does not spell."""
    limit = longest_prompt(config, policy.context_length)
    environment = read_environment(config.tools, config.environment)
    worded = config.prompt
    if environment is not None:
        examples = tuple(examples)
        for example in examples:
            environment.reset_arguments(example, seed=0)  # a column that is missing is told before the run begins
        worded = episode_prompts(worded, environment, config.episodes, policy.tokenizer)
        examples = [with_tools(example, config.prompt, worded) for example in examples]
    built = build_prompts(tuple(examples), policy.tokenizer, worded, max_tokens=limit)
    if built.dropped or built.truncated:
        progress.notice(f"{split}: {built.dropped} overlong prompts dropped, {built.truncated} shortened")
    if built.fewer_shots:
        progress.notice(
            f"{split}: {built.fewer_shots} of {len(built.prompts)} prompts have fewer worked examples, to fit"
        )
    conversations = any(prompt.example.messages for prompt in built.prompts)
    if conversations and worded.template != CHAT and getattr(policy.tokenizer, "chat_template", None):
        progress.notice(
            f"{split}: chat messages are written as plain text; prompt.template=chat writes them as the model's own "
            "chat template does"
        )
    asked = ("".join((e.preamble, *e.shots, e.question)) for e in (prompt.example for prompt in built.prompts))
    for notice in (
        notice_of_unknown_characters([prompt.text for prompt in built.prompts], policy.tokenizer),
        notice_of_control_tokens(asked, policy.tokenizer, what="questions"),
    ):
        if notice is not None:
            progress.notice(f"{split}: {notice}")
    return built.prompts


def _main_stream(prompts: tuple[Prompt, ...], config: RunConfig, shares: Mapping[str, float]) -> Stream[Prompt]:
    """The prompts of the main task; of a mixture, those of each task in passes of their own."""
    main = _stream(prompts, config, "main")
    if not shares:
        return main
    by_task = {name: tuple(prompt for prompt in prompts if prompt.example.task == name) for name in shares}
    streams = [_stream(own, config, f"main/{name}") for name, own in by_task.items()]
    return MixedStream(items=prompts, seed=main.seed, streams=streams, weights=list(shares.values()))


def _stream(prompts: tuple[Prompt, ...], config: RunConfig, name: str) -> Stream[Prompt]:
    if not prompts:
        which = f" {name.removeprefix('main/')}" if "/" in name else ""
        raise UserError(f"the task{which} has no training prompts left: check task and prompt.overlong")
    return Stream(items=prompts, seed=derive_seed(config.run.seed, "prompts", name))


def _demonstrations(
    config: RunConfig, prompts: Sequence[Prompt], policy: Policy, progress: Progress
) -> Stream[Demonstration]:
    fitting: list[Demonstration] = []
    if config.sft.steps:
        environment = read_environment(config.tools, config.environment)
        pieces = None
        if environment is not None:
            renderer = episode_renderer(config.prompt, environment, config.episodes, policy.tokenizer)
            pieces = partial(demonstrated, renderer=renderer, encoder=TextEncoder(policy.tokenizer))
        fitting, dropped = demonstrations(prompts, policy, max_tokens=policy.context_length, pieces=pieces)
        rationales = (prompt.example.rationale for prompt in prompts if prompt.example.rationale)
        spelled = notice_of_control_tokens(rationales, policy.tokenizer, what="rationales")
        if spelled is not None:
            progress.notice(spelled)
        if not fitting and not dropped:
            raise UserError(
                "sft.steps is set but no training row has a rationale: map task.rationale, or set sft.steps=0"
            )
        if not fitting:
            raise UserError(
                f"none of the {dropped} demonstrations fits into the model's context of {policy.context_length} "
                "tokens: shorten questions or rationales, take a model with a longer context, or set sft.steps=0"
            )
        if (count := len(fitting) + dropped) < len(prompts):
            progress.notice(
                f"sft: {count} of {len(prompts)} training rows have a demonstration; the others are left out"
            )
        if dropped:
            progress.notice(
                f"sft: {dropped} of {dropped + len(fitting)} demonstrations dropped: question and rationale exceed the "
                f"model's context of {policy.context_length} tokens"
            )
    return Stream(items=fitting, seed=derive_seed(config.run.seed, "demonstrations"))


def data_digests(config: RunConfig) -> dict[str, str]:
    """The start of the SHA-256 of each file, or of a task's directory, by its setting: rows, rubrics, templates.

    Files are read in pieces; a gigabyte takes about a second.
    """
    recipe = flatten(config.model_dump(mode="json", include=_SECTIONS))
    digests = {
        key: _digest(value, in_task=key.startswith(_TASKS))
        for key, value in recipe.items()
        if isinstance(value, str) and (key.rpartition(".")[2] in _SETTINGS or ".arguments." in key)
    }
    return {key: digest for key, digest in digests.items() if digest is not None}


def task_digest(task: Task) -> str:
    """The start of the SHA-256 of a task's examples, with their columns."""
    whole = hashlib.sha256()
    for example in (*task.train, *task.test):
        fields = {name: getattr(example, name) for name in Example.__dataclass_fields__}
        whole.update(json.dumps(fields, skipkeys=True, default=lambda value: type(value).__name__).encode())
    return whole.hexdigest()[:16]


def _digest(name: str, *, in_task: bool) -> str | None:
    """The digest of what a setting names; None where that is no file, nor a directory of a task's data."""
    path = Path(name).expanduser()
    try:
        if path.is_file():
            return _digest_of_files([path], path.parent)
        return _digest_of_files(_data_files(path), path) if in_task and path.is_dir() else None
    except (OSError, ValueError):  # a name that is too long or holds a NUL; a file that cannot be read
        return None


def _data_files(directory: Path) -> Iterator[Path]:
    """The files that a task may read in a directory, and not a run or an environment that lies beside them."""
    for path in sorted(directory.iterdir()):
        if path.name.startswith(_SPLITS):
            files = sorted(path.rglob("*")) if path.is_dir() else [path]
            yield from (file for file in files if file.suffix in _ENDINGS and file.is_file())


def _digest_of_files(files: Iterable[Path], root: Path) -> str:
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        whole.update(f"{path.relative_to(root).as_posix()}\n{digest}\n".encode("utf-8", "surrogateescape"))
    return whole.hexdigest()[:16]
