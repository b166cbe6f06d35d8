"""Reference resets: when they come, what they copy, and that the policy goes on as it would have."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from flatpeak.config.load import load_recipe, parse_config
from flatpeak.policy.config import ReferenceConfig
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import ReferenceResets, renewed, snapshot
from flatpeak.training.config import OptimizerConfig, TrainingConfig
from flatpeak.training.learner import Learner, PolicyStatistics
from flatpeak.training.objective import Objective
from flatpeak.training.objective_config import KLConfig, ObjectiveConfig
from flatpeak.training.optimizer import optimizer_tensors
from flatpeak.training.trainer import Trainer
from flatpeak.types import Group, Prompt, SamplingParams
from support.models import EOS, letter_tokenizer, tiny_model
from support.training import (
    FixedSampler,
    completion,
    largest_difference,
    make_batch,
    make_trainer,
    prompt,
    scored,
    tiny_policy,
    weights,
)

pytestmark = pytest.mark.usefixtures("one_thread")
KL = "policy/kl_reference"
RESETS = "reference/resets"
ROUNDING = 1e-10
"""k3 is about d^2 / 2, and log-probabilities of one model computed twice differ by a few 1e-6 at most."""
SMALL_STEPS = OptimizerConfig(name="sgd", learning_rate=0.02, max_grad_norm=None)
SCORES = {"x": (1.0, 0.0, 0.5), "y": (0.0, 1.0, 0.0)}
TOKENS = {"x": [(5, 9, EOS), (12, 3, 8), (6, EOS)], "y": [(4, 4, EOS), (9, EOS), (10, 11, 12)]}


def tied_policy() -> Policy:
    """A GPT-2, whose output layer is its embedding."""
    model = tiny_model("gpt2", num_hidden_layers=1, num_attention_heads=2)
    assert model.lm_head.weight is model.transformer.wte.weight
    return Policy(model, letter_tokenizer())


def adapted_policy() -> Policy:
    """A Qwen2 with a LoRA adapter, which is all that trains."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    return Policy(model, letter_tokenizer())


POLICIES = [tiny_policy, tied_policy, adapted_policy]


class RepeatingSampler(FixedSampler):
    """Knows the prompts of the second and later passes over the data too."""

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        return [self.groups[prompt.id.partition("@")[0]] for prompt in prompts]


def make(
    rule: ReferenceConfig,
    *,
    policy: Policy | None = None,
    reference: Policy | None = None,
    kl: float = 0.1,
    scores: dict[str, Any] = SCORES,
    optimizer: OptimizerConfig = SMALL_STEPS,
    training: TrainingConfig | None = None,
) -> Trainer:
    """A trainer of two groups, whose reference is the policy as it starts unless another is given."""
    policy = policy or tiny_policy()
    groups = [
        Group(
            prompt=prompt(name, (3, 7, ord(name) % 5)), completions=tuple(completion(c, limit=3) for c in TOKENS[name])
        )
        for name in TOKENS
    ]
    groups = scored(policy, groups)
    trainer = make_trainer(
        policy,
        groups,
        scores,
        max_new_tokens=3,
        objective=ObjectiveConfig(loss="policy_gradient"),
        kl=KLConfig(coefficient=kl),
        optimizer=optimizer,
        training=training or TrainingConfig(steps=9),
        reference=reference or snapshot(policy),
    )
    trainer.sampler = RepeatingSampler(groups)
    trainer.resets = ReferenceResets(rule)
    return trainer


def run(trainer: Trainer, steps: int) -> list[dict[str, float]]:
    return [trainer.train_step(step) for step in range(1, steps + 1)]


def values(policy: Policy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def memory(policy: Policy) -> set[int]:
    held = [*policy.model.parameters(), *policy.model.buffers()]
    return {tensor.untyped_storage().data_ptr() for tensor in held}


@pytest.fixture
def update_kl(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The mean KL that each update found."""
    result = []
    original = Learner.update

    def update(self: Learner, *args: Any, **settings: Any) -> PolicyStatistics:
        statistics = original(self, *args, **settings)
        result.append(
            sum(float(component.kl) for component in statistics.tokens if component.kl is not None)
            / sum(component.tokens for component in statistics.tokens)
        )
        return statistics

    monkeypatch.setattr(Learner, "update", update)
    return result


def test_the_first_update_after_a_reset_finds_no_kl_and_the_second_does(update_kl: list[float]) -> None:
    run(make(ReferenceConfig(reset_every=2), training=TrainingConfig(steps=9, epochs_per_rollout=2)), 5)
    first, second = update_kl[::2], update_kl[1::2]
    assert [kl < ROUNDING for kl in first] == [True, False, True, False, True]
    assert min(first[1], first[3], *second) > 1e-3


def test_resets_come_at_the_end_of_every_so_many_steps_and_are_counted() -> None:
    metrics = run(make(ReferenceConfig(reset_every=3)), 7)
    assert [row[RESETS] for row in metrics] == [0, 0, 1, 1, 1, 2, 2]
    assert [row[KL] < ROUNDING for row in metrics] == [True, False, False, True, False, False, True]


def test_nothing_is_counted_without_a_rule() -> None:
    metrics = run(make(ReferenceConfig(keep=True)), 3)
    assert all(RESETS not in row for row in metrics)
    assert min(row[KL] for row in metrics[1:]) > 1e-3


def test_a_bound_on_the_kl_acts_only_once_it_is_exceeded() -> None:
    free = [row[KL] for row in run(make(ReferenceConfig(keep=True)), 3)]
    assert free[0] < free[1] < free[2]
    reached = run(make(ReferenceConfig(reset_at_kl=free[1])), 4)
    assert [row[RESETS] for row in reached] == [0, 0, 1, 1]
    assert [row[KL] for row in reached[:3]] == free
    assert reached[3][KL] < ROUNDING
    exceeded = run(make(ReferenceConfig(reset_at_kl=math.nextafter(free[1], 0))), 3)
    assert [row[RESETS] for row in exceeded] == [0, 1, 1]
    assert exceeded[2][KL] < ROUNDING


@pytest.mark.parametrize(
    ("rule", "due"),
    [
        ({"reset_every": 2}, [False, True, False, True, False, True]),
        ({"reset_at_kl": 0.5}, [False, False, True, False, False, False]),
        ({"reset_every": 4, "reset_at_kl": 0.5}, [False, False, True, True, False, False]),
        ({"keep": True}, [False] * 6),
    ],
)
def test_either_rule_is_enough_and_a_kl_that_is_missing_or_not_a_number_is_none(
    rule: dict[str, Any], due: list[bool]
) -> None:
    resets = ReferenceResets(ReferenceConfig(**rule))
    measured: list[dict[str, float]] = [{KL: 0.1}, {KL: 0.5}, {KL: 0.6}, {KL: -1.0}, {}, {KL: math.nan}]
    assert [resets.due(step, metrics) for step, metrics in enumerate(measured, start=1)] == due


def test_the_penalty_pulls_towards_the_new_reference() -> None:
    equal = {"x": (1.0,) * 3, "y": (0.0,) * 3}
    metrics = run(make(ReferenceConfig(reset_every=2), reference=tiny_policy(seed=1), scores=equal, kl=0.01), 4)
    norms = [row["policy/grad_norm"] for row in metrics]
    # With equal rewards only the penalty has a gradient, and that is 0 where policy and reference are one.
    assert min(norms[:2]) > 1e-2
    assert max(norms[2:]) < 1e-6
    assert min(row[KL] for row in metrics[:2]) > 0.1


@pytest.mark.parametrize("make_policy", POLICIES)
def test_a_reset_gives_the_reference_the_values_of_the_policy_and_shares_only_frozen_weights_with_it(
    make_policy: Callable[[], Policy],
) -> None:
    trainer = make(ReferenceConfig(reset_every=2), policy=make_policy())
    policy, reference = trainer.learner.policy, trainer.learner.reference
    assert reference is not None
    held, start = memory(reference), values(policy)
    frozen = {weight.data_ptr() for weight in policy.model.parameters() if not weight.requires_grad}
    for step in (1, 2, 3, 4):
        trainer.train_step(step)
        assert trainer.learner.reference is reference
        assert memory(reference) == held
        assert held & memory(policy) == frozen
        assert reference.parameters() == []
        if step == 2:
            middle = values(policy)
        expected = {1: start, 2: middle, 3: middle, 4: values(policy)}[step] if step > 1 else start
        assert same(values(reference), expected)
        assert same(values(reference), values(policy)) == (step % 2 == 0)
    assert not same(middle, start)
    head = reference.causal.get_output_embeddings().weight
    assert (head is reference.causal.get_input_embeddings().weight) == (make_policy is tied_policy)


def other_models() -> dict[str, Any]:
    wide = {"hidden_size": 32}
    # The same names and shapes as the policy's, but another function of the same weights.
    rope = {"rope_type": "default", "rope_theta": 10.0}
    return {"wide": wide, "turned": {"rope_parameters": rope}}


@pytest.mark.parametrize("name", ["wide", "turned"])
def test_a_reference_that_is_another_model_is_replaced_by_the_policy(name: str) -> None:
    other = Policy(tiny_model(seed=1, **other_models()[name]), letter_tokenizer())
    other.model.requires_grad_(False)
    before = values(other)
    trainer = make(ReferenceConfig(reset_every=2), reference=other)
    policy = trainer.learner.policy
    metrics = run(trainer, 2)
    assert min(row[KL] for row in metrics) > 0.1
    first = trainer.learner.reference
    assert first is not None
    assert first is not other
    assert same(values(first), values(policy))
    assert same(values(other), before)
    assert not memory(first) & (memory(policy) | memory(other))
    metrics += [trainer.train_step(step) for step in (3, 4, 5)]
    assert [row[KL] < ROUNDING for row in metrics] == [False, False, True, False, True]
    assert trainer.learner.reference is first
    assert [row[RESETS] for row in metrics] == [0, 1, 1, 2, 2]


def test_buffers_that_a_model_saves_follow_and_those_it_derives_stay() -> None:
    policy = tiny_policy()
    policy.model.register_buffer("counted", torch.zeros(2))
    policy.model.register_buffer("derived", torch.zeros(2), persistent=False)
    reference = snapshot(policy)
    policy.model.counted += 1
    policy.model.derived += 1
    assert renewed(reference, policy) is reference
    assert reference.model.counted.tolist() == [1, 1]
    assert reference.model.derived.tolist() == [0, 0]
    policy.model.counted += 1
    assert reference.model.counted.tolist() == [1, 1]


ADAM = OptimizerConfig(learning_rate=0.05, weight_decay=0.01)


@pytest.mark.parametrize("reset_optimizer", [False, True])
def test_the_optimizer_is_forgotten_only_where_asked_for(reset_optimizer: bool) -> None:
    trainer = make(ReferenceConfig(reset_every=2, reset_optimizer=reset_optimizer), optimizer=ADAM)
    counted = []
    for step in range(1, 6):
        trainer.train_step(step)
        steps = {float(v) for name, v in optimizer_tensors(trainer.learner.optimizer).items() if name.endswith("step")}
        counted.append(steps)
    assert counted == (
        [{1.0}, set(), {1.0}, set(), {1.0}] if reset_optimizer else [{n} for n in (1.0, 2.0, 3.0, 4.0, 5.0)]
    )
    assert bool(optimizer_tensors(trainer.learner.optimizer))


def test_the_update_after_forgetting_is_that_of_a_fresh_optimizer_bit_for_bit() -> None:
    batch = make_batch([3, 2], prompts=[(3, 4), (5,)], prompt_N=[0, 1])
    ends = {}
    for name in ("forgotten", "fresh", "kept"):
        rule = ReferenceConfig(reset_every=2, reset_optimizer=name == "forgotten")
        trainer = make(rule, optimizer=ADAM)
        run(trainer, 2)
        learner = trainer.learner
        if name == "fresh":
            objective = Objective(config=learner.objective.config, kl=learner.objective.kl)
            learner = Learner(learner.policy, objective, ADAM, temperature=1.0, micro_batch_tokens=1000)
        learner.update(batch, rate=0.02)
        learner.update(batch, rate=0.01)
        ends[name] = values(learner.policy)
    assert same(ends["forgotten"], ends["fresh"])
    assert largest_difference(ends["kept"], ends["fresh"]) > 1e-3


def test_resets_change_nothing_where_nothing_uses_the_reference() -> None:
    ends = []
    for rule in (ReferenceConfig(keep=True), ReferenceConfig(reset_every=1)):
        trainer = make(rule, kl=0.0)
        metrics = run(trainer, 3)
        ends.append(weights(trainer.learner.policy))
    assert same(*ends)
    assert max(row[KL] for row in metrics) < ROUNDING
    assert metrics[-1][RESETS] == 3


@pytest.mark.parametrize("make_policy", POLICIES)
def test_a_checkpoint_holds_each_movable_weight_of_the_reference_once(
    make_policy: Callable[[], Policy], tmp_path: Path
) -> None:
    trainer = make(ReferenceConfig(reset_every=2), policy=make_policy(), optimizer=ADAM)
    trainer.train_step(1)
    assert trainer.tensors().keys() == trainer.learner.tensors().keys()
    trainer.train_step(2)
    saved = trainer.tensors()
    own = {name.removeprefix("reference."): t for name, t in saved.items() if name.startswith("reference.")}
    assert {name for name in saved if not name.startswith("reference.")} == trainer.learner.tensors().keys()
    assert own.keys() == {n for n, weight in trainer.learner.policy.model.named_parameters() if weight.requires_grad}
    assert len({tensor.untyped_storage().data_ptr() for tensor in own.values()}) == len(own)
    save_file(saved, tmp_path / "tensors")  # refuses shared memory
    assert same(load_file(tmp_path / "tensors"), saved)


@pytest.mark.parametrize("make_policy", POLICIES)
@pytest.mark.parametrize("named", [False, True], ids=["own reference", "named reference"])
@pytest.mark.parametrize("stop", [1, 2, 3])
def test_a_trainer_goes_on_from_its_tensors_bit_for_bit(
    make_policy: Callable[[], Policy], named: bool, stop: int
) -> None:
    rule = ReferenceConfig(reset_every=2, reset_optimizer=True)

    def trainer() -> Trainer:
        return make(rule, policy=make_policy(), optimizer=ADAM, reference=tiny_policy(seed=1) if named else None)

    whole, begun, resumed = trainer(), trainer(), trainer()
    expected = run(whole, 5)
    run(begun, stop)
    saved = {name: tensor.clone() for name, tensor in begun.tensors().items()}
    resumed.learner.policy.model.load_state_dict(begun.learner.policy.model.state_dict())
    resumed.load({"stage": begun.state(), "learner": begun.learner.state()}, saved)
    rows = [resumed.train_step(step) for step in range(stop + 1, 6)]
    assert same(values(resumed.learner.policy), values(whole.learner.policy))
    assert resumed.learner.reference is not None
    assert whole.learner.reference is not None
    assert same(values(resumed.learner.reference), values(whole.learner.reference))
    assert [(row[KL], row[RESETS]) for row in rows] == [(row[KL], row[RESETS]) for row in expected[stop:]]
    assert resumed.state() == whole.state()
    assert same(resumed.tensors(), whole.tensors())


def test_the_presets_say_what_their_papers_say() -> None:
    def preset(name: str) -> Any:
        return parse_config({"model": {"path": "x"}, **load_recipe(f"flatpeak:algorithms/{name}")})

    plain, penalty, resets = preset("grpo"), preset("grpo_kl"), preset("grpo_kl_resets")
    assert (plain.kl.coefficient, penalty.kl.coefficient, resets.kl.coefficient) == (0.0, 0.04, 0.04)
    assert (penalty.kl.estimator, penalty.kl.placement, penalty.reference.resets) == ("k3", "loss", False)
    assert (resets.reference.reset_every, resets.reference.reset_optimizer) == (200, True)
    assert penalty.model_copy(update={"kl": plain.kl}) == plain
    assert resets.model_copy(update={"reference": plain.reference}) == penalty
