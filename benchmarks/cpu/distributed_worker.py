"""Worker of `distributed`: GRPO steps of one process, or of ranks whose first rank takes turns with the contenders."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from benchmarks.cpu.ahead import SIZES, parity
from benchmarks.cpu.gradreg import NoRecorder, build_trainer
from benchmarks.harness.collectives import CountedCollectives, Traffic
from benchmarks.harness.worker_process import Meter, ParentPipe
from flatpeak.config.load import parse_config
from flatpeak.distributed.ranks import Ranks, open_ranks
from flatpeak.pipeline.build import build_components
from flatpeak.pipeline.progress import SilentProgress
from flatpeak.pipeline.request import CallerObjects
from flatpeak.pipeline.run_components import share_components
from flatpeak.training.trainer import Trainer

COUNTED = 1
"""The step whose collectives are counted; it takes longer and is not timed."""


def main() -> None:
    """Start the other ranks, build the trainer, and run steps in turns."""
    arguments = json.loads(sys.argv[1])
    processes: int = arguments["processes"]
    others = []
    if processes > 1 and "RANK" not in os.environ:
        job = {"WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {**job, "MASTER_PORT": str(free_port()), "RANK": "0"}
        command = [sys.executable, "-m", "benchmarks.cpu.distributed_worker", sys.argv[1]]
        for rank in range(1, processes):
            environment = os.environ | {"RANK": str(rank)}
            others.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=2))
    torch.set_num_threads(arguments["threads"])
    config = parse_config(recipe(**arguments))
    with open_ranks(config.distributed) as ranks:
        objects = CallerObjects(reward=parity)
        components = build_components(config, objects, checkpoint=None, progress=SilentProgress())
        components = share_components(components, config, objects, ranks)
        trainer = build_trainer(components, config, NoRecorder(), ranks=ranks)
        (take_turns if ranks.is_first else follow)(trainer, ranks, others)


def recipe(*, size: str, tokens: int, processes: int, strategy: str, strength: float, **_: Any) -> dict[str, Any]:
    """Sums for a new model that is never right; the reward is independent of correctness."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    return {
        "model": {"new": {"architecture": "qwen2", "config": SIZES[size] | heads}, "device": "cpu"},
        "task": {"type": "arithmetic", "train_size": 2000, "test_size": 10},
        "rollout": {"prompts_per_step": 16, "group_size": 8, "max_new_tokens": tokens},
        "gradient_regularization": {"strength": strength, "check_every": 0},
        "optimizer": {"learning_rate": 0.0},
        "training": {"steps": 1000},
        "distributed": {"processes": processes, "strategy": strategy},
    }


def take_turns(trainer: Trainer, ranks: Ranks, others: list[subprocess.Popen[bytes]]) -> None:
    """Run a step for each command of the parent, and report it with the communication of the counted step."""

    def end() -> None:
        for process in others:
            process.kill()

    parent, meter = ParentPipe(), Meter()
    meter.loaded()
    parent.send()
    traffic: dict[str, float] = {}
    step = 0
    while True:
        parent.receive(at_end=end)
        begin(ranks)
        if step == COUNTED:
            traffic = counted_step(trainer, ranks, step + 1)
        meter.start()
        metrics = trainer.train_step(step + 2 if step >= COUNTED else step + 1)
        tokens = metrics["rollout/length_mean"] * 128
        parent.send(tokens=tokens, **meter.stop(), **traffic)
        step += 1


def follow(trainer: Trainer, ranks: Ranks, _: object) -> None:
    """Run steps with the first rank until it ends this process."""
    step = 0
    while True:
        begin(ranks)
        if step == COUNTED:
            counted_step(trainer, ranks, step + 1)
        trainer.train_step(step + 2 if step >= COUNTED else step + 1)
        step += 1


def begin(ranks: Ranks) -> None:
    """Wait for the first rank's turn, so that other ranks do not sample before it."""
    if ranks.size > 1:
        dist.barrier()


def counted_step(trainer: Trainer, ranks: Ranks, step: int) -> dict[str, float]:
    """The bytes of a step's collectives by kind, counted and computed."""
    learner, passes = trainer.learner, SimpleNamespace(updates=0, micro_batches=0)
    average, logprobs = learner.parallel.average_gradients, learner.policy.token_logprobs

    def averaged(parameters: Any) -> None:
        passes.updates += 1
        average(parameters)

    def token_logprobs(*args: Any, **settings: Any) -> Any:
        passes.micro_batches += 1
        return logprobs(*args, **settings)

    object.__setattr__(learner.parallel, "average_gradients", averaged)
    learner.policy.token_logprobs = token_logprobs  # type: ignore[method-assign]
    with CountedCollectives() as collectives:
        trainer.train_step(step)
    object.__delattr__(learner.parallel, "average_gradients")
    del learner.policy.token_logprobs
    named = dict(learner.policy.model.named_parameters())
    computed = Traffic(
        strategy="fsdp2" if any(isinstance(weight, DTensor) for weight in named.values()) else "ddp",
        weights=sum(weight.numel() for weight in named.values()),
        root=sum(weight.numel() for name, weight in named.items() if ".layers." not in name),
        updates=passes.updates,
        micro_batches=passes.micro_batches,
        outside=sum(weight.numel() for weight in getattr(learner, "outside", ())),
    ).payloads()
    sent = sum(count for kind, count in collectives.bytes.items() if kind != "values")
    return {
        "sent": float(sent),
        "computed": float(sum(computed.values()) if ranks.size > 1 else 0),
        "values": float(collectives.bytes["values"]),
    }


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
