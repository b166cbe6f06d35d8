"""Worker of `real_model`: measures each part of a step once per turn."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.models import load_model, load_tokenizer
from benchmarks.harness.worker_process import ParentPipe
from flatpeak.policy.model import Policy
from flatpeak.types import PackedCompletions

PARTS = ("product", "decode", "prompts", "training")
SIDE, PROMPTS, GROUP, PROMPT_TOKENS, STEPS = 1024, 4, 8, 64, 8
TRAINED_PROMPTS, TRAINED_TOKENS, RESPONSE_TOKENS = 8, 70, 16
GIGA = 1e9


@dataclass(frozen=True, kw_only=True)
class Timer:
    """A clock of CPU and wall time that turns work into rates."""

    rates: dict[str, float]

    def measure(self, part: str, work: Callable[[], float]) -> None:
        """Add the rates of a part; `work` does it and returns its amount."""
        cpu, wall = time.process_time(), time.perf_counter()
        done = work()
        self.rates[f"{part} cpu"] = done / (time.process_time() - cpu)
        self.rates[f"{part} wall"] = done / (time.perf_counter() - wall)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A model, and the number of weights that multiply a token: below the output layer, and in it."""

    policy: Policy
    body: int
    head: int

    def turn(self) -> dict[str, float]:
        """The rates of all parts."""
        timer = Timer(rates={})
        factor = torch.randn(SIDE, SIDE)
        timer.measure("product", lambda: multiply(factor, times=8))
        self.decode(timer)
        timer.measure("training", self.train)
        return timer.rates

    def decode(self, timer: Timer) -> None:
        """Read prompts, and feed tokens to a group of each; the weights are packed before."""
        entries, slots = range(PROMPTS), range(PROMPTS * GROUP)
        prompts = [tokens(self.policy.vocabulary_size, PROMPT_TOKENS, seed=entry) for entry in entries]
        with self.policy.decoding(), torch.inference_mode():
            cache: Any = self.policy.open(
                slots=len(slots),
                entries=len(prompts),
                prompt_lengths=[PROMPT_TOKENS] * len(prompts),
                new_tokens=STEPS + 1,
            )

            def read() -> float:
                self.policy.prefill(cache, prompts, entries)
                return 2 * len(prompts) * (PROMPT_TOKENS * self.body + self.head) / GIGA

            def feed(steps: int) -> float:
                for _ in range(steps):
                    self.policy.decode(cache, torch.arange(len(slots)))
                return 2 * steps * len(slots) * (self.body + self.head) / GIGA

            timer.measure("prompts", read)
            cache.admit(slots, [slot // GROUP for slot in slots])
            feed(1)
            timer.measure("decode", lambda: feed(STEPS))

    def train(self) -> float:
        """Run a forward and backward pass."""
        count, vocabulary = TRAINED_PROMPTS * GROUP, self.policy.vocabulary_size
        total = count * RESPONSE_TOKENS
        batch = PackedCompletions(
            prompts=tuple(tuple(tokens(vocabulary, TRAINED_TOKENS, seed=each)) for each in range(TRAINED_PROMPTS)),
            prompt_N=torch.arange(TRAINED_PROMPTS).repeat_interleave(GROUP),
            lengths_N=torch.full((count,), RESPONSE_TOKENS),
            tokens_T=torch.tensor(tokens(vocabulary, total, seed=99)),
            sequence_T=torch.arange(count).repeat_interleave(RESPONSE_TOKENS),
        )
        self.policy.model.zero_grad(set_to_none=False)
        torch.autograd.backward(self.policy.token_logprobs(batch, temperature=1.0)[0].mean())
        return 6 * ((TRAINED_PROMPTS * TRAINED_TOKENS + total) * self.body + total * self.head) / GIGA


def main() -> None:
    """Load, report, and measure in turns."""
    parent = ParentPipe()
    arguments = json.loads(sys.argv[1])
    torch.set_num_threads(arguments["threads"])
    policy = Policy(load_model(arguments["model"]), load_tokenizer(arguments["model"]))
    head = policy.vocabulary_size * policy.head.linear.in_features
    matrices = [module.weight.numel() for module in policy.causal.modules() if isinstance(module, torch.nn.Linear)]
    bench = Bench(policy=policy, body=sum(matrices) - head, head=head)
    bench.train()  # chooses the kernels
    parent.send(parameters=sum(each.numel() for each in policy.model.parameters()), computed=policy.computed_with)
    while True:
        parent.receive()
        parent.send(**bench.turn())


def multiply(factor: torch.Tensor, *, times: int) -> float:
    """Square a matrix `times` times; return the operations in GFLOP."""
    for _ in range(times):
        factor @ factor
    return times * 2 * SIDE**3 / GIGA


def tokens(vocabulary: int, count: int, *, seed: int) -> list[int]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(vocabulary, (count,), generator=generator).tolist()
    return ids


if __name__ == "__main__":
    main()
