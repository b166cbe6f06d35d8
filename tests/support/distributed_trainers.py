"""Regularized Hugging Face trainers in one process and on two ranks: what is run, and what came out."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
from datasets import Dataset
from huggingface_hub import constants
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from flatpeak.errors import UserError
from flatpeak.gradreg.parameters import block_lists
from flatpeak.integrations.hf_trainer import GradientRegularizedTrainer, GradientRegularizedTrainingArguments
from support.distributed import gradients, parameters
from support.models import tiny_model
from support.trl import GRAD_REG, ROWS, SCALE, SETTINGS, STRENGTH, need_trl, rollout_trainer, shift, token_rows

need_trl()  # which brings accelerate
from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

Way = Literal["single", "ddp", "fsdp"]
ACCUMULATION = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A trainer and its settings."""

    loss: Literal["plain", "grpo"]
    """A GPT-2's cross-entropy in transformers.Trainer, or a Qwen2 in TRL's GRPOTrainer."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    trainer: type[Trainer] = GradientRegularizedTrainer
    """In place of transformers.Trainer."""
    stock: bool = False
    """Whether trainer and arguments are the library's own."""
    adapters: bool = False
    """Whether LoRA's adapters are what is trained."""


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The results of one process; tensors whole, by the parameters' plain names."""

    before: dict[str, Tensor]
    steps: list[dict[str, Tensor]] = field(default_factory=list)
    """The parameters after every update."""
    logs: list[dict[str, float]] = field(default_factory=list)
    forwards: int = 0
    """Calls of an inner module of the first block, recomputed activations included."""
    wrapper: str = ""
    """The class that the model was wrapped into."""
    shard_sizes: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(elements on this rank, elements of the whole) of every parameter that is a DTensor."""
    failure: str = ""
    """The error of training."""
    gradient: dict[str, Tensor] = field(default_factory=dict)
    """The values of `.grad` when training ended."""
    recovered: bool = False
    """After training: no replay is on, and the last micro-batch still counts as the one that synchronizes."""

    def note(self, model: Any) -> None:
        """Record the parameters as they are now."""
        self.steps.append(parameters(model))
        self.shard_sizes = {
            name: (p.to_local().numel(), p.numel()) for name, p in model.named_parameters() if isinstance(p, DTensor)
        }

    def logged(self, name: str) -> list[float]:
        """Every value of a metric."""
        return [entry[name] for entry in self.logs if name in entry]


def rows() -> list[dict[str, list[int]]]:
    """Rows with unlike numbers of targets, so that a mean of the ranks' means would be seen."""
    return [
        {"input_ids": row["input_ids"], "labels": [-100] * (1 + index % 5) + row["input_ids"][1 + index % 5 :]}
        for index, row in enumerate(token_rows())
    ]


def cross_entropy(model: Any) -> Tensor:
    """The mean over all targets of those rows."""
    ids, labels = (torch.tensor([row[name] for row in rows()]) for name in ("input_ids", "labels"))
    logprobs = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), -1)
    return -logprobs.gather(2, ids[:, 1:, None])[..., 0][labels[:, 1:] != -100].mean()


class BreaksOff(GradientRegularizedTrainer):
    """A trainer whose second pass fails on every rank."""

    micro_batch = 0
    """The micro-batch that fails, with its loss computed."""
    replayed = 0

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        if self.grad_reg_replaying:
            self.replayed += 1
            if self.replayed == self.micro_batch + 1:
                raise RuntimeError("out of memory")
        return loss


class BreaksOffLater(BreaksOff):
    micro_batch = 1


class Explodes(GradientRegularizedTrainer):
    """A trainer whose loss is not finite in the second update, on the last rank only."""

    when_replaying = False

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        here = self.args.process_index == self.args.world_size - 1
        bad = here and self.state.global_step == 1 and self.grad_reg_replaying == self.when_replaying
        return loss * float("nan") if bad else loss


class ExplodesLater(Explodes):
    when_replaying = True


def first_only(step: int) -> float:
    """A schedule that stops after one update."""
    return 0.0 if step else STRENGTH


MU = {"num_iterations": 2, "loss_type": "grpo"}
KL = {"loss_type": "dapo", "beta": 0.3, "grad_reg_ratio_mode": "reuse"}
OFF = {"grad_reg_strength": 0.0}
STILL = {"learning_rate": 0.0, "optim": "adamw_torch"}
ADAPTERS = {"grad_reg_perturbed": "adapters", "learning_rate": 0.05}
LOOKSAM = {"grad_reg_every": 2, "grad_reg_strength": "ratio:0.5", "learning_rate": 0.1, "max_steps": 4}
SAVED = {**LOOKSAM, "save_strategy": "steps", "save_steps": 3}
ROUNDED = {
    "bf16": True,
    "grad_reg_precision": "autocast",
    "grad_reg_eps": 1e-6,  # a step that is set is never lengthened
    "grad_reg_min_perturbation_kept": 0.7,
}
CASES = {
    "plain": Case(loss="plain"),
    "all perturbed": Case(loss="plain", settings={"grad_reg_perturbed": "all"}),
    "checkpointed": Case(loss="plain", settings={"gradient_checkpointing": True}),
    "adapters": Case(loss="plain", settings=ADAPTERS, adapters=True),
    "grpo": Case(loss="grpo", settings=MU),
    "grpo bf16": Case(loss="grpo", settings={**MU, "bf16": True}),
    "dapo with KL": Case(loss="grpo", settings=KL),
    "clipped": Case(loss="plain", settings={"max_grad_norm": 0.5, "max_steps": 1}),
    "plain off": Case(loss="plain", settings=OFF),
    "grpo off": Case(loss="grpo", settings={**MU, **OFF}),
    "plain stock": Case(loss="plain", stock=True),
    "grpo stock": Case(loss="grpo", settings=MU, stock=True),
    "plain at rate 0": Case(loss="plain", settings=STILL),
    "grpo at rate 0": Case(loss="grpo", settings={**MU, **STILL}),
    "breaks off": Case(loss="plain", trainer=BreaksOff),
    "breaks off later": Case(loss="plain", trainer=BreaksOffLater),
    "explodes": Case(loss="plain", trainer=Explodes, settings={"max_steps": 2}),
    "explodes later": Case(loss="plain", trainer=ExplodesLater, settings={"max_steps": 2}),
    "first update only": Case(loss="plain", settings={"grad_reg_scheduler": first_only, "max_steps": 2}),
    "looksam": Case(loss="plain", settings=SAVED),
    "looksam with AdamW": Case(loss="plain", settings={**SAVED, "optim": "adamw_torch", "learning_rate": 1e-2}),
    "rounded": Case(loss="plain", settings=ROUNDED),
}


def save_models(directory: Path) -> None:
    """Save the models that every run loads. In one process: of several, transformers lets the first alone write."""
    tiny_model("gpt2", scale=SCALE, tie_word_embeddings=True).save_pretrained(directory / "plain")
    tiny_model("qwen2", scale=SCALE).save_pretrained(directory / "grpo")
    reference = tiny_model("qwen2", scale=SCALE)
    shift(reference)
    reference.save_pretrained(directory / "reference")


def load(directory: Path, name: str) -> Any:
    """Load one of the saved models."""
    return AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32)


def start(case: Case, models: Path) -> Any:
    """The model as it is before training."""
    model = load(models, case.loss)
    if not case.adapters:
        return model
    peft = importlib.import_module("peft")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = peft.LoraConfig(r=2, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True, init_lora_weights=False)
        return peft.get_peft_model(model, config)


def run(name: str, way: Way, models: Path, output: Path, *, resume: str | None = None) -> Outcome:
    """Train one of the cases; `resume`: the checkpoint to go on from."""
    with accelerated(way):
        model = start(CASES[name], models)
        calls: list[None] = []
        block_lists(model)[0][0].mlp.register_forward_pre_hook(lambda *_: calls.append(None))
        trainer = make(CASES[name], way, model, models, output)
        outcome = Outcome(before=parameters(model))
        trainer.add_callback(Watch(outcome))
        try:
            trainer.train(resume_from_checkpoint=resume)
        except (RuntimeError, UserError) as error:
            outcome.failure = str(error)
            outcome.note(trainer.model)
        outcome.logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        outcome.forwards = len(calls)
        outcome.wrapper = type(trainer.model_wrapped).__name__
        outcome.gradient = gradients(trainer.model)
        outcome.recovered = trainer.accelerator.sync_gradients and not getattr(trainer, "grad_reg_replaying", False)
    return outcome


def refused(name: str, way: Way, models: Path, output: Path) -> str:
    """The error's message where the trainer is refused; empty where it is made."""
    with accelerated(way):
        try:
            make(CASES[name], way, start(CASES[name], models), models, output)
        except UserError as error:
            return str(error)
    return ""


class Watch(TrainerCallback):
    """Keeps the parameters of every step."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: Any, **others: Any) -> None:
        self.outcome.note(model)


def make(case: Case, way: Way, model: Any, models: Path, output: Path) -> Any:
    """The trainer, whose micro-batches on all ranks together are the fixed data."""
    shares = ACCUMULATION * (1 if way == "single" else dist.get_world_size())
    count = len(rows() if case.loss == "plain" else ROWS)
    settings = {**SETTINGS, **({} if case.stock else GRAD_REG), **case.settings, "fsdp": way == "fsdp"}
    settings |= {"gradient_accumulation_steps": ACCUMULATION, "per_device_train_batch_size": count // shares}
    if case.loss == "plain":
        ours: Any = case.trainer, GradientRegularizedTrainingArguments
        kind, config = (Trainer, TrainingArguments) if case.stock else ours
        arguments = config(output_dir=str(output), **settings)
        return kind(model, args=arguments, train_dataset=Dataset.from_list(rows()))
    trl, ours = (importlib.import_module(name) for name in ("trl", "flatpeak.integrations.trl"))
    model.config._name_or_path = str(models / "reference")  # where TRL looks for the reference model
    regularized = ours.GradientRegularizedGRPOTrainer, ours.GradientRegularizedGRPOConfig
    kinds = (trl.GRPOTrainer, trl.GRPOConfig) if case.stock else regularized
    return rollout_trainer(*kinds, model, output, **settings)


@contextmanager
def accelerated(way: Way) -> Iterator[None]:
    """accelerate's state for one trainer, without telemetry and the Hub."""
    environment = {"CI": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if way != "single":
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        environment |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with (
        patch.dict(os.environ, environment),
        patch.object(constants, "HF_HUB_OFFLINE", True),
        patch.object(constants, "HF_HUB_DISABLE_TELEMETRY", True),
        patch.object(Trainer, "create_accelerator_and_postprocess", create_accelerator),
    ):
        importlib.import_module("transformers.utils.logging").disable_progress_bar()
        gc.freeze()  # trainers collect garbage when they begin: half a second over TRL's modules
        try:
            yield
        finally:
            gc.unfreeze()
            AcceleratorState._reset_state(reset_partial_state=True)


STOCK_CREATE_ACCELERATOR = Trainer.create_accelerator_and_postprocess


def create_accelerator(trainer: Trainer) -> None:
    """The trainer's own. accelerate replicates on CPUs though asked to shard: while it decides, these pass for GPUs."""
    if trainer.args.fsdp:
        PartialState().distributed_type = DistributedType.MULTI_GPU
    STOCK_CREATE_ACCELERATOR(trainer)
