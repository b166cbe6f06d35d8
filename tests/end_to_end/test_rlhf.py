"""RLHF end to end at small size: pairs, reward model, GRPO against it, with the gold score beside it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.runs.metrics import read_metrics
from flatpeak.tasks.preferences import load_preferences

EXAMPLE = Path(__file__).parents[2] / "examples" / "rlhf.py"
SMALL = [
    *("--pairs", "1500", "--variants", "policy"),
    *("--policy", "sft.steps=120", "training.steps=12", "evaluation.every=6", "evaluation.size=40"),
    *("rollout.prompts_per_step=16", "optimizer.learning_rate=1e-3"),
    *("--judge", "reward_model.steps=120", "reward_model.evaluate_every=60"),
]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def outcome(example: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("rlhf")
    return {"root": root, **example["main"](["--directory", str(root), *SMALL])}


def test_the_gold_score_pays_for_wanted_letters_and_not_for_length(example: dict[str, Any]) -> None:
    gold = example["gold"]
    assert gold("abc", "abc") == 1.0
    assert gold("aaaa", "abc") == pytest.approx(1 / 3)
    assert gold(" abc\n", "abc") == 1.0
    assert gold("", "abc") == 0.0
    assert gold("abcabcabcabc", "abc") == pytest.approx(1 - 4 * 0.05)


def test_the_pairs_are_the_policys_own_answers_labelled_with_some_noise(
    example: dict[str, Any], outcome: dict[str, Any]
) -> None:
    config = parse_config(
        load_recipe("flatpeak:reward_model_from_scratch", [f"task.path={outcome['root']}/pairs.jsonl"])
    )
    loaded = load_preferences(config.task)
    train, test = loaded.train, loaded.test
    pairs = [*train, *test]
    assert len(pairs) > 700
    assert not {pair.prompt for pair in train} & {pair.prompt for pair in test}
    gold = example["gold"]
    turned = [gold(p.chosen, p.prompt[:3]) < gold(p.rejected, p.prompt[:3]) for p in pairs]
    assert 0.06 < sum(turned) / len(turned) < 0.14


def test_the_reward_model_is_right_more_often_than_chance(outcome: dict[str, Any]) -> None:
    low, high = outcome["interval"]
    assert 0.5 < low < outcome["accuracy"] < high


def test_the_policy_climbs_the_reward_model_with_the_gold_score_in_view(outcome: dict[str, Any]) -> None:
    curves = outcome["curves"]["policy"]
    assert curves.steps == [0, 6, 12]
    assert abs(curves.gold[0]) < 0.4  # of the same policy whose answers made the scale
    assert curves.proxy[-1] > curves.proxy[0] + 0.4
    assert curves.gap == curves.proxy[-1] - curves.gold[-1]


def test_both_curves_are_in_the_metrics_of_every_step_and_on_the_page(outcome: dict[str, Any]) -> None:
    run = outcome["root"] / "policy"
    trained = [row for row in read_metrics(run / "metrics.jsonl") if row["stage"] == "train"]
    assert len(trained) == 12
    for row in trained:
        # The gold score has weight 0: it is seen and not paid for.
        assert row["reward/mean"] == pytest.approx(row["reward/preference"], abs=1e-5)
        assert -1 < row["reward/gold"] < 1
        assert row["reward/missing_fraction"] == 0
    page = (run / "report.html").read_text(encoding="utf-8")
    chart = page.partition("Over-optimization")[2].partition("</svg>")[0]
    assert ">preference</text>" in chart
    assert ">gold</text>" in chart
    assert (outcome["root"] / "rlhf.svg").stat().st_size > 1000


def test_the_recipes_say_where_the_stages_meet() -> None:
    policy, judge = (
        parse_config(load_recipe(f"flatpeak:{name}")) for name in ("rlhf_from_scratch", "reward_model_from_scratch")
    )
    assert isinstance(policy, RunConfig)
    assert policy.rewards["preference"].path == f"{judge.run.directory}/{judge.run.name}"  # type: ignore[union-attr]
    assert policy.rewards["gold"].weight == 0
    assert policy.evaluation.accuracy is None
