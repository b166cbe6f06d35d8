"""Trains on, or samples from, one long prompt and many short ones: all together, or the long prompt separately."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence

import torch

from benchmarks.harness.models import load_model, load_tokenizer
from benchmarks.harness.worker_process import Meter, ParentPipe
from benchmarks.harness.workloads import FIRST_WORD, Workload
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.types import Batch, Completion, Example, Group, Prompt, SamplingParams

CONTEXT = 2048
LONG, SHORT = [1500], [20] * 80
PROMPT_SETS = {"together": [LONG + SHORT], "apart": [LONG, SHORT]}
"""The prompts' lengths in each pass or rollout, by contender."""
ANSWER, NEW_TOKENS = 10, 32


def main() -> None:
    """Load, report, and work in turns."""
    parent, meter = ParentPipe(), Meter()
    arguments = json.loads(sys.argv[1])
    work = Workload(**arguments["workload"])
    torch.set_num_threads(1)
    policy = Policy(load_model(arguments["model"]).train(), load_tokenizer(arguments["model"]))
    assert policy.native, policy.notice
    sets = [prompts(lengths, work) for lengths in PROMPT_SETS[arguments["contender"]]]
    run = {"training pass": train, "rollout": sample}[arguments["work"]](policy, sets)
    meter.loaded()
    parent.send(prompts=sum(map(len, sets)))
    while True:
        parent.receive()
        meter.start()
        tokens = run()
        parent.send(tokens=tokens, **meter.stop())


def train(policy: Policy, sets: Sequence[Sequence[Prompt]]) -> Callable[[], int]:
    """Make a function that runs forward and backward over each set of prompts."""
    batches = [batch_of(prompts_of_set) for prompts_of_set in sets]

    def run() -> int:
        policy.model.zero_grad()
        for batch in batches:
            policy.token_logprobs(batch, temperature=1.0)[0].sum().backward()
        return sum(len(batch.tokens_T) for batch in batches)

    return run


def sample(policy: Policy, sets: Sequence[Sequence[Prompt]]) -> Callable[[], int]:
    """Make a function that samples answers to each set of prompts; no answer ends early."""
    engine = NativeEngine(policy)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS)

    def run() -> int:
        groups: list[Group] = []
        for prompts_of_set in sets:
            groups += engine.generate(prompts_of_set, group_size=1, sampling=sampling, seed=0)
        answers: list[Completion] = [completion for group in groups for completion in group.completions]
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
    """A batch with the same answer to each prompt."""
    count = len(asked)
    return Batch(
        prompts=tuple(prompt.token_ids for prompt in asked),
        prompt_N=torch.arange(count),
        lengths_N=torch.full((count,), ANSWER),
        tokens_T=torch.arange(count * ANSWER) % ANSWER + FIRST_WORD,
        sequence_T=torch.arange(count).repeat_interleave(ANSWER),
        advantages_T=torch.zeros(count * ANSWER),
        weights_N=torch.zeros(count),
        old_logprobs_T=torch.zeros(count * ANSWER),
    )


if __name__ == "__main__":
    main()
