"""A checkpoint carries how it was asked, and a copy of it is asked so, without trusting where it comes from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from flatpeak.apps import chat
from flatpeak.apps.chat import Console, chat_loop
from flatpeak.apps.compare import compare_checkpoints
from flatpeak.apps.publish.export import export
from flatpeak.config.load import parse_config, read_recipe
from flatpeak.errors import UserError
from flatpeak.pipeline.model_source import locate_model, recipe_of
from flatpeak.pipeline.prompt_record import PROMPT_RECORD, hub_base, make_prompt_record, read_prompt_record, recipe_hash
from flatpeak.policy.config import ModelConfig
from flatpeak.rewards.config import RewardConfig
from flatpeak.runs.checkpoints import broken_file
from flatpeak.runs.summary import read_summary
from flatpeak.tasks.config import TaskConfig
from flatpeak.types import Completion, Prompt
from support.pushed_runs import PRINTED_KEY, STORED_KEY
from support.runs import tiny_recipe


@pytest.fixture
def copy(finished_run: Path, tmp_path: Path) -> Path:
    """The best checkpoint's files, outside the run, without what is the trainer's."""
    target = tmp_path / "copy"
    shutil.copytree(
        finished_run / "checkpoints" / "best", target, ignore=shutil.ignore_patterns("trainer", "manifest*")
    )
    return target


def config_of(**sections: Any) -> Any:
    return parse_config(tiny_recipe(Path("runs"), **sections))


def change(directory: Path, **values: Any) -> None:
    path = directory / PROMPT_RECORD
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def asked(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[Prompt, Any, list[str]]:
    """The prompt and the sampling of one question, and the notes around it."""
    calls: list[tuple[Prompt, Any]] = []
    notes: list[str] = []

    def reply(policy: Any, prompt: Prompt, *, sampling: Any, seed: int) -> Completion:
        calls.append((prompt, sampling))
        return Completion(token_ids=(3,), logprobs=(0.0,), finish_reason="stop", text="")

    monkeypatch.setattr(chat, "reply", reply)
    questions = iter(["2+2=", ""])
    chat_loop(
        str(path), console=Console(read=lambda _: next(questions), write=notes.append, note=notes.append), **settings
    )
    return *calls[0], notes


def test_every_checkpoint_says_how_it_was_asked_and_by_which_recipe(finished_run: Path) -> None:
    checkpoints = finished_run / "checkpoints"
    paths = [checkpoints / "sft" / "last", *(checkpoints / f"step_00000{step}" for step in range(4))]
    records = [json.loads((path / PROMPT_RECORD).read_text()) for path in paths]
    assert all(record == records[0] for record in records)
    record = records[0]
    assert (record["template"], record["stop"], record["system"]) == ("7*{question}", ["#"], None)
    assert Path(record["template_name"]).name == "ask.txt"
    assert record["sampling"] == {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 3}
    assert (record["task"], record["base_model"], record["objects"]) == ("arithmetic", None, [])
    resolved = yaml.safe_load((finished_run / "config.yaml").read_text())
    assert record["recipe_sha256"] == recipe_hash(resolved)
    assert all(broken_file(path) is None for path in paths)


def test_the_hash_of_a_recipe_is_that_of_its_settings_and_not_of_its_name() -> None:
    hashes = [
        recipe_hash(config_of(**sections).model_dump(mode="json"))
        for sections in ({}, {"run": {"name": "other"}}, {"run": {"seed": 1}}, {"training": {"steps": 3}})
    ]
    assert hashes[0] == hashes[1]
    assert len(set(hashes)) == 3


def test_a_copy_is_asked_in_a_chat_as_in_training(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, sampling, notes = asked(copy, monkeypatch)
    assert prompt.text == "7*2+2="
    assert (sampling.temperature, sampling.max_new_tokens, sampling.stop) == (0.0, 3, ("#",))
    assert notes[0].startswith("asked as in training: /")
    assert notes[0].endswith("ask.txt, each question by itself")
    assert any(note.startswith("try: ") for note in notes)
    (copy / PROMPT_RECORD).unlink()
    prompt, sampling, notes = asked(copy, monkeypatch)
    assert (prompt.text, sampling.temperature) == ("2+2=", 1.0)
    assert "is unknown" in notes[0] or notes[0].startswith("asked by plain")


def test_a_run_is_asked_by_its_template_though_the_file_is_gone(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert asked(finished_run, monkeypatch)[0].text == "7*2+2="
    assert asked(finished_run, monkeypatch, template="plain")[0].text == "2+2="


def test_a_record_asks_by_a_chat_template_as_its_recipe_did() -> None:
    prompt = {"template": "chat", "system": "Brief.", "user": "{question}\nAs JSON.", "chat_template_kwargs": {"a": 1}}
    config = parse_config(read_recipe({"model": {"path": "me/base"}, "task": {"type": "gsm8k"}, "prompt": prompt}))
    record = make_prompt_record(config, task="gsm8k")
    assert parse_config(read_recipe(record.recipe())).prompt == config.prompt


def test_a_copy_is_evaluated_as_its_run_was(copy: Path, finished_run: Path) -> None:
    summary = read_summary(finished_run / "summary.json")
    rows = [one for one in summary.evaluations if one.step == summary.best_step and one.stage == "train"]
    wanted = rows[-1] if rows else summary.evaluation("sft")
    assert wanted is not None
    comparison = compare_checkpoints([str(copy), str(finished_run)])
    for evaluation in comparison.evaluations:
        assert evaluation.metrics() == pytest.approx(dict(wanted.metrics))
        assert [row["text"] for row in evaluation.rows] == [row["text"] for row in comparison.evaluations[0].rows]
    assert list(comparison.notices) == []
    with pytest.raises(
        UserError, match=r"trained with prompt\.template=8\{question\}, but the first model's recipe asks with 7\*"
    ):
        change(copy, template="8{question}")
        compare_checkpoints([str(finished_run), str(copy)])


def test_a_copy_whose_grading_runs_code_leaves_the_task_to_whoever_evaluates_it(
    run_with_keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "copy"
    shutil.copytree(run_with_keys / "checkpoints" / "last", target)
    with pytest.raises(
        UserError, match=r"unknown \(rewards\.mine\.type=function is loaded for its own run only\): give --rec"
    ):
        compare_checkpoints([str(target)])
    assert asked(target, monkeypatch)[0].text == "2+2="
    assert "rewards" not in recipe_of(locate_model(str(target)))


@pytest.mark.parametrize(
    ("section", "unsafe"),
    [
        ({"task": {"type": "custom", "factory": "evil.py:task"}}, "task.type=custom"),
        (
            {"rewards": {"x": {"type": "judge", "backend": {"base_url": "http://a", "api_key_env": "K"}}}},
            "rewards.x.type=",
        ),
        ({"rewards": {"x": {"type": "reward_model", "path": "evil/model"}}}, "rewards.x.type=reward_model"),
        ({"rewards": {"x": {"type": "of a later version"}}}, "rewards.x.type=of a later version"),
        ({"task": None}, "task.type=None"),
        ({"tools": ["evil.py:f"]}, "tools=['evil.py:f']"),
        ({"environment": "evil.py:E"}, "environment=evil.py:E"),
        ({"task": {"type": ["gsm8k"]}}, "task.type=['gsm8k']"),
        ({"rewards": {"x": {"type": {}}}}, "rewards.x.type={}"),
        ({"task": {"type": "gsm8k", "path": "/etc"}}, "task.path=/etc"),
        ({"task": {"type": "math", "math500_path": "x.jsonl"}}, "task.math500_path=x.jsonl"),
        ({"task": {"type": "rows", "train": [{"hub": "me/rows"}, {"path": "a.csv"}]}}, "task.train.1.path=a.csv"),
        ({"task": {"type": "rows", "train": [{"hub": "../data"}]}}, "task.train.0.hub=../data"),
        ({"tasks": [{"task": {"type": "custom", "factory": "evil.py:task"}}]}, "tasks.0.task.type=custom"),
        ({"tasks": {"task": {"type": "gsm8k"}}}, "tasks.0.task.type=None"),
        ({"evaluation": {"sets": {"x": {"type": "custom", "factory": "evil.py:x"}}}}, "evaluation.sets.x.type=custom"),
        ({"evaluation": {"sets": {"x": {"type": "gsm8k", "path": "/etc"}}}}, "evaluation.sets.x.path=/etc"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_record_can_name_no_code_server_or_file(copy: Path, section: dict[str, Any], unsafe: str) -> None:
    evaluation = json.loads((copy / PROMPT_RECORD).read_text())["evaluation"]
    change(copy, evaluation=evaluation | section)
    record = read_prompt_record(copy)
    assert record is not None
    assert str(record.unsafe).startswith(unsafe)
    assert {"task", "tasks", "rewards"}.isdisjoint(record.recipe())
    assert "sets" not in record.recipe().get("evaluation", {})
    with pytest.raises(UserError, match=r"is loaded for its own run only\): give --recipe"):
        compare_checkpoints([str(copy)])


def test_a_copy_of_a_reward_model_is_not_said_to_have_a_task(copy: Path) -> None:
    change(copy, kind="reward_model", template=None, evaluation={})
    with pytest.raises(UserError, match="so the task is unknown: give --recipe"):
        compare_checkpoints([str(copy)])


def test_every_task_and_reward_that_runs_code_is_outside_the_safe_ones() -> None:
    from typing import get_args

    from flatpeak.pipeline.prompt_record import SAFE_REWARDS, SAFE_TASKS

    def types(union: Any) -> set[str]:
        return {one.model_fields["type"].default for one in get_args(get_args(union)[0])}

    assert types(TaskConfig) - SAFE_TASKS == {"custom", "preferences", "reasoning_gym"}
    assert types(RewardConfig) - SAFE_REWARDS == {"environment", "function", "judge", "reward_model", "reasoning_gym"}


@pytest.mark.parametrize("content", ["{", "[]", '{"flatpeak": 1}', '{"flatpeak": "0", "task": "x"}'])
def test_a_damaged_record_is_an_error_with_a_way_out(copy: Path, content: str) -> None:
    (copy / PROMPT_RECORD).write_text(content)
    with pytest.raises(
        UserError, match=r"flatpeak\.json: not the record of a checkpoint \(.*copy it again, or remove it"
    ):
        locate_model(str(copy))


def test_a_record_opens_no_file_as_a_template_and_keys_of_later_versions_are_passed_over(copy: Path) -> None:
    change(copy, of_a_later_version=[1])
    assert read_prompt_record(copy) is not None
    change(copy, template="/etc/passwd")
    with pytest.raises(UserError, match=r"its template has no \{question\}"):
        read_prompt_record(copy)


def test_a_record_holds_no_keys_and_the_objects_of_a_caller_are_named(run_with_keys: Path, tmp_path: Path) -> None:
    text = (run_with_keys / "checkpoints" / "last" / PROMPT_RECORD).read_text()
    assert STORED_KEY not in text
    assert PRINTED_KEY not in text
    assert text.count("[redacted]") == 2
    record = make_prompt_record(config_of(), task="sums", objects=("model", "reward"))
    assert (record.objects, record.base_model, record.unsafe) == (("model", "reward"), None, "a reward from Python")


def test_the_base_is_followed_through_checkpoints_to_the_hub(copy: Path, tmp_path: Path) -> None:
    assert hub_base(ModelConfig(path="me/base", revision="v1")) == ("me/base", "v1")
    assert hub_base(ModelConfig(path=str(copy))) == (None, None)
    change(copy, base_model="me/base", base_revision="v2")
    assert hub_base(ModelConfig(path=str(copy))) == ("me/base", "v2")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "me/other", "revision": None}))
    assert hub_base(ModelConfig(path=str(adapter))) == ("me/other", None)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "me/other/m.gguf"}))
    assert hub_base(ModelConfig(path=str(adapter))) == ("me/other", None)
    assert hub_base(ModelConfig(path="/nowhere/at/all")) == (None, None)
    assert hub_base(ModelConfig()) == (None, None)


def test_an_export_keeps_the_record(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dtype in (("copied", None), ("half", "bfloat16")):
        path = export(finished_run, tmp_path / name, dtype=dtype).path  # type: ignore[arg-type]
        record = read_prompt_record(path)
        assert record is not None
        assert record.dtype == (dtype or "float32")
        assert asked(path, monkeypatch)[0].text == "7*2+2="
