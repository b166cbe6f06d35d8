"""The loss that a recipe describes, against its formulas in NumPy at double precision."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from flatpeak import functional as F
from flatpeak.config.load import load_recipe, shipped_recipes
from flatpeak.functional import losses, policy_losses
from flatpeak.functional.policy_losses import POLICY_LOSSES
from flatpeak.training.batch import micro_batches
from flatpeak.training.objective import Objective, TokenStatistics
from flatpeak.training.objective_config import LOSS_ARGUMENTS, LOSS_SETTINGS, KLConfig, ObjectiveConfig, PolicyLossName
from flatpeak.types import Batch

Array = np.ndarray[Any, np.dtype[np.float64]]

ADVANTAGES = [1.5, -0.5, 2.0, -1.0]
LENGTHS = [3, 2, 1, 4]
RATIOS = np.array([0.5, 1.0, 1.5, 0.7, 1.25, 1.1, 4.0, 0.75, 1.0, 2.5])
"""Below, within and above the clip, under advantages of both signs."""
SEQUENCE = np.repeat(np.arange(4), LENGTHS)
A = np.repeat(ADVANTAGES, LENGTHS)
LOGPROBS = -np.linspace(0.3, 3.0, 10)
REFERENCE = LOGPROBS + np.array([0.4, -0.3, 0.0, 1.2, -0.8, 0.1, -0.05, 0.6, -1.5, 0.2])
ENTROPY = np.linspace(0.2, 2.0, 10)
D = REFERENCE - LOGPROBS
SEQUENCE_RATIOS = np.exp(
    [np.log(RATIOS[n == SEQUENCE]).mean() for n in range(4)],
)[SEQUENCE]
"""The geometric mean of a completion's ratios: 0.909, 0.935, 1.1, 1.655."""


def batch(*, reference: bool = True) -> Batch:
    """The numbers above, in float64."""
    return Batch(
        prompts=((3,), (4, 5)),
        prompt_N=torch.tensor([0, 0, 1, 1]),
        lengths_N=torch.tensor(LENGTHS),
        tokens_T=torch.arange(10) + 3,
        sequence_T=torch.from_numpy(SEQUENCE),
        advantages_T=torch.tensor(ADVANTAGES, dtype=torch.float64)[SEQUENCE],
        weights_N=torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64),
        old_logprobs_T=torch.from_numpy(LOGPROBS - np.log(RATIOS)),
        reference_logprobs_T=torch.from_numpy(REFERENCE) if reference else None,
    )


def evaluate(
    config: ObjectiveConfig, kl: KLConfig | None = None, *, data: Batch | None = None
) -> tuple[Array, Array, TokenStatistics]:
    """The loss of every token, the gradient of their sum with respect to its log-probability, and the statistics."""
    logprobs_T = torch.from_numpy(LOGPROBS.copy()).requires_grad_()
    objective = Objective(config=config, kl=kl or KLConfig())
    loss_T, statistics = objective(logprobs_T, torch.from_numpy(ENTROPY), data or batch())
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), logprobs_T)
    return loss_T.detach().numpy(), gradient_T.numpy(), statistics


def clipped(ratio: Array, *, low: float, high: float, dual: float = np.inf) -> tuple[Array, Array]:
    """The PPO loss, and which tokens keep their gradient."""
    loss = -np.minimum(ratio * A, np.clip(ratio, 1 - low, 1 + high) * A)
    lost = ((A > 0) & (ratio > 1 + high)) | ((A < 0) & (ratio < 1 - low)) | ((A < 0) & (ratio > dual))
    return np.where(A < 0, np.minimum(loss, -dual * A), loss), ~lost


TOKEN_LOSSES: dict[str, tuple[dict[str, Any], Array, Array, float]] = {
    "policy gradient": ({"loss": "policy_gradient"}, -A * LOGPROBS, -A, 0.0),
    "unclipped": ({"loss": "unclipped_surrogate"}, -RATIOS * A, -RATIOS * A, 0.0),
    # Above the clip: the third token. Below it: the fourth and the eighth.
    "clipped": (
        {"loss": "clipped_surrogate"},
        clipped(RATIOS, low=0.2, high=0.2)[0],
        -RATIOS * A * clipped(RATIOS, low=0.2, high=0.2)[1],
        3 / 10,
    ),
    "clipped unevenly": (
        {"loss": "clipped_surrogate", "clip_low": 0.28, "clip_high": 0.6},
        clipped(RATIOS, low=0.28, high=0.6)[0],
        -RATIOS * A * clipped(RATIOS, low=0.28, high=0.6)[1],
        1 / 10,
    ),
    # The dual clip also takes the gradient of the seventh and the tenth.
    "dual clip": (
        {"loss": "clipped_surrogate", "dual_clip": 2.0},
        clipped(RATIOS, low=0.2, high=0.2, dual=2.0)[0],
        -RATIOS * A * clipped(RATIOS, low=0.2, high=0.2, dual=2.0)[1],
        5 / 10,
    ),
    "capped": (
        {"loss": "truncated_policy_gradient", "cap": 1.2},
        -np.minimum(RATIOS, 1.2) * A * LOGPROBS,
        -np.minimum(RATIOS, 1.2) * A,
        4 / 10,
    ),
}
"""Settings, loss, its gradient, and the fraction of tokens that the clip touches, counted by hand."""


def test_statistics_are_sums_over_the_tokens() -> None:
    _, _, statistics = evaluate(ObjectiveConfig())
    assert statistics.tokens == 10
    assert float(statistics.entropy) == pytest.approx(ENTROPY.sum(), rel=1e-12)
    assert float(statistics.ratio) == pytest.approx(RATIOS.sum(), rel=1e-12)
    assert float(statistics.max_ratio_gap) == pytest.approx(3.0, rel=1e-12)
    assert statistics.kl is not None
    assert float(statistics.kl) == pytest.approx((np.exp(D) - D - 1).sum(), rel=1e-12)


def test_without_a_reference_no_kl_is_reported() -> None:
    _, _, statistics = evaluate(ObjectiveConfig(), data=batch(reference=False))
    assert statistics.kl is None


def by_sequence(values: Array) -> Array:
    """Each completion's mean, at each of its tokens."""
    return np.array([values[n == SEQUENCE].mean() for n in range(4)])[SEQUENCE]


SEQUENCE_LOSSES: dict[str, tuple[dict[str, Any], Array, Array, float]] = {
    "unclipped": (
        {"loss": "unclipped_surrogate"},
        -SEQUENCE_RATIOS * A,
        # A completion's len tokens share one ratio, and d s / d log p_t = s / len: the two cancel.
        -SEQUENCE_RATIOS * A,
        0.0,
    ),
    "clipped": (
        {"loss": "clipped_surrogate", "clip_low": 0.2, "clip_high": 0.05},
        clipped(SEQUENCE_RATIOS, low=0.2, high=0.05)[0],
        -SEQUENCE_RATIOS * A * clipped(SEQUENCE_RATIOS, low=0.2, high=0.05)[1],
        1 / 10,
    ),
    "capped": (
        {"loss": "truncated_policy_gradient", "cap": 1.2},
        -np.minimum(SEQUENCE_RATIOS, 1.2) * A * LOGPROBS,
        -np.minimum(SEQUENCE_RATIOS, 1.2) * A,
        4 / 10,
    ),
}


@pytest.mark.parametrize(
    ("ratio", "name"), [*(("token", name) for name in TOKEN_LOSSES), *(("sequence", name) for name in SEQUENCE_LOSSES)]
)
def test_every_loss_has_the_value_gradient_and_clip_fraction_of_its_formula(ratio: Any, name: str) -> None:
    cases, ratios = (TOKEN_LOSSES, RATIOS) if ratio == "token" else (SEQUENCE_LOSSES, SEQUENCE_RATIOS)
    settings, expected_loss, expected_gradient, clip_fraction = cases[name]
    loss, gradient, statistics = evaluate(ObjectiveConfig(ratio=ratio, **settings))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-12)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-12, atol=1e-15)
    assert float(statistics.clipped) / statistics.tokens == clip_fraction
    assert float(statistics.ratio) == pytest.approx(ratios.sum(), rel=1e-12)
    assert float(statistics.max_ratio_gap) == pytest.approx(3.0, rel=1e-12)


def test_the_clip_within_a_geometric_mean_is_counted_token_by_token() -> None:
    _, gradient, statistics = evaluate(ObjectiveConfig(loss="gmpo", clip_low=0.2, clip_high=0.2))
    assert int(statistics.clipped) == int(((gradient == 0) & (A != 0)).sum()) > 0


def test_a_sequence_ratio_is_that_of_whole_completions_in_every_micro_batch() -> None:
    config = ObjectiveConfig(ratio="sequence", loss="unclipped_surrogate")
    objective = Objective(config=config, kl=KLConfig())
    pieces, start = [], 0
    for micro in micro_batches(batch(), 1):
        stop = start + len(micro.tokens_T)
        loss_T, _ = objective(torch.from_numpy(LOGPROBS[start:stop]), torch.from_numpy(ENTROPY[start:stop]), micro)
        pieces.append(loss_T.numpy())
        start = stop
    assert len(pieces) == 4
    np.testing.assert_allclose(np.concatenate(pieces), -SEQUENCE_RATIOS * A, rtol=1e-12)


KL_VALUES: dict[str, tuple[Array, Array]] = {
    "k1": (-D, np.ones(10)),
    "k2": (D**2 / 2, -D),
    "k3": (np.exp(D) - D - 1, 1 - np.exp(D)),
}
"""Each estimator, and its derivative with respect to log p."""


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_kl_in_the_loss_is_added_per_token(estimator: Any) -> None:
    value, derivative = KL_VALUES[estimator]
    loss, gradient, statistics = evaluate(ObjectiveConfig(), KLConfig(coefficient=0.3, estimator=estimator))
    plain_loss, plain_gradient, _ = evaluate(ObjectiveConfig())
    np.testing.assert_allclose(loss, plain_loss + 0.3 * value, rtol=1e-12)
    np.testing.assert_allclose(gradient, plain_gradient + 0.3 * derivative, rtol=1e-12)
    assert statistics.kl is not None
    assert float(statistics.kl) == pytest.approx(value.sum(), rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_ratio_weighted_kl_is_differentiated_through_the_ratio_too(estimator: Any) -> None:
    value, derivative = KL_VALUES[estimator]
    kl = KLConfig(coefficient=0.3, estimator=estimator, ratio_weighted=True)
    loss, gradient, statistics = evaluate(ObjectiveConfig(), kl)
    plain_loss, plain_gradient, _ = evaluate(ObjectiveConfig())
    np.testing.assert_allclose(loss, plain_loss + 0.3 * RATIOS * value, rtol=1e-12)
    np.testing.assert_allclose(gradient, plain_gradient + 0.3 * RATIOS * (value + derivative), rtol=1e-12)
    assert statistics.kl is not None
    assert float(statistics.kl) == pytest.approx(value.sum(), rel=1e-12)


def test_ratio_weighted_kl_takes_the_sequence_ratio_where_that_is_the_ratio() -> None:
    value, derivative = KL_VALUES["k3"]
    config = ObjectiveConfig(ratio="sequence", loss="policy_gradient")
    loss, gradient, _ = evaluate(config, KLConfig(coefficient=0.3, ratio_weighted=True))
    np.testing.assert_allclose(loss, -A * LOGPROBS + 0.3 * SEQUENCE_RATIOS * value, rtol=1e-12)
    expected = -A + 0.3 * SEQUENCE_RATIOS * (derivative + by_sequence(value))
    np.testing.assert_allclose(gradient, expected, rtol=1e-12)


@pytest.mark.parametrize(
    "kl",
    [KLConfig(), KLConfig(coefficient=0.3, placement="reward"), KLConfig(placement="reward", estimator="k1")],
    ids=str,
)
def test_kl_outside_the_loss_is_reported_and_changes_no_loss(kl: KLConfig) -> None:
    loss, gradient, statistics = evaluate(ObjectiveConfig(), kl)
    plain_loss, plain_gradient, _ = evaluate(ObjectiveConfig(), data=batch(reference=False))
    np.testing.assert_array_equal(loss, plain_loss)
    np.testing.assert_array_equal(gradient, plain_gradient)
    assert statistics.kl is not None
    assert float(statistics.kl) == pytest.approx(KL_VALUES[kl.estimator][0].sum(), rel=1e-12)


def test_the_entropy_term_lowers_the_loss_of_uncertain_tokens() -> None:
    entropy_T = torch.from_numpy(ENTROPY.copy()).requires_grad_()
    objective = Objective(config=ObjectiveConfig(entropy_coefficient=0.25), kl=KLConfig())
    loss_T, _ = objective(torch.from_numpy(LOGPROBS), entropy_T, batch())
    plain, _, _ = evaluate(ObjectiveConfig())
    np.testing.assert_allclose(loss_T.detach().numpy(), plain - 0.25 * ENTROPY, rtol=1e-12)
    (gradient_T,) = torch.autograd.grad(loss_T.sum(), entropy_T)
    np.testing.assert_array_equal(gradient_T.numpy(), np.full(10, -0.25))


PUBLIC = {*losses.__all__, *policy_losses.__all__} - {"PolicyLoss"}
HELPERS = {
    *("importance_ratio", "sequence_importance_ratio", "clipped_geometric_ratio"),
    *("beyond_kl", "beyond_total_variation"),
    *("capped_policy_loss", "frozen_policy_loss", "reweighted_policy_loss"),
}
"""Public functions among the losses that no recipe chooses: ratios, bounds, and losses of a second pass."""


def missing_of_a_loss(name: str) -> Iterator[str]:
    """Everything that a loss of this name still needs, so that a recipe can choose it and a reader find it."""
    function = getattr(F, name, None)
    if name not in PUBLIC:
        yield f"a function {name} in functional/losses.py or policy_losses.py, named in __all__"
    if name not in POLICY_LOSSES:
        yield f"an entry {name} in POLICY_LOSSES of functional/policy_losses.py"
    if name not in get_args(PolicyLossName):
        yield f"{name} in PolicyLossName of training/config.py"
    own_ratio = POLICY_LOSSES[name].ratio if name in POLICY_LOSSES else None
    parameters = inspect.signature(function).parameters.values() if function else ()
    settings = ["ratio"] if any(p.name == "ratio" for p in parameters) and own_ratio is None else []
    settings += ["clip_low", "clip_high"] if name == "gmpo" else []  # which its ratio reads
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    settings += [keyword for keyword in keywords if keyword in ObjectiveConfig.model_fields]
    arguments = [keyword for keyword in keywords if keyword not in ObjectiveConfig.model_fields]
    if list(LOSS_ARGUMENTS.get(name, ())) != arguments:
        yield f"LOSS_ARGUMENTS of training/config.py with {name}: {tuple(arguments)}"
    if list(LOSS_SETTINGS.get(name, ("nothing",))) != settings:  # type: ignore[call-overload]
        yield f"LOSS_SETTINGS of training/config.py with {name}: {tuple(settings)}"
    recipes = [load_recipe(one) for one in shipped_recipes() if one.startswith("flatpeak:algorithms/")]
    if name not in {recipe.get("objective", {}).get("loss") for recipe in recipes}:
        yield f"a recipe in recipes/algorithms/ with objective.loss={name}"
    if f"| `{name}` |" not in (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8"):
        yield f"a row for {name} in docs/algorithms.md"


@pytest.mark.parametrize(
    "name", sorted({*get_args(PolicyLossName), *POLICY_LOSSES, *LOSS_SETTINGS, *(PUBLIC - HELPERS)})
)
def test_a_loss_has_a_function_a_name_a_recipe_and_a_row_in_the_documents(name: str) -> None:
    missing = list(missing_of_a_loss(name))
    assert not missing, "\n".join(missing)


def test_all_that_a_forgotten_loss_needs_is_named() -> None:
    assert list(missing_of_a_loss("unheard_of")) == [
        "a function unheard_of in functional/losses.py or policy_losses.py, named in __all__",
        "an entry unheard_of in POLICY_LOSSES of functional/policy_losses.py",
        "unheard_of in PolicyLossName of training/config.py",
        "LOSS_SETTINGS of training/config.py with unheard_of: ()",
        "a recipe in recipes/algorithms/ with objective.loss=unheard_of",
        "a row for unheard_of in docs/algorithms.md",
    ]


@pytest.mark.parametrize("module", [losses, policy_losses])
def test_every_public_function_among_the_losses_is_exported(module: Any) -> None:
    functions = inspect.getmembers(module, inspect.isfunction)
    own = {name for name, function in functions if name[0] != "_" and function.__module__ == module.__name__}
    assert own == set(module.__all__) - {"PolicyLoss"}
