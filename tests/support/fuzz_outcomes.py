"""Comparison of two runs of a random recipe, and of a run's sampler with its trainer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flatpeak.config.load import parse_config
from flatpeak.pipeline.rollout_engines import build_sampler
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.model import Policy
from flatpeak.training.batch import collate
from flatpeak.types import Example, Group, Prompt

Notice = tuple[str, int, str]
"""Stage, step and text."""
MONITORED = (" so far", "no group of the last")
"""Words of notices that count steps since the start of their process."""
BFLOAT16_GAP = 0.02
"""Largest mean |difference| of log-probabilities in bfloat16, at temperature 1, of models with small logits."""
BFLOAT16_STEP = 2**-7
"""The largest distance of two neighbours in bfloat16, relative to them."""


def differences(resumed: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Names of what differs, by how much in tensors."""
    different = []
    for what in ("weights", "optimizer", "best"):
        if resumed[what].keys() != expected[what].keys():
            different.append(f"names of {what}")
            continue
        gaps = {
            name: (resumed[what][name].double() - tensor.double()).abs().max().item()
            for name, tensor in expected[what].items()
            if not torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (resumed[what][name], tensor)))
        }
        if gaps:
            different.append(
                f"{len(gaps)} of {len(expected[what])} tensors of {what} by up to {max(gaps.values()):.2g}"
            )
    for what in ("rollouts", "evaluations", "summary", "links"):
        if repr(resumed[what]) != repr(expected[what]):
            different.append(what)
    different += _notice_differences(resumed["notices"], expected["notices"])
    different += _nested_differences(resumed["state"], expected["state"], where="state")
    different += _metric_differences(resumed["metrics"], expected["metrics"])
    return different


def _notice_differences(resumed: list[Notice], expected: list[Notice]) -> list[str]:
    kept, wanted = (
        [one for one in rows if not any(words in one[2] for words in MONITORED)] for rows in (resumed, expected)
    )
    new, lost = [one for one in kept if one not in wanted], [one for one in wanted if one not in kept]
    return [f"notices: {new} for {lost}"] if kept != wanted else []


def _nested_differences(resumed: Any, expected: Any, *, where: str) -> list[str]:
    if isinstance(resumed, dict) and isinstance(expected, dict) and resumed.keys() == expected.keys():
        return [
            text
            for key in expected
            for text in _nested_differences(resumed[key], expected[key], where=f"{where}.{key}")
        ]
    return [] if repr(resumed) == repr(expected) else [f"{where}: {resumed!r:.60} for {expected!r:.60}"]


def _metric_differences(resumed: list[dict[str, Any]], expected: list[dict[str, Any]]) -> list[str]:
    if len(resumed) != len(expected):
        return [f"{len(resumed)} rows of metrics for {len(expected)}"]
    return [
        f"{name} at {row['stage']} {row['step']}: {json.dumps(other.get(name))} for {json.dumps(value)}"
        for other, row in zip(resumed, expected, strict=True)
        for name, value in row.items()
        if name != "gradreg/time_share" and json.dumps(other.get(name)) != json.dumps(value)
    ][:5]


def sampler_gap(recipe: dict[str, Any], path: Path) -> float:
    """The gap between the sampler's and the trainer's log-probabilities after training, as a share of the bound."""
    config = parse_config(recipe)
    policy = load_policy(ModelConfig(path=str(path / "checkpoints" / "last"), device="cpu", dtype=config.model.dtype))
    policy.batch_invariant = config.rollout.batch_invariant
    prompts = _prompts_of(path)
    if not prompts:  # the run ended before a step that is logged
        return 0.0
    temperature = config.rollout.temperature
    sampler = build_sampler(policy, config)
    groups = sampler.generate(prompts, group_size=2, sampling=config.rollout.sampling(), seed=1)
    batch = collate(groups, torch.ones(len(groups), 2, dtype=torch.bool), device=policy.device)
    with torch.no_grad():
        recomputed_T, _ = policy.token_logprobs(batch, temperature=temperature)
    gap_T = (recomputed_T.float() - batch.sampler_logprobs_T).abs()
    if config.model.dtype == "bfloat16":
        rounding = _largest_logit(policy, groups) * BFLOAT16_STEP / 2
        return float(gap_T.mean()) / (max(BFLOAT16_GAP, rounding) / min(1.0, temperature))
    return float(gap_T.max()) / (1e-5 * max(1.0, _largest_logit(policy, groups)) / temperature)


def _prompts_of(path: Path) -> list[Prompt]:
    """The longest and a few other prompts that the run logged."""
    seen: dict[str, Prompt] = {}
    for file in sorted((path / "rollouts").iterdir()):
        for line in file.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            name = row["group"].partition("@")[0]
            example = Example(id=name, question=name, gold="")
            seen[name] = Prompt(id=name, token_ids=tuple(row["prompt_token_ids"]), text=name, example=example)
    return sorted(seen.values(), key=lambda prompt: -len(prompt.token_ids))[:5]


@torch.no_grad()
def _largest_logit(policy: Policy, groups: Sequence[Group]) -> float:
    texts = [[*group.prompt.token_ids, *one.token_ids] for group in groups for one in group.completions]
    with policy.plain_attention() as model:
        model.eval()
        return max(float(model(input_ids=torch.tensor([text])).logits.abs().max()) for text in texts)
