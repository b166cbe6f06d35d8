"""Whole runs of episodes: with tools or an environment, in worker processes, beside what else a recipe may ask for."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import flatpeak
from flatpeak.apps.compare import compare_checkpoints
from flatpeak.config.load import merge
from flatpeak.errors import UserError
from flatpeak.protocols import Sampler
from flatpeak.report.explain_group import explain
from flatpeak.report.page import write_report
from flatpeak.types import Completion, Group, Prompt, SamplingParams
from support import distributed_runs
from support.commands import command
from support.games import CHARACTERS, WON, WORDS, game, metrics_of, rows_of
from support.ranks import Ranks
from support.resumes import MakeRun, Whole, assert_same
from support.runs import Recipe, Train, quick_train, tiny_recipe

CODE = '''
from flatpeak.episodes.environments import Step


class Even:
    """Three actions, each of which earns 1 if it is of even length."""

    def reset(self, gold, seed):
        self.left = 3
        return f"{seed % 7}+{gold}="

    def step(self, action):
        self.left -= 1
        return Step(str(len(action)), reward=1.0 - len(action) % 2, done=self.left == 0)


class Sum:
    """Adds, and rewards the number of calls."""

    def reset(self, question):
        self.calls = 0

    def plus(self, a: int, b: int) -> int:
        """Add."""
        self.calls += 1
        return a + b

    def reward(self, episode):
        return float(self.calls) + len(episode.turns) / 10


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


def fail(a: int) -> int:
    """Fail."""
    raise ValueError("no " + str(a))


def no_tool(a):
    pass
'''
LONG = {"new": {"config": {"max_position_embeddings": 600}}}


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file with tools and environments."""
    path = tmp_path_factory.mktemp("code") / "acting.py"
    path.write_text(CODE)
    return str(path)


class Script(Sampler):
    """Writes the same turns in every episode: a list of texts, and the next one after each answer."""

    def __init__(self, policy: Any, turns: Sequence[str]) -> None:
        self.tokenizer, self.turns = policy.tokenizer, turns

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        """A completion per prompt, with an end token after all but calls."""
        return [Group(prompt=prompt, completions=(self._write(prompt),) * group_size) for prompt in prompts]

    def _write(self, prompt: Prompt) -> Completion:
        text = self.turns[int(prompt.id.rpartition(".")[2]) if "#" in prompt.id else 0]
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        ids = tuple(ids if text.endswith("</call>") else [*ids, self.tokenizer.eos_token_id])
        return Completion(token_ids=ids, logprobs=(-1.0,) * len(ids), finish_reason="stop", text=text)


Scripted = Callable[..., Path]


@pytest.fixture
def scripted(train: Train, recipe: Recipe) -> Scripted:
    """`scripted(turns, **sections)`: a run of one step whose episodes are all of these turns."""

    def run(*turns: str, tools: Any = None, environment: Any = None, **sections: Any) -> Path:
        base = {
            "model": {"new": CHARACTERS},
            "task": {"rationale": WORDS + "add fail plus error:"},
            "rollout": {"max_new_tokens": 80},
            "training": {"steps": 1},
        }
        config = recipe(**merge(base, sections))
        done = train(
            config,
            sampler=lambda policy: Script(policy, turns),
            tools=tools,
            environment=environment,
            progress=False,
        )
        assert done.exit_code == 0
        return Path(done.path)

    return run


def test_a_game_is_trained_on_what_the_policy_sampled_and_rewarded_by_its_environment(
    train: Train, recipe: Recipe, code: str
) -> None:
    run = Path(train(recipe(**game(code, evaluation={"every": 1, "size": 4, "samples": 2})), progress=False).path)
    rows = rows_of(run)
    assert len(rows) == 16
    for row in rows:
        assert len(row["trained"]) == len(row["token_ids"]) == len(row["logprobs"])
        assert sum(row["trained"]) == sum(turn["sampled"] for turn in row["turns"])
        assert len(row["trained"]) - sum(row["trained"]) == sum(turn["added"] for turn in row["turns"])
        assert [turn["answer"] for turn in row["turns"]] == [str(len(turn["text"])) for turn in row["turns"]]
        assert row["rewards"]["won"] == sum(len(turn["text"]) % 2 == 0 for turn in row["turns"])
        assert (row["stop_reason"], len(row["turns"])) == ("done", 3)
    assert len({row["reward"] for row in rows}) > 1
    first, second = metrics_of(run)
    assert (first["episodes/turns"], first["episodes/calls"], first["episodes/ended/done"]) == (3.0, 0.0, 1.0)
    assert first["episodes/added_tokens"] == sum(turn["added"] for row in rows for turn in row["turns"]) / 16
    assert first["rollout/length_mean"] == sum(sum(row["trained"]) for row in rows) / 16
    assert first["reward/won"] == first["reward/mean"] == sum(row["reward"] for row in rows) / 16
    assert first["policy/ratio_max_gap"] < 1e-4
    assert second["policy/grad_norm"] > 0
    evaluated = metrics_of(run, "eval")[-1]
    assert 0 <= evaluated["eval/arithmetic/sampled/won"] <= 3
    assert 3 <= evaluated["eval/arithmetic/length"] <= 12


def test_calls_answers_and_failures_of_a_run_with_tools_are_those_of_its_functions(
    scripted: Scripted, code: str
) -> None:
    turns = ("<call>add(a=2,b=5)</call>", "<call>fail(a=1)</call>", "<call>add(a=1,c=2)</call>", "<call>a(</call>", "7")
    run = scripted(*turns, tools=[f"{code}:add", f"{code}:fail"], rollout={"max_new_tokens": 500}, model=LONG)
    row = rows_of(run)[0]
    calls = [call for turn in row["turns"] for call in turn["calls"]]
    assert [(call["name"], call["failure"]) for call in calls] == [
        ("add", None),
        ("fail", "raised"),
        ("add", "bad_arguments"),
        ("", "malformed"),
    ]
    assert [call["answer"] for call in calls[:2]] == ["7", "error: ValueError: no 1"]
    assert calls[0]["arguments"] == {"a": 2, "b": 5}
    (step,) = metrics_of(run)
    assert {name: value for name, value in step.items() if name.startswith("episodes/")} == {
        "episodes/turns": 5.0,
        "episodes/calls": 4.0,
        "episodes/added_tokens": float(len(row["trained"]) - sum(row["trained"])),
        "episodes/failed/bad_arguments": 0.25,
        "episodes/failed/malformed": 0.25,
        "episodes/failed/raised": 0.25,
        "episodes/ended/answered": 1.0,
    }
    # Only the last turn is graded.
    assert [one["reward"] == 1.0 for one in rows_of(run)] == [one["gold"] == "7" for one in rows_of(run)]


def test_an_environment_with_tools_rewards_the_whole_episode(scripted: Scripted, code: str) -> None:
    call = "<call>plus(a=1,b=2)</call>"
    run = scripted(
        call,
        call,
        "3",
        environment=f"{code}:Sum",
        rollout={"max_new_tokens": 120},
        rewards={"calls": {"type": "environment"}, "correctness": {"type": "number"}},
    )
    rows = rows_of(run)
    assert {row["rewards"]["calls"] for row in rows} == {2.3}
    assert {row["turns"][1]["answer"] for row in rows} == {"3"}
    assert {row["stop_reason"] for row in rows} == {"answered"}


def test_functions_and_classes_of_a_module_are_named_in_the_run_s_recipe(
    scripted: Scripted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acting_module.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import acting_module  # type: ignore[import-not-found]

    run = scripted("<call>add(a=2,b=5)</call>", "7", tools=[acting_module.add], run={"name": "function"})
    assert rows_of(run)[0]["turns"][0]["answer"] == "7"
    assert "- acting_module:add\n" in (run / "config.yaml").read_text()
    run = scripted("1", "2", "3", environment=acting_module.Even, run={"name": "class"}, **WON)
    assert rows_of(run)[0]["reward"] == 0.0
    assert "environment: acting_module:Even\n" in (run / "config.yaml").read_text()
    sys.modules.pop("acting_module")


def test_what_no_process_can_import_is_refused_in_one_line(train: Train, recipe: Recipe, code: str) -> None:
    def local(a: int) -> int:
        return a

    class Local:
        def look(self) -> str:
            return ""

    refusals: list[dict[str, Any]] = [
        {"tools": [lambda a: a]},
        {"tools": [local]},
        {"environment": Local},
        {"tools": [f"{code}:no_tool"]},
        {"tools": [f"{code}:add"], "environment": f"{code}:Sum"},
    ]
    for given in refusals:
        with pytest.raises(UserError) as refused:
            train(recipe(), **given, progress=False)
        assert "\n" not in str(refused.value)
    assert not Path(recipe()["run"]["directory"]).exists()


def test_a_run_without_tools_has_no_rows_and_metrics_of_episodes(train: Train, recipe: Recipe) -> None:
    run = Path(train(recipe(training={"steps": 1}), progress=False).path)
    assert not {"turns", "trained", "stop_reason"} & set(rows_of(run)[0])
    assert [name for row in metrics_of(run) for name in row if name.startswith("episodes/")] == []
    assert "tools: []\nenvironment: null\n" in (run / "config.yaml").read_text()
    assert not (run / "calls").exists()


COMBINED: dict[str, dict[str, Any]] = {
    "gradient regularization": {"gradient_regularization": {"strength": 0.1}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "top_p and the correction": {"rollout": {"top_p": 0.9}, "objective": {"sampler_correction": {"type": "truncate"}}},
    "exact KL": {"kl": {"coefficient": 0.05, "estimator": "exact"}},
    "KL to go": {"kl": {"coefficient": 0.05, "placement": "reward_to_go"}},
    "sequence ratio": {"objective": {"ratio": "sequence", "normalization": "token_mean"}},
    "dynamic sampling": {"training": {"dynamic_sampling": {"max_resamples": 2}}},
    "minibatches of completions": {
        "training": {"minibatches": 2, "epochs_per_rollout": 2, "minibatch_of": "completions"}
    },
    "generate": {"rollout": {"engine": "generate"}},
}


@pytest.mark.parametrize("name", COMBINED)
def test_episodes_go_with_other_parts_of_a_recipe(train: Train, recipe: Recipe, code: str, name: str) -> None:
    run = Path(train(recipe(**game(code, **COMBINED[name])), progress=False).path)
    steps = metrics_of(run)
    assert [step["episodes/ended/done"] for step in steps] == [1.0, 1.0]
    assert all(step["policy/grad_norm"] > 0 for step in steps)
    if "bfloat16" not in name and "minibatches" not in name:  # bfloat16 rounds, and later updates are off the policy
        assert steps[0].get("policy/ratio_max_gap", 0.0) < 1e-4


SECTIONS: dict[str, dict[str, Any]] = {
    "game": {},
    "game in bfloat16 with a KL to go": {
        "model": {"dtype": "bfloat16"},
        "kl": {"coefficient": 0.05, "placement": "reward_to_go"},
    },
    "game with gradient regularization": {"gradient_regularization": {"strength": 0.1, "every": 2}},
}


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", SECTIONS)
def test_a_stopped_run_of_episodes_goes_on_bit_for_bit(make_run: MakeRun, whole: Whole, code: str, name: str) -> None:
    sections = game(code, training={"micro_batch_tokens": 200}, **SECTIONS[name])
    expected, run = whole(**sections), make_run(**sections)
    run.stop_at("train", 3)
    assert_same(run.go_on(), expected)


@pytest.fixture(scope="module")
def calculator(tmp_path_factory: pytest.TempPathFactory, code: str) -> Path:
    """A run that has learned from demonstrations to write calls."""
    config = tiny_recipe(
        tmp_path_factory.mktemp("runs"),
        run={"name": "calculator", "checkpoint_every": 1},
        model={"new": merge(CHARACTERS, {"config": {"hidden_size": 32, "num_hidden_layers": 1}})},
        task={"rationale": WORDS},
        tools=[f"{code}:add"],
        rollout={"max_new_tokens": 56},
        sft={"steps": 60, "batch_size": 16, "optimizer": {"learning_rate": 1e-2}},
        optimizer={"learning_rate": 1e-4},
        training={"steps": 1},
        evaluation={"every": 1, "size": 4},
    )
    return quick_train(config)


@pytest.mark.slow
def test_calls_are_learned_from_demonstrations_and_answered_in_rollouts(calculator: Path) -> None:
    answered = [turn for row in rows_of(calculator) for turn in row["turns"] if turn["answer"]]
    assert len(answered) > 10
    for turn in answered:
        (call,) = turn["calls"]
        if call["failure"] is None:
            assert turn["answer"] == str(sum(call["arguments"].values()))
    assert sum(turn["calls"][0]["failure"] is None for turn in answered) > 10


@pytest.mark.slow
def test_explain_and_the_report_read_a_run_of_episodes(calculator: Path) -> None:
    explained = explain(calculator, step=1).completions
    for one in explained:
        assert len(one.ratios) == len(one.tokens) == len(one.row["trained"])
        own = [ratio for ratio, sampled in zip(one.ratios, one.row["trained"], strict=True) if sampled]
        assert one.weight == pytest.approx(1 / (16 * len(own)))
        added = [ratio for ratio, sampled in zip(one.ratios, one.row["trained"], strict=True) if not sampled]
        assert set(added) <= {None}
    told = command("explain", str(calculator))
    assert (told.returncode, "step 1, group" in told.stdout) == (0, True)
    assert "episodes/turns" in write_report(calculator).read_text()


@pytest.mark.slow
def test_the_evaluation_of_a_checkpoint_calls_the_tools(calculator: Path) -> None:
    done = command("eval", str(calculator), "evaluation.size=4", "--json")
    assert done.returncode == 0, done.stderr
    (model,) = json.loads(done.stdout)["models"]
    own = metrics_of(calculator, "eval")[-1]
    for name in ("length", "reward", "truncated"):
        assert model["metrics"][name] == own[f"eval/arithmetic/{name}"]
    assert "-> " in (calculator / "evaluations" / "train_000001.jsonl").read_text()


@pytest.mark.slow
def test_a_model_is_evaluated_with_its_tools_wherever_it_is_asked(calculator: Path, tmp_path: Path) -> None:
    own = metrics_of(calculator, "eval")[-1]
    asked = flatpeak.evaluate(str(calculator), settings={"evaluation.final_size": 4}, progress=False)
    assert asked.metrics["length"] == own["eval/arithmetic/length"]
    bare = tmp_path / "bare"
    shutil.copytree(calculator / "checkpoints" / "last", bare)
    size = ["evaluation.final_size=4"]
    (elsewhere,) = compare_checkpoints([str(bare)], size, recipe=str(calculator / "config.yaml")).evaluations
    assert elsewhere.metrics()["length"] == own["eval/arithmetic/length"]
    plain = quick_train(tiny_recipe(tmp_path, run={"name": "plain"}, task={"rationale": WORDS}, training={"steps": 1}))
    with pytest.raises(UserError, match=r"calculator was trained with tools=.*, but the first model's recipe has \[\]"):
        compare_checkpoints([str(plain), str(calculator)])


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two gloo ranks."""
    both = Ranks()
    yield both
    both.close()


@pytest.mark.slow
def test_two_ranks_play_the_episodes_of_one_process(ranks: Ranks, code: str, tmp_path: Path) -> None:
    def of(name: str, processes: int) -> dict[str, Any]:
        base = distributed_runs.recipe(tmp_path, name, processes=processes, training={"steps": 2})
        return merge({**base, "rewards": {}}, game(code))

    assert distributed_runs.train(of("alone", 1))["code"] == 0
    done = ranks(distributed_runs.train, of("shared", 2))
    assert [one.get("code") for one in done] == [0, 0], done
    for step in (1, 2):
        alone, shared = rows_of(tmp_path / "alone", step), rows_of(tmp_path / "shared", step)
        assert len(alone) == 20
        for one, other in zip(alone, shared, strict=True):
            for what in ("prompt_token_ids", "token_ids", "turns", "trained", "stop_reason", "rewards"):
                assert one[what] == other[what]
    gap = distributed_runs.largest_gap(
        distributed_runs.weights(tmp_path / "alone"), distributed_runs.weights(tmp_path / "shared")
    )
    assert gap < 1e-3  # two steps of Adam from other roundings
