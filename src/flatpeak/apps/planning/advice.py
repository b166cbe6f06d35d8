"""Settings that make a run fit into memory, each checked by the estimate itself, those that cost least time first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from flatpeak.apps.planning.planned_model import PlannedModel, read_model
from flatpeak.apps.planning.run_plan import RunPlan, plan_on
from flatpeak.config.load import apply_settings, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError
from flatpeak.training.config import OptimizerConfig

Settings = dict[str, Any]
"""Dotted keys of a recipe, and their values."""
FEWEST_ROWS: Final = 8
"""Completions side by side below which decoding takes several times as long."""
FEWEST_TOKENS: Final = 1024
"""Tokens of a micro-batch below which passes take longer than those that recompute layers."""
WORTHWHILE: Final = 0.99
"""A setting that leaves more than this share of the peak is not tried together with others."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Settings that make a run fit, and the memory that it needs with them."""

    settings: Mapping[str, Any]
    needed: int
    """Bytes, the libraries' included."""
    saves: Mapping[str, int]
    """Bytes that each setting saves once those before it are set; of several settings of one kind, the first one's."""


@dataclass(frozen=True, kw_only=True)
class AdviceReport:
    """The ways to make a run fit, those that cost least time first."""

    fitting: tuple[Advice, ...] = ()
    """Each makes the run fit: settings by themselves, and settings together where none that trains the same does."""
    least: Advice | None = None
    """The settings that need the least memory, where nothing makes the run fit."""


def advise(plan: RunPlan) -> AdviceReport:
    """Search the settings that make a run fit."""
    search = _Search(plan)
    savers = SAVERS_ON_CPU if plan.device.on_cpu else SAVERS
    fitting = list(search.singles(savers))
    if not fitting:
        together = search.combine(savers)
        fitting = [search.prune(together)] if together.fits else []
    fitting += search.singles(OTHER_TRAINING)
    if fitting:
        return AdviceReport(fitting=tuple(map(search.advice, fitting)))
    last = search.combine((*savers, *OTHER_TRAINING))
    if last.fits:
        return AdviceReport(fitting=(search.advice(search.prune(last)),))
    return AdviceReport(least=search.advice(last) if last.choices else None)


@dataclass(frozen=True, kw_only=True)
class _Attempt:
    """A plan with some choices made."""

    choices: tuple[Settings, ...]
    plan: RunPlan

    @property
    def fits(self) -> bool:
        return self.plan.fits

    @property
    def needed(self) -> int:
        return self.plan.needed


class _Search:
    """Plans of one recipe with changed settings, each made once."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self._recipe = plan.config.model_dump(mode="json", exclude_unset=True)
        self._plans: dict[str, RunPlan | None] = {}
        self._models: dict[str, PlannedModel] = {}

    def singles(self, savers: Sequence[Saver]) -> Iterator[_Attempt]:
        """The first choice of each saver with which the run fits."""
        for saver in savers:
            yield from islice((attempt for attempt in self._try_each((), saver) if attempt.fits), 1)

    def combine(self, savers: Sequence[Saver]) -> _Attempt:
        """Add saver after saver until the run fits, or none is left."""
        current = _Attempt(choices=(), plan=self.plan)
        for saver in savers:
            attempts = list(self._try_each(current.choices, saver))
            fitting = next((one for one in attempts if one.fits), None)
            if fitting is not None:
                return fitting
            least = min(attempts, key=lambda one: one.needed, default=current)
            if least.needed < WORTHWHILE * current.needed:
                current = least
        return current

    def prune(self, attempt: _Attempt) -> _Attempt:
        """Leave out every choice without which the run fits as well, the one that costs most time first."""
        for choice in reversed(attempt.choices):
            fewer = self._try(tuple(one for one in attempt.choices if one is not choice))
            if fewer is not None and fewer.fits:
                attempt = fewer
        return attempt

    def advice(self, attempt: _Attempt) -> Advice:
        """The settings of an attempt, and what each saves."""
        saves, needed = {}, self.plan.needed
        for count, choice in enumerate(attempt.choices, start=1):
            made = self._try(attempt.choices[:count])
            after = needed if made is None else made.needed
            saves[next(iter(choice))] = needed - after
            needed = after
        return Advice(settings=_merged(attempt.choices), needed=attempt.needed, saves=saves)

    def _try_each(self, choices: tuple[Settings, ...], saver: Saver) -> Iterator[_Attempt]:
        """Plans with each choice of a saver, from the one that costs least time."""
        base = self._try(choices)
        for choice in saver(base.plan) if base is not None else ():
            attempt = self._try((*choices, choice))
            if attempt is not None:
                yield attempt

    def _try(self, choices: tuple[Settings, ...]) -> _Attempt | None:
        """The plan with these choices; None where they do not go together with the recipe."""
        settings = _merged(choices)
        key = repr(sorted(settings.items()))
        if key not in self._plans:
            self._plans[key] = self._make(settings)
        plan = self._plans[key]
        return None if plan is None else _Attempt(choices=choices, plan=plan)

    def _make(self, settings: Settings) -> RunPlan | None:
        if not settings:
            return self.plan
        try:
            config = parse_config(apply_settings(self._recipe, settings))
            return plan_on(config, self.plan.work, self._model(config), self.plan.device)
        except UserError:
            return None

    def _model(self, config: RunConfig) -> PlannedModel:
        """The model of a changed recipe: made once for each set of settings that change it."""
        if config.model == self.plan.config.model:
            return self.plan.model
        key = config.model.model_dump_json()
        if key not in self._models and config.model.new is None:
            self._models[key] = read_model(config.model)
        elif key not in self._models:  # its tokenizer, and so its shape, are the same
            self._models[key] = PlannedModel(config=config.model, shape=self.plan.model.shape)
        return self._models[key]


def _merged(choices: Sequence[Settings]) -> Settings:
    return {key: value for choice in choices for key, value in choice.items()}


Saver = Callable[[RunPlan], Sequence[Settings]]
"""The choices of one or two settings that would lower a plan's memory, from the one that costs least time."""


def _micro_batch_tokens(plan: RunPlan) -> Sequence[Settings]:
    """Halves of the largest micro-batch; one completion with its prompt is never cut."""
    longest = max(FEWEST_TOKENS, plan.work.prompt_lengths[0] + plan.work.new_tokens)
    return [{"training.micro_batch_tokens": tokens} for tokens in _halves(plan.memory.micro_batch_tokens, longest)]


def _max_rows(plan: RunPlan) -> Sequence[Settings]:
    """Halves of the completions that are decoded side by side."""
    evaluated = len(plan.work.evaluation.prompt_lengths) * plan.work.evaluation.completions
    rows = min(plan.config.rollout.max_rows, max(plan.work.completions, evaluated))
    return [{"rollout.max_rows": one} for one in _halves(rows, FEWEST_ROWS)]


def _halves(value: int, least: int) -> list[int]:
    """The powers of two below a value, down to the least."""
    halves = []
    power = 1 << (value - 1).bit_length() - 1 if value > 1 else 0
    while power >= least:
        halves.append(power)
        power //= 2
    return halves


def _activation_checkpointing(plan: RunPlan) -> Sequence[Settings]:
    return [] if plan.config.training.activation_checkpointing else [{"training.activation_checkpointing": True}]


def _reference_offload(plan: RunPlan) -> Sequence[Settings]:
    kept = any("reference" in phase.items for phase in plan.memory.phases)
    return [{"reference.offload": True}] if kept and not plan.config.reference.offload else []


def _optimizer_offload(plan: RunPlan) -> Sequence[Settings]:
    keys = [key for key, optimizer in _optimizers(plan).items() if not optimizer.offload]
    return [dict.fromkeys((f"{key}.offload" for key in keys), True)] if keys else []


def _moments_in_8_bits(plan: RunPlan) -> Sequence[Settings]:
    keys = [key for key, optimizer in _optimizers(plan).items() if optimizer.name == "adamw"]
    return [dict.fromkeys((f"{key}.name" for key in keys), "adamw_8bit")] if keys else []


def _optimizers(plan: RunPlan) -> dict[str, OptimizerConfig]:
    """The optimizers of the stages that the run has, by the key of their section."""
    stages = {
        "optimizer": (plan.work.steps, plan.config.optimizer),
        "sft.optimizer": (plan.work.sft_steps, plan.config.sft.optimizer),
    }
    return {key: optimizer for key, (steps, optimizer) in stages.items() if steps}


def _bfloat16(plan: RunPlan) -> Sequence[Settings]:
    return [] if plan.config.model.dtype == "bfloat16" else [{"model.dtype": "bfloat16"}]


def _adapters(plan: RunPlan) -> Sequence[Settings]:
    return [] if plan.config.model.lora is not None else [{"model.lora": {}}]


def _four_bits(plan: RunPlan) -> Sequence[Settings]:
    model = plan.config.model
    if model.quantization is not None:
        return []
    adapters: Settings = {} if model.lora is not None else {"model.lora": {}}
    return [{**adapters, "model.quantization": "nf4"}]


SAVERS: Final[tuple[Saver, ...]] = (
    _bfloat16,
    _micro_batch_tokens,
    _moments_in_8_bits,
    _reference_offload,
    _optimizer_offload,
    _activation_checkpointing,
    _max_rows,
)
"""Savers of a GPU that leave the trained weights what they are, in the order of the time that they cost: bfloat16 is
faster than float32, moments in 8 bits cost nothing, offloading copies once a step or an update, recomputation adds a
forward pass, and half as many rows may take rollouts twice as long."""
SAVERS_ON_CPU: Final[tuple[Saver, ...]] = (
    _micro_batch_tokens,
    _activation_checkpointing,
    _max_rows,
    _moments_in_8_bits,
    _bfloat16,
)
"""The same on a CPU, which has nothing to offload to, and where both roundings are slower."""
OTHER_TRAINING: Final[tuple[Saver, ...]] = (_adapters, _four_bits)
"""Savers that train adapters in place of the weights."""
