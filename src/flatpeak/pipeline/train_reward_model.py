"""`flatpeak.train_reward_model`: a recipe with preference pairs in, a run directory and a reward model out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from flatpeak.config.load import Settings
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import UserError, brief
from flatpeak.evaluation.config import EvaluationConfig
from flatpeak.pipeline.lifecycle import conduct
from flatpeak.pipeline.train import Recipe, RunResult, as_config, open_notices, report_on
from flatpeak.policy.loading import build_tokenizer, cast_weights, check_source, move_to_own_memory
from flatpeak.protocols import Progress
from flatpeak.rewards.classifier import (
    COMPLETION,
    PROMPT,
    Classifier,
    Record,
    load_model,
    locate,
    make_wording,
    pick_template,
)
from flatpeak.rollout.randomness import derive_seed
from flatpeak.runs.checkpoints import CheckpointState, newest_valid, read_checkpoint
from flatpeak.runs.directory import RunDirectory, RunPaths, check_start
from flatpeak.runs.notices import START, NoticeLog
from flatpeak.runs.signals import StopSignals
from flatpeak.tasks.preferences import Preferences, PreferencesConfig, load_preferences
from flatpeak.training.curriculum import Stream
from flatpeak.training.diagnostics import SkippedUpdates
from flatpeak.training.recorder import Recorder
from flatpeak.training.reward_model_trainer import (
    EncodedPair,
    EncodedPairs,
    PairEvaluator,
    PreferenceLearner,
    RewardModelTrainer,
    SavedClassifier,
    encode_pairs,
)
from flatpeak.training.state import History
from flatpeak.utils.huggingface import pick_device

REFERENCE_PAIRS = 256
"""How many held-out pairs give the mean and the standard deviation that are recorded with the model."""


def train_reward_model(
    config: Recipe,
    *,
    model: Any = None,
    tokenizer: Any = None,
    settings: Settings | None = None,
    progress: Progress | bool | None = None,
    resume: bool = False,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
) -> RunResult:
    """Train a reward model on the pairs of `task`, by the section `reward_model` of a recipe.

    `config` is a RunConfig, the mapping of a recipe, or a recipe's path or name. `model`, with its tokenizer, may be
    the caller's own sequence-classification model with one output; `settings` and `progress` are those of
    `flatpeak.train`. Raises UserError for bad input, before a run directory is made; a run name that exists needs
    `resume` or `overwrite`.
    """
    recipe = as_config(config, settings)
    resolved, chosen = recipe.model_dump(mode="json"), recipe.model_dump(mode="json", exclude_defaults=True)
    check_start(recipe.run, resolved, resume=resume, overwrite=overwrite, chosen=chosen)
    with open_notices(progress, metric="accuracy") as (shown, notices):
        if recipe.run.threads:
            torch.set_num_threads(recipe.run.threads)
        saved = _saved(recipe, shown) if resume else None
        parts = _assemble(recipe, model, tokenizer, saved=saved, progress=shown)
        with (
            RunDirectory.create(
                recipe.run, resolved, resume=resume, overwrite=overwrite, command=command, chosen=chosen
            ) as run,
            StopSignals() as stop,
        ):
            recorder = _recorder(recipe, parts, run, stop, shown, notices, saved)
            summary = conduct(recorder, lambda: _train(recipe, parts, recorder, saved))
        return RunResult(path=run.path, summary=summary, report=report_on(run, shown), exit_code=stop.exit_code)


def _train(config: RunConfig, parts: _Parts, recorder: Recorder, saved: CheckpointState | None) -> None:
    trainer = parts.trainer(config, recorder, saved)
    if saved is not None:
        saved.free_tensors()
    trainer.train(first_step=saved.step + 1 if saved else 1)


@dataclass(frozen=True, kw_only=True)
class _Parts:
    name: str
    classifier: Classifier
    train: tuple[EncodedPair, ...]
    test: tuple[EncodedPair, ...]

    def trainer(self, config: RunConfig, recorder: Recorder, saved: CheckpointState | None) -> RewardModelTrainer:
        budget = config.training.micro_batch_tokens
        reference = self.test[:REFERENCE_PAIRS]
        learner = PreferenceLearner(
            SavedClassifier(classifier=self.classifier, reference=reference, batch_tokens=budget),
            config.reward_model,
            micro_batch_tokens=budget,
        )
        if saved is not None:
            learner.load(saved.tensors)
        seed = derive_seed(config.run.seed, "pairs", config.reward_model.seed)
        stream = Stream(items=self.train, seed=seed)
        trainer = RewardModelTrainer(
            learner,
            stream,
            config=config.reward_model,
            max_skipped_updates=config.training.max_skipped_updates,
            recorder=recorder,
        )
        if saved is not None:
            trainer.skipped = SkippedUpdates.of(saved.state["stage"])
        return trainer


def _assemble(
    config: RunConfig, model: Any, tokenizer: Any, *, saved: CheckpointState | None, progress: Progress
) -> _Parts:
    task = config.task
    if not isinstance(task, PreferencesConfig):
        raise UserError(
            f"task.type={task.type}: a reward model learns from preference pairs; use task.type=preferences"
        )
    if model is None:
        check_source(config.model)
    elif tokenizer is None:
        raise UserError("train_reward_model(model=...) needs tokenizer=... too")
    preferences = load_preferences(task)
    for notice in preferences.notices:
        progress.notice(notice)
    classifier = _classifier(config, model, tokenizer, preferences, saved=saved)
    train, test = (
        _encoded(encode_pairs(pairs, classifier.wording), progress, what=what)
        for pairs, what in ((preferences.train, "training"), (preferences.test, "held-out"))
    )
    return _Parts(name=task.name, classifier=classifier, train=train, test=test)


def _encoded(encoded: EncodedPairs, progress: Progress, *, what: str) -> tuple[EncodedPair, ...]:
    if encoded.truncated or encoded.dropped:
        progress.notice(
            f"{what} pairs: {encoded.truncated} with a shortened question, {encoded.dropped} dropped because an "
            "answer does not fit"
        )
    if not encoded.pairs:
        raise UserError(f"no {what} pair fits into reward_model.max_tokens: raise it")
    return encoded.pairs


def _classifier(
    config: RunConfig, model: Any, tokenizer: Any, preferences: Preferences, *, saved: CheckpointState | None
) -> Classifier:
    """The model that is trained: the caller's, the one a recipe names, or a new one; or, of a resumed run, its own."""
    section, record = config.reward_model, None
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    path = str(saved.path) if saved else config.model.path
    if model is not None and saved is not None:
        own, _, record = load_model(str(saved.path), where="run.name", dtype=dtype)
        model.load_state_dict(own.state_dict())
    elif model is None:
        seed = derive_seed(config.run.seed, "weights", section.seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if path is None:
                model, tokenizer = _new_model(config, preferences)
                cast_weights(model, dtype)
            else:
                model, tokenizer, record = _load(config, path, dtype=dtype, own=saved is not None)
        move_to_own_memory(model.to(pick_device(config.model.device, where="model.device")))
    if model.config.num_labels != 1:
        raise UserError(f"the model has {model.config.num_labels} outputs and a reward model one: set num_labels=1")
    # transformers' own forward needs to know it, and whoever loads the model later may use that.
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
    return load_model(
        locate(path, where="model.path"),
        where="model.path",
        trained=own,  # a language model gets a new head
        num_labels=1,
        ignore_mismatched_sizes=not own,
        revision=None if own else config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
        dtype=dtype,
    )


def _new_model(config: RunConfig, preferences: Preferences) -> tuple[Any, Any]:
    """A tokenizer built from the pairs' text, and a model with random weights around it."""
    new = config.model.new
    assert new is not None  # check_source
    pairs = (*preferences.train, *preferences.test)
    texts = [text for pair in pairs for text in (pair.prompt, pair.chosen, pair.rejected)]
    tokenizer = build_tokenizer(new.tokenizer, texts)
    if config.reward_model.template != "chat":
        # The template's own words are read too.
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


def _saved(config: RunConfig, progress: Progress) -> CheckpointState | None:
    checkpoints = RunPaths(Path(config.run.directory) / config.run.name).checkpoints
    newest = newest_valid(checkpoints, notice=progress.notice)
    return read_checkpoint(newest) if newest else None


def _recorder(
    config: RunConfig,
    parts: _Parts,
    run: RunDirectory,
    stop: StopSignals,
    progress: Progress,
    notices: NoticeLog,
    saved: CheckpointState | None,
) -> Recorder:
    evaluated = saved is None or bool(saved.state.get("evaluated", True))
    if run.resumed:
        run.rewind(saved.step if saved else None, evaluated=evaluated)
    notices.open(run.notices, stage="train" if saved else START, step=saved.step if saved else 0)
    section = config.reward_model
    recorder = Recorder(
        run,
        config=config.run,
        evaluation=EvaluationConfig(every=section.evaluate_every, size=section.evaluation_size, metric="accuracy"),
        evaluator=PairEvaluator(
            classifier=parts.classifier,
            pairs=parts.test,
            task=parts.name,
            batch_tokens=config.training.micro_batch_tokens,
        ),
        stop=stop,
        progress=progress,
        notices=notices,
        history=History(**saved.state["history"]) if saved else History(),
        evaluated=evaluated,
    )
    if saved is not None:
        recorder.point_at(saved.path)
    return recorder
