"""Whether a run may go on under a changed recipe."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from flatpeak.errors import UserError

# What may change between the starts of one run: where it lives, how often it saves and logs, how many threads it uses,
# how long it trains and how much memory it takes. None of it alters what an
# earlier or later row of metrics.jsonl means.
CHANGEABLE = frozenset(
    {
        "run.name",
        "run.directory",
        "run.checkpoint_every",
        "run.keep_checkpoints",
        "run.log_rollouts_every",
        "run.threads",
        "run.grading_workers",
        "run.grading_timeout",
        "run.grading_memory",
        "run.grading_budget",
        "training.steps",
        "training.activation_checkpointing",
        "training.micro_batch_tokens",
        "rollout.max_rows",
    }
)
# Of a reward: how it is reached and how much may be spent on it, not what its scores mean.
_CHANGEABLE_OF_A_REWARD = re.compile(
    r"rewards\.[^.]+\.(timeout|deadline|retries|retry_delay|concurrency|requests_per_minute|tokens_per_minute|cache"
    r"|(budget|breaker)\..+|backend\.(base_url|api_key_env|price_input|price_output|device))"
)
_ABSENT = "(absent)"


def check_resumable(
    old: Mapping[str, Any], new: Mapping[str, Any], *, chosen: Mapping[str, Any] | None = None
) -> dict[str, str]:
    """The keys that changed, all of them allowed to, as {"training.steps": "100 -> 200"}.

    `chosen` is the new recipe without what is at its default: a key that an earlier version did not know, and so did
    not write, has not changed where nobody chose a value for it. None counts every such key.

    Raises UserError showing the others. `training.steps` may change only under a constant schedule: a linear or cosine
    one stretches with it, so that the steps already taken would have had other learning rates.
    """
    changed = changes(old, new)
    if chosen is not None:
        unknown = _unknown_then(flatten(old), flatten(new)) - flatten(chosen).keys()
        changed = {key: change for key, change in changed.items() if key not in unknown}
    allowed = set(CHANGEABLE)
    if flatten(new).get("optimizer.schedule", "constant") != "constant":
        allowed.discard("training.steps")
    refused = [
        f"{key}: {change}"
        for key, change in changed.items()
        if key not in allowed and not _CHANGEABLE_OF_A_REWARD.fullmatch(key)
    ]
    if refused:
        raise UserError(
            f"cannot resume with a changed recipe ({'; '.join(refused)}): put the old values back, or choose another "
            "run.name"
        )
    return changed


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """The keys in which two recipes differ, as {"training.steps": "100 -> 200"}."""
    before, after = flatten(old), flatten(new)
    return {
        key: f"{before.get(key, _ABSENT)} -> {after.get(key, _ABSENT)}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
    }


def _unknown_then(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Keys that only the new recipe has, in sections that both have; a part of a section that is new was added."""
    sections = {key.rpartition(".")[0] for key in old}
    return {key for key in new.keys() - old.keys() if key.rpartition(".")[0] in sections}


def flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": [1]}} as {"a.b.0": 1}; empty mappings and lists stay as they are."""
    items: Sequence[tuple[Any, Any]]
    if isinstance(value, Mapping) and value:
        items = list(value.items())
    elif isinstance(value, list | tuple) and value:
        items = list(enumerate(value))
    else:
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in items:
        flat |= flatten(item, f"{prefix}.{key}" if prefix else str(key))
    return flat
