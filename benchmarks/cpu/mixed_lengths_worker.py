"""Trains on, or samples from, one long prompt among short ones: all together, or the long one and the others apart."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness.models import load_model, load_tokenizer
from benchmarks.harness.worker_process import Link, Meter
from benchmarks.harness.workloads import FIRST_WORD, Workload
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Batch, Completion, Example, Group, Prompt, SamplingParams

CONTEXT = 2048
LONG, SHORT = [1500], [20] * 80
PARTS = {"together": [LONG + SHORT], "apart": [LONG, SHORT]}
"""By contender, the prompts' lengths in each of its passes or rollouts."""
ANSWER, NEW_TOKENS = 10, 32


def main() -> None:
    """Load, say so, and work in turn."""
    link, meter = Link(), Meter()
    arguments = json.loads(sys.argv[1])
    work = Workload(**arguments["workload"])
    torch.set_num_threads(1)
    policy = Policy(load_model(arguments["model"]).train(), load_tokenizer(arguments["model"]))
    assert policy.native, policy.notice
    parts = [prompts(lengths, work) for lengths in PARTS[arguments["contender"]]]
    run = {"training pass": train, "rollout": sample}[arguments["work"]](policy, parts)
    meter.loaded()
    link.tell(prompts=sum(map(len, parts)))
    while True:
        link.wait()
        meter.start()
        tokens = run()
        link.tell(tokens=tokens, **meter.stop())


def train(policy: Policy, parts: Sequence[Sequence[Prompt]]) -> Callable[[], int]:
    """A pass over each part, forward and backward."""
    batches = [batch_of(part) for part in parts]

    def run() -> int:
        policy.model.zero_grad()
        for batch in batches:
            policy.token_logprobs(batch, temperature=1.0)[0].sum().backward()
        return sum(len(batch.tokens_T) for batch in batches)

    return run


def sample(policy: Policy, parts: Sequence[Sequence[Prompt]]) -> Callable[[], int]:
    """A rollout of each part; no answer ends early."""
    engine = NativeEngine(policy)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)

    def run() -> int:
        found: list[Group] = []
        for part in parts:
            found += engine.generate(part, group_size=1, sampling=sampling, seed=0)
        answers: list[Completion] = [completion for group in found for completion in group.completions]
        return sum(len(answer.token_ids) for answer in answers)

    return run


def prompts(lengths: Sequence[int], work: Workload) -> list[Prompt]:
    """Prompts of random words, of the given lengths."""
    draw = random.Random(len(lengths))
    return [
        Prompt(
            id=str(index),
            token_ids=tuple(draw.randrange(FIRST_WORD, work.limits.vocabulary) for _ in range(length)),
            text="",
            example=Example(id=str(index), question="", gold=""),
        )
        for index, length in enumerate(lengths)
    ]


def batch_of(asked: Sequence[Prompt]) -> Batch:
    """The same answer to each."""
    count = len(asked)
    return Batch(
        prompts=tuple(prompt.token_ids for prompt in asked),
        prompt_N=torch.arange(count),
        lengths_N=torch.full((count,), ANSWER),
        tokens_T=torch.arange(count * ANSWER) % ANSWER + FIRST_WORD,
        sequence_T=torch.arange(count).repeat_interleave(ANSWER),
        advantages_N=torch.zeros(count),
        weights_N=torch.zeros(count),
        old_logprobs_T=torch.zeros(count * ANSWER),
    )


if __name__ == "__main__":
    main()
