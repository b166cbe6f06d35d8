"""Falls of the reward under weight noise, computed again by hand, and what the measurement leaves behind: nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from flatpeak.errors import DivergedError, UserError
from flatpeak.evaluation.config import EvaluationConfig, SharpnessConfig
from flatpeak.evaluation.evaluate import PolicyEvaluator
from flatpeak.evaluation.sharpness import SharpnessProbe
from flatpeak.evaluation.tables import Comparison
from flatpeak.gradreg.perturbation import Perturbation
from flatpeak.gradreg.weight_noise import relative_noise
from flatpeak.protocols import Sampler
from flatpeak.rewards.reward_set import as_reward
from flatpeak.tasks.prompts import PromptConfig
from flatpeak.types import Completion, Example, Group, Prompt, SamplingParams
from support.gradreg import network, unchanged, values

RADII, DRAWS, SIZE, SAMPLES, SEED = (0.1, 0.5), 3, 2, 2, 11


class WeightReader(Sampler):
    """Completions that say the sum of a model's weights, plus the index of the question and of the sample."""

    def __init__(self, model: nn.Module | None, *, foreign: bool = True) -> None:
        self.model = model
        self.foreign = foreign
        self.asked: list[tuple[list[str], int, SamplingParams, int]] = []
        self.fail_at: int | None = None
        self.logprob: float | None = None
        self.lengths = {"q0": 3.0}

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        self.asked.append(([prompt.id for prompt in prompts], group_size, sampling, seed))
        if len(self.asked) == self.fail_at:
            raise RuntimeError("no more completions")
        self.lengths["q0"] += 1
        total = weight_sum(self.model) if self.model is not None else 1.0
        return [
            Group(prompt=prompt, completions=tuple(self.said(total + p + g / 10) for g in range(group_size)))
            for p, prompt in enumerate(prompts)
        ]

    def said(self, value: float) -> Completion:
        logprob = -abs(value) if self.logprob is None else self.logprob
        return Completion(token_ids=(1,), logprobs=(logprob,), finish_reason="stop", text=repr(value))

    def state(self) -> Mapping[str, Any]:
        return dict(self.lengths)

    def load(self, state: Mapping[str, Any]) -> None:
        self.lengths = dict(state)


def weight_sum(model: nn.Module) -> float:
    return sum(float(p.detach().double().sum()) for p in model.parameters() if p.ndim == 2)


def doubled(completion: str) -> float:
    return 2 * float(completion)


def sign(completion: str) -> float | None:
    """Missing for the first sample of the second question, whose clean text begins with 6."""
    return None if completion.startswith("6") else math.copysign(1.0, float(completion))


def shifted(model: nn.Module, *, total: float) -> nn.Module:
    """The model with the sum of its matrices made this."""
    with torch.no_grad():
        weight = next(p for p in model.parameters() if p.ndim == 2)
        weight[0, 0] += total - weight_sum(model)
    return model


def questions(count: int) -> list[Prompt]:
    return [
        Prompt(id=f"q{i}", token_ids=(1,), text="?", example=Example(id=f"q{i}", question="?", gold=""))
        for i in range(count)
    ]


def evaluator(model: nn.Module, sampler: Any, *, reward: Any = None, **settings: Any) -> PolicyEvaluator:
    config = SharpnessConfig(**{"radii": RADII, "draws": DRAWS, "size": SIZE, "samples": SAMPLES, **settings})
    return PolicyEvaluator(
        config=EvaluationConfig(accuracy=None, metric="reward", temperature=0.7, seed=SEED, sharpness=config),
        task="sums",
        prompts=questions(4),
        sampler=sampler,
        reward=as_reward(reward or {"doubled": doubled, "sign": (sign, 0)}),
        max_new_tokens=5,
        tokenizer=SimpleNamespace(),  # type: ignore[arg-type]
        prompt=PromptConfig(),
        longest_prompt=100,
        sharpness=SharpnessProbe(
            config=config,
            perturbation=Perturbation(model, matrices(model)),
            make_losses=lambda groups, scores: None,
        ),
    )


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.ndim == 2]


def perturbed_sums(model: nn.Module, radius: float) -> list[float]:
    """By draw, the sum of all weights with the noise added."""
    held = Perturbation(model, matrices(model))
    clean = weight_sum(model)
    return [
        clean + radius * sum(float(z.sum()) for z in relative_noise(held, seed=SEED, draw=draw).values())
        for draw in range(DRAWS)
    ]


def test_falls_are_clean_rewards_less_the_mean_over_draws() -> None:
    model = shifted(network(), total=5.0)
    result = evaluator(model, WeightReader(model)).evaluate()
    metrics = result.metrics()
    # Questions 0 and 1, samples 0 and 1: the mean text is sum + 0.5 + 0.05, twice that is the reward.
    assert metrics["sharpness/clean"] == pytest.approx(2 * 5.55)
    assert metrics["sharpness/clean/doubled"] == pytest.approx(2 * 5.55)
    norms = [float(p.detach().norm()) for p in matrices(model)]
    assert metrics["sharpness/weight_norm"] == pytest.approx(math.hypot(*norms))
    assert metrics["sharpness/perturbation_kept"] == pytest.approx(1.0)
    for radius in RADII:
        fall = 2 * (5.0 - float(np.mean(perturbed_sums(model, radius))))
        assert abs(fall) > 1e-3
        assert metrics[f"sharpness/fall_{radius}"] == pytest.approx(fall)
        assert metrics[f"sharpness/fall_{radius}/doubled"] == pytest.approx(fall)
        assert metrics[f"sharpness/relative_fall_{radius}"] == pytest.approx(fall / (2 * 5.55))


def test_missing_scores_leave_the_figures_of_their_question() -> None:
    model = shifted(network(), total=5.0)
    result = evaluator(model, WeightReader(model)).evaluate()
    assert result.sharpness is not None
    # The texts of question 1 are 6.0 and 6.1: both are missing when clean, and so is the fall.
    assert result.sharpness.clean["sign"] == [1.0, None]
    per_draw = []
    for total in perturbed_sums(model, 0.5):
        known = [sign(repr(total + g / 10)) for g in range(SAMPLES)]
        values_known = [value for value in known if value is not None]
        if values_known:
            per_draw.append(float(np.mean(values_known)))
    assert result.sharpness.falls[0.5]["sign"] == [pytest.approx(1.0 - float(np.mean(per_draw))), None]
    assert result.estimates["sharpness/fall_0.5/sign"].questions == 1


def test_every_state_of_the_weights_is_asked_the_same_way() -> None:
    model = network()
    sampler = WeightReader(model)
    evaluator(model, sampler).evaluate(size=1)
    greedy, *asked = sampler.asked
    assert greedy[:2] == (["q0"], 1)
    assert len(asked) == 1 + len(RADII) * DRAWS
    assert all(one == asked[0] for one in asked)
    ids, group_size, sampling, seed = asked[0]
    assert (ids, group_size, sampling.temperature, sampling.max_new_tokens, seed) == (
        ["q0", "q1"],
        SAMPLES,
        0.7,
        5,
        SEED,
    )
    assert SharpnessConfig(radii=RADII, draws=DRAWS, size=SIZE, samples=SAMPLES).completions == len(asked) * 4


def test_weights_sampler_and_random_state_are_as_before() -> None:
    model = network()
    sampler = WeightReader(model)
    before, state = values(model), torch.get_rng_state()
    evaluator(model, sampler).evaluate()
    assert unchanged(model, before)
    # One call is the greedy answer's, whose trace an evaluation always leaves.
    assert sampler.lengths == {"q0": 4.0}
    assert torch.equal(torch.get_rng_state(), state)


def test_generators_that_a_reward_draws_from_are_as_before() -> None:
    def drawing(completion: str) -> float:
        return random.random() + float(np.random.rand())

    def next_numbers(*, sharpness: bool) -> tuple[float, float]:
        model = network()
        ours = evaluator(model, WeightReader(model), reward={"drawing": drawing})
        random.seed(3)
        np.random.seed(3)
        (ours if sharpness else replace(ours, sharpness=None)).evaluate()
        return random.random(), float(np.random.rand())

    before = random.getstate(), np.random.get_state()
    try:
        assert next_numbers(sharpness=True) == next_numbers(sharpness=False)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def test_noise_too_much_for_the_model_is_told_as_such() -> None:
    class Overflowing(WeightReader):
        def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Group]:
            if len(self.asked) == 3:  # the greedy answers, the clean ones and those of the first radius came before
                raise DivergedError("its weights have diverged: fork the run from an earlier checkpoint")
            return super().generate(prompts, **settings)

    model = network()
    before = values(model)
    with pytest.raises(UserError, match=r"radii=\[0\.1, 0\.5\]: .* NaN or infinite.*name smaller radii") as caught:
        evaluator(model, Overflowing(model)).evaluate()
    assert not isinstance(caught.value, DivergedError)
    assert unchanged(model, before)


def test_diverged_weights_are_not_blamed_on_noise() -> None:
    class Diverged(WeightReader):
        def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Group]:
            if len(self.asked) == 1:
                raise DivergedError("its weights have diverged")
            return super().generate(prompts, **settings)

    model = network()
    with pytest.raises(DivergedError, match="its weights have diverged"):
        evaluator(model, Diverged(model)).evaluate()


@pytest.mark.parametrize("call", [2, 3, 6])
def test_an_error_in_the_middle_leaves_weights_and_sampler_as_before(call: int) -> None:
    model = network()
    sampler = WeightReader(model)
    sampler.fail_at = call
    before = values(model)
    with pytest.raises(RuntimeError, match="no more completions"):
        evaluator(model, sampler).evaluate()
    assert len(sampler.asked) == call
    assert unchanged(model, before)
    assert sampler.lengths == {"q0": 4.0}


def test_a_callers_sampler_with_weights_of_its_own_is_refused() -> None:
    says = r"perturbed by 0\.1 of their norm .* does not read the policy's weights.*evaluation\.sharpness=null"
    with pytest.raises(UserError, match=says) as caught:
        evaluator(network(), WeightReader(None)).evaluate()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["ours", "small radii", "a certain policy", "new adapters"])
def test_equal_log_probabilities_are_no_reason_to_refuse_where_they_can_be_explained(case: str) -> None:
    model, sampler = network(), WeightReader(None, foreign=case != "ours")
    ours = evaluator(model, sampler, radii=(0.001,) if case == "small radii" else RADII)
    if case == "new adapters":
        with torch.no_grad():
            matrices(model)[-1].zero_()
    if case == "a certain policy":
        sampler.logprob = -1e-4
    assert ours.evaluate().metrics()["sharpness/clean"] == pytest.approx(2 * 1.55)


def test_the_relative_fall_is_absent_where_the_clean_reward_is_not_positive() -> None:
    model = shifted(network(), total=-5.0)
    metrics = evaluator(model, WeightReader(model)).evaluate().metrics()
    assert metrics["sharpness/clean"] < 0
    assert "sharpness/fall_0.1" in metrics
    assert not [name for name in metrics if "relative" in name or "eigenvalue" in name]


def test_summaries_count_the_questions_and_a_part_of_them_has_no_sharpness() -> None:
    model = shifted(network(), total=5.0)
    result = evaluator(model, WeightReader(model)).evaluate()
    told = result.as_dict()
    assert told["counted"] == {"sign": 3} | {
        name: 1 if name.endswith("/sign") else 2
        for name in told["metrics"]
        if name.startswith(("sharpness/clean", "sharpness/fall"))
    }
    assert told["methods"]["sharpness/fall_0.1"] == "bootstrap"
    assert "sharpness/weight_norm" not in told["intervals"]
    assert result.first(1).sharpness is None
    assert result.first(4).sharpness is not None


def test_tables_show_sharpness_and_pair_the_models_by_question() -> None:
    models = [shifted(network(seed=seed), total=5.0 + seed) for seed in (0, 1)]
    results = [evaluator(model, WeightReader(model)).evaluate() for model in models]
    comparison = Comparison(labels=["one", "two"], evaluations=results)
    change = comparison.as_dict()["differences"][0]["metrics"]["sharpness/clean"]
    assert change["difference"] == pytest.approx(2.0)
    assert change["questions"] == 2
    lines = [line for line in comparison.render().splitlines() if "sharpness/" in line]
    assert [line.split()[1] for line in lines][:3] == [
        "sharpness/clean",
        "sharpness/clean/doubled",
        "sharpness/clean/sign",
    ]
    assert "11.1 [" in lines[0]
    assert "of 2" in lines[0]
    norm = next(line for line in lines if "weight_norm" in line)
    assert " of " not in norm


def test_an_evaluation_without_a_probe_measures_none() -> None:
    model = network()
    plain = replace(evaluator(model, WeightReader(model)), sharpness=None).evaluate()
    assert plain.sharpness is None
    assert not [name for name in plain.metrics() if "sharpness" in name]


def test_falls_have_no_intervals_of_shares() -> None:
    # All falls are 0, which as shares of questions would be [0, 0.66] (Wilson's of 0 of 2).
    class Constant(WeightReader):
        def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Group]:
            total = weight_sum(self.model) if self.model is not None else 0.0
            told = replace(self.said(0.0), logprobs=(-abs(total),))
            return [Group(prompt=prompt, completions=(told,) * settings["group_size"]) for prompt in prompts]

    model = network()
    result = evaluator(model, Constant(model)).evaluate()
    assert result.estimates["sharpness/fall_0.1"].interval == (0.0, 0.0)
    assert result.estimates["sharpness/fall_0.1"].method == "bootstrap"
