from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from flatpeak.config.load import parse_config
from flatpeak.errors import UserError
from flatpeak.rewards.judge.config import CanaryConfig
from flatpeak.rewards.judge.reward import build_judge_reward, judge_reward
from flatpeak.rewards.judge.rubrics import load_rubric
from flatpeak.rewards.reward_set import build_reward
from support.judges import FunctionJudge, config, group

EXAMPLES = Path(__file__).parents[3] / "examples"


def recipe(**judge):
    return parse_config({"rewards": {"judge": {"type": "judge", **judge}}}).rewards


def test_the_example_rubric_gates_the_reason_on_the_result():
    rubric = load_rubric(str(EXAMPLES / "judge_rubric.yaml"))
    assert rubric.score({"result": 10, "reason": 0}) == pytest.approx(0.7)
    assert rubric.score({"result": 5, "reason": 1}) == pytest.approx(0.65)
    assert rubric.score({"result": 4, "reason": 1}) == pytest.approx(0.28)


def test_a_judge_marks_by_the_example_rubric():
    judge = FunctionJudge(lambda content: '{"rationale": "", "result": 10, "reason": 1}')
    component = judge_reward(judge, rubric=str(EXAMPLES / "judge_rubric.yaml"), canaries=CanaryConfig(enabled=False))
    component._examples = ()
    assert component.score([group("9.81 m/s^2, by gravity")]).scores == [[1.0]]
    component.close()
    assert "three digits are fine" in judge.asked[0].messages[1]["content"]


def test_the_example_judge_runs_from_a_recipe_and_passes_the_canaries():
    backend = {"type": "custom", "factory": f"{EXAMPLES / 'custom_judge.py'}:WordJudge", "arguments": {"enough": 0.5}}
    reward = build_reward(recipe(backend=backend, output="json"))
    groups = [group("a red fox", "a dog", "", gold="red fox"), group("blue", gold="a blue whale", id="row-2")]
    assert reward(groups).total == [[1.0, 0.0, 0.0], [0.0]]
    reward.close()


def test_the_example_judge_prints_a_verdict(capsys):
    runpy.run_path(str(EXAMPLES / "custom_judge.py"), run_name="__main__")
    assert capsys.readouterr().out == '{"correct": 1}\n'


def test_an_endpoint_without_the_openai_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(UserError, match=r'pip install "flatpeak\[judge\]"'):
        build_judge_reward("judge", config("http://localhost:1/v1"))


@pytest.mark.parametrize(
    ("judge", "named"),
    [
        ({}, "backend"),
        ({"backend": {"type": "endpoint", "base_url": "localhost:8000", "model": "m"}}, "http://"),
        ({"backend": {"type": "local", "path": "p"}, "budget": {"max_cost": 1.0}}, "budget.max_cost"),
        ({"backend": {"type": "local", "path": "p"}, "budget": {"max_calls": 5}}, "budget.max_calls"),
        ({"backend": {"type": "local", "path": "p"}, "rubrik": "x"}, "did you mean"),
        ({"backend": {"type": "local", "path": "p"}, "max_tokens": 4}, "max_tokens"),
    ],
)
def test_a_bad_section_is_refused_and_named(judge, named):
    with pytest.raises(UserError, match=r"judge|backend|budget|mode") as error:
        recipe(**judge)
    assert named in str(error.value)


def test_a_rubric_that_does_not_exist_is_refused_before_anything_is_asked():
    with pytest.raises(UserError, match=r"rewards\.judge: rubric 'nope'"):
        build_reward(
            recipe(backend={"type": "endpoint", "base_url": "http://localhost:1/v1", "model": "m"}, rubric="nope")
        )


def test_a_factory_that_makes_no_judge_is_refused():
    with pytest.raises(UserError, match="must return an object with `identity`"):
        build_reward(recipe(backend={"type": "custom", "factory": "builtins:dict"}))
