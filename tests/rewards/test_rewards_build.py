from __future__ import annotations

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.config import CountdownConfig, FormatConfig, FunctionConfig, LengthConfig, NumberConfig
from flatpeak.rewards.numeric_answer import NumberReward
from flatpeak.rewards.reward_set import RewardSet, as_reward, build_reward
from flatpeak.types import Scores


def test_every_type_of_a_recipe_is_built_with_its_settings(group, tmp_path):
    (tmp_path / "mine.py").write_text("def size(completion, scale): return scale * len(completion)")
    reward = build_reward(
        {
            "correctness": NumberConfig(extraction="answer_tag"),
            "format": FormatConfig(weight=0.5),
            "short": LengthConfig(target=0, limit=4, weight=2.0),
            "countdown": CountdownConfig(weight=0.0),
            "size": FunctionConfig(function=f"{tmp_path}/mine.py:size", weight=10.0, arguments={"scale": 0.1}),
        }
    )
    scores = reward([group("<answer>6*3</answer>", "<answer>18</answer>", nums=[6, 3], target=18)])
    assert scores.parts["correctness"] == [[0.0, 1.0]]
    assert scores.parts["format"] == [[1 / 3, 1 / 3]]
    assert scores.parts["short"] == [[0.75, 0.75]]
    assert scores.parts["countdown"] == [[1.0, 0.0]]
    assert scores.parts["size"][0] == pytest.approx([2.0, 1.9])
    assert scores.total[0] == pytest.approx([0.5 / 3 + 1.5 + 20.0, 1.0 + 0.5 / 3 + 1.5 + 19.0])
    assert list(reward.weights) == ["correctness", "format", "short", "countdown", "size"]


def test_a_function_that_cannot_be_built_names_its_place_in_the_recipe():
    with pytest.raises(UserError, match=r"^rewards\.mine: function 'nowhere\.py:f': there is no file .*nowhere\.py"):
        build_reward({"mine": FunctionConfig(function="nowhere.py:f")})
    with pytest.raises(UserError, match=r"^rewards\.mine: reward function 'sqrt' has parameters without a usable name"):
        build_reward({"mine": FunctionConfig(function="math:sqrt")})


def test_a_reward_set_passes_unchanged():
    reward = build_reward({"correctness": NumberConfig()})
    assert as_reward(reward) is reward


def test_callables_of_groups_give_the_scores_of_a_set(group, completion, prompt):
    own = Scores(total=[[2.0]], parts={"mine": [[1.0]]})

    def whole(groups):
        return own

    class Judge:
        def __call__(self, groups):
            return own

    for function in (whole, Judge()):
        reward = as_reward(function)
        assert reward([group("18")], budget=reward.step_budget()) is own
        assert (reward.weights, reward.failures, reward.grading(), reward.measured(own)) == ({}, {}, None, {})
        assert reward.answer("mine", completion(" 18\n"), prompt()) == "18"
        reward.prepare([])
        reward.check()
        reward.close()
        assert as_reward(reward) is reward


def test_a_function_becomes_a_set_named_after_it_or_as_asked(group):
    def closeness(completion, gold):
        return float(completion == gold)

    groups = [group("18", "17")]
    assert as_reward(closeness)(groups).parts == {"closeness": [[1.0, 0.0]]}
    assert as_reward(closeness, name="correctness")(groups).parts == {"correctness": [[1.0, 0.0]]}
    assert as_reward(closeness)(groups).total == [[1.0, 0.0]]


def test_a_built_in_rule_can_be_passed_in_python(group):
    assert as_reward(NumberReward(), name="correctness")([group("18", "17")]).total == [[1.0, 0.0]]


def test_a_mapping_becomes_a_set_with_its_names_and_weights(group):
    reward = as_reward({"a": lambda completion: 1.0, "b": (lambda completion: 3.0, 0.5), "c": (NumberReward(), 0)})
    assert isinstance(reward, RewardSet)
    assert reward.weights == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert reward([group("18")]).total == [[2.5]]


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ("mine.py:f", "reward is str 'mine.py:f': pass a function"),
        (None, "reward is None"),
        ({}, "there is no reward"),
        ({"a": "mine.py:f"}, "reward 'a' is str"),
        ({"a": (len, "heavy")}, "reward 'a' is tuple"),
        ({"a": (lambda completion: 1.0, True)}, "reward 'a' is tuple"),
        (lambda text: 1.0, "f\\(completion, ...\\)"),
    ],
)
def test_anything_else_is_refused_with_what_would_do(obj, message):
    with pytest.raises(UserError, match=message):
        as_reward(obj)
