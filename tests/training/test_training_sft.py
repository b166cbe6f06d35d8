"""Demonstrations: which of them fit, and how their tokens are weighted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flatpeak.distributed.ranks import ALONE
from flatpeak.errors import UserError
from flatpeak.training.config import SFTConfig
from flatpeak.training.curriculum import Stream
from flatpeak.training.sft import Demonstration, SFTTrainer, demonstration_batch, demonstrations
from flatpeak.types import Example
from support.models import LETTERS
from support.training import prompt, tiny_policy

Recipe = Callable[..., dict[str, Any]]


def demonstration(length: int) -> Demonstration:
    return Demonstration(prompt_ids=(3,), target_ids=(4,) * length)


def sums(rationales: list[str]) -> SimpleNamespace:
    """A task with these rationales; prompts of 4 tokens."""
    train = [Example(id=str(n), question=f"1+{n}=", gold="1", rationale=text) for n, text in enumerate(rationales)]
    return SimpleNamespace(name="sums", train=train, test=[Example(id="test", question="1+1=", gold="2")])


def test_those_that_do_not_fit_are_counted() -> None:
    prompts = [
        replace(one, example=replace(one.example, rationale=LETTERS[:length]))
        for one, length in ((prompt("a", [3, 4]), 3), (prompt("b", [3, 4]), 4), (prompt("c", [3]), 9))
    ]
    result, dropped = demonstrations(prompts, tiny_policy(), max_tokens=6)
    assert ([len(one.target_ids) for one in result], dropped) == ([4], 2)  # each with an end-of-sequence token
    assert len(demonstrations(prompts, tiny_policy(), max_tokens=None)[0]) == 3


def test_a_run_announces_the_demonstrations_that_it_drops(recipe: Recipe, train: Any, watch: Any) -> None:
    seen = watch()
    task = sums(["1", "2", "3" * 70, ""])
    train(recipe(sft={"steps": 1}, training={"steps": 0}), task=task, progress=seen)
    assert "sft: 3 of 4 training rows have a demonstration; the others are left out" in seen.notices
    assert (
        "sft: 1 of 3 demonstrations dropped: question and rationale exceed the model's context of 64 tokens"
        in seen.notices
    )


def test_no_demonstration_left_is_an_error_before_there_is_a_run(recipe: Recipe, train: Any, tmp_path: Any) -> None:
    with pytest.raises(UserError, match=r"none of the 2 demonstrations fits into the model's context of 64 tokens"):
        train(recipe(sft={"steps": 1}), task=sums(["1" * 70, "2" * 70]))
    assert not (tmp_path / "runs").exists()


def test_constant_divides_by_the_longest_demonstration_of_all_in_every_batch() -> None:
    items = [demonstration(length) for length in (2, 5, 10)]
    trainer = SFTTrainer(
        tiny_policy(),
        Stream(items=items, seed=0),
        config=SFTConfig(normalization="constant"),
        micro_batch_tokens=None,
        check=lambda: 0.0,
        sampler=SimpleNamespace(),  # type: ignore[arg-type]
        max_skipped_updates=10,
        recorder=SimpleNamespace(ranks=ALONE),  # type: ignore[arg-type]
    )
    assert trainer.longest == 10
    for drawn in (items[:2], items[1:]):
        batch = demonstration_batch(drawn, trainer.config, longest=trainer.longest, device=torch.device("cpu"))
        assert batch.weights_N.tolist() == pytest.approx([1 / 20, 1 / 20])


def test_longest_still_divides_by_the_longest_of_the_batch() -> None:
    batch = demonstration_batch(
        [demonstration(2), demonstration(5)], SFTConfig(normalization="longest"), device=torch.device("cpu")
    )
    assert batch.weights_N.tolist() == pytest.approx([1 / 10, 1 / 10])
