"""Whole runs with a judge behind HTTP."""

from __future__ import annotations

import json
import os
import signal
import threading

import pytest

from flatpeak.config.load import parse_config
from flatpeak.errors import UserError
from flatpeak.rewards.judge.rate_limits import JudgeDownError
from flatpeak.runs.checkpoints import newest_valid
from support.judge_server import JudgeServer, error
from support.runs import Watcher


def judged(url, **fields):
    backend = {"type": "endpoint", "base_url": url, "model": "judge-1"}
    judge = {"type": "judge", "backend": backend, "canaries": {"enabled": False}, **fields}
    return {"judge": judge, "correctness": {"type": "number", "weight": 0.0}}


def test_a_run_learns_from_a_judge_whose_server_fails_now_and_then(recipe, train):
    def shaky(earlier, body):
        return error(500) if earlier == 0 and len(server.requests) % 3 == 0 else None

    with JudgeServer(shaky) as server:
        result = train(recipe(rewards=judged(server.url), run={"name": "judged"}))
        assert len(server.requests) > 4
    rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["stage"] == "train"]
    assert len(steps) == 2
    for row in steps:
        assert row["reward/mean"] == row["reward/judge"]
        assert row["reward/missing_fraction"] == 0.0


def test_a_judge_that_goes_down_stops_the_run_which_goes_on_once_it_is_back(recipe, train, tmp_path, endpoint_limits):
    endpoint_limits(failures=2)
    with JudgeServer(lambda earlier, body: error(503) if len(server.requests) > 12 else None) as server:
        settings = recipe(rewards=judged(server.url, give_up=0.2, retries=50), run={"name": "down"})
        with pytest.raises(JudgeDownError, match=r"has not answered .*503.*resume the run"):
            train(settings)
        assert newest_valid(tmp_path / "runs" / "down" / "checkpoints", notice=print) is not None
        server.script = lambda earlier, body: None
        result = train(settings, resume=True)
    assert (result.exit_code, result.summary.status, result.summary.last_step) == (0, "done", 2)


def test_a_run_has_the_judges_figures_transcripts_and_distance_from_the_truth(recipe, train):
    with JudgeServer(lambda earlier, body: None) as server:
        result = train(recipe(rewards=judged(server.url, shadow="correctness"), run={"name": "figures"}))
    rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["stage"] == "train"]
    assert len(steps) == 2
    for row in steps:
        assert row["judge/valid_fraction"] == 1.0
        gap = row["reward/judge"] - row["reward/correctness"]
        assert row["judge/shadow_gap"] == pytest.approx(gap)
    lines = (result.path / "judge" / "judge.jsonl").read_text().splitlines()
    assert len(lines) >= sum(row["judge/calls"] for row in steps) > 0


@pytest.mark.slow
def test_what_the_step_before_left_is_saved_when_a_judge_goes_down_in_the_middle(
    recipe, train, tmp_path, endpoint_limits
):
    """The run that goes on ends as one that was never interrupted."""
    endpoint_limits(failures=2)
    settings = {"training": {"steps": 4}, "run": {"checkpoint_every": 0}}
    with JudgeServer(lambda earlier, body: None) as server:
        rewards = judged(server.url, give_up=0.2, retries=50)
        whole = train(recipe(**settings | {"rewards": rewards, "run": {"name": "whole", "checkpoint_every": 0}}))
        broken = recipe(**settings | {"rewards": rewards, "run": {"name": "broken", "checkpoint_every": 0}})
        watch = Watcher({("train", 2): lambda: setattr(server, "script", lambda earlier, body: error(503))})
        with pytest.raises(JudgeDownError):
            train(broken, progress=watch)
        actual = newest_valid(tmp_path / "runs" / "broken" / "checkpoints", notice=print)
        assert actual is not None
        assert actual.name == "step_000002"
        assert json.loads((tmp_path / "runs" / "broken" / "summary.json").read_text())["status"] == "failed"
        server.script = lambda earlier, body: None
        result = train(broken, resume=True)
    assert result.summary.last_step == 4
    name = "checkpoints/step_000004/model.safetensors"
    assert (result.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_signal_while_a_judge_is_waited_for_stops_the_run_at_the_step_before(
    recipe, train, tmp_path, endpoint_limits
):
    endpoint_limits(first_delay=5.0)
    sent = []

    def slow(earlier, body):
        if not sent:  # a second one would end the process at once
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        return error(503)

    with JudgeServer(lambda earlier, body: None) as server:
        rewards = judged(server.url, retries=50)
        settings = recipe(rewards=rewards, training={"steps": 4}, run={"name": "asked", "checkpoint_every": 0})
        watch = Watcher({("train", 2): lambda: setattr(server, "script", slow)})
        result = train(settings, progress=watch)
    assert result.exit_code == 143
    assert (result.summary.status, result.summary.last_step) == ("stopped", 2)


@pytest.mark.slow
def test_a_budget_is_one_for_the_whole_run_however_often_it_is_resumed(recipe, train, tmp_path, without_valid_fraction):
    def spent():
        return json.loads((tmp_path / "runs" / "budgeted" / "judge" / "judge.spent.json").read_text())

    with JudgeServer(lambda earlier, body: None) as server:
        rewards = judged(server.url, budget={"max_calls": 10_000})
        settings = recipe(rewards=rewards, training={"steps": 4}, run={"name": "budgeted", "checkpoint_every": 0})
        stop = Watcher({("train", 2): lambda: os.kill(os.getpid(), signal.SIGTERM)})
        assert train(settings, progress=stop).exit_code == 143
        first = len(server.requests)
        assert spent()["calls"] >= first > 10  # a retry that never arrived counts too
        train(settings, resume=True)
        assert spent()["calls"] >= len(server.requests) > first
        (tmp_path / "runs" / "budgeted" / "judge" / "judge.spent.json").write_text('{"calls": 10000, "cost": 0}')
        before = len(server.requests)
        watch = Watcher()
        train(settings | {"training": {"steps": 5}}, resume=True, progress=watch)
        assert len(server.requests) - before == 2  # a right and a wrong answer before it goes on, and nothing more
    assert watch.values("reward/missing_fraction")[0] > 0.5  # all but what is 0 by rule
    assert any("budget is spent" in notice for notice in watch.notices)


def test_a_judge_that_canaries_fool_is_refused_before_a_run_begins(recipe, train, tmp_path):
    rewards = {
        "judge": {
            "type": "judge",
            "output": "json",
            "backend": {"type": "custom", "factory": "support.judges:gullible"},
        },
        "correctness": {"type": "number", "weight": 0.0},
    }
    before = threading.active_count()
    with pytest.raises(UserError, match="worthless answers"):
        train(recipe(rewards=rewards, run={"name": "fooled"}))
    assert threading.active_count() <= before
    assert [path.name for path in (tmp_path / "runs" / "fooled").iterdir()] == [".lock"]


def test_a_shadow_has_to_be_another_reward():
    rewards = judged("http://localhost:1/v1", shadow="truth")
    with pytest.raises(UserError, match=r"shadow=truth: name another reward \(correctness\)"):
        parse_config({"rewards": rewards})
