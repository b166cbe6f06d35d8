from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

import flatpeak
from flatpeak.errors import RunError
from flatpeak.runs.metrics import read_metrics
from flatpeak.runs.rollout_log import read_rollouts
from flatpeak.training.sft import SFTTrainer
from flatpeak.types import Completion, Group, Prompt, SamplingParams
from support.reward_functions import varied
from support.runs import MakeModel, Recipe, Train, Watch

pytestmark = pytest.mark.usefixtures("one_thread")

CHOSEN = 8
SGD = {"name": "sgd", "learning_rate": 1.0}
TIMES = ("time/", "throughput/", "memory/")


def chosen_fraction(completion_ids: list[list[int]]) -> list[float]:
    return [ids.count(CHOSEN) / len(ids) for ids in completion_ids]


def weights(directory: Path) -> dict[str, torch.Tensor]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def checkpoint(result: flatpeak.RunResult, step: int) -> dict[str, torch.Tensor]:
    return weights(result.path / "checkpoints" / f"step_{step:06d}")


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def timeless(result: flatpeak.RunResult) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.startswith(TIMES)}
        for row in read_metrics(result.path / "metrics.jsonl")
    ]


def test_a_reward_for_one_token_climbs_from_chance_to_nearly_always(recipe: Recipe, train: Train) -> None:
    config = recipe(
        rollout={"prompts_per_step": 8, "group_size": 8},
        optimizer={"learning_rate": 3e-2},
        training={"steps": 20},
    )
    result = train(config, reward=chosen_fraction)
    rewards = [row["reward/mean"] for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
    vocabulary = next(iter(weights(result.best).values())).shape[0]
    assert rewards[0] == pytest.approx(1 / vocabulary, abs=0.06)
    assert min(rewards[-3:]) > 0.95
    assert result.exit_code == 0
    assert result.summary.status == "done"


def test_the_same_seed_gives_the_same_run_and_another_seed_another(recipe: Recipe, train: Train) -> None:
    runs = [train(recipe(run={"name": name, "seed": seed}), reward=varied) for name, seed in (("a", 3), ("b", 3))]
    assert timeless(runs[0]) == timeless(runs[1])
    assert same(checkpoint(runs[0], 2), checkpoint(runs[1], 2))
    other = train(recipe(run={"name": "c", "seed": 4}), reward=varied)
    assert timeless(other) != timeless(runs[0])


def test_sft_teaches_what_rationales_say(recipe: Recipe, train: Train, watch: Watch) -> None:
    config = recipe(
        task={"rationale": "7"},
        sft={"steps": 15, "batch_size": 8, "optimizer": {"learning_rate": 3e-2}},
        training={"steps": 0},
    )
    seen = watch()
    result = train(config, reward=lambda completion: float(completion == "7"), progress=seen)
    assert [(row.stage, row.metrics["accuracy"]) for row in result.summary.evaluations] == [
        ("start", 0.0),
        ("sft", 1.0),
    ]
    losses = seen.values("sft/loss", stage="sft")
    assert losses[0] > 2.0
    assert losses[-1] < 0.1


def test_problems_of_an_sft_check_are_left_out_of_sft_alone(
    recipe: Recipe, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `sft.check_size` says of itself."""
    demonstrated: list[int] = []
    stream = SFTTrainer.__init__
    monkeypatch.setattr(
        SFTTrainer,
        "__init__",
        lambda self, policy, items, **options: (
            demonstrated.append(len(items.items)),
            stream(self, policy, items, **options),
        )[1],
    )
    config = recipe(
        task={"train_size": 6},
        sft={"steps": 1, "batch_size": 2, "stop_at": 1.0, "check_every": 1, "check_size": 4},
        rollout={"prompts_per_step": 6},
        training={"steps": 1},
    )
    result = train(config)
    rows = [row for path in sorted((result.path / "rollouts").iterdir()) for row in read_rollouts(path)]
    assert demonstrated == [2]
    assert len({row["group"] for row in rows}) == 6


def test_sft_sees_every_demonstration_once_in_a_pass(recipe: Recipe, train: Train, watch: Watch) -> None:
    sft = {"steps": 6, "batch_size": 10, "normalization": "sequence_mean", "optimizer": {"learning_rate": 0.0}}
    seen = watch()
    train(recipe(sft=sft, training={"steps": 0}), progress=seen)
    losses = seen.values("sft/loss", stage="sft")
    assert len(set(losses)) == 6
    # 30 rows are three batches: whatever the order, a pass has the same mean.
    assert sum(losses[:3]) == pytest.approx(sum(losses[3:]), rel=1e-6)


def test_equal_rewards_leave_the_weights_alone(recipe: Recipe, train: Train) -> None:
    result = train(recipe(optimizer=SGD), reward=lambda completion: 1.2)
    assert same(checkpoint(result, 0), checkpoint(result, 2))
    for row in read_metrics(result.path / "metrics.jsonl"):
        assert all(value is not None and math.isfinite(value) for name, value in row.items() if name != "stage"), row
        if row["stage"] == "train":
            assert (row["policy/grad_norm"], row["groups/informative_fraction"]) == (0.0, 0.0)


def test_a_step_does_not_use_the_gradient_of_the_step_before(recipe: Recipe, train: Train, watch: Watch) -> None:
    done = []
    result = train(
        recipe(run={"checkpoint_every": 1}, optimizer=SGD),
        reward=lambda completion_ids: varied(completion_ids) if not done else [1.0] * len(completion_ids),
        progress=watch({("train", 1): lambda: done.append(1)}),
    )
    assert not same(checkpoint(result, 0), checkpoint(result, 1))
    assert same(checkpoint(result, 1), checkpoint(result, 2))


def test_missing_rewards_leave_the_groups_statistics_and_the_loss(recipe: Recipe, train: Train) -> None:
    def first_is_missing(group: Any) -> list[float | None]:
        return [None, *(sum(c.token_ids) / 100 for c in group.completions[1:])] if len(group.completions) > 1 else [0.0]

    result = train(recipe(training={"steps": 1}), reward=first_is_missing)
    (row,) = [row for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
    rollouts = read_rollouts(result.path / "rollouts" / "step_000001.jsonl")
    known = [line["reward"] for line in rollouts if line["reward"] is not None]
    assert (row["reward/missing_fraction"], len(known)) == (0.25, 12)
    assert row["reward/mean"] == pytest.approx(sum(known) / 12, rel=1e-6)
    for start in range(0, 16, 4):
        group = rollouts[start : start + 4]
        rewards = torch.tensor([line["reward"] for line in group[1:]], dtype=torch.float64)
        by_hand = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        assert group[0]["reward"] is None
        assert group[0]["advantage"] == 0.0
        assert [line["advantage"] for line in group[1:]] == pytest.approx(by_hand.tolist(), abs=1e-4)


def test_steps_whose_rewards_are_all_missing_change_nothing_and_the_run_fails(
    recipe: Recipe, train: Train, tmp_path: Path
) -> None:
    with pytest.raises(RunError, match=r"^no completion of 2 steps had a reward, so nothing was learned"):
        train(recipe(optimizer=SGD, kl={"coefficient": 0.1}), reward=lambda completion: None)
    run = tmp_path / "runs" / "tiny"
    rows = [row for row in read_metrics(run / "metrics.jsonl") if row["stage"] == "train"]
    assert [(row["reward/mean"], row["reward/missing_fraction"], row["optimizer/updates"]) for row in rows] == [
        (None, 1.0, 0.0)
    ] * 2
    assert same(*(weights(run / "checkpoints" / f"step_00000{step}") for step in (0, 2)))


def test_a_second_epoch_sees_the_updated_weights(recipe: Recipe, train: Train, watch: Watch) -> None:
    # 16 completions of at most 8 tokens, prompt included: 20 tokens make several micro-batches of each minibatch.
    small = {"steps": 1, "micro_batch_tokens": 20}
    seen = {}
    for name, training in {
        "once": small,
        "epochs": small | {"epochs_per_rollout": 2},
        "both": small | {"epochs_per_rollout": 2, "minibatches": 2},
    }.items():
        seen[name] = watch()
        train(recipe(run={"name": name}, training=training), reward=varied, progress=seen[name])
    updates = {name: watcher.values("optimizer/updates") for name, watcher in seen.items()}
    gaps = {name: watcher.values("policy/ratio_max_gap")[0] for name, watcher in seen.items()}
    assert updates == {"once": [1.0], "epochs": [2.0], "both": [4.0]}
    assert gaps["once"] < 1e-5
    assert gaps["epochs"] > 1e-3
    assert gaps["both"] > 1e-3


@pytest.mark.parametrize("normalization", ["sequence_mean", "constant", "token_mean", "longest", "sequence_sum"])
def test_micro_batches_change_memory_and_not_the_update(recipe: Recipe, train: Train, normalization: str) -> None:
    ends = []
    for tokens in (16, 10000):
        config = recipe(
            run={"name": f"{tokens}"},
            optimizer={"name": "sgd", "learning_rate": 0.1},
            objective={"normalization": normalization},
            training={"steps": 1, "minibatches": 2, "micro_batch_tokens": tokens},
        )
        result = train(config, reward=varied)
        start = checkpoint(result, 0)
        ends.append(checkpoint(result, 1))
    for name, tensor in ends[0].items():
        torch.testing.assert_close(tensor, ends[1][name], rtol=0, atol=1e-6)
    moved = [float((tensor - start[name]).abs().max()) for name, tensor in ends[0].items()]
    assert max(moved) > 1e-3


def lora_model(make_tiny_model: MakeModel, *, dropout: float) -> tuple[Any, Any]:
    model, tokenizer = make_tiny_model()
    torch.manual_seed(0)
    # Random B matrices: with the usual zeros the adapter, and so its dropout, would have no effect.
    config = LoraConfig(r=4, lora_dropout=dropout, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(model, config), tokenizer


@pytest.mark.parametrize("kept", [False, True])
def test_dropout_is_off_in_every_pass_unless_the_recipe_keeps_it(
    recipe: Recipe, train: Train, make_tiny_model: MakeModel, watch: Any, kept: bool
) -> None:
    model, tokenizer = lora_model(make_tiny_model, dropout=0.1)
    seen = watch()
    config = recipe(model={"dropout": kept}, optimizer={"learning_rate": 0.0})
    result = train(config, model=model, tokenizer=tokenizer, reward=varied, progress=seen)
    gaps = seen.values("policy/ratio_max_gap")
    assert (min(gaps) > 1e-4) if kept else (max(gaps) < 1e-5)
    # Whatever the training pass of the first step did, completions of the second were drawn without dropout.
    for row in read_rollouts(result.path / "rollouts" / "step_000002.jsonl")[::5]:
        ids = torch.tensor([row["prompt_token_ids"] + row["token_ids"]])
        with torch.no_grad():
            logprobs = torch.log_softmax(model.eval()(input_ids=ids).logits[0], dim=-1)
        start = len(row["prompt_token_ids"]) - 1
        expected = [float(logprobs[start + k, token]) for k, token in enumerate(row["token_ids"])]
        assert row["logprobs"] == pytest.approx(expected, abs=1e-5)


def test_only_the_adapter_of_a_lora_model_is_trained(recipe: Recipe, train: Train, make_tiny_model: MakeModel) -> None:
    model, tokenizer = lora_model(make_tiny_model, dropout=0.0)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    train(recipe(), model=model, tokenizer=tokenizer, reward=varied)
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert moved == {name for name in before if "lora_" in name}


def test_one_completion_per_prompt_is_enough_without_a_baseline(recipe: Recipe, train: Train) -> None:
    config = recipe(
        rollout={"group_size": 1, "prompts_per_step": 8},
        advantage={"baseline": "none", "scale": "none"},
        optimizer={"learning_rate": 3e-2},
        training={"steps": 12},
    )
    result = train(config, reward=chosen_fraction)
    rewards = [row["reward/mean"] for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
    assert rewards[-1] > rewards[0] + 0.3


class Scripted:
    """A sampler of the caller's own: every completion is the chosen token and an end."""

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        completion = Completion(token_ids=(CHOSEN, 1), logprobs=(-2.5, -0.5), finish_reason="stop", text="5")
        return [Group(prompt=prompt, completions=(completion,) * group_size) for prompt in prompts]


def test_a_sampler_of_the_callers_serves_rollouts_and_evaluation(recipe: Recipe, train: Train, watch: Watch) -> None:
    seen = watch()
    result = train(recipe(), sampler=Scripted(), progress=seen)
    rows = read_rollouts(result.path / "rollouts" / "step_000001.jsonl")
    assert {(tuple(row["token_ids"]), tuple(row["logprobs"]), row["text"]) for row in rows} == {
        ((CHOSEN, 1), (-2.5, -0.5), "5")
    }
    assert [row.metrics["length"] for row in result.summary.evaluations] == [2.0, 2.0]
    assert seen.values("rollout/length_mean") == [2.0, 2.0]
