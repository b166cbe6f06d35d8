"""What rounding, names and frozen advantages do to published gradient regularization; no transformer is run here.

Part of gradient_regularization.py, which prints these tables. Each function returns rows of cells, the header first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, GPT2Config

from flatpeak.functional import (
    frozen_policy_loss,
    group_advantages,
    hessian_vector_product,
    importance_ratio,
    reweighted_policy_loss,
)
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.parameters import block_lists, choose_parameters
from flatpeak.gradreg.perturbation import Perturbation, PerturbationFidelity
from flatpeak.gradreg.regularizer import GradientRegularizer

Rows = list[tuple[str, ...]]

WEIGHTS = 4_000_000
SPREAD = 0.02
"""Standard deviation of the synthetic weights: what language models are initialized with, and near what they keep."""
PAPER_STEP = 1e-3 / (SPREAD * 358e6**0.5)
"""The paper's absolute step 1e-3 at ||g|| = 1, relative to the norm of 358 million weights, a 0.5B model's blocks."""
PAPER_RATE = 5e-6
EXCLUDED = ("embed", "embedding", "lm_head", "output", "classifier", "score")
"""Parts of names that keep a parameter out of the paper's set, in its code."""
ARMS = 8
DRAWS = 200_000


def number(value: float) -> str:
    """Two significant digits; below 1e-12, where float64 rounds, 0."""
    if abs(value) < 1e-12:
        return "0"
    text = f"{value:.2g}"
    return text if "e+" not in text else f"{float(text):.0f}"


class Weights(nn.Module):
    """A model that is one vector of weights."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)


def gaussian(count: int, *, seed: int, spread: float = 1.0) -> Tensor:
    """Float32 random numbers."""
    return spread * torch.randn(count, generator=torch.Generator().manual_seed(seed))


def perturbation() -> Rows:
    """How much of a perturbation of Gaussian weights along a Gaussian gradient survives, by precision."""
    weights, gradient = gaussian(WEIGHTS, seed=0, spread=SPREAD), gaussian(WEIGHTS, seed=1)
    minimum = GradientRegularizationConfig().min_perturbation_kept
    header = (
        "relative step",
        "bf16 weights moved",
        "cosine",
        "norm",
        "bf16 copy of float32: cosine",
        "norm",
        "float32",
    )
    rows = [(*header, f"guard ({minimum}) refuses")]
    for step in (PAPER_STEP, 3e-5, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1):
        rounded = realized(weights.bfloat16(), gradient, step=step)
        mixed = realized(weights, gradient, step=step, compute_dtype=torch.bfloat16)
        full = realized(weights, gradient, step=step)
        moved = moved_share(weights.bfloat16(), gradient, step=step)
        kinds = {"bf16": rounded, "copy": mixed, "float32": full}
        refused = [name for name, kept in kinds.items() if kept.cosine < minimum]
        cells = (step, moved, rounded.cosine, rounded.norm, mixed.cosine, mixed.norm, full.cosine)
        rows.append((*map(number, cells), ", ".join(refused) or "none"))
    return rows


def realized(
    weights: Tensor, gradient: Tensor, *, step: float, compute_dtype: torch.dtype | None = None
) -> PerturbationFidelity:
    """What flatpeak measures of one perturbation."""
    model = Weights(weights)
    moving = Perturbation(model, [model.values], compute_dtype=compute_dtype)
    h = step * float(weights.float().norm() / gradient.norm())
    with moving.applied({model.values: gradient}, step=h) as kept:
        return kept


def moved_share(weights: Tensor, gradient: Tensor, *, step: float) -> float:
    """The share of weights that are another number afterwards."""
    h = step * float(weights.float().norm() / gradient.norm())
    after = (weights.float() + h * gradient).to(weights.dtype)
    return float((after != weights).float().mean())


def master() -> Rows:
    """An optimizer whose float32 weights are overwritten with their bf16 copy after every step."""
    rows: Rows = [
        (
            "Adam's step / learning rate",
            "share of weights that move in a step",
            "share of the distance covered in 100 steps",
            "with the master kept",
        )
    ]
    for size in (0.3, 1.0):
        start = gaussian(WEIGHTS // 4, seed=0, spread=SPREAD).bfloat16()
        direction = size * PAPER_RATE * gaussian(WEIGHTS // 4, seed=1).sign()
        first = (start.float() + direction).bfloat16()
        overwritten, kept = start, start.float()
        for _ in range(100):
            overwritten = (overwritten.float() + direction).bfloat16()
            kept = kept + direction
        whole = float((100 * direction).norm())
        ways = [float((end.float() - start.float()).norm()) / whole for end in (overwritten, kept)]
        rows.append((number(size), number(float((first != start).float().mean())), *map(number, ways)))
    return rows


def restore() -> Rows:
    """The share of weights that differ after a perturbation was added and taken back."""
    weights, gradient = gaussian(WEIGHTS // 4, seed=0, spread=SPREAD), gaussian(WEIGHTS // 4, seed=1)
    rows: Rows = [("type", "relative step", "changed by adding and subtracting", "changed by flatpeak")]
    for dtype in (torch.bfloat16, torch.float32):
        for step in (3e-5, 3e-4, 3e-3):
            start, change = weights.to(dtype), (step * SPREAD * gradient).to(dtype)
            back = start + change - change
            model = Weights(start.clone())
            with Perturbation(model, [model.values]).applied({model.values: change}, step=1.0):
                pass
            shares = [float((end != start).float().mean()) for end in (back, model.values.detach())]
            rows.append((str(dtype)[6:], number(step), *map(number, shares)))
    return rows


def names() -> Rows:
    """Which parameters a list of substrings hits and misses, held against the blocks themselves."""
    gpt2 = AutoModelForCausalLM.from_config(GPT2Config(n_layer=2, n_embd=16, n_head=2, **_small()))
    bert = AutoModelForMaskedLM.from_config(
        BertConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=64, **_small())
    )
    models = {"GPT-2": gpt2, "BERT": bert, "GPT-2 in DataParallel": nn.DataParallel(gpt2)}
    config = GradientRegularizationConfig(strength=1.0)
    rows: Rows = [("model", "perturbed outside of blocks", "block tensors missed", "of", "flatpeak perturbs")]
    for name, model in models.items():
        inside = {p for blocks in block_lists(model) for p in blocks.parameters()}
        # Chosen before the model is wrapped, compared after: the published code adds a prefix for DeepSpeed alone.
        unwrapped = model.module if isinstance(model, nn.DataParallel) else model
        wanted = {n for n, _ in unwrapped.named_parameters() if not any(part in n for part in EXCLUDED)}
        hit = {p: n for n, p in model.named_parameters() if n in wanted}
        outside = sorted({n.removeprefix("transformer.").split(".")[0] for p, n in hit.items() if p not in inside})
        missed, chosen = len(inside - hit.keys()), len(choose_parameters(model, config))
        rows.append((name, ", ".join(f"`{n}`" for n in outside) or "none", f"{missed}", f"{len(inside)}", f"{chosen}"))
    return rows


def _small() -> dict[str, int | None]:
    return {"vocab_size": 24, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def bandit() -> Rows:
    """The penalty's gradient of each ratio mode on a softmax bandit, held against that of the expected reward."""
    logits = gaussian(ARMS, seed=0).double()
    rewards = gaussian(ARMS, seed=1).double()
    p = torch.softmax(logits, 0)
    every_arm = torch.arange(ARMS)
    exact = (every_arm, p * (rewards - p @ rewards))
    drawn = torch.multinomial(p, DRAWS, replacement=True, generator=torch.Generator().manual_seed(2))
    advantages = group_advantages(rewards[drawn].view(-1, ARMS), baseline="leave_one_out", scale="none").view(-1)
    sampled = (drawn, advantages / DRAWS)
    truth = expected_reward_curvature(logits, rewards)
    rows: Rows = [("advantages", "ratio mode", "size / size of H g", "cosine", "relative error")]
    for name, (arms, weights) in (("enumerated", exact), (f"{DRAWS:,} draws in groups of {ARMS}", sampled)):
        for mode in ("importance", "reuse"):
            found = bandit_penalty(logits, arms, -weights, mode=mode)
            rows.append((name, mode, *compared(found, truth)))
    return rows


def compared(found: Tensor, truth: Tensor) -> tuple[str, str, str]:
    """Size, cosine and error of a vector that should be another."""
    size, error = found.norm() / truth.norm(), (found - truth).norm() / truth.norm()
    angle = number(float(found @ truth / (found.norm() * truth.norm()))) if size > 1e-12 else "-"
    return number(float(size)), angle, number(float(error))


def expected_reward_curvature(logits: Tensor, rewards: Tensor) -> Tensor:
    """H g of L = -sum_a p_a r_a, exact."""
    leaf = logits.clone().requires_grad_()

    def loss() -> Tensor:
        return -(torch.softmax(leaf, 0) @ rewards)

    (gradient,) = torch.autograd.grad(loss(), leaf)
    return hessian_vector_product(loss, [leaf], [gradient])[0]


def bandit_penalty(logits: Tensor, arms: Tensor, coefficients: Tensor, *, mode: str) -> Tensor:
    """The penalty's gradient as flatpeak finds it; `coefficients` is d loss / d log p of every draw."""
    model = Weights(logits.clone())
    first = torch.log_softmax(logits, 0)[arms]

    def logprobs() -> Tensor:
        return torch.log_softmax(model.values, 0)[arms]

    def again() -> Tensor:
        if mode == "reuse":
            return frozen_policy_loss(logprobs(), coefficients).sum()
        return reweighted_policy_loss(logprobs(), first, coefficients).sum()

    config = GradientRegularizationConfig(strength=1.0, perturbed="all", step=1e-6)
    total, plain = both_gradients(
        model, config, lambda: (coefficients * importance_ratio(logprobs(), first)).sum(), again
    )
    return total - plain


def both_gradients(
    model: Weights,
    config: GradientRegularizationConfig,
    once: Callable[[], Tensor],
    again: Callable[[], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """The regularized gradient, and the plain one."""
    regularizer = GradientRegularizer(model, config)
    passes = (
        lambda: once().backward(),
        lambda: regularizer.accumulate(lambda: [once()], again=lambda: [(again or once)()]),
    )
    found = []
    for run in passes:
        model.zero_grad()
        run()
        assert model.values.grad is not None
        found.append(model.values.grad)
    return found[1], found[0]


def conventions() -> Rows:
    """Whose gamma, lambda or rho is which strength: on a quadratic, where every difference quotient is exact."""
    matrix = gaussian(25, seed=0).double().view(5, 5)
    matrix = matrix + matrix.T
    theta = gaussian(5, seed=1).double()
    g, gamma, rho = matrix @ theta, 0.01, 0.05
    quotient = (matrix @ (theta + gamma * g) - g) / gamma
    ascent = matrix @ (theta + rho * g / g.norm())
    config = GradientRegularizationConfig
    norm = {"penalty": "norm", "step_scale": "radius", "step": rho}
    sources = {
        "paper, equations: g + gamma/2 (g' - g)/eps": (g + gamma / 2 * quotient, config.paper(gamma=gamma / 2)),
        "paper, code: g + gamma (g' - g)/eps": (g + gamma * quotient, config.paper(gamma=gamma)),
        "from-scratch Dr. GRPO: g + gamma/2 (g' - g)/eps": (
            g + gamma / 2 * quotient,
            config.from_scratch_dr_grpo(gamma=gamma),
        ),
        "SAM without its norm: g' at theta + rho g": (
            matrix @ (theta + rho * g),
            config(strength=rho, step=rho, step_scale="absolute"),
        ),
        "SAM: g' at theta + rho g/norm(g)": (ascent, config.model_validate(norm | {"strength": rho})),
        "Zhao et al.: (1 - lambda/rho) g + lambda/rho g'": (
            (1 - gamma / rho) * g + gamma / rho * ascent,
            config.model_validate(norm | {"strength": gamma}),
        ),
    }
    rows: Rows = [("written as", "`strength`", "`penalty`", "`step_scale`", "penalty / H g, theirs", "flatpeak's")]
    for name, (theirs, settings) in sources.items():
        model = Weights(theta.clone())
        everything = settings.model_copy(update={"perturbed": "all"})
        ours, plain = both_gradients(model, everything, lambda model=model: model.values @ matrix @ model.values / 2)
        factors = [float((total - plain) @ (matrix @ g) / (matrix @ g).square().sum()) for total in (theirs, ours)]
        kinds = (f"{settings.strength}", settings.penalty, settings.step_scale)
        rows.append((f"{name}", *kinds, *map(number, factors)))
    return rows
