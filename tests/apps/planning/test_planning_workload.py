"""The work of a planned run: rows, prompts, tokens, updates and micro-batches, counted or bounded and said so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatpeak.apps.planning.workload import ASSUMED_PROMPT, Workload, plan_workload
from flatpeak.errors import UserError
from support.plans import saved_model, sums_recipe


def work_of(**sections: Any) -> Workload:
    return plan_workload(sums_recipe(**sections))[0]


def test_a_step_is_counted_from_the_recipe_and_its_data() -> None:
    training = {"steps": 5, "epochs_per_rollout": 2, "minibatches": 3, "dynamic_sampling": {"max_resamples": 2}}
    work = work_of(training=training, sft={"steps": 7})
    assert (work.task, work.train_rows, work.test_rows) == ("arithmetic", 30, 6)
    assert work.prompt_lengths == (4, 4, 4, 4)  # "1+2=", a token per character
    assert (work.completions, work.new_tokens, work.step_tokens) == (16, 4, 3 * 16 * 4)
    assert (work.steps, work.updates, work.sft_steps) == (5, 30, 7)
    assert work.notes == ()


def test_an_evaluation_is_as_large_as_the_largest_one() -> None:
    evaluation = {"size": 2, "final_size": 5, "samples": 3, "max_new_tokens": 3}
    assert work_of(evaluation=evaluation).evaluation.prompt_lengths == (4,) * 5
    assert work_of(evaluation=evaluation).evaluation.group_size == 3
    assert work_of(evaluation=evaluation).evaluation.new_tokens == 3
    assert work_of().evaluation.prompt_lengths == (4,) * 6


def test_a_model_of_its_own_has_the_vocabulary_of_the_data() -> None:
    _, model = plan_workload(sums_recipe())
    assert model.vocabulary == len("0123456789+=") + 3


def test_data_that_are_not_at_hand_are_bounded_and_said_so(tmp_path: Path) -> None:
    sections = {"model": {"path": str(saved_model(tmp_path, max_position_embeddings=4096)), "new": None}}
    work = work_of(task={"type": "gsm8k"}, **sections)
    assert (work.train_rows, work.test_rows) == (None, None)
    assert work.prompt_lengths == (ASSUMED_PROMPT,) * 4
    assert "gsm8k are not on this machine" in work.notes[0]
    assert "set prompt.max_tokens" in work.notes[1]
    bounded = work_of(task={"type": "gsm8k"}, prompt={"max_tokens": 99}, **sections)
    assert bounded.prompt_lengths == (99,) * 4
    assert "(prompt.max_tokens)" in bounded.notes[1]


def test_data_that_a_call_from_python_gives_are_not_at_hand_either(tmp_path: Path) -> None:
    model = {"path": str(saved_model(tmp_path, max_position_embeddings=4096)), "new": None}
    work = work_of(task={"type": "rows"}, model=model)
    assert (work.train_rows, work.prompt_lengths) == (None, (ASSUMED_PROMPT,) * 4)


def test_the_context_bounds_prompts_that_are_not_at_hand(tmp_path: Path) -> None:
    model = {"path": str(saved_model(tmp_path, max_position_embeddings=64)), "new": None}
    assert work_of(task={"type": "gsm8k"}, model=model).prompt_lengths == (60,) * 4


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    task = {"type": "rows", "train": [{"path": str(tmp_path / "none.jsonl")}]}
    with pytest.raises(UserError, match=r"none\.jsonl: does not exist"):
        work_of(task=task)


def test_prompts_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(UserError, match="exceed 3 tokens"):
        work_of(prompt={"max_tokens": 3})
