"""Gradient regularization of other trainers: transformers' own, RLOO, DPO, SFT, reward models and KTO."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from support.manual_step import regularized_step
from support.models import EOS, letter_tokenizer
from support.trl import (
    EPS,
    GRAD_REG,
    LIMIT,
    RATE,
    SETTINGS,
    STRENGTH,
    cross_entropy,
    distance,
    logged,
    need_trl,
    plain_trainer,
    saved_model,
    trained,
    weights,
)

need_trl()
import trl  # noqa: E402

from flatpeak.integrations.trl import (  # noqa: E402
    GradientRegularizationArguments,
    GradientRegularizationMixin,
)

WORDS = ("abba", "acid", "baa", "bead", "cab", "dad", "decade", "fade")


def regularized(name: str) -> tuple[type, type]:
    """The two lines that a user writes for any of TRL's trainers."""
    config, trainer = getattr(trl, f"{name}Config"), getattr(trl, f"{name}Trainer")
    return (
        type(f"{name}WithPenalty", (GradientRegularizationMixin, trainer), {}),
        dataclass(type(f"{name}ConfigWithPenalty", (GradientRegularizationArguments, config), {})),
    )


def text_rows() -> list[dict[str, Any]]:
    """Preferences between two words."""
    pairs = zip(WORDS, reversed(WORDS), strict=True)
    return [{"prompt": a[:2], "chosen": a[2:] + "e", "rejected": b[2:] + "gh"} for a, b in pairs]


def assert_steps_by_hand(
    trainer: Any, by_hand: Any, first: Callable[[], Tensor], second: Callable[[], Tensor], *, steps: int = 1
) -> None:
    """The trainer's weights are those of `steps` steps on the hand's model."""
    moves = [regularized_step(by_hand, first, second, strength=STRENGTH, eps=EPS, rate=RATE) for _ in range(steps)]
    assert max(moves) > 1e-3
    assert distance(weights(trainer.model), weights(by_hand)) <= max(1e-6, 1e-3 * max(moves))


def test_steps_of_transformers_trainer_are_those_written_out_by_hand(tmp_path: Path) -> None:
    by_hand = saved_model(tmp_path, "gpt2")
    loss = partial(cross_entropy, by_hand)
    assert_steps_by_hand(trained(plain_trainer(tmp_path)), by_hand, loss, loss, steps=2)


def test_a_loss_that_takes_its_labels_out_of_the_inputs_has_them_in_both_passes(tmp_path: Path) -> None:
    seen: list[bool] = []

    def loss(outputs: Any, labels: Tensor | None, num_items_in_batch: Any = None) -> Tensor:
        seen.append(labels is not None)
        return outputs.logits.square().mean()

    trainer = plain_trainer(tmp_path, max_steps=1)
    trainer.compute_loss_func = loss
    trained(trainer)
    assert len(seen) >= 4
    assert all(seen)


@pytest.mark.parametrize("mode", ["importance", "reuse", "importance_clipped"])
def test_two_updates_of_rloo_are_those_written_out_by_hand(mode: str, tmp_path: Path) -> None:
    kind, config = regularized("RLOO")
    settings = {**SETTINGS, "learning_rate": RATE, "max_steps": 2, "num_iterations": 2, "num_generations": 4}
    settings |= {"per_device_train_batch_size": 16, "max_completion_length": LIMIT, "beta": 0.1}
    trainer = kind(
        saved_model(tmp_path),
        reward_funcs=lambda completions, **columns: [float(len(set(text)) - len(text)) for text in completions],
        args=config(output_dir=str(tmp_path / "run"), grad_reg_ratio_mode=mode, **settings, **GRAD_REG),
        train_dataset=Dataset.from_list([{"prompt": word} for word in WORDS[:4]]),
        processing_class=letter_tokenizer(),
    )
    trainer.train()
    (inputs,) = trainer._buffered_inputs
    assert inputs["advantages"].abs().min() > 0
    by_hand = saved_model(tmp_path)
    old_N = completion_logprobs(by_hand, inputs).detach()
    moves = []
    for _ in range(2):
        first_N = completion_logprobs(by_hand, inputs).detach()
        ratio_N = (first_N - old_N).exp()
        advantages_N = inputs["advantages"]
        clipped_N = ((ratio_N > 1.2) & (advantages_N > 0)) | ((ratio_N < 0.8) & (advantages_N < 0))

        def first(advantages_N: Tensor = advantages_N) -> Tensor:
            ratio_N = (completion_logprobs(by_hand, inputs) - old_N).exp()
            return -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(0.8, 1.2) * advantages_N).mean()

        def second(
            advantages_N: Tensor = advantages_N, clipped_N: Tensor = clipped_N, ratio_N: Tensor = ratio_N
        ) -> Tensor:
            logprobs_N = completion_logprobs(by_hand, inputs)
            live_N = (logprobs_N - old_N).exp() if mode == "importance" else ratio_N * logprobs_N
            return torch.where(clipped_N, 0, -live_N * advantages_N).mean()

        again = first if mode == "importance_clipped" else second
        moves.append(regularized_step(by_hand, first, again, strength=STRENGTH, eps=EPS, rate=RATE))
    assert clipped_N.any()
    assert distance(weights(trainer.model), weights(by_hand)) <= max(1e-6, 1e-3 * max(moves))


def completion_logprobs(model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """The log-probability of each completion, its row filled up on the right."""
    rows = []
    for prompt, real, completion, mask in zip(
        *(inputs[name] for name in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")), strict=True
    ):
        ids = torch.cat([prompt[real.bool()], completion[mask.bool()]])
        logits = model(input_ids=ids[None]).logits[0, :-1].float()
        picked = torch.log_softmax(logits, -1).gather(1, ids[1:, None])[:, 0]
        rows.append(picked[int(real.sum()) - 1 :].sum())
    return torch.stack(rows)


def dpo_trainer(directory: Path, kind: type, config: type, **settings: Any) -> Any:
    merged = {**SETTINGS, "learning_rate": RATE, "max_steps": 1, "per_device_train_batch_size": 8, **settings}
    return kind(
        saved_model(directory),
        args=config(output_dir=str(directory / "run"), beta=0.5, **merged),
        train_dataset=Dataset.from_list(text_rows()),
        processing_class=letter_tokenizer(),
    )


def test_a_step_of_dpo_is_the_one_written_out_by_hand(tmp_path: Path) -> None:
    trainer = trained(dpo_trainer(tmp_path, *regularized("DPO"), **GRAD_REG))
    by_hand, reference = saved_model(tmp_path), saved_model(tmp_path)

    def answers(model: Any, which: str) -> Tensor:
        values = []
        for row in text_rows():
            prompt, answer = (letter_tokenizer().encode(row[component]) for component in ("prompt", which))
            ids = torch.tensor([*prompt, *answer, EOS])
            picked = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1].float(), -1).gather(1, ids[1:, None])
            values.append(picked[len(prompt) - 1 :].sum())
        return torch.stack(values)

    def loss() -> Tensor:
        with torch.no_grad():
            gap = answers(reference, "chosen") - answers(reference, "rejected")
        margin = answers(by_hand, "chosen") - answers(by_hand, "rejected") - gap
        return -torch.nn.functional.logsigmoid(0.5 * margin).mean()

    assert_steps_by_hand(trainer, by_hand, loss, loss)


def trl_trainer(name: str, directory: Path, *, ours: bool, **settings: Any) -> Any:
    """One of TRL's trainers on the same preferences, regularized or not."""
    kind, config = regularized(name) if ours else (getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"))
    if name == "DPO":
        return dpo_trainer(directory, kind, config, **settings)
    rows = text_rows()
    if name == "SFT":
        rows = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    if name == "KTO":
        rows = [{"prompt": r["prompt"], "completion": r["chosen"], "label": bool(i % 2)} for i, r in enumerate(rows)]
    model = saved_model(directory)
    if name == "Reward":
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForSequenceClassification.from_pretrained(
                directory / "model", num_labels=1, dtype=torch.float32
            )
    merged = {**SETTINGS, "learning_rate": RATE, "max_steps": 1, "per_device_train_batch_size": 8, **settings}
    return kind(
        model,
        args=config(output_dir=str(directory / "run"), **merged),
        train_dataset=Dataset.from_list(rows),
        processing_class=letter_tokenizer(),
    )


@pytest.mark.parametrize("name", ["DPO", "SFT", "Reward", "KTO"])
def test_what_trls_trainers_log_is_logged_once_and_their_penalty_is_a_curvature(name: str, tmp_path: Path) -> None:
    """At learning rate 0 all else is alike; a second pass of another function would grow as 1 / step."""
    settings = {"learning_rate": 0.0, "max_steps": 2}
    theirs = trained(trl_trainer(name, tmp_path, ours=False, **settings)).state.log_history
    far, near = (
        trained(trl_trainer(name, tmp_path, ours=True, **settings, **{**GRAD_REG, "grad_reg_eps": eps}))
        for eps in (3e-3, 3e-4)
    )
    timed = ("grad_norm", "train_runtime", "train_samples_per_second", "train_steps_per_second")
    for left, right in zip(far.state.log_history, theirs, strict=True):
        assert {k: v for k, v in left.items() if not k.startswith("gradreg/") and k not in timed} == {
            k: v for k, v in right.items() if k not in timed
        }
    ratios = [logged(trainer, "gradreg/penalty_ratio") for trainer in (far, near)]
    assert len(ratios[0]) == 2
    assert min(ratios[0]) > 1e-3
    assert ratios[1] == pytest.approx(ratios[0], rel=0.1)
