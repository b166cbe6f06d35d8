"""What a resumed run may change, and what its start records."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.kernels.native.build import UnavailableError, library_name
from flatpeak.pipeline.rollout_engines import PlainSampler
from flatpeak.report.page import shorten_hashes, write_report
from flatpeak.runs.manifest import check_resumable, describe_start
from support.runs import Recipe, Train

OLD = {"evaluation": {"every": 5}, "rewards": {"correctness": {"type": "number"}}, "curriculum": None}


def with_keys(**sections: Any) -> dict[str, Any]:
    return {name: {**content, **sections.get(name, {})} if content else content for name, content in OLD.items()}


@pytest.mark.parametrize(
    "new",
    [
        with_keys(evaluation={"choices": "rank"}),
        with_keys(evaluation={"every": 6}),
        with_keys(rewards={"extra": {"type": "number"}}),
        {**OLD, "curriculum": {"task": {"type": "arithmetic"}}},
        {**OLD, "evaluation": {}},
    ],
)
def test_what_was_changed_added_or_left_out_is_a_change(new: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot resume with a changed recipe"):
        check_resumable(OLD, new)


class OwnSampler(PlainSampler):
    """A sampler as a caller has one."""


def own_sampler(policy: Any) -> OwnSampler:
    return OwnSampler(policy, max_rows=8)


@pytest.mark.parametrize(
    ("rollout", "options", "decoder"),
    [
        ({"kernels": "native"}, {}, None),
        ({"kernels": "torch"}, {}, "torch"),
        ({"engine": "generate"}, {}, "generate"),
        ({}, {"sampler": own_sampler}, "OwnSampler"),
    ],
    ids=["native", "torch", "generate", "own"],
)
def test_the_manifest_and_the_report_name_what_draws_the_rollouts(
    rollout: Any, options: Any, decoder: str | None, recipe: Recipe, train: Train
) -> None:
    try:
        expected = decoder or library_name()
    except UnavailableError as error:
        pytest.skip(str(error))
    result = train(recipe(training={"steps": 1}, rollout=rollout), **options)
    assert json.loads((result.path / "manifest.json").read_text())["decoder"] == expected
    assert f"rollouts by {shorten_hashes(expected)}" in write_report(result.path).read_text()


def test_the_command_in_the_manifest_has_no_secret_values() -> None:
    start = describe_start(["flatpeak", "train", "rewards.f={arguments: {api_key: plain-value}}"])
    assert start["command"] == ["flatpeak", "train", "rewards.f={arguments: {api_key: [redacted]}}"]


@pytest.mark.parametrize(
    ("listed", "name"),
    [
        (
            "processor : 0\ncpu family : 25\nmodel : 17\nmodel name : AMD EPYC\n\nprocessor : 1\n",
            "AMD EPYC (family 25, model 17)",
        ),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nCPU part\t: 0xd0c\n", platform.processor() or platform.machine()),
    ],
)
def test_a_processor_is_named_with_its_generation(listed: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text
    given = lambda path, *how, **more: listed if path.name == "cpuinfo" else read_text(path, *how, **more)  # noqa: E731
    monkeypatch.setattr(Path, "read_text", given)
    assert describe_start([])["hardware"]["cpu"] == name


JUDGE = {"type": "judge", "rubric": "correctness", "timeout": 60.0, "budget": {"max_calls": 10}}


def judged(**changes: Any) -> dict[str, Any]:
    return {"rewards": {"judge": JUDGE | changes}}


@pytest.mark.parametrize(
    ("changes", "key"),
    [({"budget": {"max_calls": 20}}, "rewards.judge.budget.max_calls"), ({"timeout": 5.0}, "rewards.judge.timeout")],
)
def test_how_a_judge_is_asked_and_what_may_be_spent_can_change(changes: dict[str, Any], key: str) -> None:
    assert list(check_resumable(judged(), judged(**changes))) == [key]


def test_what_a_step_may_lose_to_hopeless_answers_can_change() -> None:
    changed = check_resumable({"run": {"grading_budget": 30.0}}, {"run": {"grading_budget": None}})
    assert changed == {"run.grading_budget": "30.0 -> None"}


@pytest.mark.parametrize("changes", [{"rubric": "weighted"}, {"weight": 2.0}, {"type": "math"}])
def test_what_its_scores_mean_cannot(changes: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="cannot resume with a changed recipe"):
        check_resumable(judged(), judged(**changes))
