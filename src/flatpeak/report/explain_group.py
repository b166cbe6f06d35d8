"""The explanation of a group of completions: rewards, advantages, weights, and changes of token probabilities."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from rich.cells import cell_len
from rich.console import Group as Lines
from rich.table import Column, Table
from rich.text import Text

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.functional import completion_weights, importance_ratio, kl_k3
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.model import Policy
from flatpeak.report.logged_step import logged_step
from flatpeak.report.patterns import visible
from flatpeak.runs.checkpoints import LAST, checkpoint_name
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.rollout_log import read_rollouts, turn_rewards
from flatpeak.training.batch import collate
from flatpeak.training.learner import score, token_budget
from flatpeak.training.objective_config import AdvantageConfig
from flatpeak.types import Completion, Example, Group, Prompt

Row = dict[str, Any]
WEIGHED_BY_RATIO = ("clipped_surrogate", "unclipped_surrogate", "truncated_policy_gradient", "policy_gradient")
"""The losses whose gradient weighs a token by its ratio, up to a clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainedCompletion:
    """A completion of the group, with its weight and the changes of its tokens' probabilities."""

    row: Row
    """Its row of the rollout log: text, rewards, total reward, advantage, log-probs."""
    weight: float
    """The weight w_i of each of its tokens in the loss, if the whole step is one minibatch."""
    tokens: tuple[str, ...]
    ratios: tuple[float | None, ...]
    """Per token, the ratio of its probability under the run's last checkpoint to the sampler's; None: not sampled."""
    kls: tuple[float | None, ...]
    """Per token, the k3 estimate of the KL divergence from the last checkpoint to the policy before RL; likewise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """A group of completions and the configuration of its run."""

    step: int
    config: RunConfig
    completions: tuple[ExplainedCompletion, ...]

    @property
    def rewards(self) -> list[float]:
        """The total rewards that are not missing."""
        rewards = (completion.row["reward"] for completion in self.completions)
        return [reward for reward in rewards if reward is not None]


def explain(run: Path, *, step: int | None = None, group: str | None = None) -> Explanation:
    """Read a group from a step's log (by default the group whose rewards differ most) and score it with the run's last
    and first checkpoint. `step` None is the last logged step. UserError if the run, step or group does not exist."""
    paths = RunPaths(run)
    step, path = logged_step(run, step)
    rows = read_rollouts(path)
    config = parse_config(load_recipe(paths.config))
    chosen = [row for row in rows if row["group"] == (group or _most_varied_group(rows))]
    if not chosen:
        known = ", ".join(sorted({row["group"] for row in rows})[:8])
        raise UserError(f"step {step} has no group {group!r}: there are {known}, ...")
    weights = completion_weights(
        torch.tensor([sum(row.get("trained", [1] * len(row["token_ids"]))) for row in rows]),
        config.objective.normalization,
        max_tokens=config.rollout.max_new_tokens,
        valid_N=torch.tensor([_is_trained(row, config) for row in rows]),
    )
    weight_of = {id(row): float(weight) for row, weight in zip(rows, weights, strict=True)}
    completions = _explain_completions(chosen, weight_of, config, paths)
    return Explanation(step=step, config=config, completions=tuple(completions))


def _is_trained(row: Row, config: RunConfig) -> bool:
    """Whether the update of its step had a completion's gradient."""
    masked = config.objective.truncated == "mask" and row["finish_reason"] == "length"
    return row["reward"] is not None and not masked


def _checkpoint(paths: RunPaths, name: str, trained: ModelConfig) -> Policy:
    """The policy of a run's checkpoint, loaded as the run loaded its model."""
    loading = {"device": trained.device, "dtype": trained.dtype, "trust_remote_code": trained.trust_remote_code}
    return load_policy(ModelConfig(path=str(paths.checkpoints / name), **loading))


def _explain_completions(
    rows: Sequence[Row], weight_of: dict[int, float], config: RunConfig, paths: RunPaths
) -> list[ExplainedCompletion]:
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
    last, first = (_checkpoint(paths, name, config.model) for name in (LAST, checkpoint_name(0)))
    for policy in (last, first):  # the self-test of the kernels would take longer than one group
        policy.kernels.choose("torch", unserved=None)
    batch = collate([group], torch.ones(1, len(rows), dtype=torch.bool), device=last.device)
    last_logprobs_T, first_logprobs_T = (
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
    ratios = importance_ratio(last_logprobs_T, batch.sampler_logprobs_T).split(lengths)
    kls = kl_k3(last_logprobs_T, first_logprobs_T).split(lengths)
    return [
        ExplainedCompletion(
            row=row,
            weight=weight_of[id(row)],
            tokens=tuple(visible_token(last.tokenizer, token) for token in row["token_ids"]),
            ratios=_of_sampled(row, ratio.tolist()),
            kls=_of_sampled(row, kl.tolist()),
        )
        for row, ratio, kl in zip(rows, ratios, kls, strict=True)
    ]


def _of_sampled(row: Row, values: Sequence[float]) -> tuple[float | None, ...]:
    """A value of each token that the policy sampled, None for what was added between its turns."""
    sampled = row.get("trained", [1] * len(values))
    return tuple(value if own else None for value, own in zip(values, sampled, strict=True))


def _most_varied_group(rows: Sequence[Row]) -> str:
    rewards: dict[str, list[float]] = {}
    for row in rows:
        if row["reward"] is not None:
            rewards.setdefault(row["group"], []).append(row["reward"])
    return max(rewards, key=lambda group: max(rewards[group]) - min(rewards[group]), default="")


def render(explanation: Explanation, *, width: int | None = None) -> Lines:
    """Render the group as lines: the advantage's rule, a row per completion, and the tokens in colour.

    Columns that do not fit into `width` go into further tables, so that no number is cut off.
    """
    first, advantage = explanation.completions[0].row, explanation.config.advantage
    rewards = explanation.rewards
    spread = stdev(rewards) if len(rewards) > 1 else float("nan")
    counts = _counts(explanation.completions)
    completions = [explanation.completions[index] for index in counts]
    rows = [completion.row for completion in completions]
    columns = {
        **({"times": [str(count) for count in counts.values()]} if max(counts.values()) > 1 else {}),
        "reward": [_number(row["reward"]) for row in rows],
        "advantage": [_number(row["advantage"]) for row in rows],
        "weight per token": [_number(completion.weight) for completion in completions],
        "tokens": [str(sum(ratio is not None for ratio in completion.ratios)) for completion in completions],
        "ended by": [row.get("stop_reason") or row["finish_reason"] for row in rows],
        **({"rewards of turns": list(map(turn_rewards, rows))} if any(map(turn_rewards, rows)) else {}),
    }
    # Not in the dictionary, because a reward may have the name of a column.
    rewards_by_name = [(name, [_number(row["rewards"].get(name)) for row in rows]) for name in first["rewards"]]
    return Lines(
        Text(f"step {explanation.step}, group {first['group']}, gold {first['gold']}"),
        Text(first["prompt"], style="dim"),
        Text(
            f"rewards: mean {mean(rewards) if rewards else float('nan'):.4g}, std {spread:.4g} (n - 1); "
            f"{_rule(advantage)}"
        ),
        *_tables([*columns.items(), *rewards_by_name], [str(index) for index in counts], width=width),
        Text(
            "Tokens: green ones are more likely now than when they were drawn, red ones less (xN: by this factor at "
            "the last checkpoint); "
            "underlined if the KL to the policy before RL (k3) exceeds 0.1. "
            f"{'Grey tokens answered a turn and are not trained on. ' if 'turns' in first else ''}"
            f"{_gradient(explanation.config.objective.loss)}"
        ),
        *(_tokens(index, completion) for index, completion in zip(counts, completions, strict=True)),
    )


def _counts(completions: Sequence[ExplainedCompletion]) -> dict[int, int]:
    """By the index of each distinct completion, the number of completions with its tokens and rewards."""
    rows = (completion.row for completion in completions)
    scored = [(row["finish_reason"], row["reward"], *row["rewards"].values()) for row in rows]
    keys = [(completion.tokens, *scores) for completion, scores in zip(completions, scored, strict=True)]
    return {keys.index(key): count for key, count in Counter(keys).items()}


def _rule(advantage: AdvantageConfig) -> str:
    """The rule that turned rewards into advantages."""
    rule = f"baseline {advantage.baseline}, scale {advantage.scale}"
    if advantage.function is not None:
        rule = f"advantages by {advantage.function}"
    if advantage.credit == "turn":
        rule = f"{rule}, for each turn (below: the mean over a completion's tokens)"
    if advantage.limit_spreads is not None:
        rule = f"{rule}, within {advantage.limit_spreads:g} spreads of the group"
    if advantage.whiten != "none":
        rule = f"{rule}, whitened over {advantage.whiten}"
    return rule if advantage.limit is None else f"{rule}, within ±{advantage.limit:g}"


def _gradient(loss: str) -> str:
    """The weight of a token's gradient, under the losses of which it is the ratio's."""
    if loss in WEIGHED_BY_RATIO:
        return "A token's gradient weighs -advantage * weight * ratio."
    return f"A token's loss is its weight times {loss}."


def _tables(columns: Sequence[tuple[str, Sequence[str]]], numbers: Sequence[str], *, width: int | None) -> list[Table]:
    """Split the columns into tables, each with as many columns as fit into the width beside the rows' numbers."""
    margin = 3  # the line and the two spaces around a cell
    room = None if width is None else width - 1 - max(map(len, numbers)) - margin
    chunks: list[list[tuple[str, Sequence[str]]]] = [[]]
    used = 0
    for name, cells in columns:
        needed = max(map(cell_len, (name, *cells))) + margin
        if room is not None and chunks[-1] and used + needed > room:
            chunks.append([])
            used = 0
        chunks[-1].append((name, cells))
        used += needed
    return [_table([("", numbers), *chunk]) for chunk in chunks]


def _table(columns: Sequence[tuple[str, Sequence[str]]]) -> Table:
    # Only text wider than a whole line (such as the name of a reward) is folded.
    table = Table(*(Column(Text(name), overflow="fold") for name, _ in columns))
    for row in zip(*(cells for _, cells in columns), strict=True):
        table.add_row(*map(Text, row))
    return table


def _tokens(index: int, completion: ExplainedCompletion) -> Text:
    line = Text(f"{index} ")
    for token, ratio, kl in zip(completion.tokens, completion.ratios, completion.kls, strict=True):
        if ratio is None or kl is None:
            line.append(f"{token} ", style="dim")
            continue
        colour = "green" if ratio > 1.05 else "red" if ratio < 0.95 else "default"
        line.append(token, style=f"{colour}{' underline' if kl > 0.1 else ''}")
        line.append(f"x{ratio:.2f} ", style="dim")
    return line


def visible_token(tokenizer: Any, token: int) -> str:
    """A token's text with invisible characters escaped: `\\n` for a line break, `␣` for each of only blanks."""
    text: str = tokenizer.decode([token]) or str(tokenizer.convert_ids_to_tokens(token) or f"<{token}>")
    if not text.strip(" "):
        return "␣" * len(text)
    return visible(text)


def _number(value: float | None) -> str:
    return "missing" if value is None else f"{value:.4g}"
