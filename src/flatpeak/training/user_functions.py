"""A loss or an advantage of the user's own: loaded, tried on a few numbers before a run, and checked at every call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.functional.advantage_functions import ADVANTAGE_INPUTS, ADVANTAGES
from flatpeak.functional.losses import LOG_RATIO_LIMIT, importance_ratio
from flatpeak.functional.policy_losses import POLICY_LOSSES, PolicyLoss, TokenFunction
from flatpeak.functional.token_weights import TOKEN_WEIGHT_INPUTS, TOKEN_WEIGHTS, TokenWeights
from flatpeak.training.objective import Objective, WeightFunction
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig, TokenWeightsConfig
from flatpeak.training.reward_tensors import Advantages
from flatpeak.utils.user_code import asked_by_name, check_call, describe_value, load_object, one_line

LOSS_PARAMETERS: Final = ("logprobs_T", "ratio_T", "advantages_T", "config")
ADVANTAGE_PARAMETERS: Final = ("rewards_PG", "valid_PG")
_TRIAL_TOKENS: Final = 12
_TRIAL_LIMITS: Final = (1.0, 2.0, 5.0, 10.0, LOG_RATIO_LIMIT)
_TRIAL_SPACING: Final = 0.125
_TRIAL_LOGPROBS: Final = torch.tensor([-0.01, -0.1, -0.5, -1.0, -2.0, -4.0, -8.0, -16.0, -32.0])
_NO_CLIP: Final = PolicyLoss.__dataclass_fields__["clipped"].default
_NO_GRADIENT: Final = (
    "its gradient does not reach the log-probabilities: compute it from logprobs_T or ratio_T with torch, and detach "
    "at most one of them"
)
_MASKED_MEAN: Final = (
    "mean = (rewards_PG * valid_PG).sum(-1, keepdim=True) / valid_PG.sum(-1, keepdim=True).clamp(min=1)"
)


def make_objective(config: ObjectiveConfig, kl: KLConfig, *, own: object = None) -> Objective:
    """The objective of a recipe; `own` is the loss that a Python caller gave. UserError for one that is unfit."""
    weights = make_token_weights(config.token_weights)
    if own is None and config.loss in POLICY_LOSSES:
        return Objective(config=config, kl=kl, token_weights=weights)
    where = f"objective.loss={config.loss}"
    loaded = load_object(config.loss, where=where) if own is None else own
    loss = policy_loss(loaded, config, where=where)
    return Objective(config=config, kl=kl, own_loss=loss, token_weights=weights)


def make_token_weights(config: TokenWeightsConfig) -> WeightFunction | None:
    """The token weights of a recipe, tried on a few tokens; None where it has none. UserError for an unfit function."""
    if config.function is None:
        return None
    where = f"objective.token_weights.function={config.function}"
    known = TOKEN_WEIGHTS.get(config.function)
    function = load_object(config.function, where=where) if known is None else known
    if not callable(function):
        raise UserError(f"{where} is {describe_value(function)}, not a function")
    asks = asked_by_name(function, TOKEN_WEIGHT_INPUTS) - config.arguments.keys()
    arguments = config.arguments | dict.fromkeys(asks)
    check_call(function, given=(), arguments=arguments, where=where, key="objective.token_weights.arguments")

    def checked(inputs: Mapping[str, Any]) -> TokenWeights:
        result = function(**{name: inputs[name] for name in asks}, **config.arguments)
        weights = result if isinstance(result, TokenWeights) else TokenWeights(policy_T=result)
        for values in (weights.policy_T, *([] if weights.penalty_T is None else [weights.penalty_T])):
            like, what = inputs["logprobs_T"], "one weight per token"
            tensor = _checked_tensor(values, like, torch.float32, where=where, what=what)
            if not bool(tensor.isfinite().all()):
                raise UserError(f"{where} returned a weight that is not finite: bound what it divides by")
        return weights

    trial = _token_weight_trial()
    if not torch.equal(*(_called(lambda: checked(trial).policy_T, where=where) for _ in range(2))):
        raise UserError(f"{where} returned other weights for the same tokens: draw random numbers from its `seed`")
    return checked


def _token_weight_trial() -> dict[str, Any]:
    """Inputs of three completions of four tokens."""
    logprobs_T = torch.linspace(-3, -0.1, _TRIAL_TOKENS)
    return {
        "logprobs_T": logprobs_T,
        "old_logprobs_T": logprobs_T + 0.1,
        "sampler_logprobs_T": logprobs_T - 0.1,
        "entropy_T": torch.linspace(0, 2, _TRIAL_TOKENS),
        "advantages_T": torch.tensor([1.0, -1.0, 0.5]).repeat_interleave(4),
        "sequence_T": torch.arange(3).repeat_interleave(4),
        "num": 3,
        "seed": 0,
        "clip_low": 0.2,
        "clip_high": 0.2,
    }


def make_advantages(
    config: AdvantageConfig,
    *,
    own: object = None,
    num_prompts: int = 2,
    group_size: int = 4,
    part_weights: Mapping[str, float] = MappingProxyType({"correctness": 1.0}),
) -> Advantages:
    """The advantages of a recipe; `own` is the function that a Python caller gave.

    A function is tried on rewards of `num_prompts` groups of `group_size`, of components with these weights. UserError
    for one that is not there, or whose result is of another shape or dtype, not finite, or depends on chance or on
    missing rewards.
    """
    if config.function is None:
        return Advantages(config=config)
    where, known = f"advantage.function={config.function}", ADVANTAGES.get(config.function or "")
    function: object = own
    if own is None:
        function = load_object(config.function, where=where) if known is None else known.value
    if not callable(function):
        raise UserError(f"{where} is {describe_value(function)}, not a function")
    asks = asked_by_name(function, ADVANTAGE_INPUTS) - config.arguments.keys()
    check_call(
        function,
        given=ADVANTAGE_PARAMETERS,
        arguments=config.arguments | dict.fromkeys(asks),
        where=where,
        key="advantage.arguments",
    )
    called = partial(function, **config.arguments)
    with torch.random.fork_rng(devices=[]):
        _try_advantages(called, num_prompts, group_size, where, asks, part_weights)
    checked = partial(_checked_advantages, called, where)
    return Advantages(config=config, own=checked, asks=asks, compares=known is None or known.compares)


def _with_arguments(
    function: Callable[..., Any], given: Sequence[str], arguments: Mapping[str, Any], *, where: str, section: str
) -> Callable[..., Any]:
    """The function with the recipe's arguments; UserError where it cannot be called so."""
    check_call(function, given=given, arguments=arguments, where=where, key=f"{section}.arguments")
    return partial(function, **arguments) if arguments else function


def _called(function: Callable[..., Tensor], *inputs: Any, where: str, **others: Any) -> Tensor:
    """The result of a trial call; an error inside the function as a UserError."""
    try:
        return function(*inputs, **others)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{where}: {one_line(error)}") from error


def _checked_tensor(result: object, like: Tensor, dtype: torch.dtype, *, where: str, what: str) -> Tensor:
    """The result of a function; UserError for one of another type, shape, dtype or device."""
    if not isinstance(result, Tensor):
        returned = describe_value(result)
    elif (result.shape, result.dtype, result.device) != (like.shape, dtype, like.device):
        returned = _described(result.dtype, result)
    else:
        return result
    raise UserError(f"{where} returned {returned}: return {_described(dtype, like)}, {what}")


def _described(dtype: torch.dtype, tensor: Tensor) -> str:
    return f"{dtype} {list(tensor.shape)} on {tensor.device}"


def policy_loss(own: object, config: ObjectiveConfig, *, where: str) -> PolicyLoss:
    """A function or `PolicyLoss` of the user's as a loss whose results are checked, tried once on a few tokens.

    UserError, which begins with `where`, for a result of another shape, dtype or device than the log-probabilities, for
    one that is not finite or without a gradient, and for a loss of a token that depends on other tokens.
    """
    if not isinstance(own, PolicyLoss) and not callable(own):
        raise UserError(f"{where} is {describe_value(own)}: name a function or a flatpeak.functional.PolicyLoss")
    loss = own if isinstance(own, PolicyLoss) else PolicyLoss(value=own)
    prepare = partial(_checked_loss, arguments=config.arguments, where=where)
    loss = replace(
        loss,
        value=prepare(loss.value, "value"),
        clipped=loss.clipped if loss.clipped is _NO_CLIP else prepare(loss.clipped, "clipped"),
        with_curvature=loss.with_curvature and prepare(loss.with_curvature, "with_curvature"),
    )
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        all_tokens = _try_loss(loss, config, where)
    return replace(loss, all_tokens=loss.all_tokens or all_tokens)


def _checked_loss(
    function: Callable[..., Any], name: str, *, arguments: Mapping[str, Any], where: str
) -> TokenFunction:
    """The function with the recipe's arguments, its result checked at every call."""
    where = where if name == "value" else f"{where}, {name}"
    called = _with_arguments(function, LOSS_PARAMETERS, arguments, where=where, section="objective")

    def checked(logprobs_T: Tensor, ratio_T: Tensor, advantages_T: Tensor, config: Any) -> Tensor:
        dtype = torch.bool if name == "clipped" else logprobs_T.dtype
        if not len(logprobs_T):  # a process without completions of its own: a maximum, say, is not defined
            return logprobs_T.to(dtype)
        result = called(logprobs_T, ratio_T, advantages_T, config)
        what = "one value per token and not their mean, which objective.normalization takes"
        return _checked_tensor(result, logprobs_T, dtype, where=where, what=what)

    return checked


def _try_loss(loss: PolicyLoss, config: ObjectiveConfig, where: str) -> bool:
    """Try a loss on tokens with ratios on both sides of 1; returns whether tokens of advantage 0 have a gradient."""
    old_T = torch.linspace(-3, -0.7, _TRIAL_TOKENS)
    logprobs_T = old_T + torch.tensor([-0.5, 0.5, 0.0, 0.1, -0.1, 0.3]).repeat(2)
    advantages_T = torch.tensor([1.0, -1.0, 0.5, -2.0]).repeat(3)

    def differentiated(function: TokenFunction, advantages_T: Tensor, where: str) -> tuple[Tensor, Tensor]:
        return _differentiated(function, logprobs_T, old_T, advantages_T, config, where)

    value_T, gradient_T = differentiated(loss.value, advantages_T, where)
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
        _, other_T = differentiated(loss.with_curvature, advantages_T, f"{where}, with_curvature")
        if not torch.allclose(other_T, gradient_T, rtol=1e-4, atol=1e-6):
            raise UserError(
                f"{where}: with_curvature has another gradient than value: make them equal, or leave it out"
            )
    _called(loss.clipped, logprobs_T, importance_ratio(logprobs_T, old_T), advantages_T, config, where=where)
    where = f"{where} at advantages of 0"
    _, gradient_T = differentiated(loss.value, torch.zeros_like(advantages_T), where)
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
            loss_T = _called(function, logprobs_T, ratio_T, torch.zeros_like(logprobs_T), config, where=where)
        except UserError:
            return False
        (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprobs_T, materialize_grads=True)
        if bool((gradient_T.isfinite() & (gradient_T != 0)).any()):
            return True
    return False


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
    loss_T = _called(function, leaf_T, importance_ratio(leaf_T, old_T), advantages_T.clone(), config, where=where)
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


def _checked_advantages(
    function: Callable[..., Any], where: str, rewards_PG: Tensor, valid_PG: Tensor, **inputs: Any
) -> Tensor:
    """A function's advantages, 0 where a reward is missing. It is given copies, of which missing rewards are 0."""
    result = function(rewards_PG.masked_fill(~valid_PG, 0.0), valid_PG.clone(), **inputs)
    what = "one advantage per completion, like rewards_PG"
    result = _checked_tensor(result, rewards_PG, rewards_PG.dtype, where=where, what=what)
    advantages_PG = result.detach().masked_fill(~valid_PG, 0.0)
    if not bool(advantages_PG.isfinite().all()):
        prompt, index = (~advantages_PG.isfinite()).nonzero()[0].tolist()
        rewards = _rewards_as_text(rewards_PG[prompt], valid_PG[prompt])
        raise UserError(
            f"{where} returned {advantages_PG[prompt, index]:g} for a completion of the group with the rewards "
            f"{rewards}: return a finite number, with an eps beside what it divides by (equal rewards have no standard "
            "deviation), and without missing rewards in its statistics"
        )
    return advantages_PG


def _rewards_as_text(rewards_G: Tensor, valid_G: Tensor) -> str:
    texts = [f"{reward:g}" if valid else "missing" for reward, valid in zip(rewards_G[:8], valid_G[:8], strict=True)]
    return f"[{', '.join(texts)}{', ...' if len(rewards_G) > 8 else ''}]"


def _try_advantages(
    function: Callable[..., Any],
    num_prompts: int,
    group_size: int,
    where: str,
    asks: Collection[str],
    part_weights: Mapping[str, float],
) -> None:
    """Try a function on rewards that differ, that are equal, and of which some, or all, are missing."""
    shape = (num_prompts, group_size)
    # 0 and 1 alone: a function for such rewards may refuse others.
    rewards_PG = torch.arange(num_prompts * group_size, dtype=torch.float32).view(shape).remainder(2)
    everything, nothing = torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    some = everything.clone()
    some[0, 2:3] = False  # of two, a missing one would leave one, whose group is missing as a whole
    some[1:2] = False
    inputs = {name: made for name, made in _trial_inputs(rewards_PG, part_weights).items() if name in asks}
    function = partial(function, **inputs)

    for rewards, valid in (
        (rewards_PG, everything),
        (torch.zeros(shape), everything),
        (torch.ones(shape), everything),
        (rewards_PG, some),
        (rewards_PG, nothing),
    ):
        missing = "" if bool(valid.all()) else f" where {'some' if bool(valid.any()) else 'all'} are missing"
        call = partial(_called, _checked_advantages, function, where, where=f"{where}, tried on rewards{missing}")
        if not torch.equal(call(rewards, valid), call(rewards, valid)):
            raise UserError(f"{where} returned other advantages for the same rewards: let it use no random numbers")
    _try_missing(function, rewards_PG, some, where)


def _trial_inputs(rewards_PG: Tensor, part_weights: Mapping[str, float]) -> dict[str, Any]:
    """Values for all that a function may ask for: completions of three tokens, equal reward components."""
    return {
        "lengths_PG": torch.full(rewards_PG.shape, 3),
        "parts": {name: rewards_PG.clone() for name in part_weights},
        "part_weights": dict(part_weights),
        "old_logprobs_PGL": torch.full((*rewards_PG.shape, 3), -0.5),
        "greedy_P": torch.zeros(len(rewards_PG)),
    }


def _try_missing(function: Callable[..., Any], rewards_PG: Tensor, valid_PG: Tensor, where: str) -> None:
    """UserError where the advantages of valid rewards depend on the numbers that stand for missing ones."""
    first_PG = function(rewards_PG.masked_fill(~valid_PG, 0.0), valid_PG.clone())
    try:
        second_PG = function(rewards_PG.masked_fill(~valid_PG, 3.0), valid_PG.clone())
    except Exception:  # a function may refuse rewards above 1; missing ones are 0 in a run
        return
    if not torch.equal(first_PG[valid_PG], second_PG[valid_PG]):
        raise UserError(
            f"{where}: its advantages depend on rewards that are missing, which are 0 in rewards_PG: leave them out of "
            f"its statistics by valid_PG, as in {_MASKED_MEAN}"
        )
