"""Digests of the files that a recipe names: which settings have them, and what changes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flatpeak
from flatpeak.config.load import parse_config
from flatpeak.pipeline.run_data import data_digests, make_prompts
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.runs.notices import read_notices
from flatpeak.types import Example
from support.runs import Watcher, speed_up_runs, tiny_recipe


def digests(**sections: Any) -> dict[str, str]:
    return data_digests(parse_config({"model": {"path": "x"}, **sections}))


def test_files_of_rows_rubrics_templates_and_arguments_have_a_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "held.jsonl", "rubric.yaml", "template.txt", "words.txt"):
        Path(name).write_text(name)
    judge = {
        "type": "judge",
        "rubric": "rubric.yaml",
        "backend": {"type": "endpoint", "base_url": "http://h", "model": "m"},
    }
    function = {"type": "function", "function": "f.py:f", "arguments": {"words": ["words.txt"], "n": 3, "none": "\0"}}
    found = digests(
        task={"type": "rows", "train": [{"path": "train.jsonl"}], "test": [{"path": "held.jsonl"}, {"hub": "a/b"}]},
        rewards={"judge": judge, "f": function, "correctness": {"type": "number"}},
        prompt={"template": "template.txt"},
    )
    assert sorted(found) == [
        "prompt.template",
        "rewards.f.arguments.words.0",
        "rewards.judge.rubric",
        "task.test.0.path",
        "task.train.0.path",
    ]
    assert len(set(found.values())) == 5
    assert all(len(digest) == 16 for digest in found.values())


def test_a_directory_of_data_has_one_digest_of_what_a_task_may_read_in_it(tmp_path: Path) -> None:
    for name in ("train.jsonl", "test/algebra/1.json", "runs/x/metrics.jsonl", "train.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    task = {"type": "math", "path": str(tmp_path)}
    before = digests(task=task)
    assert list(before) == ["task.path"]
    for name in ("runs/x/metrics.jsonl", "train.md"):
        (tmp_path / name).write_text("2")
    assert digests(task=task) == before
    (tmp_path / "test/algebra/1.json").write_text("2")
    assert digests(task=task) != before


def test_chat_messages_in_a_plain_prompt_are_told_of_where_the_model_has_a_chat_template(base: Path) -> None:
    messages = tuple({"role": role, "content": "1"} for role in ("user", "assistant", "user"))
    example = Example(id="e", question="1", gold="1", messages=messages)
    policy = load_policy(ModelConfig(path=str(base), device="cpu"))
    told = []
    for template in (None, "{{ messages }}"):
        policy.tokenizer.chat_template = template
        progress = Watcher()
        make_prompts(parse_config(tiny_recipe(base)), [example], policy, progress, split="train")
        told.append([text for text in progress.notices if "chat messages are written as plain text" in text])
    assert told[0] == []
    assert len(told[1]) == 1


def test_a_run_that_goes_on_with_another_file_of_data_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    speed_up_runs(monkeypatch)
    data, held_out = tmp_path / "d.jsonl", tmp_path / "held_out.jsonl"
    held_out.write_text(json.dumps({"question": "5 + 5 =", "answer": "10"}) + "\n")

    def write(shift: int) -> None:
        rows = [{"question": f"{n} + 1 =", "answer": str(n + shift)} for n in range(20)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def notices(steps: int) -> list[str]:
        recipe = tiny_recipe(tmp_path, run={"checkpoint_every": 1}, training={"steps": steps})
        recipe["task"] = {"type": "rows", "train": [{"path": str(data)}], "test": [{"path": str(held_out)}]}
        path = flatpeak.train(recipe, progress=False, resume=True).path
        return [row["text"] for row in read_notices(path / "notices.jsonl") if "has changed" in row["text"]]

    write(1)
    assert notices(1) == notices(2) == []
    write(2)
    changed = f"the data of task.train.0.path={data} has changed since the run was last started: what follows is "
    [text] = notices(3)
    assert text.startswith(f"{changed}another run than it was; put the data back, or give")
    manifest = json.loads((tmp_path / "tiny" / "manifest.json").read_text())
    kept = [start["data"]["task.train.0.path"] for start in (manifest, *manifest["resumed"])]
    assert kept[0] == kept[1] != kept[2]
