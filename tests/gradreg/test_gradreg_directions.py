"""Which way and how far: steps by their scale, the norm instead of its square, ASAM, strength by depth."""

import math

import pytest
import torch
from torch import nn

from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.directions import ASAM_ETA, default_step
from flatpeak.gradreg.perturbation import Perturbation
from support.gradreg import (
    Quadratic,
    exact_penalty,
    gradient,
    joined,
    left_in_grad,
    measured_penalty,
    network,
    one,
    regression,
    regularizer,
    relative_error,
)


def displacement(model, **changes):
    """How far the second pass is from theta."""
    seen = []

    def losses():
        seen.append(model.x.detach())
        return [model.loss()]

    regularizer(model, **changes).accumulate(losses)
    return seen[1] - seen[0]


def test_an_absolute_step_multiplies_the_gradient():
    model = Quadratic()
    torch.testing.assert_close(displacement(model, step=0.2), 0.2 * model.gradient(model.x))


def test_a_radius_is_the_distance_itself():
    model = Quadratic()
    moved = displacement(model, step=0.2, step_scale="radius")
    g1 = model.gradient(model.x)
    torch.testing.assert_close(moved, 0.2 * g1 / g1.norm())


def test_a_relative_step_is_a_share_of_the_parameters_norm():
    model = Quadratic()
    moved = displacement(model, step=0.2, step_scale="relative")
    g1 = model.gradient(model.x)
    torch.testing.assert_close(moved, 0.2 * model.x.norm() * g1 / g1.norm())


def test_a_relative_step_counts_the_perturbed_parameters_only():
    model = Quadratic()
    moved = displacement(model, step=0.2, step_scale="relative", perturbed=("blocks.1.*",))
    assert not moved[:2].any()
    assert float(moved[2:].norm()) == pytest.approx(0.2 * float(model.blocks[1].value.detach().norm()))


@pytest.mark.parametrize(
    ("weights", "computed", "step"),
    [
        (torch.float64, None, 3e-5),
        (torch.float32, None, 3e-5),
        (torch.float32, torch.bfloat16, 3e-4),
        (torch.bfloat16, None, 3e-4),
        (torch.bfloat16, torch.float32, 3e-4),
        (torch.float16, None, 3e-4),
    ],
)
def test_the_default_step_is_that_of_the_coarsest_type_on_the_way(weights, computed, step):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(2, dtype=weights))
    assert default_step(Perturbation(model, [model.weight], compute_dtype=computed)) == step


@pytest.mark.parametrize(("base", "step"), [(torch.float32, 3e-5), (torch.bfloat16, 3e-3), (torch.float16, 3e-3)])
def test_small_float32_weights_beside_frozen_ones_of_half_precision_move_further(base, step):
    model = nn.Module()
    model.frozen = nn.Parameter(torch.ones(2, dtype=base), requires_grad=False)
    model.weight = nn.Parameter(torch.ones(2))
    assert default_step(Perturbation(model, [model.weight])) == step


def test_the_default_step_is_relative():
    model = Quadratic()
    g1 = model.gradient(model.x)
    moved = displacement(model, step=None, step_scale="relative")
    torch.testing.assert_close(moved, 3e-5 * model.x.norm() * g1 / g1.norm(), rtol=1e-9, atol=0)


def test_parameters_that_are_all_0_have_no_relative_step():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(UserError, match="set step_scale=radius or absolute"):
        regularizer(model, perturbed="all", step=1e-3, step_scale="relative").accumulate(
            one(lambda: model.weight.sum())
        )
    assert not model.weight.any()


@pytest.mark.parametrize("alpha", [0.3, 1.0])
def test_the_norm_as_penalty_is_the_published_interpolation_of_two_gradients(alpha):
    # Zhao et al. 2022: (1 - alpha) g1 + alpha g2, with alpha = strength / radius; SAM at alpha 1.
    model = Quadratic()
    radius, x = 0.05, model.x.detach()
    g1 = model.gradient(x)
    g2 = model.gradient(x + radius * g1 / g1.norm())
    regularizer(model, penalty="norm", step_scale="radius", step=radius, strength=alpha * radius).accumulate(
        one(model.loss)
    )
    assert relative_error(left_in_grad(model.parameters()), (1 - alpha) * g1 + alpha * g2) < 1e-12


@pytest.mark.parametrize("difference", ["forward", "exact"])
def test_the_norm_s_gradient_is_the_curvature_along_the_unit_gradient(difference):
    model = network()
    loss = regression(model)
    ours = regularizer(model, penalty="norm", difference=difference)
    grads = gradient(ours.parameters, loss, create_graph=True)
    norm = torch.cat([grad.reshape(-1) for grad in grads]).norm()
    wanted = joined(torch.autograd.grad(norm, ours.parameters))
    assert relative_error(measured_penalty(ours, loss), wanted) < 1e-3


def asam_penalty(parameters, loss, *, squared):
    """The gradient of ||T grad L||^2 / 2, or of ||T grad L||, with T = |w| + eta held fixed."""
    grads = gradient(parameters, loss, create_graph=True)
    scaled = torch.cat(
        [((p.detach().abs() + 0.01) * grad).reshape(-1) for p, grad in zip(parameters, grads, strict=True)]
    )
    return joined(torch.autograd.grad(scaled.square().sum() / 2 if squared else scaled.norm(), parameters))


@pytest.mark.parametrize("penalty", ["squared_norm", "norm"])
@pytest.mark.parametrize("difference", ["forward", "central", "exact"])
def test_asam_penalizes_the_gradient_measured_per_weight(penalty, difference):
    assert ASAM_ETA == 0.01
    model = network()
    loss = regression(model)
    ours = regularizer(model, scaling="asam", penalty=penalty, difference=difference, step=1e-3)
    wanted = asam_penalty(ours.parameters, loss, squared=penalty == "squared_norm")
    assert relative_error(measured_penalty(ours, loss), wanted) < 1e-3
    assert relative_error(wanted, exact_penalty(ours.parameters, loss)) > 0.1


def test_asam_moves_by_its_radius_in_the_scaled_measure():
    # Kwon et al. 2021: T^2 g / ||T g|| times the radius, so that ||T^-1 (the move)|| is the radius.
    model = Quadratic()
    scale = model.x.detach().abs() + 0.01
    moved = displacement(model, scaling="asam", step=0.2, step_scale="radius")
    g1 = model.gradient(model.x)
    torch.testing.assert_close(moved, 0.2 * scale**2 * g1 / (scale * g1).norm())
    assert float((moved / scale).norm()) == pytest.approx(0.2)


def test_asam_s_relative_step_is_a_share_of_the_parameters_norm_too():
    model = Quadratic()
    moved = displacement(model, scaling="asam", step=0.2, step_scale="relative")
    assert float(moved.norm()) == pytest.approx(0.2 * float(model.x.detach().norm()))


def test_asam_reports_the_norm_of_the_gradient_itself():
    model = Quadratic()
    report = regularizer(model, scaling="asam", step=0.01, strength=0.5).accumulate(one(model.loss))
    g1, scale = model.gradient(model.x), model.x.detach().abs() + 0.01
    penalty = model.A @ (scale**2 * g1)
    assert report.g1_norm == pytest.approx(float(g1.norm()))
    assert report.penalty_ratio == pytest.approx(0.5 * float(penalty.norm() / g1.norm()))


def blockwise(model, loss, **changes):
    """The penalty of each block, and of the head."""
    ours = regularizer(model, perturbed="all", **changes)
    plain = dict(zip(ours.parameters, gradient(ours.parameters, loss), strict=True))
    model.zero_grad()
    ours.accumulate(one(loss))
    return [
        joined(p.grad - plain[p] for p in component.parameters())
        for component in (*model.blocks, model.entry, model.head)
    ]


def test_strength_by_depth_multiplies_every_block_s_penalty_by_its_factor():
    model = network(depth=3)
    loss = regression(model)
    plain = blockwise(model, loss, difference="exact")
    scaled = blockwise(model, loss, difference="exact", depth_scale=(0.5, 2.5))
    factors = [0.5, 1.5, 2.5, 1.0, 1.0]
    for factor, result, whole in zip(factors, scaled, plain, strict=True):
        torch.testing.assert_close(result, factor * whole)


def test_of_a_single_block_the_first_factor_counts():
    model = network(depth=1)
    loss = regression(model)
    plain = blockwise(model, loss, difference="exact")
    scaled = blockwise(model, loss, difference="exact", depth_scale=(3.0, 7.0))
    torch.testing.assert_close(scaled[0], 3 * plain[0])
    assert not math.isclose(float(plain[0].norm()), 0)


def test_the_reported_ratio_includes_depth():
    model = network(depth=3)
    loss = regression(model)
    result = joined(blockwise(model, loss, depth_scale=(0.0, 4.0), strength=0.5))
    model.zero_grad()
    ours = regularizer(model, perturbed="all", depth_scale=(0.0, 4.0), strength=0.5)
    report = ours.accumulate(one(loss))
    assert report.penalty_ratio == pytest.approx(float(result.norm()) / report.g1_norm, rel=1e-6)


def test_published_settings_give_the_published_combinations():
    model = Quadratic()
    x = model.x.detach()
    g1 = model.gradient(x)
    for config, gamma, eps, factor in (
        (GradientRegularizationConfig.paper(gamma=3e-3, eps=1e-2), 3e-3, 1e-2, 1.0),
        (GradientRegularizationConfig.from_scratch_dr_grpo(gamma=3e-3, eps=1e-2), 3e-3, 1e-2, 0.5),
        (GradientRegularizationConfig.paper(), 1e-3, 1e-3, 1.0),
        (GradientRegularizationConfig.from_scratch_dr_grpo(), 1e-2, 1e-2, 0.5),
    ):
        g2 = model.gradient(x + eps * g1)
        model.zero_grad()
        regularizer(model, **config.model_dump()).accumulate(one(model.loss))
        assert relative_error(left_in_grad(model.parameters()), g1 + factor * gamma / eps * (g2 - g1)) < 1e-12
        assert config.ratio_mode == "reuse"
