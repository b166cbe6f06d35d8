"""The components of a run, ready to train: built, checked against torch, and shared by the ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from flatpeak.config.algorithm_name import algorithm_name
from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.ranks import Ranks
from flatpeak.distributed.sharding import Replica, shard
from flatpeak.distributed.shared_rollouts import SharedReward, SharedSampler, divided
from flatpeak.errors import UserError
from flatpeak.evaluation.choice_ranking import LetterRanker
from flatpeak.pipeline.build import Components, build_components
from flatpeak.pipeline.policies import check_regularization
from flatpeak.pipeline.progress import model_line
from flatpeak.pipeline.prompt_record import make_prompt_record
from flatpeak.pipeline.request import CallerObjects, code_digests
from flatpeak.pipeline.rollout_engines import announce_decoding
from flatpeak.pipeline.run_data import task_digest
from flatpeak.pipeline.run_rewards import unanswered
from flatpeak.pipeline.run_start import Run, RunStart
from flatpeak.pipeline.samplers import asks_servers, make_sampler
from flatpeak.policy.model import Policy
from flatpeak.policy.model_settings import training_layers
from flatpeak.policy.native_decoding import TORCH
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.vllm.weight_versions import checksums_of
from flatpeak.runs.notices import RecordedProgress
from flatpeak.training.history import ZeroAdvantageMonitor
from flatpeak.training.master_weights import CheckpointSize
from flatpeak.training.optimizer import check_blocks
from flatpeak.utils.environment import without_collection
from flatpeak.utils.gguf import SUFFIX, cache_directory


@contextmanager
def open_components(
    run: Run, objects: CallerObjects, *, stages: Sequence[str]
) -> Iterator[tuple[Components, RunStart]]:
    """The components of a run, closed at the end, and what its directory says of them."""
    config, progress = run.config, run.progress
    with ExitStack() as resources:
        with run.ranks.together(), without_collection():
            _announce_conversion(config, progress)
            checkpoint = run.resume_point.model
            components = resources.enter_context(
                closing(build_components(config, objects, checkpoint=checkpoint, progress=progress, ranks=run.ranks))
            )
        policy, training, rl = components.policy, config.training, "train" in stages
        progress.say(model_line(policy.model, data=_data_line(config, components, stages)))
        _check_kernels(config, components, progress)
        run.resume_point.announce_engine(policy, progress)
        decoder = components.sampler.decoder or policy.decoded_with or TORCH
        components = share_components(components, config, objects, run.ranks)
        resources.enter_context(
            training_layers(policy.causal, recompute=training.activation_checkpointing, compiled=training.compile)
        )
        zero_advantages = ZeroAdvantageMonitor(
            progress.notice,
            limit=config.rollout.max_new_tokens,
            other_terms=components.algorithm.objective.needs_all_tokens,
            unanswered=unanswered(components.phases, config.evaluation.accuracy_part),
        )
        yield (
            components,
            RunStart(
                evaluator=components.stoppable_evaluator(lambda: run.stop.signal is not None),
                evaluation=config.evaluation,
                record=make_prompt_record(config, task=components.task, objects=objects.names),
                size=CheckpointSize.of(
                    policy.model,
                    config.optimizer if rl else config.sft.optimizer,
                    reference=config.reference if rl else None,
                ),
                steps=(config.sft.steps, config.training.steps if rl else 0),
                zero_advantages=zero_advantages,
                # Rewards check themselves once the run's name is taken, since a judge is paid.
                prepare=components.prepare,
                decoder=decoder,
                code=code_digests(config, objects),
                data={} if objects.task is None else {"dataset": task_digest(objects.task)},
            ),
        )


def _data_line(config: RunConfig, components: Components, stages: Sequence[str]) -> str:
    """The numbers of questions, and the names of the stages."""
    train = sum(len(phase.prompts.items) for phase in components.phases)
    names = {"sft": "SFT" if config.sft.steps else "", "train": algorithm_name(config)}
    trained_by = ", then ".join(names[stage] for stage in stages if names[stage])
    return f"{train:,} questions to train on, {len(components.data.test):,} held out · {trained_by}"


def _announce_conversion(config: RunConfig, progress: RecordedProgress) -> None:
    """Say that a GGUF file is converted, where the cache does not have it."""
    file = Path(config.model.path or "").expanduser()
    if file.is_file() and file.suffix == SUFFIX and not cache_directory(file).is_dir():
        progress.say(f"converting {file.name} to float32, once")


def _check_kernels(config: RunConfig, components: Components, progress: RecordedProgress) -> None:
    """Compare native kernels with torch and single rollouts with batches, with a notice where they differ."""
    policy = components.policy
    if policy.native:
        progress.say("checking kernels and rollouts on this model")
    if not isinstance(config.rollout.engine, VLLMConfig):
        announce_decoding(policy, components.data.test, progress, max_new_tokens=config.rollout.max_new_tokens)
    if policy.native:
        policy.kernels.trains(policy)
    for reason in policy.kernels.notices:
        progress.notice(reason)


def share_components(components: Components, config: RunConfig, objects: CallerObjects, ranks: Ranks) -> Components:
    """The components with a sampler, rewards and evaluators that the ranks share; sharded where the recipe says so.

    One process alone has them as they are. UserError where the model cannot be sharded, or the ranks differ.
    """
    if ranks.size == 1:
        return components
    check_alike(components, code_digests(config, objects), ranks)
    policy, sampler = components.policy, components.sampler
    served = asks_servers(config, objects.sampler)
    whole: Policy = policy
    weights: Callable[[], AbstractContextManager[object]] = nullcontext
    if config.distributed.sharded:
        if objects.model is not None:
            raise UserError(
                "a model that is passed to train() would stay sharded: save it and name it in model.path, or use "
                "distributed.strategy=ddp"
            )
        if not policy.native:
            raise UserError(f"distributed.strategy shards models of the native engine only ({policy.notice}): use ddp")
        whole = replica = Replica(policy)
        weights = replica.present
        if not served:
            sampler = make_sampler(config, objects.sampler, replica)
            components.resources.callback(sampler.close)
        shard(policy, replica, config.distributed, ranks)
        check_regularization(config, policy)
        for where, optimizer in (("optimizer", config.optimizer), ("sft.optimizer", config.sft.optimizer)):
            check_blocks(dict(policy.model.named_parameters()), optimizer, where=where)
    rewards = {id(phase.reward): SharedReward(phase.reward, ranks) for phase in components.phases}
    shared: dict[str, Any] = {
        "sampler": sampler if served else SharedSampler(sampler, ranks, weights=weights),
        "reward": rewards[id(components.evaluator.reward)],
    }
    if config.evaluation.choices == "rank":
        ranker = LetterRanker(policy=whole, tokenizer=policy.tokenizer)
        shared["ranker"] = partial(divided, ranker, ranks=ranks, weights=weights)
    return replace(
        components,
        sampler=shared["sampler"],
        phases=tuple(replace(phase, reward=rewards[id(phase.reward)]) for phase in components.phases),
        evaluator=replace(
            components.evaluator, **shared, sets=tuple(replace(one, **shared) for one in components.evaluator.sets)
        ),
        sft_check=replace(components.sft_check, **shared),
    )


def check_alike(components: Components, code: Mapping[str, str], ranks: Ranks) -> None:
    """UserError, on all ranks, where they have other weights or data: nothing later would show it.

    Gradients would be averaged over unlike models, and completions given to other prompts than drew them.
    """
    prompts = [prompt for phase in components.phases for prompt in phase.prompts.items]
    test_prompts = [*components.data.test, *(prompt for one in components.data.sets.values() for prompt in one)]
    demonstrations = components.data.demonstrations.items
    own = {
        "weights": checksums_of(list(components.policy.model.parameters())),
        "training prompts": _digest([(prompt.id, prompt.token_ids) for prompt in prompts]),
        "test prompts": _digest([(prompt.id, prompt.token_ids) for prompt in test_prompts]),
        "functions": _digest(sorted(code.items())),
        "demonstrations": _digest([(one.prompt_ids, one.target_ids, one.trained) for one in demonstrations]),
    }
    first, *others = ranks.gather(own)
    for rank, other in enumerate(others, start=1):
        differing = [name for name in own if other[name] != first[name]]
        if differing:
            raise UserError(
                f"rank {rank} has other {' and '.join(differing)} than rank 0, and all ranks train one model on the "
                "same data in the same order: give every process the same, with torch.manual_seed before a model is "
                "made, and no order of a set"
            )


def _digest(rows: Sequence[tuple[Any, ...]]) -> str:
    return blake2b(json.dumps(rows).encode(), digest_size=16).hexdigest()
