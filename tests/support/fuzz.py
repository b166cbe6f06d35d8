"""Random recipes that are run, interrupted, resumed and compared.

By hand: `PYTHONPATH=tests python -m support.fuzz --count 200 --seed 1`.

Each case is run in one go, and once more with an interruption; both must end in the same bits. Then the
log-probabilities that the sampler stores are compared with those of the training pass. A recipe that is refused
(UserError) is counted; any other exception is a failure. What fails is printed as YAML, which `--case FILE` runs again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers.utils.logging import disable_progress_bar

from flatpeak.config.load import merge, parse_config
from flatpeak.errors import UserError
from flatpeak.pipeline import train as api
from flatpeak.pipeline.rollout_engines import build_sampler
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.model import Policy
from flatpeak.training.batch import collate
from flatpeak.types import Example, Group, Prompt
from support.fuzz_cases import Case, draw
from support.resumes import Death, die, outcome
from support.runs import Watcher, speed_up_runs

BFLOAT16_GAP = 0.02
"""Largest mean |difference| of log-probabilities in bfloat16, at temperature 1."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one case."""

    case: Case
    kind: str
    """ok, refused or failed."""
    detail: str = ""
    gap: float = 0.0
    """Sampler against trainer, as a share of what is allowed."""


def examine(case: Case, directory: Path) -> Verdict:
    """Run a case twice, once with an interruption, and compare."""
    try:
        with pytest.MonkeyPatch.context() as patch:
            speed_up_runs(patch)
            whole = _run(case, directory / "whole")
            cut = _interrupted(case, directory / "cut")
        different = _differences(outcome(cut), outcome(whole))
        if different:
            return Verdict(case=case, kind="failed", detail=f"resumed run differs in {'; '.join(different)}")
        gap = sampler_gap(case, whole)
    except UserError as error:
        return Verdict(case=case, kind="refused", detail=str(error))
    except Exception:
        return Verdict(case=case, kind="failed", detail=traceback.format_exc())
    if not gap <= 1:
        return Verdict(case=case, kind="failed", detail=f"sampler-trainer gap is {gap:.3g} times the bound", gap=gap)
    return Verdict(case=case, kind="ok", gap=gap)


class Scorer:
    """Scores that depend on a group's tokens alone, so that a resumed run gives the same ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.prompts: dict[str, Prompt] = {}
        """Every prompt that was sampled."""

    def __call__(self, group: Group) -> list[float | None]:
        self.prompts[group.prompt.id] = group.prompt
        return [self._score(completion.token_ids) for completion in group.completions]

    def _score(self, tokens: Sequence[int]) -> float | None:
        total = sum((place + 1) * token for place, token in enumerate(tokens))
        match self.kind:
            case "parity":
                return float(total % 2)
            case "length":
                return len(tokens) / 10
            case "seldom":
                return float(total % 7 == 0)
            case "missing":
                return None if total % 3 == 0 else float(total % 2)
            case _:
                return 1.0


def mixed_task(longest: int) -> Any:
    """Short questions, and one of `longest` characters."""
    texts = [f"{left}+{right}=" for left in range(4) for right in range(3)] + ["7" * (longest - 1) + "="]
    rows = [
        Example(id=str(number), question=text, gold="1", rationale="12"[: 1 + number % 2])
        for number, text in enumerate(texts)
    ]
    return SimpleNamespace(name="mixed", train=rows[2:], test=rows[:2])


def _start(case: Case, directory: Path, *, stop: Any = None, **options: Any) -> Any:
    recipe = merge(case.recipe, {"run": {"directory": str(directory)}})
    task = mixed_task(case.long_prompt) if case.long_prompt else None
    watcher = Watcher({case.stop: stop} if stop else {})
    return api.train(recipe, task=task, reward=Scorer(case.reward), progress=watcher, **options)


def _run(case: Case, directory: Path) -> Path:
    result = _start(case, directory)
    assert result.exit_code == 0, result.summary
    return Path(result.path)


def _interrupted(case: Case, directory: Path) -> Path:
    if case.kill:
        with suppress(Death):
            _start(case, directory, stop=die)
    else:
        stopped = _start(case, directory, stop=lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert stopped.exit_code == 128 + signal.SIGTERM, stopped.summary
    result = _start(case, directory, resume=True)
    assert result.exit_code == 0, result.summary
    return Path(result.path)


def _differences(resumed: dict[str, Any], expected: dict[str, Any]) -> list[str]:
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
    different += _nested_differences(resumed["state"], expected["state"], where="state")
    different += _metric_differences(resumed["metrics"], expected["metrics"])
    return different


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


def sampler_gap(case: Case, path: Path) -> float:
    """The gap between the sampler's and the trainer's log-probabilities after training, as a share of the bound."""
    config = parse_config(case.recipe)
    policy = load_policy(ModelConfig(path=str(path / "checkpoints" / "last"), device="cpu", dtype=config.model.dtype))
    policy.batch_invariant = config.rollout.batch_invariant
    prompts = _prompts_of(path)
    temperature = config.rollout.temperature
    sampler = build_sampler(policy, config)
    groups = sampler.generate(prompts, group_size=2, sampling=config.rollout.sampling(), seed=1)
    batch = collate(groups, torch.ones(len(groups), 2, dtype=torch.bool), device=policy.device)
    with torch.no_grad():
        recomputed_T, _ = policy.token_logprobs(batch, temperature=temperature)
    gap_T = (recomputed_T.float() - batch.sampler_logprobs_T).abs()
    if config.model.dtype == "bfloat16":
        return float(gap_T.mean()) / (BFLOAT16_GAP / min(1.0, temperature))
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


def to_yaml(case: Case) -> str:
    """A case as a file that `--case` reads."""
    return str(yaml.safe_dump(json.loads(json.dumps(asdict(case))), sort_keys=False))


def from_yaml(text: str) -> Case:
    """The case of such a file."""
    fields = yaml.safe_load(text)
    return Case(**{**fields, "stop": tuple(fields["stop"])})


def main() -> None:
    """Run cases one after another, print what fails, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20, help="how many recipes")
    parser.add_argument("--seed", type=int, default=0, help="the first case is SEED/0, the next SEED/1, ...")
    parser.add_argument("--case", type=Path, help="run the case in this YAML file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bar()
    torch.set_num_threads(1)
    if arguments.case:
        cases = [from_yaml(arguments.case.read_text(encoding="utf-8"))]
    else:
        cases = [draw(f"{arguments.seed}/{index}") for index in range(arguments.count)]
    kinds: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    largest, started = {"float32": 0.0, "bfloat16": 0.0}, time.perf_counter()
    for case in cases:
        with tempfile.TemporaryDirectory() as directory:
            verdict = examine(case, Path(directory))
        kinds[verdict.kind] += 1
        dtype = case.recipe["model"]["dtype"]
        largest[dtype] = max(largest[dtype], verdict.gap)
        if verdict.kind == "refused":
            refusals[verdict.detail] += 1
        if verdict.kind == "failed":
            sys.stdout.write(f"--- {case.seed}: {verdict.detail}\n{to_yaml(case)}\n")
            sys.stdout.flush()
    for text, count in refusals.most_common():
        sys.stdout.write(f"refused {count}: {text}\n")
    sys.stdout.write(
        f"{len(cases)} recipes in {time.perf_counter() - started:.0f} s: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        + "; largest gap, of what is allowed: "
        + ", ".join(f"{dtype} {share:.2f}" for dtype, share in largest.items())
        + "\n"
    )
    sys.exit(1 if kinds["failed"] else 0)


if __name__ == "__main__":
    main()
