"""A policy loss of the user's own: loaded, tried on a few tokens before a run begins, and checked at every call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.functional.losses import LOG_RATIO_LIMIT, POLICY_LOSSES, PolicyLoss, TokenFunction, importance_ratio
from flatpeak.training.config import KLConfig, ObjectiveConfig
from flatpeak.training.objective import Objective
from flatpeak.utils.user_code import check_call, describe_value, load_object, one_line

PARAMETERS: Final = ("logprobs_T", "ratio_T", "advantages_T", "config")
"""The arguments of a loss."""
_TRIAL_TOKENS: Final = 12
_TRIAL_LIMITS: Final = (1.0, 2.0, 5.0, 10.0, LOG_RATIO_LIMIT)
_TRIAL_SPACING: Final = 0.125
_TRIAL_LOGPROBS: Final = torch.tensor([-0.01, -0.1, -0.5, -1.0, -2.0, -4.0, -8.0, -16.0, -32.0])
_NO_CLIP: Final = PolicyLoss.__dataclass_fields__["clipped"].default


def make_objective(config: ObjectiveConfig, kl: KLConfig, *, own: object = None) -> Objective:
    """The objective of a recipe; `own` is the loss that a Python caller gave. UserError for one that is unfit."""
    if own is None and config.loss in POLICY_LOSSES:
        return Objective(config=config, kl=kl)
    where = f"objective.loss={config.loss}"
    loaded = load_object(config.loss, where=where) if own is None else own
    return Objective(config=config, kl=kl, own_loss=policy_loss(loaded, config, where=where))


def policy_loss(own: object, config: ObjectiveConfig, *, where: str) -> PolicyLoss:
    """A function or `PolicyLoss` of the user's as a loss whose results are checked, tried once on a few tokens.

    UserError, which begins with `where`, for a result of another shape, dtype or device than the log-probabilities, for
    one that is not finite or without a gradient, and for a loss of a token that depends on other tokens.
    """
    if not isinstance(own, PolicyLoss) and not callable(own):
        raise UserError(f"{where} is {describe_value(own)}: name a function or a flatpeak.functional.PolicyLoss")
    loss = own if isinstance(own, PolicyLoss) else PolicyLoss(value=own)
    prepare = partial(_prepared, arguments=config.arguments, where=where)
    loss = replace(
        loss,
        value=prepare(loss.value, "value"),
        clipped=loss.clipped if loss.clipped is _NO_CLIP else prepare(loss.clipped, "clipped"),
        with_curvature=loss.with_curvature and prepare(loss.with_curvature, "with_curvature"),
    )
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        all_tokens = _tried(loss, config, where)
    return replace(loss, all_tokens=loss.all_tokens or all_tokens)


def _prepared(function: Callable[..., Any], name: str, *, arguments: Mapping[str, Any], where: str) -> TokenFunction:
    """The function with the recipe's arguments, its result checked at every call."""
    where = where if name == "value" else f"{where}, {name}"
    check_call(function, given=PARAMETERS, arguments=arguments, where=where, key="objective.arguments")
    called = partial(function, **arguments) if arguments else function

    def checked(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
        dtype = torch.bool if name == "clipped" else logprobs_T.dtype
        if not len(logprobs_T):  # a process without completions of its own: a maximum, say, is not defined
            return logprobs_T.to(dtype)
        result = called(logprobs_T, ratio_T, advantages_T, config)
        if not isinstance(result, Tensor):
            raise UserError(f"{where} returned {describe_value(result)}: return a {dtype} tensor, one value per token")
        if (result.shape, result.dtype, result.device) != (logprobs_T.shape, dtype, logprobs_T.device):
            raise UserError(
                f"{where} returned {_described(result)} for {len(logprobs_T)} tokens: return {dtype} "
                f"{list(logprobs_T.shape)} on {logprobs_T.device}, one value per token and not their mean, which "
                "objective.normalization takes"
            )
        return result

    return checked


def _described(result: Tensor) -> str:
    return f"{result.dtype} {list(result.shape)} on {result.device}"


def _tried(loss: PolicyLoss, config: ObjectiveConfig, where: str) -> bool:
    """Try a loss on tokens with ratios on both sides of 1; returns whether tokens of advantage 0 have a gradient."""
    old_T = torch.linspace(-3, -0.7, _TRIAL_TOKENS)
    logprobs_T = old_T + torch.tensor([-0.5, 0.5, 0.0, 0.1, -0.1, 0.3]).repeat(2)
    advantages_T = torch.tensor([1.0, -1.0, 0.5, -2.0]).repeat(3)
    value_T, gradient_T = _differentiated(loss.value, logprobs_T, old_T, advantages_T, config, where)
    if not bool(gradient_T.any()):
        raise UserError(f"{where}: {_NO_GRADIENT}")
    cuts = (slice(0, 5), slice(5, _TRIAL_TOKENS))
    pieces = [_differentiated(loss.value, logprobs_T[c], old_T[c], advantages_T[c], config, where)[0] for c in cuts]
    if not torch.allclose(torch.cat(pieces), value_T, rtol=1e-4, atol=1e-6):
        raise UserError(
            f"{where}: a token's loss depends on the other tokens of the call, or on chance: compute it of its own "
            "values alone, since batches are split for memory (what depends on a group belongs into advantage.function)"
        )
    if loss.with_curvature is not None:
        _, other_T = _differentiated(
            loss.with_curvature, logprobs_T, old_T, advantages_T, config, f"{where}, with_curvature"
        )
        if not torch.allclose(other_T, gradient_T, rtol=1e-4, atol=1e-6):
            raise UserError(
                f"{where}: with_curvature has another gradient than value: make them equal, or leave it out"
            )
    _called(loss.clipped, logprobs_T, importance_ratio(logprobs_T, old_T), advantages_T, config, where)
    where = f"{where} at advantages of 0"
    _, gradient_T = _differentiated(loss.value, logprobs_T, old_T, torch.zeros_like(advantages_T), config, where)
    return bool(gradient_T.any()) or _moves_without_advantage(loss.value, config, where)


def _moves_without_advantage(function: TokenFunction, config: ObjectiveConfig, where: str) -> bool:
    """Whether a token of advantage 0 has a gradient at any ratio that there is: a barrier, say, has none near 1.

    On a grid that widens until the function raises, as one does that refuses such ratios. Numbers that are not finite,
    which a loss may have far out, say nothing.
    """
    for limit in _TRIAL_LIMITS:
        log_ratios_R = torch.arange(-limit, limit + _TRIAL_SPACING, _TRIAL_SPACING)
        logprobs_T = _TRIAL_LOGPROBS.repeat_interleave(len(log_ratios_R)).requires_grad_()
        ratio_T = importance_ratio(logprobs_T, logprobs_T.detach() - log_ratios_R.repeat(len(_TRIAL_LOGPROBS)))
        try:
            loss_T = _called(function, logprobs_T, ratio_T, torch.zeros_like(logprobs_T), config, where)
        except UserError:
            return False
        (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprobs_T, materialize_grads=True)
        if bool((gradient_T.isfinite() & (gradient_T != 0)).any()):
            return True
    return False


_NO_GRADIENT: Final = (
    "its gradient does not reach the log-probabilities: compute it from logprobs_T or ratio_T with torch, and detach "
    "at most one of them"
)


def _differentiated(
    function: TokenFunction,
    logprobs_T: Tensor,
    old_T: Tensor,
    advantages_T: Tensor,
    config: ObjectiveConfig,
    where: str,
) -> tuple[Tensor, Tensor]:
    """The losses and their gradient by the log-probabilities, both finite."""
    leaf_T = logprobs_T.detach().clone().requires_grad_()
    loss_T = _called(function, leaf_T, importance_ratio(leaf_T, old_T), advantages_T.clone(), config, where)
    if not torch.equal(leaf_T, logprobs_T):
        raise UserError(f"{where} changes logprobs_T in place, which others read after it: change a clone()")
    if not loss_T.requires_grad:
        raise UserError(f"{where}: {_NO_GRADIENT}")
    try:
        (gradient_T,) = torch.autograd.grad(loss_T.sum(), leaf_T, materialize_grads=True)
    except RuntimeError as error:
        raise UserError(f"{where}: its gradient cannot be computed: {one_line(error)}") from error
    for name, values_T in (("loss", loss_T.detach()), ("gradient", gradient_T)):
        if not bool(values_T.isfinite().all()):
            token = int((~values_T.isfinite()).nonzero()[0])
            raise UserError(
                f"{where}: its {name} is {values_T[token]:g} for a token of log-probability {logprobs_T[token]:.3g}, "
                f"ratio {float(importance_ratio(logprobs_T, old_T)[token]):.3g} and advantage {advantages_T[token]:g}: "
                "let it be finite there"
            )
    return loss_T.detach(), gradient_T


def _called(function: TokenFunction, *values: Any) -> Tensor:
    """The result of a trial call; an error inside the function as a UserError."""
    *inputs, where = values
    try:
        return function(*inputs)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}: {one_line(error)}") from error
