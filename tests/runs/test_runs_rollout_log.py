import math

import pytest

from flatpeak.errors import UserError
from flatpeak.runs import rollout_log
from flatpeak.runs.rollout_log import (
    RolloutLog,
    answers_over_run,
    first_row,
    logged_steps,
    read_rollouts,
    truncate_rollouts,
    write_answers,
)
from flatpeak.types import Completion, Example, Group, Prompt, Scores


def group(name: str, texts: list[str]) -> Group:
    prompt = Prompt(
        id=name, token_ids=(5, 6), text=f"ask {name}", example=Example(id=name, question=name, gold=f"gold {name}")
    )
    completions = tuple(
        Completion(token_ids=(1, index), logprobs=(-0.5, -math.inf), finish_reason="stop", text=text)
        for index, text in enumerate(texts)
    )
    return Group(prompt=prompt, completions=completions)


SCORES = Scores(
    total=[[1.0, None], [0.0, 0.5]], parts={"right": [[1.0, None], [0.0, 0.0]], "layout": [[0.0, math.nan], [0.0, 1.0]]}
)


def test_a_row_says_all_that_decided_what_a_completion_did(tmp_path):
    groups = [group("a", ["x", "y"]), group("b", ["z", "w"])]
    RolloutLog(tmp_path).write(12, groups, SCORES, [[0.7, None], [-0.1, math.nan]])
    rows = read_rollouts(tmp_path / "step_000012.jsonl")
    assert len(rows) == 4
    assert rows[0] == {
        "group": "a",
        "index": 0,
        "prompt": "ask a",
        "prompt_token_ids": [5, 6],
        "text": "x",
        "token_ids": [1, 0],
        "logprobs": [-0.5, None],
        "finish_reason": "stop",
        "reward": 1.0,
        "rewards": {"right": 1.0, "layout": 0.0},
        "advantage": 0.7,
        "gold": "gold a",
    }
    missing = {"reward": None, "rewards": {"right": None, "layout": None}, "advantage": None}
    assert {key: rows[1][key] for key in missing} == missing
    assert [(row["group"], row["index"], row["reward"], row["advantage"]) for row in rows[2:]] == [
        ("b", 0, 0.0, -0.1),
        ("b", 1, 0.5, None),
    ]


def test_any_text_a_model_writes_survives(tmp_path):
    texts = ["line\nline\u2028line", "\ud800 lone surrogate \x00 日本"]
    RolloutLog(tmp_path).write(1, [group("a", texts)], Scores(total=[[0.0, 0.0]], parts={}), [[0.0, 0.0]])
    assert [row["text"] for row in read_rollouts(tmp_path / "step_000001.jsonl")] == texts


def test_a_full_disk_is_told_once_and_training_goes_on(tmp_path):
    messages: list[str] = []
    log = RolloutLog(tmp_path, notice=messages.append)
    for step in (1, 2):
        (tmp_path / f".tmp-step_{step:06d}.jsonl").symlink_to("/dev/full")
        log.write(step, [group("a", ["x" * 100_000])], Scores(total=[[0.0]], parts={}), [[0.0]])
    assert len(messages) == 1
    assert "No space left on device" in messages[0]
    assert list(tmp_path.iterdir()) == []


def test_secrets_are_not_logged(tmp_path):
    text = "my key is hf_ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    RolloutLog(tmp_path).write(1, [group("a", [text])], Scores(total=[[0.0]], parts={}), [[0.0]])
    assert read_rollouts(tmp_path / "step_000001.jsonl")[0]["text"] == "my key is [redacted]"


def test_answers_of_evaluations_lose_secrets_and_keep_scores_and_ordinary_texts(tmp_path):
    row = {"id": "1", "gold": "Secret: 24", "scores": {"password": 0.5}, "text": "Secret: 24", "samples": ["a"]}
    leaked = row | {"text": "hf_ABCDEFGHIJKLMNOPQRSTUVWXYZ", "samples": ["sk-abcdefghijklmn"]}
    write_answers(tmp_path / "evaluations" / "train_000001.jsonl", [row, leaked])
    assert read_rollouts(tmp_path / "evaluations" / "train_000001.jsonl") == [
        row,
        leaked | {"text": "[redacted]", "samples": ["[redacted]"]},
    ]


def test_the_answers_of_an_evaluation_are_searched_for_secrets_in_one_call(tmp_path, monkeypatch):
    calls = []

    def counted(value, **settings):
        calls.append(value)
        return value

    monkeypatch.setattr(rollout_log, "redact", counted)
    rows = [{"id": str(number), "text": "4", "rewards": {"secret": 1.0}, "reward": 1.0} for number in range(9)]
    write_answers(tmp_path / "train_000001.jsonl", rows)
    assert read_rollouts(tmp_path / "train_000001.jsonl") == rows
    assert len(calls) == 1


def test_later_steps_and_half_written_files_are_forgotten(tmp_path):
    for name in ("step_000001.jsonl", "step_000002.jsonl", "step_000010.jsonl", ".tmp-step_000011.jsonl", "notes.txt"):
        (tmp_path / name).write_text("")
    truncate_rollouts(tmp_path, step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", "step_000001.jsonl", "step_000002.jsonl"]
    assert logged_steps(tmp_path) == {1: tmp_path / "step_000001.jsonl", 2: tmp_path / "step_000002.jsonl"}


def test_rollouts_that_will_take_much_room_are_announced_once(tmp_path, monkeypatch):
    notices = []
    log = RolloutLog(tmp_path, notice=notices.append)
    log.announce_size(1, total=100, every=1)  # nothing is written yet
    log.write(2, [group("a", ["x", "y"])], Scores(total=[[1.0, 0.0]], parts={}), [[0.5, -0.5]])
    size = (tmp_path / "step_000002.jsonl").stat().st_size
    # Steps 2, 4, ..., 100 come to 50 files.
    monkeypatch.setattr(rollout_log, "LARGE", 50 * size)
    for step in (2, 4):
        log.announce_size(step, total=100, every=2)
    assert notices == [
        f"{tmp_path} may grow to {50 * size / 2**30:.1f} GiB by step 100: one step's rollouts take "
        f"{size / 2**20:.1f} MiB; run.log_rollouts_every=20 keeps a tenth of them"
    ]


def test_rollouts_that_take_little_room_are_not(tmp_path):
    notices = []
    log = RolloutLog(tmp_path, notice=notices.append)
    log.write(1, [group("a", ["x", "y"])], Scores(total=[[1.0, 0.0]], parts={}), [[0.5, -0.5]])
    log.announce_size(1, total=1000, every=1)
    assert notices == []


def test_the_first_row_is_read_without_the_others(tmp_path):
    (tmp_path / "step_000001.jsonl").write_text('{"prompt": "a"}\n{torn')
    assert first_row(tmp_path / "step_000001.jsonl") == {"prompt": "a"}


def test_a_file_that_is_cut_short_is_one_line_with_its_name(tmp_path):
    RolloutLog(tmp_path).write(12, [group("a", ["x", "y"]), group("b", ["z", "w"])], SCORES, [[0.7, None], [0.1, 0.2]])
    path = tmp_path / "step_000012.jsonl"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match=r"step_000012\.jsonl is incomplete \(.*\): choose another step") as error:
        read_rollouts(path)
    assert len(str(error.value).splitlines()) == 1


def test_answers_over_a_run_are_those_of_the_same_questions_in_each_evaluation(tmp_path):
    rows = [{"id": str(i), "question": f"{i}+1=", "gold": str(i + 1), "text": "?"} for i in range(5)]
    for name, text in (("start_000000", "?"), ("train_000002", "2"), ("train_000004", "1")):
        write_answers(tmp_path / f"{name}.jsonl", [row | {"text": text} for row in rows])
    stages = ["start_000000", "train_000002", "train_000004"]
    texts = [(rows[0]["question"], *(row["text"] for row in rows)) for rows in answers_over_run(tmp_path, stages)]
    assert texts == [(f"{i}+1=", "?", "2", "1") for i in range(3)]
    assert answers_over_run(tmp_path, []) == []
    assert answers_over_run(tmp_path, ["start_000000"]) == []
    assert answers_over_run(tmp_path, ["start_000000", "train_000006"]) == []
    (tmp_path / "train_000004.jsonl").write_text('{"id": "0", "te', encoding="utf-8")
    assert answers_over_run(tmp_path, stages) == []
