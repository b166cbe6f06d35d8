from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.cpu.mixed_lengths_worker import prompts, sample, train
from benchmarks.cpu.training_pass_worker import PASSES, SHAPES, random_batch
from benchmarks.harness.models import load_model, load_tokenizer, save_model
from benchmarks.harness.workloads import (
    EOS,
    FIRST_WORD,
    LENGTHS,
    as_text,
    continuous_batching,
    prompt_ids,
    useful_tokens,
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
    # So that a change of the words, which all figures depend on, is a decision.
    assert prompt_ids(work, 0)[0][:4] == [18, 92, 23, 8]


def test_tokens_count_up_to_the_first_end_of_sequence() -> None:
    assert useful_tokens([5, 6, EOS, 0, 0, EOS]) == 3
    assert useful_tokens([EOS, 7]) == 1
    assert useful_tokens([5, 6, 7]) == 3


def test_a_cache_of_the_set_size_holds_every_row_at_its_longest() -> None:
    work = workload("1M", "skewed")
    settings = continuous_batching(work)
    assert settings["num_blocks"] * settings["page_size"] >= 64 * (80 + 256)


def test_a_saved_model_is_the_same_again_and_reads_words_as_their_numbers(tmp_path: Path) -> None:
    work = workload("1M", "skewed")
    one, other = (load_model(save_model(work, tmp_path / name)).state_dict() for name in ("one", "other"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    tokenizer = load_tokenizer(tmp_path / "one")
    ids = prompt_ids(work, 0)[0]
    assert tokenizer.encode(as_text(ids)) == ids
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (EOS, 0, 96)


def test_answers_end_about_as_often_as_the_vocabulary_says(tmp_path: Path) -> None:
    work = workload("1M", "skewed")
    model = load_model(save_model(work, tmp_path)).eval()
    with torch.no_grad():
        ends = torch.softmax(model(torch.tensor(prompt_ids(work, 0)[:1])).logits, -1)[0, :, EOS]
    # Even a random model likes some tokens better than others.
    assert 1 / 192 < float(ends.mean()) < 1 / 48


@pytest.mark.parametrize("shape", SHAPES)
def test_all_training_passes_give_the_same_log_probabilities(shape: str, tmp_path: Path) -> None:
    work = workload("1M", "uniform, long prompts", prompts=4)
    save_model(work, tmp_path)
    policy = Policy(load_model(tmp_path), load_tokenizer(tmp_path))
    batch = random_batch(work, SHAPES[shape])
    assert {len(prompt) for prompt in batch.prompts} == {SHAPES[shape].prompt}
    with torch.no_grad():
        found = {name: logprobs(policy, batch) for name, logprobs in PASSES.items()}
    assert found["padded"].shape == batch.tokens_T.shape
    assert float(found["padded"].mean()) == pytest.approx(-6.24, abs=0.1)  # -log 512, a random token of a random model
    for name in ("shared", "packed"):
        torch.testing.assert_close(found[name], found["padded"], atol=1e-5, rtol=0)


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
