"""The same update in one process and on two ranks: tiny models, their batch, how they are wrapped, what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.guard import Report
from flatpeak.gradreg.parameters import plain_name
from flatpeak.gradreg.regularizer import GradientRegularizer

Way = Literal["single", "ddp", "ddp_view", "fsdp"]
Rows = tuple[Tensor, ...]

NUM_ROWS = 8
MICRO_BATCHES = (3, 1)
"""Rows of each micro-batch of a rank: unlike, so that a mean of means would be seen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A model, a batch, and the loss of some of its rows, summed."""

    build: Callable[[], nn.Module]
    rows: Callable[[], Rows]
    loss: Callable[[nn.Module, Rows], Tensor]
    parts: Callable[[nn.Module], list[nn.Module]]
    """The modules that are sharded by themselves, before the root."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """The run of a test: picklable, so that ranks and the single process get the very same."""

    task: str
    config: GradientRegularizationConfig
    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.05
    steps: int = 1
    dtype: torch.dtype = torch.float64


@dataclass(kw_only=True, slots=True)
class Outcome:
    """The results of one process; gradients and parameters whole, by their plain names."""

    reports: list[Report] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    forwards: int = 0
    """Micro-batches that went through the model."""

    @property
    def changes(self) -> dict[str, Tensor]:
        """Changes of the parameters, since their values would hide small differences of the changes."""
        return {name: value - self.before[name] for name, value in self.after.items()}


def mlp() -> nn.Module:
    """Odd widths: FSDP2 splits 7, 3 and 1 rows over two ranks unevenly, and one rank holds nothing of the last."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1))


def mlp_rows() -> Rows:
    return torch.randn(NUM_ROWS, 5), torch.randn(NUM_ROWS, 1)


def squared_error(model: nn.Module, rows: Rows) -> Tensor:
    outputs: Tensor = model(rows[0])
    return (outputs - rows[1]).square().sum()


class Waves(nn.Module):
    """A linear layer under sin(1e5 x): its gradient is not linear over the default step of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(1e5 * self.linear(x)).sum(-1, keepdim=True)


def llama() -> nn.Module:
    """A Llama of two blocks with a tied head. torch's own norms: those of transformers go through float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=11,
        hidden_size=12,
        intermediate_size=18,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        tie_word_embeddings=True,
        initializer_range=0.3,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    for name in [name for name, _ in model.named_modules()]:
        if name.endswith("norm"):
            model.set_submodule(name, nn.RMSNorm(12))
    return model


def llama_rows() -> Rows:
    """Token ids and an advantage for every row."""
    return torch.randint(11, (NUM_ROWS, 6)), torch.randn(NUM_ROWS)


def policy_gradient(model: nn.Module, rows: Rows) -> Tensor:
    """-A sum_t log p of the next tokens."""
    ids, advantages = rows
    logprobs = torch.log_softmax(model(input_ids=ids[:, :-1]).logits, -1)
    return -(logprobs.gather(-1, ids[:, 1:, None])[..., 0].sum(-1) * advantages).sum()


def lora() -> nn.Module:
    """The Llama with adapters, both of whose halves are off zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=3, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    model: nn.Module = get_peft_model(llama(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def blocks(model: nn.Module) -> list[nn.Module]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    return [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]


def linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


TASKS = {
    "mlp": Task(build=mlp, rows=mlp_rows, loss=squared_error, parts=linears),
    "waves": Task(build=Waves, rows=mlp_rows, loss=squared_error, parts=linears),
    "llama": Task(build=llama, rows=llama_rows, loss=policy_gradient, parts=blocks),
    "lora": Task(build=lora, rows=llama_rows, loss=policy_gradient, parts=blocks),
}


def seeded(make: Callable[[], Any], seed: int) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()


def build(case: Case, way: Way, **sharding: Any) -> nn.Module:
    """The model, wrapped; `sharding` goes to `fully_shard`."""
    task = TASKS[case.task]
    model: nn.Module = seeded(task.build, 0).to(case.dtype)
    if way == "fsdp":
        for module in task.parts(model):
            fully_shard(module, **sharding)
        fully_shard(model, **sharding)
    elif way != "single":
        model = DistributedDataParallel(model, gradient_as_bucket_view=way == "ddp_view")
    return model


def micro_batches(case: Case, way: Way) -> list[Rows]:
    """One micro-batch of everything, or this rank's half in pieces."""
    rows = tuple(one.to(case.dtype) if one.is_floating_point() else one for one in seeded(TASKS[case.task].rows, 1))
    if way == "single":
        return [rows]
    half = NUM_ROWS // 2
    mine = [one[dist.get_rank() * half :][:half].split(MICRO_BATCHES) for one in rows]
    return list(zip(*mine, strict=True))


class Losses:
    """The losses of an update, every one a share of the mean over rows: ranks average, so each counts its own rows.

    `no_sync` and `set_requires_gradient_sync` hold for what runs between two draws, and the regularizer runs a loss's
    backward pass before it draws the next: so the generator yields from inside.
    """

    def __init__(self, case: Case, way: Way, model: nn.Module, *, synchronize: bool = True) -> None:
        self.task, self.model = TASKS[case.task], model
        self.micro = micro_batches(case, way)
        self.num_rows = sum(len(rows[0]) for rows in self.micro)
        self.synchronize = synchronize
        """In the last micro-batch; False makes the mistake of not doing so."""
        self.drawn = 0
        self.watch: Callable[[int], object] = lambda drawn: None
        """Announce a micro-batch before it goes through the model."""

    def __call__(self) -> Iterator[Tensor]:
        for position, rows in enumerate(self.micro):
            synchronized = self.synchronize and position == len(self.micro) - 1
            if isinstance(self.model, FSDPModule):
                self.model.set_requires_gradient_sync(synchronized)
            replicas = self.model if isinstance(self.model, DistributedDataParallel) else None
            with replicas.no_sync() if replicas is not None and not synchronized else nullcontext():
                self.drawn += 1
                self.watch(self.drawn)
                yield self.task.loss(self.model, rows) / self.num_rows


def run(case: Case, way: Way, **sharding: Any) -> Outcome:
    """All of a case's updates."""
    model = build(case, way, **sharding)
    regularizer = GradientRegularizer(model, case.config)
    losses = Losses(case, way, model)
    return updates(case, model, regularizer, losses)


def updates(case: Case, model: nn.Module, regularizer: GradientRegularizer, losses: Losses) -> Outcome:
    """Go on for `case.steps` updates."""
    optimizer = build_optimizer(case, model)
    outcome = Outcome(before=parameters(model))
    for _ in range(case.steps):
        optimizer.zero_grad()
        outcome.reports.append(regularizer.accumulate(losses))
        outcome.gradients.append(gradients(model))
        optimizer.step()
    outcome.after, outcome.forwards = parameters(model), losses.drawn
    return outcome


def build_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    if case.optimizer == "sgd":
        return torch.optim.SGD(trained, lr=case.learning_rate)
    return torch.optim.AdamW(trained, lr=case.learning_rate)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): whole(parameter) for name, parameter in model.named_parameters()}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def same_bits(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def whole(tensor: Tensor) -> Tensor:
    """All of it, on every rank."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def distance(measured: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """||measured - wanted|| / ||wanted||, over all tensors."""
    assert measured.keys() == wanted.keys()
    gap = sum((measured[name] - wanted[name]).square().sum().item() for name in wanted)
    return float((gap / sum(value.square().sum().item() for value in wanted.values())) ** 0.5)
