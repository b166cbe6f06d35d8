"""`flatpeak.train_reward_model`: a recipe with preference pairs in, a run directory with a reward model out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from flatpeak.config.load import Settings
from flatpeak.config.run_config import RunConfig
from flatpeak.distributed.launch import check_alone
from flatpeak.errors import UserError, brief
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.pipeline.lifecycle import finish, open_run, training
from flatpeak.pipeline.progress import first_line, model_line
from flatpeak.pipeline.prompt_record import make_prompt_record
from flatpeak.pipeline.request import RecipeSource, RunRequest, resolve_config
from flatpeak.pipeline.run_result import RunResult
from flatpeak.pipeline.run_start import RunStart, restore_trainer
from flatpeak.policy.loading import (
    build_tokenizer,
    cast_weights,
    check_single_adapter,
    check_source,
    move_to_own_memory,
)
from flatpeak.protocols import Progress
from flatpeak.rewards.sequence_classifier import (
    COMPLETION,
    PROMPT,
    Classifier,
    Record,
    load_model,
    locate,
    make_wording,
    pick_template,
    read_record,
)
from flatpeak.rollout.randomness import derive_seed
from flatpeak.runs.callbacks import Callback
from flatpeak.runs.checkpoints import CheckpointState
from flatpeak.tasks.preferences import Preferences, PreferencesConfig, load_preferences
from flatpeak.training.curriculum import Stream
from flatpeak.training.master_weights import CheckpointSize
from flatpeak.training.reward_model_trainer import (
    EncodedPair,
    EncodedPairs,
    PairEvaluator,
    PreferenceLearner,
    RewardModelTrainer,
    encode_pairs,
)
from flatpeak.utils.adapter_base import ADAPTER_CONFIG, SCORE_HEADS, check_base
from flatpeak.utils.adapters import add_adapters, check_own_adapters, restore_adapter
from flatpeak.utils.control_tokens import notice_of_control_tokens
from flatpeak.utils.host_memory import offload_notices
from flatpeak.utils.huggingface import pick_device
from flatpeak.utils.torch_state import usual_torch_state

REFERENCE_PAIRS = 256
"""Held-out pairs whose scores give the mean and the standard deviation that are recorded with the model."""


def train_reward_model(
    config: RecipeSource,
    *,
    model: Any = None,
    tokenizer: Any = None,
    callbacks: Sequence[Callback] = (),
    settings: Settings | None = None,
    progress: Progress | bool | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Train a reward model on the pairs of `task`, by the section `reward_model` of a recipe.

    `config` is a RunConfig, the mapping of a recipe, or a recipe's path or name. `model`, with its tokenizer, may be
    the caller's own sequence-classification model with one output; `callbacks`, `settings` and `progress` are those of
    `flatpeak.train`. Raises UserError for bad input, before a run directory is made; a run name that exists needs
    `resume` or `overwrite`.
    """
    request = RunRequest(
        recipe=config,
        settings=settings,
        progress=progress,
        resume=resume,
        overwrite=overwrite,
        command=command,
        callbacks=callbacks,
    )
    return run_reward_model(request, model=model, tokenizer=tokenizer)


def run_reward_model(request: RunRequest, *, model: Any = None, tokenizer: Any = None) -> RunResult:
    """Train a reward model as requested, from where it was left."""
    config = resolve_config(request.recipe, request.settings)
    check_alone(config.distributed, "reward models")
    with usual_torch_state(), open_run(request, config, metric="accuracy") as run:
        run.progress.say(first_line(config, model=model))
        checkpoint = run.resume_point.train
        task = config.task
        if config.tasks or config.evaluation.sets:
            raise UserError(
                "a reward model learns from one task of preference pairs: leave out tasks and evaluation.sets"
            )
        if not isinstance(task, PreferencesConfig):
            raise UserError(
                f"task.type={task.type}: a reward model learns from preference pairs; use task.type=preferences"
            )
        _check_model(config, model, tokenizer)
        preferences = load_preferences(task)
        for notice in preferences.notices:
            run.progress.notice(notice)
        classifier = _classifier(config, model, tokenizer, preferences, checkpoint=checkpoint)
        train, test = _encoded_pairs(config, preferences, classifier, run.progress)
        pairs = f"{len(train):,} pairs to train on, {len(test):,} held out · reward model"
        run.progress.say(model_line(classifier.model, data=pairs))
        section, budget = config.reward_model, config.training.micro_batch_tokens
        start = RunStart(
            evaluator=PairEvaluator(classifier=classifier, pairs=test, task=task.name, batch_tokens=budget),
            evaluation=EvaluationConfig(every=section.evaluate_every, size=section.evaluation_size, metric="accuracy"),
            record=make_prompt_record(
                config, task=task.name, kind="reward_model", objects=() if model is None else ("model",)
            ),
            size=CheckpointSize.of(classifier.model, section.optimizer),
            steps=(section.steps,),
        )
        with training(run, start) as recorder:
            reference = test[:REFERENCE_PAIRS]
            trainer = RewardModelTrainer(
                PreferenceLearner(classifier, section, micro_batch_tokens=budget, reference=reference),
                Stream(items=train, seed=derive_seed(config.run.seed, "pairs", section.seed)),
                config=section,
                max_skipped_updates=config.training.max_skipped_updates,
                recorder=recorder,
            )
            trainer.train(first_step=restore_trainer(trainer, checkpoint))
        return finish(run, recorder)


def _check_model(config: RunConfig, model: Any, tokenizer: Any) -> None:
    """UserError where neither recipe nor caller has a model that can be trained."""
    if model is None:
        check_source(config.model)
    elif tokenizer is None:
        raise UserError("train_reward_model(model=...) needs tokenizer=... too")
    else:
        check_own_adapters(model)


def _encoded_pairs(
    config: RunConfig, preferences: Preferences, classifier: Classifier, progress: Progress
) -> tuple[tuple[EncodedPair, ...], tuple[EncodedPair, ...]]:
    """The pairs to train on and those held out, as the model reads them; UserError where none of them fits."""
    offload = {"reward_model.optimizer.offload": config.reward_model.optimizer.offload}
    for notice in offload_notices(offload, classifier.device):
        progress.notice(notice)
    texts = ("\n".join((pair.prompt, pair.chosen, pair.rejected)) for pair in (*preferences.train, *preferences.test))
    spelled = notice_of_control_tokens(texts, classifier.wording.tokenizer, what="pairs")
    if spelled is not None:
        progress.notice(spelled)
    train, test = (
        _encoded(encode_pairs(pairs, classifier.wording), progress, split=split)
        for pairs, split in ((preferences.train, "training"), (preferences.test, "held-out"))
    )
    return train, test


def _encoded(encoded: EncodedPairs, progress: Progress, *, split: str) -> tuple[EncodedPair, ...]:
    if encoded.truncated or encoded.dropped:
        progress.notice(
            f"{split} pairs: {encoded.truncated} with a shortened question, {encoded.dropped} dropped because an "
            "answer does not fit"
        )
    if not encoded.pairs:
        raise UserError(f"no {split} pair fits into reward_model.max_tokens: raise it")
    return encoded.pairs


def _classifier(
    config: RunConfig, model: Any, tokenizer: Any, preferences: Preferences, *, checkpoint: CheckpointState | None
) -> Classifier:
    """The model to train: the caller's, the recipe's or a new one, with the checkpoint's weights in a resumed run."""
    section, record = config.reward_model, None
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    path = str(checkpoint.path) if checkpoint else config.model.path
    if model is not None and checkpoint is not None and hasattr(model, "peft_config"):
        check_base(model, checkpoint.path, where=str(checkpoint.path))
        restore_adapter(model, checkpoint.path)
        record = read_record(checkpoint.path)
    elif model is not None and checkpoint is not None:
        own, _, record = load_model(str(checkpoint.path), where="run.name", device=torch.device("cpu"), dtype=dtype)
        model.load_state_dict(own.state_dict())
    elif model is None:
        seed = derive_seed(config.run.seed, "weights", section.seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if path is None:
                model, tokenizer = _new_model(config, preferences)
                cast_weights(model, dtype)
            else:
                model, tokenizer, record = _load(config, path, dtype=dtype, own=checkpoint is not None)
        move_to_own_memory(model.to(pick_device(config.model.device, where="model.device")))
    if model.config.num_labels != 1:
        raise UserError(f"the model has {model.config.num_labels} outputs and a reward model one: set num_labels=1")
    # The forward pass of transformers needs it, and the saved model may be used through that.
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    template = section.template
    if template == "auto" and record is None:
        template = "chat" if tokenizer.chat_template else "plain"
    return Classifier(
        model,
        make_wording(model, tokenizer, record, template=template, max_tokens=section.max_tokens, where="reward_model"),
    )


def _load(config: RunConfig, path: str, *, dtype: torch.dtype, own: bool) -> tuple[Any, Any, Record | None]:
    """The model of the recipe with a new head, and new adapters where it asks for them; or the run's own."""
    path = locate(path, where="model.path")
    if not own and (Path(path) / ADAPTER_CONFIG).is_file():
        check_single_adapter(config.model)
    model, tokenizer, record = load_model(
        path,
        where="model.path",
        device=pick_device(config.model.device, where="model.device"),
        trained=own,  # a language model gets a new head
        num_labels=1,
        ignore_mismatched_sizes=not own,
        revision=None if own else config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
        quantization=config.model.quantization,
        dtype=dtype,
    )
    lora = config.model.lora
    if lora is not None and lora.dropout:
        raise UserError("model.lora.dropout: reward models are trained without dropout; leave it out")
    if lora is not None and not hasattr(model, "peft_config"):
        head = next(name for name in SCORE_HEADS if hasattr(model, name))
        seed = derive_seed(config.run.seed, "weights")
        model = add_adapters(model, lora, seed=seed, head=head, revision=config.model.revision)
    return model, tokenizer, record


def _new_model(config: RunConfig, preferences: Preferences) -> tuple[Any, Any]:
    """A tokenizer built from the pairs' text, and a model with random weights around it."""
    new = config.model.new
    assert new is not None  # check_source
    pairs = (*preferences.train, *preferences.test)
    texts = [text for pair in pairs for text in (pair.prompt, pair.chosen, pair.rejected)]
    tokenizer = build_tokenizer(new.tokenizer, texts)
    if config.reward_model.template != "chat":
        # The template's own words are tokenized too.
        name = "plain" if config.reward_model.template == "auto" else config.reward_model.template
        template = pick_template(name, tokenizer, None, where="reward_model.template")
        tokenizer = build_tokenizer(new.tokenizer, [*texts, template.replace(PROMPT, "").replace(COMPLETION, "")])
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    try:
        model_config = AutoConfig.for_model(
            new.architecture, **{"vocab_size": len(tokenizer), "num_labels": 1, **special, **new.config}
        )
        model = AutoModelForSequenceClassification.from_config(model_config, dtype=torch.float32).eval()
        with torch.no_grad():
            model(input_ids=torch.tensor([[tokenizer.eos_token_id]]))
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UserError(f"model.new cannot be built with a score head: {brief(error)}") from error
    return model, tokenizer
