from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from flatpeak.rewards.config import FunctionConfig
from flatpeak.rewards.reward_set import build_reward

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_reward.py"


def test_the_example_of_custom_rewards_runs_and_prints_its_totals(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == [
        "'3 * 6 = 18': total 1.50 (close 1.00, rare 1.00, concise 1.00)",
        "'about 20': total 0.58 (close 0.33, rare 0.50, concise 1.00)",
        "'about 20': total 0.58 (close 0.33, rare 0.50, concise 1.00)",
    ]


@pytest.mark.parametrize(("name", "arguments", "score"), [("concise", {"words": 2}, 0.5), ("closeness", {}, 0.2)])
def test_its_functions_work_in_a_recipe(group, name, arguments, score):
    reward = build_reward({"mine": FunctionConfig(function=f"{EXAMPLE}:{name}", arguments=arguments)})
    assert reward([group("it may be 22")]).total == [[score]]
