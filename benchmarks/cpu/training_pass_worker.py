"""Worker of `training_pass`: forward and backward of one batch in one of three ways; it first saves the gradient."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.harness.models import load_model, load_tokenizer
from benchmarks.harness.worker_process import Meter, ParentPipe
from benchmarks.harness.workloads import FIRST_WORD, GROUP, Workload
from flatpeak.kernels.matmul import SETTING, onednn_is_faster
from flatpeak.policy.model import Policy
from flatpeak.types import Batch

Answers = Callable[[random.Random], int]
"""Draws the length of an answer."""
PROMPTS = 4


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The shape of a batch."""

    prompt: int
    answer: Answers


SHAPES = {
    "prompt 256 and short answers": Shape(prompt=256, answer=lambda draw: draw.randint(8, 24)),
    "prompt 64 and long tail": Shape(
        prompt=64, answer=lambda draw: min(256, max(4, round(draw.lognormvariate(3.9, 0.9))))
    ),
}


def main() -> None:
    """Load, run once to save the gradient, report, and work in turns."""
    parent, meter = ParentPipe(), Meter()
    arguments = json.loads(sys.argv[1])
    work = Workload(**arguments["workload"])
    torch.set_num_threads(arguments["threads"])
    policy = Policy(load_model(arguments["model"]).train(), load_tokenizer(arguments["model"]))
    assert policy.native, policy.notice
    batch = random_batch(work, SHAPES[arguments["shape"]])
    weights_T = torch.rand(len(batch.tokens_T), generator=torch.Generator().manual_seed(0)) - 0.5
    logprobs = METHODS[arguments["contender"]]
    with torch.no_grad():
        logprobs(policy, batch)  # the first pass chooses kernels and replaces layers
    meter.loaded()
    with multiplied_by_mkl():
        (logprobs(policy, batch) * weights_T).sum().backward()
    gradients = {name: entry.grad for name, entry in policy.model.named_parameters() if entry.grad is not None}
    save_file(gradients, arguments["gradient"])
    parent.send(completions=len(batch.lengths_N), tokens=len(batch.tokens_T))
    while True:
        parent.receive()
        policy.model.zero_grad()
        meter.start()
        (logprobs(policy, batch) * weights_T).sum().backward()
        parent.send(tokens=len(batch.tokens_T), **meter.stop())


@contextmanager
def multiplied_by_mkl() -> Iterator[None]:
    """Use transformers' products for the compared gradient only, not for the timed passes."""
    before = os.environ.get(SETTING)
    os.environ[SETTING] = "mkl"
    onednn_is_faster.cache_clear()
    try:
        yield
    finally:
        del os.environ[SETTING]
        if before is not None:
            os.environ[SETTING] = before
        onednn_is_faster.cache_clear()


def shared(policy: Policy, batch: Batch) -> Tensor:
    """Run flatpeak's training pass, with each prompt once."""
    return policy.token_logprobs(batch, temperature=1.0)[0]


def packed(policy: Policy, batch: Batch) -> Tensor:
    """Run the same pass over the same completions, each with its own copy of the prompt."""
    alone = replace(
        batch,
        prompts=tuple(batch.prompts[prompt] for prompt in batch.prompt_N.tolist()),
        prompt_N=torch.arange(len(batch.prompt_N)),
    )
    return policy.token_logprobs(alone, temperature=1.0)[0]


def padded(policy: Policy, batch: Batch) -> Tensor:
    """Run transformers' forward pass over [N, L] with all logits."""
    answers = batch.tokens_T.split(batch.lengths_N.tolist())
    rows = [
        torch.cat([torch.tensor(batch.prompts[prompt]), answer])
        for prompt, answer in zip(batch.prompt_N.tolist(), answers, strict=True)
    ]
    lengths_N = torch.tensor([len(row) for row in rows])
    ids_NL = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    columns_NL = torch.arange(ids_NL.shape[1])
    read_NL = columns_NL < lengths_N[:, None]
    with policy.plain_attention() as model:
        logits_NLV = model(input_ids=ids_NL, attention_mask=read_NL.long(), use_cache=False).logits
    logprobs_NL = -torch.nn.functional.cross_entropy(
        logits_NLV[:, :-1].flatten(0, 1), ids_NL[:, 1:].flatten(), reduction="none"
    ).view(len(rows), -1)
    answered_NL = read_NL & (columns_NL >= (lengths_N - batch.lengths_N)[:, None])
    return logprobs_NL[answered_NL[:, 1:]]


def random_batch(work: Workload, shape: Shape) -> Batch:
    """PROMPTS groups of GROUP random answers."""
    draw = random.Random(f"{work.size} {shape.prompt}")

    def words(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(FIRST_WORD, work.limits.vocabulary) for _ in range(count))

    lengths_N = torch.tensor([shape.answer(draw) for _ in range(PROMPTS * GROUP)])
    zeros_N = torch.zeros(PROMPTS * GROUP)
    return Batch(
        prompts=tuple(words(shape.prompt) for _ in range(PROMPTS)),
        prompt_N=torch.arange(PROMPTS).repeat_interleave(GROUP),
        lengths_N=lengths_N,
        tokens_T=torch.tensor(words(int(lengths_N.sum()))),
        sequence_T=torch.arange(PROMPTS * GROUP).repeat_interleave(lengths_N),
        advantages_T=torch.zeros(int(lengths_N.sum())),
        weights_N=zeros_N,
        old_logprobs_T=torch.zeros(int(lengths_N.sum())),
    )


METHODS = {"shared": shared, "packed": packed, "padded": padded}

if __name__ == "__main__":
    main()
