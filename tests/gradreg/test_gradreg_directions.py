"""Which way and how far: steps by their scale, the norm instead of its square."""

import pytest
import torch
from torch import nn

from flatpeak.errors import UserError
from flatpeak.gradreg.config import GradientRegularizationConfig
from flatpeak.gradreg.directions import default_step
from flatpeak.gradreg.perturbation import Perturbation
from support.gradreg import (
    Quadratic,
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
