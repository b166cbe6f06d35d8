"""Settings that make a run fit into memory, each checked by the estimate itself; the fastest settings come first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from flatpeak.apps.planning.planned_model import PlannedModel, read_model
from flatpeak.apps.planning.run_plan import RunPlan, plan_on
from flatpeak.config.load import apply_settings, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError

Settings = dict[str, Any]
"""Dotted keys of a recipe, and their values."""
MOST: Final = 5
"""Suggestions at most."""
FEWEST_ROWS: Final = 8
"""With fewer completions side by side, decoding takes several times as long."""
FEWEST_TOKENS: Final = 1024
"""With fewer tokens per micro-batch, passes take longer than passes that recompute layers."""
WORTHWHILE: Final = 0.99
"""A setting that leaves more than this share of the memory is not combined with others."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Settings that lower the memory of a run."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    needed: int
    """Bytes with these settings, including libraries."""
    saves: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each setting saves after the earlier ones are set; of settings of one kind, the first one's."""
    fits: bool


def advise(plan: RunPlan) -> tuple[Advice, ...]:
    """At most five ways to make a run fit; if there are none, the settings with the lowest memory."""
    search = _Search(plan)
    savers, adapters = _savers(plan), _adapters(plan)
    fitting = list(search.singles(savers))
    if not fitting:
        fitting = [one for one in [search.combine(savers)] if one.fits]
    fitting += search.singles(adapters)
    if fitting:
        return tuple(fitting[:MOST])
    least = search.combine([*savers, *adapters])
    return (least,) if least.settings else ()


class _Search:
    """Plans of a recipe with changed settings."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self._recipe = plan.config.model_dump(mode="json", exclude_unset=True)
        self._models: dict[str, PlannedModel] = {}
        self._unchanged = Advice(needed=plan.needed, fits=plan.fits)

    def singles(self, savers: Sequence[Sequence[Settings]]) -> Iterator[Advice]:
        """The first choice of each saver with which the run fits."""
        for choices in savers:
            fitting = next((one for one in self._each(self._unchanged, choices) if one.fits), None)
            if fitting is not None:
                yield fitting

    def combine(self, savers: Sequence[Sequence[Settings]]) -> Advice:
        """Add saver after saver until the run fits, or no more are left."""
        current = self._unchanged
        for choices in savers:
            attempts = []
            for one in self._each(current, choices):
                if one.fits:
                    return one
                attempts.append(one)
            least = min(attempts, key=lambda one: one.needed, default=current)
            if least.needed < WORTHWHILE * current.needed:
                current = least
        return current

    def _each(self, before: Advice, choices: Sequence[Settings]) -> Iterator[Advice]:
        """The settings so far with each choice that is valid for the recipe."""
        for choice in choices:
            settings = {**before.settings, **choice}
            try:
                config = parse_config(apply_settings(self._recipe, settings))
                plan = plan_on(config, self._plan.work, self._model(config), self._plan.device)
            except UserError:
                continue
            saves = {**before.saves, next(iter(choice)): before.needed - plan.needed}
            yield Advice(settings=settings, needed=plan.needed, saves=saves, fits=plan.fits)

    def _model(self, config: RunConfig) -> PlannedModel:
        """The model of a changed recipe: made once per section `model`, so that dry runs are shared."""
        if config.model == self._plan.config.model:
            return self._plan.model
        key = config.model.model_dump_json()
        if key not in self._models and config.model.new is None:
            self._models[key] = read_model(config.model)
        elif key not in self._models:  # its tokenizer, and therefore its shape, are the same
            self._models[key] = PlannedModel(config=config.model, shape=self._plan.model.shape)
        return self._models[key]


def _savers(plan: RunPlan) -> list[list[Settings]]:
    """The choices of each setting that leaves the trained weights unchanged; the fastest come first.

    On a GPU, bfloat16 is faster than float32, 8-bit moments cost nothing, offloading copies once per step or update,
    recomputation adds a forward pass, and half as many rows may take twice as long for rollouts. A CPU has nothing to
    offload to, and both roundings are slower there. Settings that the recipe already has save nothing, and drop out.
    """
    work = plan.work
    longest = max(FEWEST_TOKENS, work.prompt_lengths[0] + work.new_tokens)
    evaluated = len(work.evaluation.prompt_lengths) * work.evaluation.group_size
    rows = min(plan.config.rollout.max_rows, max(work.completions, evaluated))
    optimizers = [key for key, steps in (("optimizer", work.steps), ("sft.optimizer", work.sft_steps)) if steps]
    micro_batches = [
        {"training.micro_batch_tokens": tokens} for tokens in _halves(plan.memory.micro_batch_tokens, longest)
    ]
    recomputation: list[Settings] = [{"training.activation_checkpointing": True}]
    fewer_rows = [{"rollout.max_rows": each} for each in _halves(rows, FEWEST_ROWS)]
    moments: list[Settings] = [{f"{key}.name": "adamw_8bit" for key in optimizers}]
    bfloat16: list[Settings] = [{"model.dtype": "bfloat16"}]
    if plan.device.on_cpu:
        return [micro_batches, recomputation, fewer_rows, moments, bfloat16]
    offloads: list[Settings] = [{f"{key}.offload": True for key in optimizers}]
    return [bfloat16, micro_batches, moments, [{"reference.offload": True}], offloads, recomputation, fewer_rows]


def _adapters(plan: RunPlan) -> list[list[Settings]]:
    """The choices that train adapters instead of the weights."""
    model = plan.config.model
    lora: Settings = {} if model.lora is not None else {"model.lora": {}}
    four_bits: Settings = {} if model.quantization is not None else {"model.quantization": "nf4", **lora}
    return [[choice] for choice in (lora, four_bits) if choice]


def _halves(value: int, least: int) -> list[int]:
    """The powers of two below a value, down to the least."""
    powers = [1 << exponent for exponent in range(value.bit_length())]
    return [power for power in reversed(powers) if least <= power < value]
