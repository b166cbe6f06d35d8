"""Credit by turn in runs: the rewards of a game's steps, what is logged of them, and what is learned from them."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytest
from rich.console import Console

from flatpeak.config.algorithm_name import algorithm_name
from flatpeak.config.load import merge
from flatpeak.config.run_config import RunConfig
from flatpeak.episodes.environments import EnvironmentHost, make_environment
from flatpeak.errors import UserError
from flatpeak.pipeline.samplers import acting
from flatpeak.policy.model import Policy
from flatpeak.protocols import Sampler
from flatpeak.report.explain_group import explain, render
from flatpeak.report.page import write_report
from flatpeak.rewards.workers.pool import WorkerPool
from flatpeak.runs.rollout_log import turn_rewards
from support import distributed_runs
from support.episodes import LocalHost, Scripted, asked, draw, sampler_of
from support.games import game, metrics_of, rows_of
from support.ranks import Ranks
from support.resumes import EVERYTHING, assert_same, outcome
from support.runs import Recipe, Send, Train, Watcher, quick_train, tiny_recipe

CODE = '''
from zlib import crc32

from flatpeak.episodes.environments import Step


class Even:
    """Up to three actions, each of which earns 1 if it is of even length; an a ends the game, None after a b."""

    def reset(self, gold, seed):
        self.left = 3
        return f"{seed % 7}+{gold}="

    def step(self, action):
        if action == "crash":
            raise RuntimeError("flipped")
        self.left -= 1
        reward = None if "b" in action else 1.0 - len(action) % 2
        return Step(str(len(action)), reward=reward, done=self.left == 0 or "a" in action)


class Noisy:
    """The first action earns a large reward by chance, the second one 1 if it begins with a late letter."""

    def reset(self, gold, seed):
        self.first = True
        return f"{seed % 7}+{gold}="

    def step(self, action):
        if not self.first:
            return "", float(action[:1] > "a"), True
        self.first = False
        return "go", 8.0 * (crc32(action.encode()) % 2), False


class Judged(Even):
    def reward(self):
        return 1.0


class Sum:
    def plus(self, a: int, b: int) -> int:
        """Add."""
        return a + b

    def reward(self):
        return 1.0
'''


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with environments."""
    path = tmp_path_factory.mktemp("code") / "playing.py"
    path.write_text(CODE)
    return str(path)


def credited(code: str, name: str = "Even", **sections: Any) -> dict[str, Any]:
    """The sections of a game with credit by turn."""
    return merge(game(code, name, advantage={"credit": "turn"}), sections)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, timeout=60) as pool:
        yield pool


def test_a_turn_has_the_reward_of_its_step_and_none_where_no_step_gave_one(code: str, pool: WorkerPool) -> None:
    scripts = [("cc", "c", "dd"), ("bb", "cc", "c"), ("cc", "crash", ""), ("cca", "", "")]

    def write(name: str, index: int) -> str:
        _, _, place = name.partition("#")
        number, _, turn = place.partition(".")
        return scripts[int(number) if place else index][int(turn or 0)]

    host = EnvironmentHost(make_environment(environment=f"{code}:Even"), pool, call_timeout=60)
    (group,) = draw(sampler_of(Scripted(write), host), [asked("a")], group_size=4)
    rewards = [[turn.reward for turn in episode.turns] for episode in group.completions]
    assert rewards == [[1.0, 0.0, 1.0], [None, 1.0, 0.0], [1.0, None], [0.0]]
    assert [episode.reward for episode in group.completions] == [2.0, 1.0, None, 0.0]
    assert [episode.stop_reason for episode in group.completions] == ["done", "done", "failed", "done"]

    # The last action of max_turns counts; a limit of tokens leaves the last turn without a step.
    limited = sampler_of(Scripted(write), host, max_turns=2)
    (group,) = draw(limited, [asked("a")], group_size=1)
    assert [turn.reward for turn in group.completions[0].turns] == [1.0, 0.0]
    (group,) = draw(sampler_of(Scripted(write), host), [asked("a")], group_size=1, max_new_tokens=22)
    assert group.completions[0].stop_reason == "max_tokens"
    assert [turn.reward for turn in group.completions[0].turns] == [1.0, None]


def test_calls_of_tools_have_no_rewards() -> None:
    scripted = Scripted(lambda name, index: "7" if "#" in name else "<call>add(x=2)</call>")
    ((episode,),) = [
        group.completions for group in draw(sampler_of(scripted, LocalHost(lambda call: "2")), [asked("a")])
    ]
    assert [turn.reward for turn in episode.turns] == [None, None]


def expected_advantages(rows: list[dict[str, Any]]) -> list[float]:
    """The mean over its sampled tokens of each episode's advantages, of a group whose total is the sum of its steps."""
    returns = [
        [sum(turn["reward"] or 0 for turn in row["turns"][place:]) for place in range(len(row["turns"]))]
        for row in rows
    ]
    means = []
    for row, own in zip(rows, returns, strict=True):
        weighted = 0.0
        for place, turn in enumerate(row["turns"]):
            peers = [other[place] for other in returns if len(other) > place]
            if len(set(peers)) > 1:
                weighted += turn["sampled"] * (own[place] - mean(peers)) / (stdev(peers) + 1e-6)
        means.append(weighted / sum(row["trained"]))
    return means


def test_a_run_learns_from_the_returns_of_turns_and_shows_their_rewards(
    train: Train, recipe: Recipe, code: str
) -> None:
    run = Path(train(recipe(**credited(code)), progress=False).path)
    for step in (1, 2):
        rows = rows_of(run, step)
        groups = {row["group"]: [one for one in rows if one["group"] == row["group"]] for row in rows}
        for group in groups.values():
            assert [row["advantage"] for row in group] == pytest.approx(expected_advantages(group), abs=1e-5)
        for row in rows:
            for turn in row["turns"]:
                assert turn["reward"] == (None if "b" in turn["text"] else 1.0 - len(turn["text"]) % 2)
            assert row["reward"] == sum(turn["reward"] or 0.0 for turn in row["turns"])
    rows = [*rows_of(run, 1), *rows_of(run, 2)]
    assert len({len(row["turns"]) for row in rows}) > 1
    assert any(turn["reward"] is None for row in rows for turn in row["turns"])
    assert all(step["policy/grad_norm"] > 0 for step in metrics_of(run))

    explained = explain(run, step=1)
    console = Console(width=200, file=None, force_terminal=False)
    with console.capture() as capture:
        console.print(render(explained))
    text = capture.get()
    assert "baseline mean, scale std, for each turn" in text
    shown = turn_rewards(explained.completions[0].row)
    assert shown.count(",") == len(explained.completions[0].row["turns"]) - 1
    assert shown in text
    assert f"rewards of turns {shown}" in write_report(run).read_text()


def test_rows_of_older_files_have_no_rewards_of_turns() -> None:
    assert turn_rewards({"turns": [{"sampled": 1, "added": 0, "text": "", "calls": [], "answer": ""}]}) == ""
    assert turn_rewards({"text": "no episode"}) == ""
    assert turn_rewards({"turns": [{"reward": 0.0}, {"reward": None}, {"reward": 1 / 3}]}) == "0, none, 0.3333"


def test_credit_by_episode_is_the_default_and_logs_the_rewards_of_turns_too(
    train: Train, recipe: Recipe, code: str
) -> None:
    by_default = credited(code)
    del by_default["advantage"]
    runs = {}
    for name, sections in (("default", by_default), ("episode", credited(code, advantage={"credit": "episode"}))):
        config = recipe(**merge(sections, {"run": {"name": name}, "training": {"steps": 1}}))
        runs[name] = rows_of(Path(train(config, progress=False).path))
    assert runs["default"] == runs["episode"]
    group = [row for row in runs["default"] if row["group"] == runs["default"][0]["group"]]
    rewards = [row["reward"] for row in group]
    spread = stdev(rewards) + 1e-6 if len(set(rewards)) > 1 else 1.0
    assert [row["advantage"] for row in group] == pytest.approx([(one - mean(rewards)) / spread for one in rewards])
    assert any(turn["reward"] == 1.0 for row in group for turn in row["turns"])


COMBINED: dict[str, dict[str, Any]] = {
    "gradient regularization": {"gradient_regularization": {"strength": 0.1}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "top_p and the correction": {"rollout": {"top_p": 0.9}, "objective": {"sampler_correction": {"type": "truncate"}}},
    "exact KL of informative groups": {"kl": {"coefficient": 0.05, "estimator": "exact", "groups": "informative"}},
    "KL in the reward": {"kl": {"coefficient": 0.05, "placement": "reward"}},
    "KL to go and whitening": {
        "kl": {"coefficient": 0.05, "placement": "reward_to_go"},
        "advantage": {"baseline": "none", "scale": "none", "whiten": "tokens"},
    },
    "dynamic sampling": {"training": {"dynamic_sampling": {"max_resamples": 2}}},
    "minibatches of completions": {
        "training": {"minibatches": 2, "epochs_per_rollout": 2, "minibatch_of": "completions", "micro_batch_tokens": 60}
    },
    "generate": {"rollout": {"engine": "generate"}},
    "token weights": {"objective": {"token_weights": {"function": "off_policy_mask"}}},
    "sharpness": {"evaluation": {"every": 2, "size": 2, "sharpness": {"size": 2, "samples": 3, "eigenvalue": True}}},
    **{
        loss: {"objective": {"loss": loss, "normalization": "token_mean"}}
        for loss in ("policy_gradient", "truncated_policy_gradient", "sapo", "vespo", "topr", "dppo_tv")
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMBINED)
def test_credit_by_turn_goes_with_other_parts_of_a_recipe(train: Train, recipe: Recipe, code: str, name: str) -> None:
    run = Path(train(recipe(**credited(code, **COMBINED[name])), progress=False).path)
    steps = metrics_of(run)
    assert [step["episodes/ended/done"] for step in steps] == [1.0, 1.0]
    assert all(step["policy/grad_norm"] > 0 for step in steps)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stopped_run_with_credit_by_turn_goes_on_bit_for_bit(
    train: Train, recipe: Recipe, send: Send, code: str, dtype: str
) -> None:
    sections = merge(EVERYTHING, credited(code, training={"micro_batch_tokens": 200}, model={"dtype": dtype}))
    whole, stopped = (recipe(**merge(sections, {"run": {"name": name}})) for name in ("whole", "stopped"))
    expected = outcome(Path(train(whole, progress=Watcher()).path))
    at_step = Watcher({("train", 3): send(signal.SIGTERM)})
    assert train(stopped, progress=at_step).exit_code == 128 + signal.SIGTERM
    assert_same(outcome(Path(train(stopped, progress=Watcher(), resume=True).path)), expected)


@pytest.mark.slow
def test_two_ranks_credit_turns_as_one_process_does(code: str, tmp_path: Path) -> None:
    def of(name: str, processes: int) -> dict[str, Any]:
        base = distributed_runs.recipe(tmp_path, name, processes=processes, training={"steps": 1})
        return merge({**base, "rewards": {}}, credited(code))

    ranks = Ranks()
    try:
        assert distributed_runs.train(of("alone", 1))["code"] == 0
        done = ranks(distributed_runs.train, of("shared", 2))
        assert [one.get("code") for one in done] == [0, 0], done
    finally:
        ranks.close()
    alone, shared = rows_of(tmp_path / "alone"), rows_of(tmp_path / "shared")
    assert [row["turns"] for row in alone] == [row["turns"] for row in shared]
    assert [row["advantage"] for row in alone] == [row["advantage"] for row in shared]
    group = [row for row in shared if row["group"] == shared[0]["group"]]
    assert [row["advantage"] for row in group] == pytest.approx(expected_advantages(group), abs=1e-5)


@pytest.mark.slow
def test_a_second_turn_is_learned_beside_a_first_one_of_large_rewards_by_chance(tmp_path: Path, code: str) -> None:
    share: dict[str, list[float]] = {"turn": [], "episode": []}
    for credit, shares in share.items():
        for seed in (0, 1):
            sections = credited(
                code, "Noisy", advantage={"credit": credit, "scale": "none"}, episodes={"max_tokens": 2}
            )
            config = tiny_recipe(
                tmp_path,
                **merge(
                    sections,
                    {
                        "run": {"name": f"{credit}{seed}", "seed": seed},
                        "rollout": {"prompts_per_step": 8, "group_size": 8},
                        "optimizer": {"learning_rate": 2e-2},
                        "training": {"steps": 30},
                    },
                ),
            )
            rows = rows_of(quick_train(config), 30)
            shares.append(mean(row["turns"][1]["reward"] for row in rows))
    assert mean(share["turn"]) > 0.6 > 0.4 > mean(share["episode"])


def test_an_algorithm_with_credit_by_turn_is_called_so(code: str) -> None:
    sections = {**credited(code), "model": {"path": "somewhere"}}
    del sections["task"]
    assert algorithm_name(RunConfig(**sections)) == "GRPO with credit by turn"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Judged", r"playing.py:Judged has a reward\(\), which replaces the rewards of its turns"),
        ("Sum", r"playing.py:Sum has no step\(\)"),
    ],
)
def test_environments_without_rewards_of_turns_are_refused(code: str, name: str, says: str) -> None:
    sections = {**credited(code, name), "model": {"path": "somewhere"}}
    del sections["task"]
    policy: Any = Policy
    with pytest.raises(UserError, match=rf"^advantage\.credit=turn: .*{says}; set advantage\.credit=episode$"):
        acting(RunConfig(**sections), Sampler(), policy)


def test_a_reward_of_the_caller_s_is_refused(train: Train, recipe: Recipe, code: str) -> None:
    with pytest.raises(UserError, match=r"^advantage\.credit=turn with a reward from Python, which replaces"):
        train(recipe(**credited(code)), reward=lambda completions: [0.0] * len(completions), progress=False)
