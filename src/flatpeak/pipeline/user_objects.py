"""Objects of a Python caller, the algorithm that a recipe and its caller describe, and digests of users' code.

A recipe cannot name a task, a reward or a sampler from Python: config.yaml has what they replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from flatpeak.config.load import Settings
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.functional.losses import PolicyLoss
from flatpeak.pipeline.prompt_record import PromptRecord, read_prompt_record
from flatpeak.pipeline.samplers import SamplerFactory
from flatpeak.protocols import SamplerLike, Task
from flatpeak.rewards.functions import function_name
from flatpeak.runs.manifest import flatten
from flatpeak.training.objective import Objective
from flatpeak.training.reward_tensors import Advantages
from flatpeak.training.user_functions import make_advantages, make_objective
from flatpeak.utils.user_code import FROM_PYTHON, REFERENCES, file_digest, source_digest

_FUNCTIONS: Final = {"loss": "objective.loss", "advantage": "advantage.function"}
"""The settings in whose place a caller gives functions."""
_SECTIONS: Final = {"task": "task", "reward": "rewards"}
"""The sections in whose place a caller gives objects."""


@dataclass(frozen=True, kw_only=True)
class CallerObjects:
    """Objects that a Python caller passes in place of those that the recipe names; None leaves it to the recipe."""

    model: Any = None
    tokenizer: Any = None
    task: Task | None = None
    reward: Any = None
    sampler: SamplerLike | SamplerFactory | None = None
    loss: Any = None
    """A policy loss: a function, or a PolicyLoss."""
    advantage: Any = None
    """A function from rewards to advantages."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the objects that are given; a model's tokenizer belongs to it."""
        known = ("model", "task", "reward", "sampler", "loss", "advantage")
        return tuple(name for name in known if getattr(self, name) is not None)

    def named_in(self, settings: Settings | None) -> Settings | None:
        """The settings, with the names of the caller's functions as those of loss and advantage.

        So a run's own recipe never names another loss than it was trained by.
        """
        given = {key: getattr(self, name) for name, key in _FUNCTIONS.items() if getattr(self, name) is not None}
        named = {key: f"{FROM_PYTHON}{function_name(_function(own))}" for key, own in given.items()}
        if not named:
            return settings
        if settings is None or isinstance(settings, Mapping):
            return {**(settings or {}), **named}
        written = [settings] if isinstance(settings, str) else settings
        return [*written, *(f"{key}={name}" for key, name in named.items())]


def check_given_again(checkpoint: Path | None, config: RunConfig, objects: CallerObjects) -> None:
    """UserError where a run lacks an object that its checkpoint was trained with, and the recipe names no other."""
    record = None if checkpoint is None else read_prompt_record(checkpoint)
    if record is None:
        return
    for name in ("task", "reward", "sampler"):
        section = _SECTIONS.get(name)
        missing = name in record.objects and getattr(objects, name) is None
        if missing and (section is None or _is_recorded(section, record, config)):
            other = "" if section is None else f", or fork the run with another in the recipe ({section}...=...)"
            raise UserError(
                f"{checkpoint} was trained with a {name} from Python, which no recipe has: give it again, "
                f"{name}=... of flatpeak.train or flatpeak.fork{other}"
            )


def _is_recorded(section: str, record: PromptRecord, config: RunConfig) -> bool:
    """Whether a section is as it was recorded; keys that the record lacks are of a later version."""
    recorded = flatten(record.evaluation.get(section, {}))
    return recorded.items() <= flatten(config.model_dump(mode="json")[section]).items()


def _function(own: object) -> object:
    return own.value if isinstance(own, PolicyLoss) else own


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    """The objective and the advantages that a policy is trained by."""

    objective: Objective
    advantages: Advantages


def make_algorithm(config: RunConfig, objects: CallerObjects) -> Algorithm:
    """The objective and the advantages of a recipe or its caller; UserError where a function is unfit."""
    rollout = config.rollout
    return Algorithm(
        objective=make_objective(config.objective, config.kl, own=objects.loss),
        advantages=make_advantages(
            config.advantage,
            own=objects.advantage,
            num_prompts=rollout.prompts_per_step,
            group_size=rollout.group_size,
        ),
    )


def code_digests(config: RunConfig, objects: CallerObjects) -> dict[str, str]:
    """A digest of each function of the user's that the recipe or its caller gives, by its setting.

    Of a recipe's, the file that the function lies in; of a caller's, the function's text, where there is one. To be
    called once they are loaded.
    """
    recipe = flatten(
        config.model_dump(mode="json", include={"objective", "advantage", "rewards", "task", "curriculum"})
    )
    digests = {
        key: file_digest(value)
        for key, value in recipe.items()
        if key.rpartition(".")[2] in REFERENCES and isinstance(value, str) and ":" in value
    }
    for name, key in _FUNCTIONS.items():
        own = getattr(objects, name)
        if own is not None:
            digests[key] = source_digest(_function(own))
    return {key: digest for key, digest in digests.items() if digest is not None}
