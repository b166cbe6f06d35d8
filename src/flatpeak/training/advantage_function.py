"""Advantages of a step: by the recipe's baseline and scale, or by a function of the user's that is tried beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.functional.advantages import group_advantages
from flatpeak.training.config import AdvantageConfig
from flatpeak.utils.user_code import check_call, describe_value, load_object, one_line

PARAMETERS: Final = ("rewards_PG", "valid_PG")
"""The arguments of an advantage function."""
AdvantageFunction = Callable[[Tensor, Tensor], Tensor]
"""(rewards_PG, valid_PG) -> advantages_PG."""
_MASKED_MEAN: Final = (
    "mean = (rewards_PG * valid_PG).sum(-1, keepdim=True) / valid_PG.sum(-1, keepdim=True).clamp(min=1)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Advantages:
    """The function from a step's rewards to its advantages."""

    config: AdvantageConfig
    own: AdvantageFunction | None = None
    """The user's function in place of baseline and scale; see `make_advantages`."""

    def __call__(self, rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
        """Advantages [P, G], 0 where `valid_PG` is False; UserError for what a function of the user's returns."""
        config = self.config
        if self.own is not None:
            return self.own(rewards_PG, valid_PG)
        return group_advantages(
            rewards_PG, baseline=config.baseline, scale=config.scale, eps=config.eps, valid_PG=valid_PG
        )

    def compare_groups(self, group_size: int) -> bool:
        """Whether a group with fewer than two rewards is missing, and one of equal rewards teaches nothing.

        A function of the user's is taken to compare the completions of a group wherever there are several.
        """
        return group_size > 1 if self.own is not None else self.config.baseline != "none"


def make_advantages(
    config: AdvantageConfig, *, own: object = None, num_prompts: int = 2, group_size: int = 4
) -> Advantages:
    """The advantages of a recipe; `own` is the function that a Python caller gave.

    A function of the user's is tried on rewards of `num_prompts` groups of `group_size`. UserError for one that is not
    there, or whose result is of another shape or dtype, not finite, or depends on chance or on missing rewards.
    """
    if config.function is None:
        return Advantages(config=config)
    where = f"advantage.function={config.function}"
    function = load_object(config.function, where=where) if own is None else own
    if not callable(function):
        raise UserError(f"{where} is {describe_value(function)}, not a function")
    check_call(function, given=PARAMETERS, arguments=config.arguments, where=where, key="advantage.arguments")
    called = partial(function, **config.arguments) if config.arguments else function
    with torch.random.fork_rng(devices=[]):
        _try(called, num_prompts, group_size, where)
    return Advantages(config=config, own=partial(_checked, called, where))


def _checked(function: Callable[..., Any], where: str, rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """The user's advantages, 0 where a reward is missing. It is given copies, of which missing rewards are 0."""
    result = function(rewards_PG.masked_fill(~valid_PG, 0.0), valid_PG.clone())
    if not isinstance(result, Tensor):
        raise UserError(f"{where} returned {describe_value(result)}: return a tensor of shape {list(rewards_PG.shape)}")
    if (result.shape, result.dtype, result.device) != (rewards_PG.shape, rewards_PG.dtype, rewards_PG.device):
        raise UserError(
            f"{where} returned {result.dtype} {list(result.shape)} on {result.device}: return {rewards_PG.dtype} "
            f"{list(rewards_PG.shape)} on {rewards_PG.device}, one advantage per completion, like rewards_PG"
        )
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


def _try(function: Callable[..., Any], num_prompts: int, group_size: int, where: str) -> None:
    """Try a function on rewards that differ, that are equal, and of which some, or all, are missing."""
    shape = (num_prompts, group_size)
    # 0 and 1 alone: a function for such rewards may refuse others.
    rewards_PG = torch.arange(num_prompts * group_size, dtype=torch.float32).view(shape).remainder(2)
    everything, nothing = torch.ones(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
    some = everything.clone()
    some[0, 2:3] = False  # of two, a missing one would leave one, whose group is missing as a whole
    some[1:2] = False

    def call(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
        try:
            return _checked(function, where, rewards_PG, valid_PG)
        except UserError:
            raise
        except Exception as error:
            missing = "" if bool(valid_PG.all()) else f" where {'some' if bool(valid_PG.any()) else 'all'} are missing"
            raise UserError(f"{where}, tried on rewards{missing}: {one_line(error)}") from error

    for rewards, valid in (
        (rewards_PG, everything),
        (torch.zeros(shape), everything),
        (torch.ones(shape), everything),
        (rewards_PG, some),
        (rewards_PG, nothing),
    ):
        advantages_PG = call(rewards, valid)
        if not torch.equal(call(rewards, valid), advantages_PG):
            raise UserError(f"{where} returned other advantages for the same rewards: let it use no random numbers")
    _try_missing(function, rewards_PG, some, where)


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
