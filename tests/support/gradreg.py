"""Small models for tests of gradient regularization, and the exact penalty by double backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatpeak.gradreg.config import CORRECTED, GradientRegularizationConfig, PublishedBehavior
from flatpeak.gradreg.parameters import choose_parameters
from flatpeak.gradreg.regularizer import GradientRegularizer
from support.models import tiny_model, use_torch_norms

Loss = Callable[[], Tensor]


class Quadratic(nn.Module):
    """L(x) = x^T A x / 2 + b^T x, float64, with x in two blocks of two: gradient A x + b, Hessian A."""

    def __init__(self, *, diagonal: Sequence[float] | None = None, gradient: Sequence[float] | None = None) -> None:
        """Random and indefinite, or with this Hessian, b = 0 and x such that the gradient is this one."""
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        root = torch.randn(4, 4, generator=generator, dtype=torch.float64)
        self.A = root + root.T
        self.b = torch.randn(4, generator=generator, dtype=torch.float64)
        x = torch.randn(4, generator=generator, dtype=torch.float64)
        if diagonal is not None and gradient is not None:
            self.A, self.b = torch.tensor(diagonal, dtype=torch.float64).diag(), torch.zeros(4, dtype=torch.float64)
            x = torch.tensor(gradient, dtype=torch.float64) / self.A.diag()
        self.blocks = nn.ModuleList(Vector(half) for half in x.view(2, 2))

    @property
    def x(self) -> Tensor:
        return torch.cat([block.value for block in self.blocks])

    def loss(self) -> Tensor:
        return self.x @ self.A @ self.x / 2 + self.b @ self.x

    def gradient(self, x: Tensor) -> Tensor:
        return self.A @ x.detach() + self.b


class Vector(nn.Module):
    """A parameter in a module of its own."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.value = nn.Parameter(value.clone())


class Sharp(nn.Module):
    """L(w) = sum cos(k w) / k^2, float64, whose gradient -sin(k w) / k bends within a step of 1 / k."""

    def __init__(self, k: float) -> None:
        super().__init__()
        self.k = k
        self.w = nn.Parameter(torch.linspace(0.5, 1.5, 64, dtype=torch.float64))

    def loss(self) -> Tensor:
        return (self.k * self.w).cos().sum() / self.k**2


class Layer(nn.Module):
    """x + tanh(W x + c), with dropout after it: smooth, so that differences converge."""

    def __init__(self, width: int, *, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Network(nn.Module):
    """A projection in, blocks, and a projection out: the middle is what `perturbed="blocks"` selects."""

    def __init__(self, *, depth: int = 2, width: int = 6, dropout: float = 0.0, normalize: bool = False) -> None:
        super().__init__()
        self.entry = nn.Linear(4, width)
        self.norm = nn.BatchNorm1d(width) if normalize else nn.Identity()
        self.blocks = nn.ModuleList(Layer(width, dropout=dropout) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.entry(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Around(nn.Module):
    """A wrapper that prefixes names as DistributedDataParallel does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def network(*, dtype: torch.dtype = torch.float64, seed: int = 0, **settings: Any) -> Network:
    """A network with the same weights whatever its type."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Network(**settings).to(dtype)


def examples(count: int = 8, *, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a regression."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return inputs.to(dtype), (inputs.square().sum(-1, keepdim=True) - 4).to(dtype)


def regression(model: nn.Module, *, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Loss:
    """The mean squared error of a network on `examples`, times `scale`."""
    inputs, targets = examples(dtype=dtype)
    return lambda: scale * (model(inputs) - targets).square().mean()


def transformer(*, dtype: torch.dtype = torch.float64, seed: int = 1, **settings: Any) -> Any:
    """A random Qwen2 of two layers. Its own norms pass through float32, which would hide small differences."""
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "max_position_embeddings": 16, "eos_token_id": None, "pad_token_id": None}
    model = use_torch_norms(tiny_model(seed=seed, scale=10.0, **sizes | settings))
    return model.to(dtype)


def language(model: Any) -> Loss:
    """Next-token cross-entropy on two short rows; attention in torch's own operations, which differentiate twice."""
    tokens = torch.randint(0, 16, (2, 7), generator=torch.Generator().manual_seed(1))

    def loss() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            logits = model(input_ids=tokens[:, :-1]).logits
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return loss


def settings(**changes: Any) -> GradientRegularizationConfig:
    """Strength 1, an absolute step of 1e-4 and no check of its consistency, unless `changes` say otherwise."""
    defaults = {"strength": 1.0, "step": 1e-4, "step_scale": "absolute", "check_every": 0}
    return GradientRegularizationConfig(**defaults | changes)


def unexpected(message: str) -> None:
    raise AssertionError(message)


def regularizer(
    model: nn.Module,
    *,
    masters: Any = None,
    compute_dtype: Any = None,
    notice: Callable[[str], None] = unexpected,
    behavior: PublishedBehavior = CORRECTED,
    **changes: Any,
) -> Any:
    """A regularizer whose notices are failures, unless a test takes them."""
    return GradientRegularizer(
        model, settings(**changes), masters=masters, compute_dtype=compute_dtype, notice=notice, behavior=behavior
    )


def one(loss: Loss) -> Callable[[], list[Tensor]]:
    """The losses of a single micro-batch."""
    return lambda: [loss()]


def gradient(parameters: Iterable[nn.Parameter], loss: Loss, *, create_graph: bool = False) -> list[Tensor]:
    """By autograd, `.grad` untouched."""
    return list(torch.autograd.grad(loss(), list(parameters), create_graph=create_graph, materialize_grads=True))


def exact_penalty(parameters: Sequence[nn.Parameter], loss: Loss) -> Tensor:
    """The gradient of ||grad L||^2 / 2 over these parameters, with respect to them, as one vector."""
    grads = gradient(parameters, loss, create_graph=True)
    half = sum(grad.square().sum() for grad in grads) / 2
    return joined(torch.autograd.grad(half, list(parameters), materialize_grads=True))


def left_in_grad(parameters: Iterable[nn.Parameter]) -> Tensor:
    """`.grad` of these parameters as one vector."""
    return joined([parameter.grad for parameter in parameters])  # type: ignore[misc]


def measured_penalty(ours: Any, loss: Loss, *, strength: float = 1.0) -> Tensor:
    """The penalty's gradient at strength 1, out of a whole update; `.grad` is left as the update left it."""
    g1 = joined(gradient(ours.parameters, loss))
    ours.accumulate(one(loss))
    return (left_in_grad(ours.parameters) - g1) / strength


def joined(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def relative_error(measured: Tensor, wanted: Tensor) -> float:
    measured, wanted = measured.detach().double(), wanted.detach().double()
    return float((measured - wanted).norm() / wanted.norm())


def cosine(left: Tensor, right: Tensor) -> float:
    left, right = left.detach().double(), right.detach().double()
    return float(left @ right / left.norm() / right.norm())


def values(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters and buffers."""
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def unchanged(model: nn.Module, before: Sequence[Tensor]) -> bool:
    """Whether parameters and buffers are, bit for bit, what `values` gave."""
    now = [*model.parameters(), *model.buffers()]
    return all(torch.equal(held, value) for held, value in zip(now, before, strict=True))


def chosen(model: nn.Module, perturbed: Any = "blocks") -> list[str]:
    """The names of the perturbed parameters."""
    names = {p: name for name, p in model.named_parameters()}
    return [names[p] for p in choose_parameters(model, settings(perturbed=perturbed))]
