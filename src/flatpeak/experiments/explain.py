"""One group of one step, told as the algorithm saw it, and what has become of its tokens since."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from flatpeak.config import RunConfig
from flatpeak.errors import UserError
from flatpeak.functional import completion_weights, importance_ratio, kl_k3
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.recipe import load_recipe, parse_config
from flatpeak.runs.checkpoints import LAST, checkpoint_name
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.rollout_log import logged_steps, read_rollouts
from flatpeak.training.batch import collate
from flatpeak.training.learner import score, token_budget
from flatpeak.types import Completion, Example, Group, Prompt

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldCompletion:
    """One completion of the group."""

    row: Row
    """Its row of the rollout log: text, reward parts, reward, advantage, log-probs."""
    weight: float
    """w_i: what each of its tokens weighs in the loss, the step taken as one minibatch."""
    tokens: tuple[str, ...]
    ratios: tuple[float, ...]
    """Per token: its probability under the run's last checkpoint over the sampler's."""
    kls: tuple[float, ...]
    """Per token: k3 of the last checkpoint to the policy as RL began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A group and the settings that judged it."""

    step: int
    config: RunConfig
    completions: tuple[ToldCompletion, ...]

    @property
    def rewards(self) -> list[float]:
        """Those that are not missing."""
        return [told.row["reward"] for told in self.completions if told.row["reward"] is not None]


def explain(run: Path, *, step: int, group: str | None = None) -> Explanation:
    """Read a group of a step's log (the one whose rewards differ most, unless named) and score it with the run's last
    checkpoint and its first. Raises UserError where there is no such run, step or group."""
    paths = RunPaths(run)
    if not paths.is_run():
        raise UserError(f"{run} is not a run's directory")
    steps = logged_steps(paths.rollouts)
    if step not in steps:
        raise UserError(f"{run} has no rollouts of step {step}: choose one of {', '.join(map(str, steps)) or 'none'}")
    rows = read_rollouts(steps[step])
    config = parse_config(load_recipe(paths.config))
    chosen = [row for row in rows if row["group"] == (group or _widest(rows))]
    if not chosen:
        known = ", ".join(sorted({row["group"] for row in rows})[:8])
        raise UserError(f"step {step} has no group {group!r}: there are {known}, ...")
    weights = completion_weights(
        torch.tensor([len(row["token_ids"]) for row in rows]),
        config.objective.normalization,
        max_tokens=config.rollout.max_new_tokens,
        valid_N=torch.tensor([row["reward"] is not None for row in rows]),
    )
    weight_of = {id(row): float(weight) for row, weight in zip(rows, weights, strict=True)}
    return Explanation(step=step, config=config, completions=tuple(_told(chosen, weight_of, config, paths)))


def _told(rows: Sequence[Row], weight_of: dict[int, float], config: RunConfig, paths: RunPaths) -> list[ToldCompletion]:
    prompt = Prompt(
        id=rows[0]["group"],
        token_ids=tuple(rows[0]["prompt_token_ids"]),
        text=rows[0]["prompt"],
        example=Example(id=rows[0]["group"], question=rows[0]["prompt"], gold=rows[0]["gold"]),
    )
    completions = tuple(
        Completion(
            token_ids=tuple(row["token_ids"]), logprobs=tuple(row["logprobs"]), finish_reason=row["finish_reason"]
        )
        for row in rows
    )
    group = Group(prompt=prompt, completions=completions)
    last, first = (
        load_policy(
            ModelConfig(path=str(paths.checkpoints / name), device=config.model.device, dtype=config.model.dtype)
        )
        for name in (LAST, checkpoint_name(0))
    )
    batch = collate([group], torch.ones(1, len(rows), dtype=torch.bool), device=last.device)
    now_T, then_T = (
        score(
            policy,
            batch,
            temperature=config.rollout.temperature,
            micro_batch_tokens=token_budget(config.training.micro_batch_tokens, policy.device),
        )
        for policy in (last, first)
    )
    lengths = batch.lengths_N.tolist()
    assert batch.sampler_logprobs_T is not None
    ratios = importance_ratio(now_T, batch.sampler_logprobs_T).split(lengths)
    kls = kl_k3(now_T, then_T).split(lengths)
    return [
        ToldCompletion(
            row=row,
            weight=weight_of[id(row)],
            tokens=tuple(last.tokenizer.decode([token]) for token in row["token_ids"]),
            ratios=tuple(ratio.tolist()),
            kls=tuple(kl.tolist()),
        )
        for row, ratio, kl in zip(rows, ratios, kls, strict=True)
    ]


def _widest(rows: Sequence[Row]) -> str:
    rewards: dict[str, list[float]] = {}
    for row in rows:
        if row["reward"] is not None:
            rewards.setdefault(row["group"], []).append(row["reward"])
    return max(rewards, key=lambda group: max(rewards[group]) - min(rewards[group]), default="")


def render(explanation: Explanation) -> Lines:
    """The group for a terminal: the rule with its numbers, a line per completion, and the tokens in colour."""
    first, advantage = explanation.completions[0].row, explanation.config.advantage
    rewards = explanation.rewards
    spread = stdev(rewards) if len(rewards) > 1 else float("nan")
    table = Table("", "reward", "advantage", "w per token", "tokens", "ended by", *first["rewards"])
    for index, told in enumerate(explanation.completions):
        row = told.row
        figures = (row["reward"], row["advantage"], told.weight)
        parts = (_figure(score) for score in row["rewards"].values())
        table.add_row(str(index), *map(_figure, figures), str(len(told.tokens)), row["finish_reason"], *parts)
    return Lines(
        f"step {explanation.step}, group {first['group']}, gold {first['gold']}",
        Text(first["prompt"], style="dim"),
        f"rewards: mean {mean(rewards) if rewards else float('nan'):.4g}, std {spread:.4g} (n - 1); "
        f"baseline {advantage.baseline}, scale {advantage.scale}",
        table,
        "Tokens: green gained and red lost probability since they were drawn (x ratio at the last checkpoint);",
        "underlined where k3 to the policy as RL began exceeds 0.1. A token's gradient weighs -advantage * w * ratio.",
        *(_tokens(index, told) for index, told in enumerate(explanation.completions)),
    )


def _tokens(index: int, told: ToldCompletion) -> Text:
    line = Text(f"{index} ")
    for token, ratio, kl in zip(told.tokens, told.ratios, told.kls, strict=True):
        colour = "green" if ratio > 1.05 else "red" if ratio < 0.95 else "default"
        line.append(repr(token)[1:-1], style=f"{colour}{' underline' if kl > 0.1 else ''}")
        line.append(f"x{ratio:.2f} ", style="dim")
    return line


def _figure(value: float | None) -> str:
    return "missing" if value is None else f"{value:.4g}"
