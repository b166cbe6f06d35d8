"""`flatpeak.train` and `flatpeak.sft`: a recipe in, a run directory and a result out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from flatpeak.config.load import Settings
from flatpeak.distributed.ranks import open_ranks
from flatpeak.distributed.shared_rollouts import checked_sampler_state
from flatpeak.errors import UserError
from flatpeak.pipeline.lifecycle import finish, open_run, training
from flatpeak.pipeline.policies import reference_checkpoint
from flatpeak.pipeline.progress import first_line
from flatpeak.pipeline.request import (
    OWN_DATA,
    CallerObjects,
    RecipeSource,
    RunRequest,
    acting_settings,
    naming_settings,
    resolve_config,
    with_own_data,
    with_settings,
    without_model_source,
)
from flatpeak.pipeline.run_components import open_components
from flatpeak.pipeline.run_result import RunResult
from flatpeak.pipeline.stages import run_rl, run_sft
from flatpeak.protocols import Progress, Task
from flatpeak.training.recorder import SAMPLER_STATE
from flatpeak.utils.torch_state import usual_torch_state

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from flatpeak.pipeline.request import (
        AdvantageInput,
        DataInput,
        LossInput,
        ModelInput,
        RewardInput,
        SamplerInput,
        ToolInput,
    )
    from flatpeak.runs.callbacks import Callback

StageName = Literal["sft", "train"]


@naming_settings
def train(
    config: RecipeSource | None = None,
    *,
    model: ModelInput | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: DataInput | None = None,
    task: Task | None = None,
    reward: RewardInput | None = None,
    sampler: SamplerInput | None = None,
    loss: LossInput | None = None,
    advantage: AdvantageInput | None = None,
    tools: Sequence[ToolInput] | None = None,
    environment: type[Any] | str | None = None,
    callbacks: Sequence[Callback] = (),
    settings: Settings | None = None,
    progress: Progress | bool | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Run a recipe: SFT where it asks for it, then reinforcement learning.

    `config` is a RunConfig, the mapping of a recipe (which may have `extends`), or a recipe's path or name; `settings`
    change it: a mapping such as `{"training.steps": 50}`, or `key.path=value` strings. Without `config`, GRPO trains
    `model`, a name or an object, on `dataset`: a list of dicts, a Dataset, a DataFrame, a file, or a mapping of
    `train` and `test` to such rows (docs/own_data.md). Any of model (with its tokenizer), task, reward and sampler may
    be the caller's own object; a sampler that uses the trained model is given as a factory, called with the policy. So
    may loss, a function (logprobs_T, ratio_T, advantages_T, config) -> loss_T or a functional.PolicyLoss, and
    advantage, (rewards_PG, valid_PG) -> advantages_PG. `tools` are functions that the policy may call, or `environment`
    a class whose methods it may call (docs/agents.md). `callbacks` (flatpeak.Callback) watch the run, log metrics and
    may stop it. `progress` shows the run: None is an occasional line on stderr, False is silence, else an object like
    `protocols.Progress`. Raises UserError for bad input, before a run directory is made; a run name that exists needs
    `resume` or `overwrite`.
    """
    objects = CallerObjects(
        model=model, tokenizer=tokenizer, task=task, reward=reward, sampler=sampler, loss=loss, advantage=advantage
    )
    request = RunRequest(
        recipe=OWN_DATA if config is None else config,
        settings=with_settings(settings, acting_settings(tools, environment)),
        progress=progress,
        resume=resume,
        overwrite=overwrite,
        command=command,
        callbacks=callbacks,
    )
    return run_stages(*with_own_data(request, objects, dataset), stages=("sft", "train"))


@naming_settings
def sft(
    config: RecipeSource | None = None,
    *,
    model: ModelInput | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: DataInput | None = None,
    task: Task | None = None,
    reward: RewardInput | None = None,
    sampler: SamplerInput | None = None,
    loss: LossInput | None = None,
    advantage: AdvantageInput | None = None,
    tools: Sequence[ToolInput] | None = None,
    environment: type[Any] | str | None = None,
    callbacks: Sequence[Callback] = (),
    settings: Settings | None = None,
    progress: Progress | bool | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Run only the SFT stage of a recipe, with the arguments of `train`; UserError where it has no SFT steps."""
    objects = CallerObjects(
        model=model, tokenizer=tokenizer, task=task, reward=reward, sampler=sampler, loss=loss, advantage=advantage
    )
    request = RunRequest(
        recipe=OWN_DATA if config is None else config,
        settings=with_settings(settings, acting_settings(tools, environment)),
        progress=progress,
        resume=resume,
        overwrite=overwrite,
        command=command,
        callbacks=callbacks,
    )
    return run_stages(*with_own_data(request, objects, dataset, sft=True), stages=("sft",))


def run_stages(request: RunRequest, objects: CallerObjects, *, stages: Sequence[StageName]) -> RunResult:
    """Run these stages, SFT before RL, each from where it was left; SFT only where the recipe has steps for it."""
    config = resolve_config(request.recipe, objects.named_in(request.settings))
    if "train" not in stages and not config.sft.steps:
        raise UserError("sft.steps=0: there is nothing to train; set sft.steps to how many steps SFT should take")
    config, notices = without_model_source(config, objects, request)
    with (
        usual_torch_state(),
        open_ranks(config.distributed) as ranks,
        open_run(request, config, metric=config.evaluation.metric, notices=notices, ranks=ranks) as run,
    ):
        run.progress.say(first_line(config, model=objects.model, task=objects.task))
        point = run.resume_point
        with ranks.together():
            reference_start = reference_checkpoint(config, point)
        with (
            open_components(run, objects, stages=stages) as (components, start),
            training(run, start) as recorder,
        ):
            components.attach(run.paths.path, run.stop)
            components.sampler.announce_with(run.progress.notice)
            components.sampler.halve_with(recorder.halvings)
            components.sampler.keep_calls(recorder.call_log)
            if point.newest is not None:
                state = point.newest.state["stage"][SAMPLER_STATE]
                components.sampler.load(checked_sampler_state(state, ranks))
            if "sft" in stages and config.sft.steps and point.train is None and not point.sft_finished:
                run_sft(config, components, recorder, point.sft)
            if "train" in stages and not recorder.stopped:
                run_rl(config, components, recorder, point.train, reference_start)
        return finish(run, recorder)
