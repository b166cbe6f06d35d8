"""The model card of a run's checkpoint: README.md in the Hub's format, every figure of it from the run's own files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from flatpeak.apps.publish.algorithm_words import algorithm_tag, describe_reward_model, describe_rl, describe_sft
from flatpeak.apps.publish.card_source import CardSource
from flatpeak.apps.publish.usage_snippet import (
    code_span,
    describe_asking,
    fenced,
    policy_snippet,
    reward_model_snippet,
)
from flatpeak.config.algorithm_name import algorithm_name
from flatpeak.report.evaluations import cell, meaning
from flatpeak.rewards.sequence_classifier import read_record
from flatpeak.runs.checkpoints import checkpoint_name
from flatpeak.tasks.config import hub_datasets, is_generated

RECIPE: Final = "recipe.yaml"
"""The file of the resolved recipe beside the card."""
_FIRST: Final = ("accuracy", "sampled/accuracy", "extraction_failed", "sampled/extraction_failed", "reward")
_STATUS: Final = {
    "running": "is still being written, or was killed",
    "stopped": "was stopped before its end",
    "failed": "failed before its end",
}
_FALLIBLE: Final = {
    "judge": "an LLM judge",
    "reward_model": "a reward model",
    "function": "a function of the user's own",
}
"""Rewards whose scores are a verdict, which may be wrong, and not a rule."""


def write_card(source: CardSource) -> str:
    """The text of README.md: the Hub's metadata, then what a reader needs before using the model."""
    sections = [
        f"# {source.repo.rpartition('/')[2]}",
        _unfinished(source),
        _introduction(source),
        "## What it is, and what it is not",
        _bullets(_nature(source)),
        "## How to ask it",
        _asking(source),
        "## Results",
        _results(source),
        "## How it was trained",
        _bullets(_training(source)),
        "## Data",
        _bullets(_data(source)),
        "## Limits",
        _bullets(_limits(source)),
        "## Versions and hardware",
        _bullets(_versions(source)),
        "## How to reproduce it",
        _reproduction(source),
    ]
    return f"---\n{metadata(source).to_yaml()}\n---\n\n" + "\n\n".join(one for one in sections if one) + "\n"


def metadata(source: CardSource) -> Any:
    """The card's metadata in the Hub's own fields, a `huggingface_hub.ModelCardData`."""
    from huggingface_hub import EvalResult, ModelCardData

    evaluation, config = source.evaluation, source.config
    results = []
    for name, value in (evaluation.metrics if evaluation else {}).items():
        headline = name in ("accuracy", "sampled/accuracy", "reward") or name.startswith(("pass@", "maj@"))
        if headline and value is not None and math.isfinite(value) and evaluation is not None:
            dataset = source.datasets[0] if source.datasets else evaluation.task
            results.append(
                EvalResult(
                    task_type="text-classification" if source.is_reward_model else "text-generation",
                    dataset_type=dataset,
                    dataset_name=f"{evaluation.task}, held-out",
                    metric_type=name.replace("sampled/", ""),
                    metric_name=name,
                    metric_value=value,
                )
            )
    tags = ["flatpeak", "reward-model" if source.is_reward_model else "text-generation"]
    if source.stage == "sft" or (source.is_before_rl and config.sft.steps):
        tags.append("sft")
    elif not source.is_before_rl and not source.is_reward_model:
        tags += ["reinforcement-learning", algorithm_tag(algorithm_name(config))]
        tags += ["gradient-regularization"] if config.gradient_regularization.enabled else []
    if source.adapter:
        tags.append("lora" if config.model.quantization is None else "qlora")
    return ModelCardData(
        library_name="peft" if source.adapter else "transformers",
        pipeline_tag="text-classification" if source.is_reward_model else "text-generation",
        license=source.license,
        base_model=source.record.base_model,
        base_model_relation=None if source.record.base_model is None else "adapter" if source.adapter else "finetune",
        datasets=source.datasets or None,
        tags=tags,
        model_name=source.repo.rpartition("/")[2] if results else None,
        eval_results=results or None,
    )


def _bullets(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _unfinished(source: CardSource) -> str:
    status = source.summary.status if source.summary else "running"
    if status == "done":
        return ""
    return f"> **The run that made this model {_STATUS[status]}.** The checkpoint is whole; its training is not."


def _introduction(source: CardSource) -> str:
    if source.is_reward_model:
        how = "A reward model, trained on preference pairs"
        how = how if source.step else "A reward model as its training began, with a head that has learned nothing,"
    elif source.is_before_rl:
        how = "A language model as reinforcement learning began with it"
        how += ", after supervised fine-tuning" if source.config.sft.steps else ", before any training,"
    elif source.stage == "sft":
        how = "A language model, trained by supervised fine-tuning"
    else:
        after = " after supervised fine-tuning" if source.config.sft.steps else ""
        how = f"A language model, trained by reinforcement learning ({algorithm_name(source.config)}){after}"
    step = f"SFT step {source.step}" if source.stage == "sft" else f"step {source.step}"
    return (
        f"{how} on the task {code_span(source.record.task)}, with flatpeak {source.record.flatpeak}: the checkpoint of "
        f"{step} of the run {code_span(source.run_name)}."
    )


def _nature(source: CardSource) -> list[str]:
    base = source.record.base_model
    named = code_span(base) + (f" at {code_span(source.record.base_revision)}" if source.record.base_revision else "")
    if source.adapter:
        kind = "over a base in 4 bits (nf4)" if source.config.model.quantization else "in peft's format"
        first = f"LoRA adapters {kind}: they need their base, {named}."
    elif "model" in source.record.objects:
        first = "All weights, of a model that a Python caller brought; the run does not know where it comes from."
    elif source.config.model.new is not None:
        first = f"All weights of a new `{source.config.model.new.architecture}`, which began at random."
    elif base is None:
        first = "All weights, of a base that is not on the Hub."
    else:
        first = f"All weights, fine-tuned from {named}."
    if source.is_reward_model:
        return [
            first,
            "It scores an answer to a prompt: a larger score is a better answer, by the pairs it has learned from.",
            "It writes no text, and its scores mean nothing for other kinds of prompts, which were not measured.",
        ]
    return [
        first,
        f"It is asked the questions of {code_span(source.record.task)}, worded as below.",
        "It is no general assistant by this training: only the figures below were measured, and nothing about safety, "
        "bias or other tasks.",
    ]


def _asking(source: CardSource) -> str:
    if not source.is_reward_model:
        code = policy_snippet(source.repo, source.record, source.config, source.folder, adapter=source.adapter)
        lines = describe_asking(source.record, source.config)
        after = "`flatpeak chat DIRECTORY` asks a local copy in the same way, by its `flatpeak.json`."
        return "\n\n".join([*lines, fenced(code, "python"), after])
    record = read_record(source.folder)
    if record is None:
        return "The template of its texts is not recorded."
    if source.adapter:
        return "In a flatpeak recipe: `type: reward_model`, and the directory of a local copy as its `path`."
    return fenced(reward_model_snippet(source.repo, record, source.folder), "python")


def _results(source: CardSource) -> str:
    columns = source.columns()
    if not columns:
        return "The run has no evaluation, so nothing is known of how well it answers."
    names = list(dict.fromkeys(name for _, evaluation in columns for name in evaluation.metrics))
    names.sort(key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    unit = "pairs" if source.is_reward_model else "questions"
    header = ["Metric", *(label for label, _ in columns)]
    rows = [["task", *(code_span(evaluation.task) for _, evaluation in columns)]]
    rows.append([f"held-out {unit}", *(str(evaluation.size) for _, evaluation in columns)])
    for name in names:
        label = ", ".join(filter(None, (code_span(name), meaning(name))))
        rows.append([label, *(cell(evaluation, name) or "not measured" for _, evaluation in columns)])
    table = "\n".join(_table_row(row) for row in (header, ["---"] * len(header), *rows))
    notes = [
        "In brackets 95% intervals: Wilson's for shares of questions, else a bootstrap of the questions. `of` marks a "
        "mean of fewer questions than there are.",
    ]
    if source.evaluation is None:
        notes.append("This checkpoint itself was not evaluated.")
    subsets = {column for _, evaluation in columns for column in evaluation.subsets}
    if subsets:
        notes.append(f"Tables by {', '.join(map(code_span, sorted(subsets)))} are in the run's summary and report.")
    return table + "\n\n" + " ".join(notes)


def _table_row(cells: Sequence[str]) -> str:
    escaped = (text.replace("|", "\\|") for text in cells)
    return f"| {' | '.join(escaped)} |"


def _training(source: CardSource) -> list[str]:
    config, summary = source.config, source.summary
    if source.is_reward_model:
        lines = describe_reward_model(config)
    else:
        lines = [f"SFT: {line}" for line in describe_sft(config)] if config.sft.steps else []
        if source.stage == "train":
            lines += [f"RL: {line}" for line in describe_rl(config)]
            parts = ", ".join(
                f"{code_span(name)} (`{reward.type}`, weight {reward.weight:g})"
                for name, reward in config.rewards.items()
            )
            own = "reward" in source.record.objects
            lines.append("Reward: a Python object of the caller's." if own else f"Reward: {parts}.")
    lines.append(f"Seed {config.run.seed}; weights in {config.model.dtype}.")
    if summary is not None:
        lines.append(f"The run has taken {summary.last_step} steps of its last stage.")
        if summary.ended_by:
            lines.append(f"It ended before its last step: {code_span(summary.ended_by)}.")
    return lines


def _data(source: CardSource) -> list[str]:
    lines = []
    if "task" in source.record.objects:
        lines.append(f"The task {code_span(source.record.task)} was a Python object of the caller's. License: unknown.")
    for task in source.tasks:
        names, name = hub_datasets(task), code_span(getattr(task, "name", task.type))
        if is_generated(task):
            lines.append(f"{name}: problems that flatpeak generates, with no data set and so no license of one.")
        elif names:
            links = ", ".join(f"[{one}](https://huggingface.co/datasets/{one})" for one in names)
            lines.append(f"{name}: {links}. License: unknown to the recipe; see there.")
        else:
            lines.append(f"{name}: local files or code (`type: {task.type}`). License: unknown.")
    return list(dict.fromkeys(lines))


_FAILURES: Final = {
    "extraction_failed": "its answers could not be graded",
    "sampled/extraction_failed": "its sampled answers could not be graded",
    "truncated": "its answers was cut at the limit of tokens",
}


def _limits(source: CardSource) -> list[str]:
    lines, summary, evaluation = [], source.summary, source.evaluation
    if evaluation is not None:
        for name, what in _FAILURES.items():
            value = evaluation.metrics.get(name)
            if value is not None:
                lines.append(f"A share of {value:.3f} of {what} (`{name}`).")
        chosen = source.stage == "train" and summary is not None and summary.best_step == source.step
        if chosen and summary is not None:
            count = sum(row.stage == "train" for row in summary.evaluations)
            lines.append(
                f"It was chosen by `{summary.metric}` among the run's evaluations ({count} of RL), on the held-out "
                "questions of the table: that flatters its figures."
                if not source.is_reward_model
                else f"It was chosen by `{summary.metric}` on the pairs of the table, which flatters its figures."
            )
    if source.stage == "train" and not source.is_reward_model and "reward" not in source.record.objects:
        fallible = sorted({_FALLIBLE[one.type] for one in source.config.rewards.values() if one.type in _FALLIBLE})
        if fallible:
            lines.append(f"Rewarded by {' and '.join(fallible)}: it has learned what that prefers, mistakes included.")
    lines.append("One run with one seed; another seed may end elsewhere.")
    return lines


def _versions(source: CardSource) -> list[str]:
    versions: Mapping[str, Any] = source.manifest.get("versions") or {}
    lines = [", ".join(f"{name} {code_span(version)}" for name, version in versions.items() if version)]
    commit = (source.manifest.get("commit") or {}).get("flatpeak")
    if commit:
        lines.append(f"flatpeak at commit {code_span(commit)}")
    machine: Mapping[str, Any] = source.manifest.get("hardware") or {}
    devices = ", ".join(machine.get("cuda") or []) or f"{machine.get('cpu')}, {machine.get('cores')} cores"
    lines.append(f"{code_span(devices)}, {machine.get('memory_gib')} GiB of memory")
    if source.manifest.get("resumed"):
        lines.append(f"Resumed {len(source.manifest['resumed'])} time(s); versions are those of the first start.")
    forked = source.manifest.get("forked")
    if forked:
        lines.append(f"Forked from the run {code_span(Path(str(forked['run'])).name)} after step {forked['step']}.")
    return [line for line in lines if line]


def _reproduction(source: CardSource) -> str:
    command = "reward-model" if source.is_reward_model else "sft" if source.stage == "sft" else "train"
    shell = f"hf download {source.repo} {RECIPE} --local-dir .\nflatpeak {command} {RECIPE} run.name=again"
    lines = [
        f"`{RECIPE}` is the whole recipe, defaults included (SHA-256 of the run's own: "
        f"`{source.record.recipe_sha256}`).",
        fenced(shell, "sh"),
    ]
    forked = source.manifest.get("forked")
    if forked:
        keys = [key for key in forked.get("changed", {}) if key not in ("run.name", "run.directory")]
        changed = f", of whose recipe it has changed {', '.join(map(code_span, keys))}" if keys else ""
        lines.append(
            f"It does not repeat this run, which is a fork: steps up to {forked['step']} are those of another run"
            f"{changed}."
        )
    elif source.stage == "train" and not source.is_reward_model:
        lines.append(f"This is the checkpoint `{checkpoint_name(source.step)}` of such a run.")
    if source.record.objects:
        lines.append(
            "The recipe does not hold what a Python caller gave in its place: "
            f"{', '.join(source.record.objects)}. Without it the run cannot be repeated."
        )
    if not source.recorded:
        lines.append(
            "The version of flatpeak that wrote the checkpoint did not record whether a Python caller gave a model, "
            "task, reward or sampler in place of the recipe's."
        )
    if source.needed:
        lines.append(f"Left out of it, and to be given again: {', '.join(map(code_span, source.needed))}.")
    if source.local:
        lines.append(
            "It names files of the directory that the run was started in, which are not in this repository; put yours "
            f"there, or change {', '.join(map(code_span, source.local))}."
        )
    return "\n\n".join(lines)
