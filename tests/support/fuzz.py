"""Random recipes that are run, interrupted, resumed and compared.

By hand: `PYTHONPATH=tests python -m support.fuzz --count 200 --seed 1`; `--model PATH` trains a model in a file.

Each case is run in one go, and once more with one or two interruptions; both must end in the same bits. Then the
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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from transformers.utils.logging import disable_progress_bar

import flatpeak.runs.checkpoints
import flatpeak.training.recorder
from flatpeak.config.load import merge
from flatpeak.errors import UserError
from flatpeak.pipeline import train as api
from flatpeak.policy.model import Policy
from flatpeak.rollout.slots import CompletionBuffer, DecodeSlots
from flatpeak.runs.metrics import MetricsWriter
from flatpeak.training.optimizer import BaseLearner
from flatpeak.types import Example, Group
from support.fuzz_cases import Case, Stop, draw
from support.fuzz_outcomes import differences, sampler_gap
from support.fuzz_sections import FILES
from support.resumes import CountedCalls, Death, die, outcome
from support.runs import Watcher, speed_up_runs

FUNCTIONS: dict[str, tuple[tuple[Any, str], ...]] = {
    "sampling": ((DecodeSlots, "step"), (CompletionBuffer, "draw")),
    "pass": ((Policy, "token_logprobs"),),
    "layer": ((BaseLearner, "_before_layer"),),
    "update": ((BaseLearner, "update"),),
    "evaluation": ((flatpeak.training.recorder.Recorder, "evaluate"), (flatpeak.training.recorder, "write_answers")),
    "save": ((flatpeak.training.recorder, "write_checkpoint"),),
    "files": ((flatpeak.runs.checkpoints, "write_manifest"),),
    "link": ((flatpeak.training.recorder, "link_checkpoint"), (flatpeak.training.recorder, "prune")),
    "log": ((MetricsWriter, "write"),),
}
"""The functions in whose calls a run is interrupted."""
REWARD_FUNCTIONS = """
def one(completion):
    return sum(map(ord, completion)) % 7 / 7

def all(completions):
    return [one(completion) for completion in completions]

def group(group):
    return all([completion.text for completion in group.completions])

def loss(logprobs_T, ratio_T, advantages_T, config):
    return advantages_T.abs() * (ratio_T - 1).square() / 0.4 - ratio_T * advantages_T

def advantage(rewards_PG, valid_PG):
    count_P1 = valid_PG.sum(-1, keepdim=True).clamp(min=1)
    return (rewards_PG - (rewards_PG * valid_PG).sum(-1, keepdim=True) / count_P1) * valid_PG
"""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of one case."""

    case: Case
    kind: str
    """ok, refused or failed."""
    detail: str = ""
    gap: float = 0.0
    """Sampler against trainer, as a share of what is allowed."""
    ends: int = 0
    """How often the run was interrupted; a resumed one may end before that."""


def examine(case: Case, directory: Path) -> Verdict:
    """Run a case twice, once with interruptions, and compare."""
    verdict = partial(Verdict, case=case)
    try:
        with pytest.MonkeyPatch.context() as patch:
            speed_up_runs(patch)
            _limit_memory(patch, case.memory)
            try:
                write_files(case, directory / "files")
                whole, calls = run_whole(case, directory / "whole")
            except UserError as error:
                return verdict(kind="failed" if "\n" in str(error) else "refused", detail=str(error))
            cut, ends = _interrupted(case, directory / "cut", calls)
        different = differences(outcome(cut), outcome(whole))
        if different:
            return verdict(kind="failed", detail=f"resumed run differs in {'; '.join(different)}")
        gap = sampler_gap(_recipe(case, directory / "whole"), whole)
    except Exception:
        return verdict(kind="failed", detail=traceback.format_exc())
    if not gap <= 1:
        return verdict(kind="failed", detail=f"sampler-trainer gap is {gap:.3g} times the bound", gap=gap)
    return verdict(kind="ok", gap=gap, ends=ends)


def write_files(case: Case, directory: Path) -> None:
    """What a recipe names: rows, one of which has no answer, functions, and the model under adapters."""
    directory.mkdir()
    rows = [{"question": f"{left}+{right}=", "answer": str(left + right)} for left in range(5) for right in range(3)]
    lines = [json.dumps(row) for row in [*rows, {"question": "1+"}]]
    (directory / "rows.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "functions.py").write_text(REWARD_FUNCTIONS)
    if case.base:
        sections = {name: case.recipe[name] for name in ("task", "tasks") if name in case.recipe}
        off = {"rollout": {"max_new_tokens": 1}, "training": {"steps": 0}, "evaluation": {"size": 1}}
        recipe = {**sections, **off, "run": {"name": "made"}, "model": {**case.base, "dtype": "float32"}}
        made = _start(replace(case, recipe=recipe), directory, at={})
        (Path(made.path) / "checkpoints" / "last").resolve().rename(directory / "base")


def _limit_memory(patch: pytest.MonkeyPatch, memory: tuple[str, int] | None) -> None:
    """Let memory run out where more tokens of several completions, or more rows, are computed at once."""
    what, limit = memory or ("", 0)
    train, decode = Policy.token_logprobs, DecodeSlots.step

    def limited_train(self: Policy, batch: Any, **settings: Any) -> Any:
        if torch.is_grad_enabled() and len(batch.lengths_N) > 1 and len(batch.tokens_T) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return train(self, batch, **settings)

    def limited_decode(self: DecodeSlots, batch_size: int) -> None:
        count, *_, max_rows = self.request_key
        if min(count, max_rows) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        decode(self, batch_size)

    if what == "tokens":
        patch.setattr(Policy, "token_logprobs", limited_train)
    if what == "rows":
        patch.setattr(DecodeSlots, "step", limited_decode)


class Scorer:
    """Scores that depend on a group's tokens alone, so that a resumed run gives the same ones."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def __call__(self, group: Group) -> list[float | None]:
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


def _recipe(case: Case, directory: Path) -> dict[str, Any]:
    recipe = json.dumps(merge(case.recipe, {"run": {"directory": str(directory)}}))
    return json.loads(recipe.replace(FILES, str(directory.parent / "files")))  # type: ignore[no-any-return]


def _start(case: Case, directory: Path, *, at: dict[tuple[str, int], Callable[[], None]], **options: Any) -> Any:
    return api.train(
        _recipe(case, directory),
        task=mixed_task(case.long_prompt) if case.long_prompt else None,
        reward=None if case.reward == "recipe" else Scorer(case.reward),
        progress=Watcher(at),
        **options,
    )


def run_whole(case: Case, directory: Path) -> tuple[Path, dict[str, int]]:
    """The run in one go, and how often it calls the functions of each kind."""
    with pytest.MonkeyPatch.context() as patch:
        counted = {name: CountedCalls(patch, *functions) for name, functions in FUNCTIONS.items()}
        result = _start(case, directory, at={})
    assert result.exit_code == 0, result.summary
    return Path(result.path), {name: calls.count for name, calls in counted.items()}


def _interrupted(case: Case, directory: Path, calls: dict[str, int]) -> tuple[Path, int]:
    """The run with its interruptions, and how many there were."""
    ends = [_ends_early(case, directory, stop, calls, resume=number > 0) for number, stop in enumerate(case.stops)]
    result = _start(case, directory, at={}, resume=True)
    assert result.exit_code == 0, result.summary
    return Path(result.path), sum(ends)


def _ends_early(case: Case, directory: Path, stop: Stop, calls: dict[str, int], *, resume: bool) -> bool:
    """Start a run, and interrupt it; whether it did not end by itself before that."""
    action = die if stop.kill else partial(os.kill, os.getpid(), signal.SIGTERM)
    at_step = {} if stop.where in FUNCTIONS else {(stop.where, int(stop.at)): action}
    with pytest.MonkeyPatch.context() as patch:
        if stop.where in FUNCTIONS:
            CountedCalls(patch, *FUNCTIONS[stop.where], at=1 + int(stop.at * calls[stop.where]), action=action)
        try:
            result = _start(case, directory, at=at_step, resume=resume)
        except Death:
            return True
    assert result.exit_code in (0, 128 + signal.SIGTERM), result.summary
    return bool(result.exit_code)


def to_yaml(case: Case) -> str:
    """A case as a file that `--case` reads."""
    return str(yaml.safe_dump(json.loads(json.dumps(asdict(case))), sort_keys=False))


def from_yaml(text: str) -> Case:
    """The case of such a file."""
    fields = yaml.safe_load(text)
    stops = tuple(Stop(**stop) for stop in fields["stops"])
    return Case(**{**fields, "stops": stops, "memory": fields["memory"] and tuple(fields["memory"])})


def features(case: Case) -> Iterable[str]:
    """What tallies are kept of."""
    recipe = case.recipe
    optional = ("tasks", "curriculum", "sft", "gradient_regularization", "kl", "rewards")
    named = {
        "adapters": "lora" in recipe["model"],
        "rows": "rows.jsonl" in json.dumps(recipe),
        "evaluation sets": "sets" in recipe["evaluation"],
        "sharpness": "sharpness" in recipe["evaluation"],
        "offload": "offload" in recipe["optimizer"],
        "staleness": "staleness" in recipe["rollout"],
        "stop_when": "stop_when" in recipe["training"],
        "memory": case.memory is not None,
        "two stops": len(case.stops) > 1,
    }
    yield from (name for name in optional if name in recipe)
    yield from (name for name, holds in named.items() if holds)
    yield from (f"{'killed' if stop.kill else 'stopped'}: {stop.where}" for stop in case.stops)


def main() -> None:
    """Run cases one after another, print what fails, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20, help="how many recipes")
    parser.add_argument("--seed", type=int, default=0, help="the first case is SEED/0, the next SEED/1, ...")
    parser.add_argument("--model", help="a model's directory or GGUF file, in place of tiny new models")
    parser.add_argument("--case", type=Path, help="run the case in this YAML file")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    disable_progress_bar()
    torch.set_num_threads(1)
    if arguments.case:
        cases = [from_yaml(arguments.case.read_text(encoding="utf-8"))]
    else:
        cases = [draw(f"{arguments.seed}/{index}", arguments.model) for index in range(arguments.count)]
    verdicts, started = [], time.perf_counter()
    for case in cases:
        with tempfile.TemporaryDirectory() as directory:
            verdict = examine(case, Path(directory))
        verdicts.append(verdict)
        sys.stdout.write(f"{case.seed} {verdict.kind} after {time.perf_counter() - started:.0f} s\n")
        if verdict.kind == "failed":
            sys.stdout.write(f"--- {case.seed}: {verdict.detail}\n{to_yaml(case)}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{_summary(verdicts)}\n{len(cases)} recipes in {time.perf_counter() - started:.0f} s\n")
    sys.exit(any(verdict.kind == "failed" for verdict in verdicts))


def _summary(verdicts: Sequence[Verdict]) -> str:
    """Refusals, tallies by feature and over all, and the largest gap."""
    refusals = Counter(verdict.detail for verdict in verdicts if verdict.kind == "refused")
    by_feature: dict[str, Counter[str]] = {}
    for verdict in verdicts:
        for name in {"all", *features(verdict.case)}:
            by_feature.setdefault(name, Counter())[verdict.kind] += 1
    gaps = [
        f"{dtype} {max((one.gap for one in verdicts if one.case.recipe['model']['dtype'] == dtype), default=0):.2f}"
        for dtype in ("float32", "bfloat16")
    ]
    return "\n".join(
        [
            *(f"refused {count}: {text}" for text, count in refusals.most_common()),
            *(
                f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
                for name, kinds in sorted(by_feature.items())
            ),
            f"{sum(verdict.ends for verdict in verdicts)} interruptions",
            f"largest gap, of what is allowed: {', '.join(gaps)}",
        ]
    )


if __name__ == "__main__":
    main()
