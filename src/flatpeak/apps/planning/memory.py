"""The memory of a planned run, by phase and item: what stays in memory, and what each phase needs in addition.

    stays      weights, reward models; masters and moments of the optimizer; the reference, if one is kept
    loading    + a model's files, mapped (on a CPU, where both are in one memory)
    rollout    + keys and values, decoding, and on a CPU packed copies of the weights
    rewards    + a pass of the largest reward model
    scoring    + a pass without gradients: the reference's, and below float32 the policy's
    update     + gradients, one micro-batch's activations with its logits, and the copies of gradient regularization
    step       + gradients, and the optimizer's own copies

With rollouts ahead, a second process also stays: its libraries, all weights, and a file in memory with the trained
weights. It draws during updates and steps. With several processes, the memory is the first one's
(`inventory.per_rank`).

One phase runs at a time; the peak is the largest phase. On a GPU, offloaded states and references stay on the host,
except a bucket of them in the step and all of them in scoring; keys and values stay, because graphs refer to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from flatpeak.apps.planning.device import GIB, PlannedDevice
from flatpeak.apps.planning.dry_run import NoDryRunError, reward_model_memory, scoring_peak, update_peak
from flatpeak.apps.planning.fake_policy import PassSettings
from flatpeak.apps.planning.inventory import Inventory, per_rank, quantized_layers, take_inventory
from flatpeak.apps.planning.planned_model import PlannedModel, causal_of, read_model
from flatpeak.apps.planning.rollout_memory import (
    fused_copies,
    has_second_process,
    native_copy,
    packed_copies,
    request_memory,
    rollout_memory,
)
from flatpeak.apps.planning.workload import Minibatch, Workload, plan_minibatch, plan_sft_minibatch, share_of_rollouts
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.functional.logprobs import chunk_tokens
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.parameters import choose_parameters
from flatpeak.pipeline.policies import keeps_own_reference
from flatpeak.policy.config import ModelConfig
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.learner import token_budget
from flatpeak.training.master_weights import FLOAT32

GAPS: Final = 9
"""One in this many bytes that a phase allocates and frees is lost to gaps between used blocks of a CPU's process,
according to runs of benchmarks/cpu/plan_accuracy.py."""
LARGEST_HEAP_BLOCK: Final = 32 * 2**20
"""Bytes above which the C library gives a freed block back to the system; it keeps smaller blocks (mallopt(3))."""
QUANTIZING: Final = 9
"""float32 copies of the largest layer that bitsandbytes leaves with the C library after quantizing a model on a CPU, up
to 7 times LARGEST_HEAP_BLOCK: 8.4 to 9.8 for any number of layers, measured by what malloc_trim gives back."""
KERNELS: Final = 3 * GIB // 16
"""Bytes that libraries take on a CPU once used: code that they load and compile, and buffers; from the same runs."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The bytes of each item that is in memory during a phase."""

    name: str
    items: Mapping[str, int]

    @property
    def total(self) -> int:
        """Bytes of all items."""
        return sum(self.items.values())


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """The phases of a run in their order."""

    phases: tuple[Phase, ...]
    inventory: Inventory
    micro_batch_tokens: int
    """Tokens of the largest micro-batch, including prompts."""
    host: int
    """Bytes of host memory that offloading takes, separate from the device."""
    notes: tuple[str, ...]
    """Items that are not counted, or counted differently from the others."""

    @property
    def largest(self) -> Phase:
        """The phase that determines how much memory is needed."""
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def peak(self) -> int:
        """Bytes of the largest phase."""
        return self.largest.total


def estimate_memory(config: RunConfig, work: Workload, model: PlannedModel, device: PlannedDevice) -> MemoryEstimate:
    """The memory of a run on a device; UserError if settings do not fit, such as a target in no layer's name."""
    return _Estimator(config, work, model, device).estimate()


class _Estimator:
    """The items of a run's phases, each computed once."""

    def __init__(self, config: RunConfig, work: Workload, model: PlannedModel, device: PlannedDevice) -> None:
        self.config, self.work, self.model = config, work, model
        self.on_cpu, self.libraries = device.on_cpu, device.libraries
        self.inventory = take_inventory(model)
        self.rewards = reward_model_memory(
            config, text_tokens=work.prompt_lengths[0] + work.new_tokens, texts=work.completions, on_cpu=self.on_cpu
        )
        self.reference = self._reference()
        self.packed = packed_copies(model, on_cpu=self.on_cpu)
        self.copies = max(sum(self.packed), native_copy(config, model, on_cpu=self.on_cpu))
        largest = max((layer.weight.numel() for layer in quantized_layers(model)), default=0)
        self.quantizing = min(QUANTIZING * FLOAT32 * largest, 7 * LARGEST_HEAP_BLOCK)
        budget = token_budget(config.training.micro_batch_tokens, torch.device("cpu" if self.on_cpu else "cuda"))
        padded = model.fallback is not None
        self.minibatch = plan_minibatch(config, work, token_budget=budget, padded=padded)
        self.sft_minibatch = plan_sft_minibatch(work, token_budget=budget, padded=padded) if work.sft_steps else None
        self.notes: list[str] = []

    def estimate(self) -> MemoryEstimate:
        """All phases of the run."""
        phases = tuple(self._phases())
        notes = tuple(dict.fromkeys([*self._omissions(), *self.notes]))
        tokens = max(one.tokens for one in (self.minibatch, self.sft_minibatch) if one is not None)
        return MemoryEstimate(
            phases=phases, inventory=self.inventory, micro_batch_tokens=tokens, host=self._host(), notes=notes
        )

    def _phases(self) -> Iterator[Phase]:
        """Each phase's items, without those that stay in every phase."""
        config, work = self.config, self.work
        own = share_of_rollouts(work, config.distributed.processes)
        rollout = rollout_memory(config, own, self._settings(self.minibatch))
        cache = {"keys and values": rollout.keys_and_values, "decoding": rollout.decoding}
        if not self.on_cpu:
            cache["concatenated weights"] = fused_copies(config, self.model)
        kept = {} if self.on_cpu else cache  # captured graphs refer to that memory
        reference = self._staying_reference()
        if self.on_cpu:
            yield self._phase("loading", {"files": self.inventory.files}, computes=False)
        if self.sft_minibatch is not None:
            named = reference if config.reference.model is not None else {}
            yield from self._update("sft ", self.sft_minibatch, config.sft.optimizer, named | kept)
        second, drawing = self._second_process()
        state = (self._state(config.optimizer) | reference | second) if work.steps else {}
        copies = {"packed copies": self.copies}
        yield self._phase("rollout", state | cache | copies, transient=rollout.decoding)
        if self.rewards.scoring:
            yield self._phase(
                "rewards", state | kept | {"activations": self.rewards.scoring}, transient=self.rewards.scoring
            )
        if not work.steps:
            return
        if self.reference or self.model.below_float32 or config.objective.sampler_correction.enabled:
            scored = self._scoring()
            yield self._phase("scoring", state | self.reference | kept | {"activations": scored}, transient=scored)
        beside = reference | kept | second | drawing
        yield from self._update("", self.minibatch, config.optimizer, beside, regularized=True)

    def _update(
        self,
        stage: str,
        minibatch: Minibatch,
        optimizer: OptimizerConfig,
        others: dict[str, int],
        *,
        regularized: bool = False,
    ) -> Iterator[Phase]:
        """The phases of an update: its passes, and the optimizer's step if that needs extra memory."""
        transient = self._transient(minibatch)
        items = {"activations": transient}
        if regularized:
            items |= {"regularization": self._regularization(transient=transient), "exact KL": self._exact_kl()}
        resident = self._state(optimizer) | others | {"gradients": self.inventory.gradients}
        kept = 0 if stage else self._kept_copies(minibatch)
        yield self._phase(f"{stage}update", resident | items, transient=transient, kept=kept)
        step = self.inventory.step_scratch(optimizer, on_cpu=self.on_cpu)
        if self._offloads(optimizer):
            step += self.inventory.bucket(optimizer)
        if step:
            yield self._phase(f"{stage}step", resident | {"optimizer step": step})

    def _phase(
        self, name: str, items: dict[str, int], *, transient: int = 0, kept: int = 0, computes: bool = True
    ) -> Phase:
        """A phase with these items, the weights, and a CPU's libraries; the C library retains `kept` of it."""
        kept += transient // GAPS + self.quantizing
        own = {"kernels": KERNELS * computes, "kept by the C library": kept} if self.on_cpu else {}
        shared = per_rank(name, self._weights() | items, self.config.distributed, self.model, self.inventory)
        held = shared | own
        return Phase(name=name, items={item: size for item, size in held.items() if size})

    def _second_process(self) -> tuple[dict[str, int], dict[str, int]]:
        """The memory that the process for rollouts ahead keeps, and the memory of its drawing."""
        if not has_second_process(self.config) or not self.work.steps:
            return {}, {}
        drawn = request_memory(self.work.request, self.config, self._settings(self.minibatch))
        drawing = drawn.keys_and_values + drawn.decoding + drawn.decoding // GAPS + self.copies
        # Pages of code shared by both processes are counted twice.
        stays = self.inventory.stored + self.inventory.trained_bytes + self.libraries + KERNELS
        return {"second process": stays}, {"rollouts ahead": drawing}

    def _kept_copies(self, minibatch: Minibatch) -> int:
        """Bytes of the rollout's packed copies that the C library keeps and that are too small for activations."""
        linears = [one for one in causal_of(self.model.modules).base_model.modules() if isinstance(one, nn.Linear)]
        widest = max((one.out_features for one in linears), default=0)
        block = min(minibatch.tokens * widest * self.model.dtype.itemsize, LARGEST_HEAP_BLOCK)
        return sum(size for size in self.packed if size < block)

    def _weights(self) -> dict[str, int]:
        inventory = self.inventory
        return {
            "weights": inventory.weights,
            "4-bit weights": inventory.quantized,
            "adapters": inventory.adapters,
            "reward models": self.rewards.weights,
        }

    def _offloads(self, optimizer: OptimizerConfig) -> bool:
        """Whether the optimizer's states are on a host separate from the device."""
        return optimizer.offload and not self.on_cpu

    def _state(self, optimizer: OptimizerConfig) -> dict[str, int]:
        """The optimizer states that stay on the device from update to update."""
        if self._offloads(optimizer):
            return {}
        return {"masters": self.inventory.masters, "optimizer": self.inventory.moments(optimizer)}

    def _reference(self) -> dict[str, int]:
        """The reference: a copy of the trained weights, which shares all others unless these are sharded; or another
        model."""
        config = self.config
        if config.reference.model is not None:
            source = ModelConfig(
                path=config.reference.model, dtype=config.model.dtype, trust_remote_code=config.model.trust_remote_code
            )
            try:
                return {"reference": take_inventory(read_model(source)).stored}
            except UserError as error:
                raise UserError(f"reference.model: {error}") from error
        inventory = self.inventory
        copied = inventory.stored if config.distributed.divides_model else inventory.trained_bytes
        return {"reference": copied} if keeps_own_reference(config) else {}

    def _average(self) -> dict[str, int]:
        """The float32 weights that `reference.ema` rounds to those of the reference."""
        averaged = self.config.reference.ema is not None
        return {"reference average": FLOAT32 * self.inventory.trained_parameters} if averaged else {}

    def _staying_reference(self) -> dict[str, int]:
        """The reference and its average, if they are on the device in an update, where an exact KL needs them."""
        away = self.config.reference.offload and self.config.kl.estimator != "exact" and not self.on_cpu
        return {} if away else self.reference | self._average()

    def _host(self) -> int:
        """The most host memory, in bytes, for offloading: torch rounds each pinned tensor up to a power of two."""
        config, work = self.config, self.work
        if self.on_cpu:
            return 0
        stages = ((config.sft.optimizer, work.sft_steps), (config.optimizer, work.steps))
        optimizers = [self.inventory.pinned(one) for one, steps in stages if steps and one.offload]
        copies = (*self.reference.values(), *self._average().values())
        reference = 2 * sum(copies) if config.reference.offload else 0
        return max(optimizers, default=0) + reference

    def _transient(self, minibatch: Minibatch) -> int:
        """The most bytes alive in the passes of a micro-batch, without gradients."""
        try:
            peak = update_peak(self._settings(minibatch), minibatch.micro_batch)
        except NoDryRunError:
            return self._rule_of_thumb(minibatch)
        return max(peak - self.inventory.gradients, 0)

    def _exact_kl(self) -> int:
        """The reference's hidden states of a micro-batch, and four more [C, V] of a chunk."""
        if not self.reference or self.config.kl.estimator != "exact":
            return 0
        tokens, vocabulary = self.minibatch.tokens, self.model.vocabulary
        chunk = min(tokens, chunk_tokens(vocabulary, on_cpu=self.on_cpu))
        states = self.model.dtype.itemsize * tokens * int(self.model.shape.hidden_size)
        return 4 * FLOAT32 * chunk * vocabulary + states

    def _scoring(self) -> int:
        try:
            return scoring_peak(self._settings(self.minibatch), self.minibatch.micro_batch)
        except NoDryRunError:
            return self._rule_of_thumb(self.minibatch) // self.model.layers

    def _settings(self, minibatch: Minibatch) -> PassSettings:
        return PassSettings(
            model=self.model,
            on_cpu=self.on_cpu,
            recompute=self.config.training.activation_checkpointing,
            accumulated=minibatch.several,
            dropout=self.config.model.dropout,
        )

    def _rule_of_thumb(self, minibatch: Minibatch) -> int:
        """Bytes of activations if no dry run is possible: 34 s b h per layer in half precision.

        Korthikanti et al. 2022, arXiv 2205.05198, equation 1 without its term of attention scores.
        """
        self.notes.append(
            "activations are estimated by a rule of thumb: this architecture has no dry run; try --measure"
        )
        layers = 1 if self.config.training.activation_checkpointing else self.model.layers
        return 17 * self.model.dtype.itemsize * minibatch.tokens * int(self.model.shape.hidden_size) * layers

    def _regularization(self, *, transient: int) -> int:
        config = self.config.gradient_regularization
        if not config.enabled:
            return 0
        return regularization_bytes(config, self.model, self.inventory, transient=transient)

    def _omissions(self) -> Iterator[str]:
        """Settings whose memory is not counted, or only in part."""
        config = self.config
        if config.distributed.processes > 1:
            yield (
                f"memory is that of the first of {config.distributed.processes} processes, each on a device of its own"
            )
        if self.model.fallback is not None:
            yield f"{self.model.fallback}: rollouts by transformers' generate, and padded training"
        if config.gradient_regularization.enabled and config.gradient_regularization.difference == "exact":
            yield "gradient_regularization.difference=exact: its double backward pass is not counted"
        if config.evaluation.sharpness is not None and config.evaluation.sharpness.eigenvalue:
            yield "evaluation.sharpness.eigenvalue: its double backward pass is not counted"
        if config.training.compile:
            yield "training.compile: counted as if the layers were not compiled"
        for where in self.rewards.uncounted:
            yield f"{where}: its weights are counted, its passes are not"


def regularization_bytes(
    config: GradientRegularizationConfig, model: PlannedModel, inventory: Inventory, *, transient: int
) -> int:
    """Bytes alive in the second pass, in addition to its own gradients and `transient` activations.

    These are the first pass's gradients, a copy of the perturbed weights, a direction if that is not the gradient,
    gradients of the perturbed weights on the other side of the step if a check or a central difference needs them, and
    what is kept for updates without a second pass. After the pass, the penalty and its sum with the first gradients
    replace the activations.
    """
    perturbed = choose_parameters(model.modules, config)
    gradients = FLOAT32 * sum(parameter.numel() for parameter in perturbed)
    copies = (config.direction == "random") + (config.every > 1)
    if config.difference != "exact":
        copies += config.difference == "central" or bool(config.check_every)
    in_pass = inventory.gradients + sum(p.nbytes for p in perturbed) + gradients * copies
    return max(in_pass, 2 * gradients - transient)
