"""Random recipes run, resume to the same bits, and sample what they train. support/fuzz.py runs more of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flatpeak.config.load import merge, parse_config
from flatpeak.errors import UserError
from flatpeak.policy.model import Policy
from flatpeak.training.history import CompletedStep
from flatpeak.training.learner import Learner
from support.fuzz import FUNCTIONS, Verdict, draw, examine, from_yaml, run_whole, to_yaml
from support.fuzz_cases import MOMENTS, TINY, Case, Stop

COUNT = 20
PLAIN = Case(
    seed="plain",
    recipe={
        "run": {"name": "plain", "checkpoint_every": 1},
        "model": {
            "new": {"config": {**TINY, "max_position_embeddings": 16}},
            "device": "cpu",
            "dtype": "float32",
        },
        "task": {"type": "arithmetic", "max_value": 9, "train_size": 12, "test_size": 4},
        "rollout": {"prompts_per_step": 4, "group_size": 4, "max_new_tokens": 4},
        "optimizer": {"learning_rate": 1e-2},
        "training": {"steps": 4},
        "evaluation": {"every": 0, "metric": "reward"},
    },
    long_prompt=None,
    reward="parity",
    stops=(Stop(where="train", at=2, kill=False),),
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.mark.parametrize("index", range(COUNT))
def test_a_random_recipe_runs_resumes_and_agrees_with_its_sampler(index: int, tmp_path: Path) -> None:
    verdict = examine(draw(f"4/{index}"), tmp_path)
    assert verdict.kind in ("ok", "refused"), f"{verdict.detail}\n{to_yaml(verdict.case)}"


def test_a_case_depends_on_its_seed_alone_and_is_printed_whole() -> None:
    first, again, other = draw("3/1"), draw("3/1"), draw("3/2")
    assert first == again != other
    assert from_yaml(to_yaml(first)) == first


def test_few_random_recipes_are_refused() -> None:
    def refused(case: Case) -> bool:
        try:
            parse_config(case.recipe)
        except UserError:
            return True
        return False

    count = sum(refused(draw(f"5/{index}")) for index in range(200))
    assert 0 < count < 40


def test_a_recipe_that_is_refused_is_no_failure(tmp_path: Path) -> None:
    case = from_yaml(to_yaml(PLAIN).replace("steps: 4", "steps: -4"))
    assert examine(case, tmp_path) == Verdict(
        case=case, kind="refused", detail="training.steps=-4: input should be greater than or equal to 0"
    )


def test_moments_that_a_resume_loses_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Learner, "load", lambda *_: None)
    verdict = examine(PLAIN, tmp_path)
    assert verdict.kind == "failed"
    assert verdict.detail.startswith("resumed run differs in")


def test_a_step_that_is_saved_half_done_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompletedStep, "intact", lambda *_, **__: True)
    recipe = merge(PLAIN.recipe, {"run": {"checkpoint_every": 0}, "training": {"minibatches": 2}})
    # The sixth of eight updates is the second of its step.
    stops = (Stop(where="update", at=0.65, kill=False),)
    verdict = examine(replace(PLAIN, recipe=recipe, stops=stops), tmp_path)
    assert verdict.kind == "failed"
    assert verdict.detail.startswith("resumed run differs in")


def test_every_moment_comes_in_a_plain_run(tmp_path: Path) -> None:
    _, calls = run_whole(PLAIN, tmp_path)
    assert set(MOMENTS) == FUNCTIONS.keys()
    assert min(calls.values()) > 1


def test_a_training_pass_at_another_temperature_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Policy.token_logprobs

    def warmer(self: Policy, batch: Any, *, temperature: float, **settings: Any) -> Any:
        return original(self, batch, temperature=1.001 * temperature, **settings)

    monkeypatch.setattr(Policy, "token_logprobs", warmer)
    verdict = examine(PLAIN, tmp_path)
    assert (verdict.kind, verdict.gap > 1) == ("failed", True), verdict


def test_an_exception_that_is_no_refusal_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "token_logprobs", lambda *_, **settings: {}[0])
    verdict = examine(PLAIN, tmp_path)
    assert (verdict.kind, "KeyError: 0" in verdict.detail) == ("failed", True)
