"""Bad input is one line that names the fix, and leaves nothing behind that stands in the way of the next try."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

import flatpeak
from flatpeak.errors import UserError
from flatpeak.pipeline import run_components, train_reward_model
from flatpeak.types import Example, Group
from support.commands import without
from support.reward_functions import asks_for_a_column, length, not_a_number, raises, wrong_length
from support.runs import Finished, MakeModel, Recipe, Train

pytestmark = pytest.mark.usefixtures("one_thread")

TEN = [{"question": f"{a}+{a}=", "answer": str(2 * a)} for a in range(10)]


@dataclass(frozen=True)
class Sums:
    """A task of the caller's own."""

    train: Sequence[Example] = field(
        default_factory=lambda: [Example(id=f"{a}", question=f"{a}+1=", gold=f"{a + 1}") for a in range(8)]
    )
    test: Sequence[Example] = (Example(id="t", question="9+0=", gold="9"),)
    name: str = "sums"


@pytest.fixture
def expect_refusal(recipe: Recipe, train: Train, tmp_path: Path) -> Callable[..., None]:
    """`expect_refusal(match, given, **sections)`: train raises one matching line and leaves no run directory."""

    def check(match: str, given: dict[str, Any] | None = None, **sections: Any) -> None:
        with pytest.raises(UserError, match=match) as caught:
            train(recipe(**sections), **(given or {}))
        assert "\n" not in str(caught.value)
        # A lock file may stay: deleting it could let two trainers lock two different files of the same name.
        assert {path.name for path in (tmp_path / "runs").rglob("*")} <= {"tiny", ".lock"}

    return check


def jsonl(path: Path, lines: Sequence[Any]) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def rows(path: str, **settings: Any) -> dict[str, Any]:
    return {"type": "rows", "train": [{"path": path}], "test_fraction": 0.3, **settings}


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"optimizer": {"lr": 1e-3}}, r"optimizer\.lr"),
        ({"rollout": {"groupsize": 4}}, r"rollout\.groupsize: did you mean rollout\.group_size"),
        ({"rolout": {}}, "rolout: did you mean rollout"),
        ({"rollout": {"group_size": 1}}, r"rollout\.group_size=1 .*advantage\.baseline"),
        ({"advantage": {"baseline": "none"}}, r"advantage\.scale=none"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, r"kl\.estimator=k1"),
        ({"training": {"minibatches": 9}}, r"training\.minibatches=9"),
        ({"evaluation": {"samples": 2, "k": [4]}}, r"evaluation\.samples"),
        ({"model": {"path": "somewhere"}}, r"model\.path .* model\.new"),
        ({"evaluation": {"accuracy": "corectness"}}, r"evaluation\.accuracy=corectness .*correctness"),
        ({"evaluation": {"metric": "acuracy"}}, r"evaluation\.metric=acuracy"),
        ({"evaluation": {"metric": "pass@2"}}, r"evaluation\.metric=pass@2"),
        ({"sft": {"steps": 2, "stop_at": 0.9, "check_size": 30}}, r"sft\.check_size"),
        ({"prompt": {"template": "chat"}}, "needs a tokenizer with a chat template"),
    ],
)
def test_a_recipe_that_cannot_work_names_its_keys(
    expect_refusal: Callable[..., None], sections: Any, match: str
) -> None:
    expect_refusal(match, **sections)


def test_the_accuracy_must_be_among_the_callers_rewards(expect_refusal: Callable[..., None]) -> None:
    expect_refusal("evaluation.accuracy=correctness", {"reward": {"short": length}})


def test_the_accuracy_must_be_among_the_rewards_of_the_first_task(expect_refusal: Callable[..., None]) -> None:
    first = {"task": {"type": "arithmetic", "train_size": 5, "test_size": 1}, "steps": 1}
    expect_refusal("evaluation.accuracy=correctness", curriculum={**first, "rewards": {"layout": {"type": "format"}}})


def test_a_data_file_that_is_missing(expect_refusal: Callable[..., None], tmp_path: Path) -> None:
    expect_refusal("nowhere.jsonl.*does not exist", task=rows(str(tmp_path / "nowhere.jsonl")))


def test_a_broken_row_is_named_by_its_line(expect_refusal: Callable[..., None], tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [*TEN[:3], '{"question": "1+1="', *TEN[3:]])
    expect_refusal(r"rows\.jsonl line 4: not valid JSON", task=rows(path))


def test_a_prompt_longer_than_the_context(expect_refusal: Callable[..., None], tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [*TEN, {"question": "1+" * 40 + "1=", "answer": "41"}])
    expect_refusal(r"1 of \d+ prompts exceed 60 tokens .*prompt\.overlong", task=rows(path))


def test_a_chat_prompt_without_a_chat_template(expect_refusal: Callable[..., None], make_tiny_model: MakeModel) -> None:
    model, tokenizer = make_tiny_model()
    expect_refusal("no chat template", {"model": model, "tokenizer": tokenizer}, prompt={"template": "chat"})


def test_sft_without_rationales(expect_refusal: Callable[..., None], tmp_path: Path) -> None:
    expect_refusal("sft.steps .*rationale", task=rows(jsonl(tmp_path / "rows.jsonl", TEN)), sft={"steps": 2})


def test_a_model_without_any_end_of_sequence(expect_refusal: Callable[..., None], make_tiny_model: MakeModel) -> None:
    model, tokenizer = make_tiny_model()
    tokenizer.eos_token = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    expect_refusal("end-of-sequence", {"model": model, "tokenizer": tokenizer})


def test_a_model_without_its_tokenizer(expect_refusal: Callable[..., None], make_tiny_model: MakeModel) -> None:
    expect_refusal("tokenizer", {"model": make_tiny_model()[0]})


def test_a_model_with_nothing_to_train(expect_refusal: Callable[..., None], make_tiny_model: MakeModel) -> None:
    model, tokenizer = make_tiny_model()
    expect_refusal("requires_grad", {"model": model.requires_grad_(False), "tokenizer": tokenizer})


@pytest.mark.parametrize(
    ("task", "match"),
    [
        (Sums(test=()), "test"),
        (Sums(train=()), "train"),
        (Sums(train=(Example(id="a", question="1+1=", gold="2"), Example(id="a", question="1+2=", gold="3"))), "'a'"),
    ],
)
def test_a_task_of_the_callers_is_checked(expect_refusal: Callable[..., None], task: Sums, match: str) -> None:
    expect_refusal(match, {"task": task})


def test_a_tokenizer_without_a_pad_token_just_works(recipe: Recipe, train: Train, make_tiny_model: MakeModel) -> None:
    for engine in ("native", "generate"):
        model, tokenizer = make_tiny_model()
        tokenizer.pad_token = None
        model.config.pad_token_id = model.generation_config.pad_token_id = None
        config = recipe(run={"name": engine}, rollout={"engine": engine})
        assert train(config, model=model, tokenizer=tokenizer).exit_code == 0


def no_grader(groups: Sequence[Group]) -> Any:
    """The protocol's Reward, without what majority votes need."""
    from flatpeak.types import Scores

    scores: Any = [[0.0] * len(group.completions) for group in groups]
    return Scores(total=scores, parts={"correctness": scores})


@pytest.mark.parametrize(
    ("reward", "match"),
    [
        (wrong_length, r"'wrong_length' returned \d+ scores for \d+ completions"),
        (not_a_number, "'not_a_number' returned float nan"),
        (raises, "failed on all .*KeyError"),
        (asks_for_a_column, "no such column"),
    ],
)
def test_a_reward_that_fails_at_its_first_call_leaves_nothing_in_the_way(
    expect_refusal: Callable[..., None], recipe: Recipe, train: Train, reward: Any, match: str
) -> None:
    expect_refusal(match, {"reward": reward})
    assert train(recipe(), reward=length).exit_code == 0


def test_a_reward_that_fails_later_leaves_the_run_to_be_resumed(recipe: Recipe, train: Train) -> None:
    calls = []

    def fails_at_the_third_call(completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return [1.0] * (len(completions) - (len(calls) == 3))

    config = recipe(run={"checkpoint_every": 1})
    with pytest.raises(UserError, match="scores for"):
        train(config, reward=fails_at_the_third_call)
    assert train(config, reward=fails_at_the_third_call, resume=True).summary.last_step == 2


def test_a_reward_that_tells_no_answers_lets_equal_texts_vote_together(recipe: Recipe, train: Train) -> None:
    assert train(recipe(evaluation={"samples": 2}), reward=no_grader).exit_code == 0


def test_a_run_name_that_exists_is_refused_and_left_alone(recipe: Recipe, train: Train, finished: Finished) -> None:
    first = finished(length)
    before = {path: path.read_bytes() for path in first.rglob("*") if path.is_file() and path.name != ".lock"}
    with pytest.raises(UserError, match=r"exists: continue it with resume=True, delete it with overwrite=True"):
        train(recipe(), reward=length)
    assert before == {path: path.read_bytes() for path in before}
    assert train(recipe(), reward=length, overwrite=True).exit_code == 0


def test_short_contexts_are_enough_for_the_start_up_test(recipe: Recipe, tmp_path: Path) -> None:
    # Learned positions end with the context: a probe that decodes beyond it would fail.
    gpt2 = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8}
    config = recipe(model={"new": {"architecture": "gpt2", "config": None}})
    config["model"]["new"]["config"] = gpt2
    assert flatpeak.train(config, reward=length).exit_code == 0


def test_the_command_line_says_a_bad_key_in_one_line_before_torch_is_imported(recipe: Recipe, tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe()))
    (done,) = without("torch", commands=[["train", "r.yaml", "optimizer.learning_rat=1e-3"]], cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "did you mean optimizer.learning_rate" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_completions_that_fill_the_context_are_refused_by_the_context_and_the_limit(
    expect_refusal: Callable[..., None],
) -> None:
    for limit in (64, 4000):
        expect_refusal(
            rf"^rollout\.max_new_tokens={limit} leaves no room for a prompt in the model's context of 64 tokens: lower",
            rollout={"max_new_tokens": limit},
        )
    expect_refusal(
        r"^evaluation\.max_new_tokens=64 leaves no room for a prompt in the model's context of 64 tokens: lower it",
        evaluation={"max_new_tokens": 64},
    )


@pytest.mark.parametrize(
    ("options", "sections", "says"),
    [
        ({}, {}, "exists: continue it with resume=True"),
        ({"resume": True, "overwrite": True}, {}, "give only one of them"),
        ({"resume": True}, {"optimizer": {"learning_rate": 0.5}}, "cannot resume with a changed recipe"),
    ],
)
def test_a_start_that_the_run_refuses_loads_neither_model_nor_task(
    recipe: Recipe,
    train: Train,
    finished: Finished,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    sections: dict[str, Any],
    says: str,
) -> None:
    finished(length, training={"steps": 1})
    monkeypatch.setattr(run_components, "build_components", lambda *args, **settings: pytest.fail("loaded"))
    monkeypatch.setattr(train_reward_model, "load_preferences", lambda task: pytest.fail("loaded"))
    changed = recipe(**{"training": {"steps": 1}, **sections})
    with pytest.raises(UserError, match=says):
        train(changed, reward=length, **options)
    with pytest.raises(UserError, match=says if not sections else "changed recipe"):
        pairs = {**changed, "task": {"type": "preferences", "path": "x.jsonl"}}
        flatpeak.train_reward_model(pairs, **options)


def test_the_command_refuses_a_start_before_torch_is_imported(
    recipe: Recipe, finished: Finished, tmp_path: Path
) -> None:
    finished(length, training={"steps": 1})
    (tmp_path / "r.yaml").write_text(yaml.safe_dump(recipe(training={"steps": 1})))
    started = (["train", "r.yaml"], ["train", "r.yaml", "--resume", "optimizer.learning_rate=0.5"])
    first, second = without("torch", commands=started, cwd=tmp_path)
    assert (first.returncode, second.returncode) == (2, 2)
    assert "exists: continue it with" in first.stderr
    assert "changed" in second.stderr
