"""The figures of docs/gradient_regularization.md: what flatpeak's regularization computes, and what others do.

    python docs/results/gradient_regularization.py [TABLE ...]

Prints Markdown tables, all of them or those named, in well under a minute on one thread of a CPU. Nothing is read or
downloaded and every seed is fixed. Figures that rounding decides differ a little between machines.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator

import torch
from published_gradient_regularization import (
    Rows,
    bandit,
    compared,
    conventions,
    master,
    names,
    number,
    perturbation,
    restore,
)
from tiny_transformer import (
    LETTERS,
    RESPONSE_TOKENS,
    adapted,
    cosine,
    curvature,
    flat,
    gradient,
    imitation,
    later_batch,
    response_logprobs,
    rollouts,
    share,
    surrogate,
    transformer,
)
from torch import Tensor, nn

from flatpeak.functional import frozen_policy_loss, importance_ratio
from flatpeak.gradreg.config import CORRECTED, GradientRegularizationConfig, PublishedBehavior
from flatpeak.gradreg.guard import Report
from flatpeak.gradreg.regularizer import GradientRegularizer
from flatpeak.policy.config import TokenizerConfig
from flatpeak.policy.loading import build_tokenizer
from flatpeak.policy.model import Policy
from flatpeak.training.config import OptimizerConfig
from flatpeak.training.learner import Learner, weighted_sum
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.regularized import FirstPass, RegularizedLearner
from flatpeak.types import Batch

LARGE = 1024.0
"""A strength at which adding g1 rounds nothing of the penalty away; a power of two, so dividing by it is exact."""
STEPS = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5, 1e-5, 1e-6)


def regularized(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    again: Callable[[], Tensor] | None = None,
    compute_dtype: torch.dtype | None = None,
    masters: dict[nn.Parameter, Tensor] | None = None,
    behavior: PublishedBehavior = CORRECTED,
    **settings: object,
) -> tuple[Tensor, Tensor, Report]:
    """(the gradient with penalty, the one without, the report), both with the same dropout masks in the first pass."""
    unguarded = {"min_perturbation_kept": 0.0, "check_every": 0, "perturbed": "all"}
    config = GradientRegularizationConfig(**{**unguarded, **settings})
    regularizer = GradientRegularizer(
        model,
        config,
        compute_dtype=compute_dtype,
        masters=masters,
        notice=lambda message: None,
        behavior=behavior,
    )
    regularizer.guard.checked = -config.check_every  # as in a run that goes on: measured, and not refused
    found = []
    passes = {
        "plain": lambda: loss().backward(),
        "regularized": lambda: regularizer.accumulate(lambda: [loss()], again=lambda: [(again or loss)()]),
    }
    for run in passes.values():
        model.zero_grad()
        torch.manual_seed(3)
        report = run()
        found.append(gradient(model))
    assert isinstance(report, Report)
    return found[1], found[0], report


def penalty(
    model: nn.Module,
    loss: Callable[[], Tensor],
    *,
    behavior: PublishedBehavior = CORRECTED,
    **settings: object,
) -> tuple[Tensor, Report]:
    """The gradient of the penalty at strength 1."""
    total, plain, report = regularized(model, loss, strength=LARGE, behavior=behavior, **settings)
    limit = behavior.g1_clip
    kept = 1.0 if limit is None else min(1.0, limit / (float(plain.norm()) + 1e-6))
    return (total - kept * plain) / LARGE, report


def steps() -> Rows:
    """The error of the difference quotient, by step and precision, relative to the exact H g in float64."""
    reference = transformer()
    truth = curvature(reference, surrogate(reference))
    kinds = {
        "float64 forward": (torch.float64, False, "forward"),
        "float64 central": (torch.float64, False, "central"),
        "float32 forward": (torch.float32, False, "forward"),
        "float32 central": (torch.float32, False, "central"),
        "bf16 copy of float32": (torch.float32, True, "forward"),
        "bf16 weights": (torch.bfloat16, False, "forward"),
    }
    rows: Rows = [("relative step", *kinds, "kept, bf16 copy", "kept, bf16 weights")]
    for step in (*STEPS, None):
        errors, kept = [], []
        for dtype, mixed, difference in kinds.values():
            model = transformer(dtype)
            settings = {"difference": "exact"} if step is None else {"difference": difference, "step": step}
            with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                loss = surrogate(model)
                compute_dtype = torch.bfloat16 if mixed else None
                found, report = penalty(model, loss, compute_dtype=compute_dtype, **settings)
            errors.append(number(float((found - truth).norm() / truth.norm())))
            if mixed or dtype == torch.bfloat16:
                kept.append(number(report.kept.cosine) if report.kept else "")
        rows.append(("exact" if step is None else number(step), *errors, *kept))
    return rows


def consistency() -> Rows:
    """What the guard measures, and the error of the penalty relative to the same difference in float32."""
    kinds = ("float32", "bf16 copy of float32", "bf16 weights, float32 masters", "float32 adapters, bf16 weights")
    rows: Rows = [("relative step", *(name for kind in kinds for name in (kind, "error")))]
    for step in STEPS[:-1]:
        cells: list[str] = []
        for kind in kinds:
            adapters = "adapters" in kind
            whole = adapted(torch.float32) if adapters else transformer(torch.float32)
            wanted, _ = penalty(whole, surrogate(whole), step=step)
            dtype = torch.bfloat16 if "weights" in kind else torch.float32
            model = adapted(dtype) if adapters else transformer(dtype)
            settings: dict[str, object] = {"step": step, "check_every": 1}
            if "masters" in kind:
                settings["masters"] = {p: p.detach().float() for p in model.parameters()}
            with torch.autocast("cpu", torch.bfloat16, enabled="copy" in kind):
                settings["compute_dtype"] = torch.bfloat16 if "copy" in kind else None
                found, report = penalty(model, surrogate(model), **settings)
            assert report.consistency is not None
            cells += [number(report.consistency), number(float((found - wanted).norm() / wanted.norm()))]
        rows.append((number(step), *cells))
    return rows


def clip() -> Rows:
    """The penalty's gradient where both gradients are clipped to norm 10 before their difference is taken."""
    model = transformer()
    header = ("loss", "norm of g1", "cosine of g1 and H g", "clipped: cosine with H g", "size / size of H g")
    rows: Rows = [(*header, "flatpeak: cosine", "size")]
    for name, loss_of in {"GRPO": surrogate, "SFT": imitation}.items():
        size = float(regularized(model, loss_of(model), strength=1.0)[1].norm())
        for norm in (9.0, 12.0, 30.0):
            loss = loss_of(model, scale=norm / size)
            truth = curvature(model, loss)
            cells = [norm, cosine(regularized(model, loss, strength=1.0)[1], truth)]
            for limit in (10.0, None):
                behavior = PublishedBehavior(g1_clip=limit, g2_clip=limit)
                found, _ = penalty(model, loss, step=1e-7, step_scale="absolute", behavior=behavior)
                cells += [cosine(found, truth), float(found.norm() / truth.norm())]
            rows.append((name, *map(number, cells)))
    return rows


def outside() -> Rows:
    """What parameters outside the perturbed set receive, as a multiple of the blocks' effect on their gradient."""
    model = transformer()
    loss = surrogate(model)
    blocks = set(model.transformer.h.parameters())
    inside = flat([torch.full_like(p, p in blocks) for p in model.parameters()]).bool()
    truth = curvature(model, loss, inside=blocks)
    rows: Rows = [("strength", "step", "penalty / H g in blocks", "outside, published", "outside, flatpeak")]
    for strength, step in ((1e-3, 1e-3), (1e-2, 1e-3), (1e-2, 1e-2)):
        changes = []
        for behavior in (PublishedBehavior(outside="g2"), PublishedBehavior()):
            settings = {"strength": strength, "step": step, "step_scale": "absolute", "perturbed": "blocks"}
            total, plain, _ = regularized(model, loss, behavior=behavior, **settings)
            changes.append(total - plain)
        published, ours = changes
        factors = share(ours[inside], truth[inside]), *(share(c[~inside], truth[~inside]) for c in (published, ours))
        rows.append(tuple(map(number, (strength, step, *factors))))
    return rows


def dropout() -> Rows:
    """A second pass with the dropout masks of the first, and with masks of its own."""
    model = transformer(dropout=0.1).train()
    loss = surrogate(model)

    def with_the_same_masks() -> Tensor:
        torch.manual_seed(3)
        return loss()

    truth = curvature(model, with_the_same_masks)
    rows: Rows = [("relative step", "replayed: relative error", "not replayed: size / size of H g", "cosine")]
    for step in (1e-3, 1e-4, 3e-5, 1e-6):
        replayed, _ = penalty(model, loss, step=step)
        drawn, _ = penalty(model, loss, step=step, behavior=PublishedBehavior(replay_randomness=False))
        error = float((replayed - truth).norm() / truth.norm())
        rows.append(tuple(map(number, (step, error, float(drawn.norm() / truth.norm()), cosine(drawn, truth)))))
    return rows


def ratio_modes() -> Rows:
    """The penalty of each ratio mode, held against the curvature of the objective itself."""
    model = transformer()
    loss = surrogate(model)
    truth = curvature(model, loss)
    coefficients_NR = (-rollouts()[1][:, None] / rollouts()[0].shape[0]).expand(-1, RESPONSE_TOKENS) / RESPONSE_TOKENS
    reuse = {
        "importance": None,
        "reuse": lambda: frozen_policy_loss(response_logprobs(model), coefficients_NR).sum(),
    }
    rows = bandit()
    for mode, again in reuse.items():
        found, _ = penalty(model, loss, again=again, step=1e-7)
        rows.append(("the transformer, 16 completions", mode, *compared(found, truth)))
    return rows


class NaiveLearner(RegularizedLearner):
    """Its second pass is another function of the weights than the first."""

    on_policy = False
    """Whether it takes the denominator of the ratio from itself; else that of the sampler, without the clip."""

    def second_pass(self, batch: Batch, frozen: list[FirstPass]) -> Iterator[Tensor]:
        """-A r, unclipped."""
        logprobs_T, _ = self.policy.token_logprobs(batch, temperature=self.temperature)
        old_T = logprobs_T.detach() if self.on_policy else batch.old_logprobs_T
        yield weighted_sum(-batch.advantages_T * importance_ratio(logprobs_T, old_T), batch)


class OnPolicyLearner(NaiveLearner):
    """Ratio 1 in the second pass, whatever it was in the first."""

    on_policy = True


def later_updates() -> Rows:
    """The penalty's size over the gradient's in a later update of a step, some of whose tokens are clipped."""
    policy = Policy(transformer(), build_tokenizer(TokenizerConfig(type="characters"), [LETTERS]))
    batch = later_batch(policy)
    objective = Objective(config=ObjectiveConfig(), kl=KLConfig())
    with torch.no_grad():
        now_T, _ = policy.token_logprobs(batch, temperature=1.0)
    clipped = int(objective.clipped(now_T, batch).sum())
    variants = {
        "ratio 1": (OnPolicyLearner, "importance"),
        "unclipped": (NaiveLearner, "importance"),
        "`importance`": (RegularizedLearner, "importance"),
        "`importance_clipped`": (RegularizedLearner, "importance_clipped"),
        "`reuse`": (RegularizedLearner, "reuse"),
    }
    rows: Rows = [(f"relative step ({clipped} of {len(now_T)} tokens clipped)", *variants)]
    for step in (1e-4, 3e-5, 3e-6, 1e-6):
        cells = [step]
        for learner, mode in variants.values():
            config = GradientRegularizationConfig(
                strength=1.0,
                perturbed="all",
                step=step,
                ratio_mode=mode,  # type: ignore[arg-type]
                check_every=0,
            )
            settings = {"temperature": 1.0, "micro_batch_tokens": 1000}
            built = learner(policy, objective, OptimizerConfig(), config, notice=warnings.warn, **settings)  # type: ignore[arg-type]
            built.optimizer.zero_grad()
            Learner.accumulate_gradients(built, batch)
            plain = gradient(policy.model)
            built.optimizer.zero_grad()
            built.accumulate_gradients(batch)
            cells.append(float((gradient(policy.model) - plain).norm() / plain.norm()))
        rows.append(tuple(map(number, cells)))
    return rows


TABLES: dict[str, Callable[[], Rows]] = {
    "conventions": conventions,
    "steps": steps,
    "consistency": consistency,
    "perturbation": perturbation,
    "master": master,
    "restore": restore,
    "clip": clip,
    "outside": outside,
    "names": names,
    "dropout": dropout,
    "ratio_modes": ratio_modes,
    "later_updates": later_updates,
}


def markdown(rows: Rows) -> str:
    """A table."""
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def main(chosen: list[str]) -> None:
    """Print tables."""
    unknown = [name for name in chosen if name not in TABLES]
    if unknown:
        raise SystemExit(f"no table is called {unknown[0]}; there are {', '.join(TABLES)}")
    torch.set_num_threads(1)
    for name in chosen or TABLES:
        print(f"{name}\n\n{markdown(TABLES[name]())}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
