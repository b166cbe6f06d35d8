"""Relative noise has the norms and directions that it says, falls are those of a quadratic, and nothing is left."""

import pytest
import torch
from torch import nn

from flatpeak.gradreg.parameters import perturbed_parameters
from flatpeak.gradreg.perturbation import Perturbation
from flatpeak.gradreg.weight_noise import falls, measure_under_noise, relative_noise
from support.gradreg import Around, network, unchanged, values


def perturbation(model, **settings):
    return Perturbation(model, perturbed_parameters(model, "blocks", section="here"), **settings)


def halfway(model):
    """-||W - W0||^2 / 2 over all parameters, where W0 are those of now: a peak of curvature 1 at W0."""
    peak = [parameter.detach().clone() for parameter in model.parameters()]
    return lambda: (
        -sum(
            float((p.detach() - at).double().square().sum()) / 2 for p, at in zip(model.parameters(), peak, strict=True)
        )
    )


def test_each_tensor_of_the_noise_has_the_norm_of_its_weight():
    held = perturbation(network())
    noise = relative_noise(held, seed=3, draw=0)
    assert list(noise) == held.parameters
    for parameter, drawn in noise.items():
        assert drawn.dtype == torch.float64
        assert float(drawn.norm()) == pytest.approx(float(parameter.detach().norm()), rel=1e-12)


def test_the_noise_is_gaussian_and_independent_between_tensors_draws_and_seeds():
    model = nn.Sequential(nn.Linear(300, 200, bias=False), nn.Linear(300, 200, bias=False))
    held = Perturbation(model, list(model.parameters()))

    def unit(seed, draw):
        return [z.flatten() / z.norm() for z in relative_noise(held, seed=seed, draw=draw).values()]

    (a, b), (c, _), (d, _) = unit(0, 0), unit(0, 1), unit(1, 0)
    z = a * 60_000**0.5
    # Of 60,000 standard normal numbers: mean 0 +- 0.004, kurtosis 3 +- 0.02, cosines 0 +- 0.004.
    assert abs(float(z.mean())) < 0.02
    assert float((z**4).mean()) == pytest.approx(3.0, abs=0.1)
    for other in (b, c, d):
        assert abs(float(a @ other)) < 0.02


def test_models_of_one_shape_move_in_the_same_directions():
    one, other = perturbation(network(seed=0)), perturbation(Around(network(seed=1)))
    pairs = zip(
        relative_noise(one, seed=5, draw=2).values(), relative_noise(other, seed=5, draw=2).values(), strict=True
    )
    for left, right in pairs:
        assert not torch.equal(left, right)
        torch.testing.assert_close(left / left.norm(), right / right.norm(), rtol=1e-12, atol=0)


def test_the_fall_of_a_quadratic_peak_is_half_the_squared_norm_of_the_noise():
    # Every tensor moves by radius * ||W||, so that the peak of curvature 1 loses radius^2 / 2 * sum ||W||^2, exactly.
    model = network()
    held = perturbation(model)
    square = sum(float(p.detach().square().sum()) for p in held.parameters)
    result = falls(held, halfway(model), radii=[0.1, 0.6], draws=3, seed=0)
    assert result == pytest.approx({0.1: 0.01 / 2 * square, 0.6: 0.36 / 2 * square}, rel=1e-9)


def test_a_draw_is_the_same_direction_at_every_radius():
    model = network()
    held = perturbation(model)
    start = [p.detach().clone() for p in held.parameters]

    def moved():
        return torch.cat([(p.detach() - at).flatten() for p, at in zip(held.parameters, start, strict=True)])

    seen = list(measure_under_noise(held, moved, radii=[0.1, 0.5], draws=2, seed=0))
    assert [(one.radius, one.draw) for one in seen] == [(0.1, 0), (0.5, 0), (0.1, 1), (0.5, 1)]
    torch.testing.assert_close(5 * seen[0].value, seen[1].value, rtol=1e-9, atol=1e-12)
    assert abs(float(torch.cosine_similarity(seen[0].value, seen[2].value, dim=0))) < 0.5


def test_the_fall_is_the_clean_value_less_the_mean_over_draws():
    given = iter([10.0, 1.0, 2.0, 3.0, 6.0])
    # Clean 10; then (draw 0: radius 0.1, 0.2), (draw 1: radius 0.1, 0.2).
    result = falls(perturbation(network()), lambda: next(given), radii=[0.1, 0.2], draws=2, seed=0)
    assert result == {0.1: 10.0 - (1 + 3) / 2, 0.2: 10.0 - (2 + 6) / 2}


def test_weights_buffers_and_random_state_are_as_before():
    model = network(normalize=True, dtype=torch.float32).train()
    before, random = values(model), torch.get_rng_state()
    inputs = torch.ones(4, 4)
    list(measure_under_noise(perturbation(model), lambda: model(inputs).sum(), radii=[0.3], draws=2, seed=0))
    assert unchanged(model, before)
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_weights_are_restored_where_measuring_raises(error):
    model = network(dtype=torch.float32)
    held, before, calls = perturbation(model), values(model), []

    def measure():
        calls.append(unchanged(model, before))
        if len(calls) == 3:
            raise error
        return 0.0

    with pytest.raises(error):
        falls(held, measure, radii=[0.3], draws=4, seed=0)
    assert calls == [True, False, False]
    assert unchanged(model, before)


def test_masters_decide_what_half_precision_weights_become():
    model = network(dtype=torch.float32)
    masters = {p: p.detach().clone() for p in model.parameters()}
    model.bfloat16()
    masters = {p: masters[before] for p, before in zip(model.parameters(), masters, strict=True)}
    held = perturbation(model, masters=masters)
    before, kept = values(model), {p: m.clone() for p, m in masters.items()}
    noise = relative_noise(held, seed=0, draw=0)
    (seen,) = measure_under_noise(held, lambda: values(model), radii=[0.3], draws=1, seed=0)
    wanted = {p: (masters[p] + 0.3 * noise[p]).bfloat16() if p in noise else p for p in model.parameters()}
    assert all(torch.equal(now, wanted[p]) for now, p in zip(seen.value, model.parameters(), strict=True))
    assert unchanged(model, before)
    assert all(torch.equal(masters[p], kept[p]) for p in masters)
    # bfloat16 has 8 bits: a perturbation of 0.3 survives nearly whole, one of 0.0001 hardly.
    assert seen.fidelity.cosine > 0.999
    (tiny,) = measure_under_noise(held, lambda: None, radii=[1e-4], draws=1, seed=0)
    assert tiny.fidelity.cosine < 0.5


def test_an_unknown_pattern_names_the_section_that_has_it():
    with pytest.raises(Exception, match=r"^evaluation.sharpness.perturbed: nothing\* matches no trainable parameter"):
        perturbed_parameters(network(), ("nothing*",), section="evaluation.sharpness")
