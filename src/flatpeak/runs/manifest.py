"""manifest.json with a run's command, versions, commit and hardware; and the check of a resumed run's recipe."""

from __future__ import annotations

import json
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

import flatpeak
from flatpeak.errors import UserError
from flatpeak.utils.machine import host_memory, usable_cores
from flatpeak.utils.redaction import redact_command

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
        "optimizer.offload",
        "sft.optimizer.offload",
        "reward_model.optimizer.offload",
        "reference.offload",
        "distributed.processes",
        "distributed.strategy",
        "distributed.shard_size",
    }
)
"""Keys that may change between starts of a run: directory, checkpoints, logs, threads, length, memory and processes.

None of them changes the meaning of rows in metrics.jsonl.
"""
# Servers' addresses and connection settings; a reward's connection and budget, which do not affect scores; and
# trackers, which do not affect the run.
_CHANGEABLE_SECTIONS = re.compile(
    r"rollout\.engine\.(urls\.\d+|model|sync|directory|timeout|max_concurrency|api_key_env)"
    r"|rewards\.[^.]+\.(timeout|deadline|retries|give_up|concurrency|requests_per_minute|tokens_per_minute|cache"
    r"|budget\..+|backend\.(base_url|api_key_env|price_input|price_output|device))"
    r"|tracking(\..+)?"
)
DigestKind = Literal["code", "data"]
"""The subject of a digest: the user's functions, or the data files that a recipe names."""
DIGESTS: Final[tuple[DigestKind, ...]] = ("code", "data")
_ABSENT = "(absent)"
_GIB = 2**30


def describe_start(
    command: Sequence[str] | None,
    *,
    decoder: str | None = None,
    code: Mapping[str, str] | None = None,
    data: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Describe a start of a run, as JSON; `command` is the command line, or None for a start from Python.

    The values of secret settings are removed from the command. `decoder` names what generates rollouts: torch, a
    library of native kernels, generate, vllm, or a caller's sampler. `code` and `data` map settings to digests of the
    user's functions and files.
    """
    facts = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": redact_command(sys.argv if command is None else command),
        "versions": {"flatpeak": flatpeak.__version__, "python": platform.python_version()}
        | {name: _version(name) for name in ("torch", "transformers", "safetensors")},
        "commit": {"flatpeak": git_commit(Path(flatpeak.__file__)), "working_directory": git_commit(Path.cwd())},
        "hardware": hardware(),
    }
    if decoder is not None:
        facts["decoder"] = decoder
    digests = {"code": code, "data": data}
    return facts | {kind: dict(by_setting) for kind, by_setting in digests.items() if by_setting}


def last_digests(manifest: Mapping[str, Any], kind: DigestKind) -> dict[str, str]:
    """The digests by setting at a run's last start; empty if that version of flatpeak saved none."""
    digests: dict[str, str] = ([manifest, *manifest.get("resumed", [])][-1]).get(kind, {})
    return digests


def read_starts(path: Path) -> list[Mapping[str, Any]]:
    """The starts of a run, oldest first; empty if the manifest is missing or damaged."""
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    return [manifest, *manifest.get("resumed", [])] if isinstance(manifest, dict) else []


def fork_step(starts: Iterable[Mapping[str, Any]]) -> int:
    """The step after which a run was forked from another; 0 for other runs."""
    return max((start.get("forked", {}).get("step", 0) for start in starts), default=0)


def code_in_steps(starts: Iterable[Mapping[str, Any]]) -> dict[str, set[str]]:
    """By user function, its digests in those starts of a run whose steps were kept."""
    kept: dict[str, set[str]] = {}
    for start in starts:
        if start.get("anew"):
            kept.clear()
        for key, digest in start.get("code", {}).items():
            kept.setdefault(key, set()).add(digest)
    return kept


def computed_by(start: Mapping[str, Any]) -> str:
    """The parts of a start's facts that decide the last bits of its results, in words."""
    hardware = start["hardware"]
    devices = [f"{hardware['cpu']} ({hardware.get('vectors', 'unknown')})", *hardware["cuda"]]
    return f"torch {start['versions']['torch']} on {', '.join(devices)}"


def hardware() -> dict[str, Any]:
    """The host, the CPU and its vector instructions, the usable cores, memory in GiB, and the CUDA devices."""
    import torch

    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": usable_cores(),
        "memory_gib": round(host_memory().total / _GIB, 1),
        "cuda": cuda,
    }


def git_commit(path: Path) -> str | None:
    """The commit that contains `path`, with `-dirty` if tracked files differ from it; None if git does not track
    `path`.

    A package installed inside another repository (`.venv/`) is not part of that repository's commits.
    """
    directory = path if path.is_dir() else path.parent
    tracked = path.is_dir() or _git(directory, "ls-files", "--error-unmatch", path.name) is not None
    commit = _git(directory, "rev-parse", "HEAD") if tracked else None
    if commit is None:
        return None
    return f"{commit}-dirty" if _git(directory, "status", "--porcelain", "--untracked-files=no") else commit


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        # Without locks, `git status` writes nothing and does not block other git commands.
        command = ["git", "--no-optional-locks", "-C", str(directory), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    """The processor's name, family and model; virtual machines often omit the generation from the name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        lines = []
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.processor() or platform.machine()
    return f"{name} (family {fields['cpu family']}, model {fields['model']})" if "cpu family" in fields else name


def check_resumable(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """The changed keys, all of which may change, as {"training.steps": "100 -> 200"}.

    Raises UserError if other keys changed, and lists them. `training.steps` may change only under a constant schedule:
    a linear or cosine schedule stretches with it, so the steps already taken would have had different learning rates.
    """
    changed = changes(old, new)
    allowed = set(CHANGEABLE)
    if flatten(new).get("optimizer.schedule", "constant") != "constant":
        allowed.discard("training.steps")
    refused = [
        f"{key}: {change}"
        for key, change in changed.items()
        if key not in allowed and not _CHANGEABLE_SECTIONS.fullmatch(key)
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
