"""Workloads that do not change between measurements, and the passes and rollouts timed on them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.cpu.mixed_lengths_worker import prompts, sample, train
from benchmarks.cpu.training_pass_worker import METHODS, SHAPES, random_batch
from benchmarks.harness.models import load_model, load_tokenizer, save_model
from benchmarks.harness.workloads import (
    EOS,
    FIRST_WORD,
    LENGTHS,
    prompt_ids,
    workload,
)

from flatpeak.policy.model import Policy


@pytest.mark.parametrize("lengths", LENGTHS)
def test_prompts_keep_to_their_lengths_and_vocabulary(lengths: str) -> None:
    work = workload("1M", lengths)
    prompts = [prompt for step in range(20) for prompt in prompt_ids(work, step)]
    assert len(prompts) == 20 * 8
    limits = work.limits
    assert min(map(len, prompts)) == limits.shortest_prompt
    assert max(map(len, prompts)) == limits.longest_prompt
    assert min(map(min, prompts)) >= FIRST_WORD
    assert max(map(max, prompts)) < limits.vocabulary


def test_prompts_are_the_same_in_every_process_and_differ_between_steps() -> None:
    work = workload("7M", "skewed")
    assert prompt_ids(work, 3) == prompt_ids(work, 3)
    assert prompt_ids(work, 3) != prompt_ids(work, 4)
    # So that a change of the words, which all results depend on, is a decision.
    assert prompt_ids(work, 0)[0][:4] == [18, 92, 23, 8]


def test_tokens_count_up_to_the_first_end_of_sequence() -> None:
    work = workload("1M", "skewed")
    assert work.useful_tokens([5, 6, EOS, 0, 0, EOS]) == 3
    assert work.useful_tokens([EOS, 7]) == 1
    assert work.useful_tokens([5, 6, 7]) == 3


@pytest.mark.parametrize("shape", SHAPES)
def test_all_ways_to_train_give_the_same_log_probabilities(shape: str, tmp_path: Path) -> None:
    work = workload("1M", "uniform, long prompts", prompts=4)
    save_model(work, tmp_path)
    policy = Policy(load_model(tmp_path), load_tokenizer(tmp_path))
    batch = random_batch(work, SHAPES[shape])
    assert {len(prompt) for prompt in batch.prompts} == {SHAPES[shape].prompt}
    with torch.no_grad():
        scores = {name: logprobs(policy, batch) for name, logprobs in METHODS.items()}
    assert scores["padded"].shape == batch.tokens_T.shape
    assert float(scores["padded"].mean()) == pytest.approx(-6.24, abs=0.1)  # -log 512, a random token of a random model
    for name in ("shared", "packed"):
        torch.testing.assert_close(scores[name], scores["padded"], atol=1e-5, rtol=0)


def test_mixed_lengths_together_and_apart_are_the_same_work(tmp_path: Path) -> None:
    work = workload("1M", "uniform, short prompts")
    save_model(work, tmp_path)
    policy = Policy(load_model(tmp_path), load_tokenizer(tmp_path))
    asked = prompts([90, 5, 5, 5], work)
    assert [len(prompt.token_ids) for prompt in asked] == [90, 5, 5, 5]
    gradients = []
    for parts in ([asked], [asked[:1], asked[1:]]):
        assert sample(policy, parts)() == 4 * 32
        assert train(policy, parts)() == 4 * 10
        gradients.append({name: weight.grad.clone() for name, weight in policy.model.named_parameters()})
    for name, together in gradients[0].items():
        torch.testing.assert_close(together, gradients[1][name], atol=1e-4, rtol=1e-4)
