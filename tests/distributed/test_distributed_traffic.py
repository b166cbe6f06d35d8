"""The bytes that a step of training sends are those that are computed from the model's size."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from benchmarks.harness.collectives import CountedCollectives, Traffic

from flatpeak.distributed.ranks import Ranks
from flatpeak.policy.model import Policy
from support.distributed_training import MATRIX, Case, make_trainer


def counted(case: Case) -> tuple[dict[str, int], dict[str, int]]:
    """Of one step: bytes by kind, and the passes over minibatches and micro-batches, with the weights."""
    trainer = make_trainer(case, Ranks(rank=dist.get_rank(), size=dist.get_world_size()))
    learner = trainer.learner
    passes = {"updates": 0, "micro_batches": 0}
    average, logprobs = learner.parallel.average_gradients, Policy.token_logprobs

    trainer.train_step(1)  # the optimizer has its states
    with pytest.MonkeyPatch.context() as patch, CountedCollectives() as collectives:

        def averaged(self, parameters):
            passes["updates"] += 1
            average(parameters)

        def token_logprobs(self, *args, **settings):
            passes["micro_batches"] += 1
            return logprobs(self, *args, **settings)

        patch.setattr(type(learner.parallel), "average_gradients", averaged)
        patch.setattr(Policy, "token_logprobs", token_logprobs)
        trainer.train_step(2)
    named = dict(learner.policy.model.named_parameters())
    sizes = {
        "weights": sum(weight.numel() for weight in named.values()),
        "root": sum(weight.numel() for name, weight in named.items() if ".layers." not in name),
    }
    if case.regularization:
        sizes["outside"] = sum(weight.numel() for weight in learner.outside)
    return dict(collectives.bytes), passes | sizes


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("matrix", ["plain", "gr", "mu2"])
def test_a_step_sends_the_bytes_that_are_computed(ranks, strategy, matrix):
    case = Case(strategy=strategy, **MATRIX[matrix])
    measured, passes = ranks(counted, case)[0]
    computed = Traffic(strategy=strategy, requests=0, **passes).payloads()  # these rollouts are fixed
    for kind, expected in computed.items():
        # Norms and flags besides; a first dimension that two ranks do not divide is padded.
        assert expected <= measured[kind] <= 1.02 * expected + 4096, (kind, measured, passes)
