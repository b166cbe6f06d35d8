"""The guard: what rounding leaves of a perturbation, measured, and refused where it is too little."""

import math

import pytest
import torch
from torch import nn

from flatpeak.errors import UserError
from flatpeak.gradreg.regularizer import GradientRegularizer
from support.gradreg import (
    cosine,
    exact_penalty,
    gradient,
    joined,
    language,
    left_in_grad,
    measured_penalty,
    network,
    one,
    regression,
    regularizer,
    settings,
    transformer,
    unchanged,
    values,
)

BF16 = torch.bfloat16


def rounded(*, seed: int = 0):
    """A bf16 network, its loss, and the float32 values it is the rounded copy of."""
    single = network(dtype=torch.float32, seed=seed)
    held = [p.detach().clone() for p in single.parameters()]
    model = single.to(BF16)
    return model, regression(model, dtype=BF16), dict(zip(model.parameters(), held, strict=True))


@pytest.mark.parametrize("step_scale", ["relative", "absolute"])
def test_bfloat16_weights_without_masters_are_refused_and_left_as_they_were(step_scale):
    for model, loss in (
        (m := network(dtype=BF16), regression(m, dtype=BF16)),
        (t := transformer(dtype=BF16), language(t)),
    ):
        before = values(model)
        ours = regularizer(model, step=1e-4, step_scale=step_scale, min_perturbation_kept=0.7)
        g1 = joined(gradient(model.parameters(), loss))
        with pytest.raises(
            UserError, match=r"keep the weights in float32 .* raise gradient_regularization\.step"
        ) as result:
            ours.accumulate(one(loss))
        assert "weights in bfloat16" in str(result.value)
        assert "gradient_regularization.min_perturbation_kept" not in str(result.value)
        assert unchanged(model, before)
        assert torch.equal(left_in_grad(model.parameters()), g1)


def test_the_refusal_names_the_cosine_it_measured():
    model = network(dtype=BF16)
    loss = regression(model, dtype=BF16)
    ours = regularizer(model, step=5e-4, min_perturbation_kept=0.7)
    g1 = [grad.float() for grad in gradient(ours.parameters, loss)]
    moved = [(p.float() + 5e-4 * g).to(BF16).float() for p, g in zip(ours.parameters, g1, strict=True)]
    kept = cosine(joined(m - p.float() for m, p in zip(moved, ours.parameters, strict=True)), joined(g1))
    assert 0.05 < kept < 0.7
    with pytest.raises(UserError, match=f"cosine {kept:.2f} between intended and realized, wanted 0.7"):
        ours.accumulate(one(loss))


def test_with_masters_the_guard_measures_what_the_rounded_copy_kept():
    model, loss, masters = rounded()
    ours = regularizer(model, masters=masters, step=5e-3)
    g1 = [grad.float() for grad in gradient(ours.parameters, loss)]
    held = [masters[p] for p in ours.parameters]
    moved = [(m + 5e-3 * g).to(BF16).float() for m, g in zip(held, g1, strict=True)]
    realized = joined(after - p.float() for after, p in zip(moved, ours.parameters, strict=True))
    before, originals = values(model), [master.clone() for master in masters.values()]
    report = ours.accumulate(one(loss))
    assert 0.7 < report.kept.cosine < 0.999
    assert report.kept.cosine == pytest.approx(cosine(realized, joined(g1)), rel=1e-5)
    assert report.kept.norm == pytest.approx(float(realized.norm() / joined(g1).norm() / 5e-3), rel=1e-5)
    assert unchanged(model, before)
    assert all(torch.equal(m, o) for m, o in zip(masters.values(), originals, strict=True))


def test_masters_are_what_moves_not_their_rounded_copies():
    # Every weight lies just below the border to the next bf16 number: a move far below bf16's own resolution reaches it
    # from the master, and from the rounded copy it could not.
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4, dtype=BF16))
    masters = {model.weight: torch.full((4,), 1 + 2**-8 - 2**-14)}
    seen = []

    def loss():
        seen.append(model.weight.detach().float().clone())
        return model.weight.sum()

    report = regularizer(model, masters=masters, perturbed="all", step=2**-12).accumulate(one(loss))
    assert [row.tolist() for row in seen] == [[1.0] * 4, [1 + 2**-7] * 4]
    assert report.kept.cosine == pytest.approx(1.0)
    assert report.kept.norm == pytest.approx(2**-7 / 2**-12)


def test_with_a_compute_type_the_guard_measures_after_the_cast():
    model = network(dtype=torch.float32)
    loss = regression(model, dtype=torch.float32)
    ours = regularizer(model, compute_dtype=BF16, step=5e-3)
    g1 = gradient(ours.parameters, loss)
    realized = joined(
        (p + 5e-3 * g).to(BF16).float() - p.to(BF16).float() for p, g in zip(ours.parameters, g1, strict=True)
    )
    report = ours.accumulate(one(loss))
    assert 0.7 < report.kept.cosine < 0.999
    assert report.kept.cosine == pytest.approx(cosine(realized, joined(g1)), rel=1e-5)
    with pytest.raises(UserError, match="weights in float32, computed in bfloat16"):
        regularizer(model, compute_dtype=BF16, step=1e-5).accumulate(one(loss))


@pytest.mark.parametrize("masters", [False, True])
def test_the_default_step_of_bfloat16_is_refused_with_the_way_out(masters):
    # As many weights of the size of a language model's as a small matrix has, and a gradient on all of them.
    generator = torch.Generator().manual_seed(0)
    held = 0.02 * torch.randn(100_000, generator=generator)
    wanted = torch.randn(100_000, generator=generator)
    model = nn.Module()
    model.weight = nn.Parameter(held.to(BF16) if masters else held.clone())
    ours = regularizer(
        model,
        masters={model.weight: held} if masters else None,
        compute_dtype=None if masters else BF16,
        perturbed="all",
        step=None,
        step_scale="relative",
    )
    with pytest.raises(UserError, match=r"cosine 0\.(29|36) .* keep the weights in float32"):
        ours.accumulate(one(lambda: (model.weight.float() * wanted).sum()))


def test_float32_weights_keep_the_default_perturbation_whole():
    model = transformer(dtype=torch.float32)
    report = regularizer(model, step=None, step_scale="relative").accumulate(one(language(model)))
    assert report.kept.cosine > 0.999
    assert report.kept.norm == pytest.approx(1.0, abs=1e-3)


def falling(notices, **changes):
    """Two updates that keep their perturbation and three that do not, as the gradient becomes small."""
    model = network(dtype=torch.float32)
    config = settings(step=1e-2, **changes)
    ours = GradientRegularizer(model, config, compute_dtype=BF16, notice=notices.append)
    reports = []
    for scale in (1.0, 1.0, 1e-3, 1e-3, 1e-3):
        model.zero_grad()
        reports.append(ours.accumulate(one(regression(model, dtype=torch.float32, scale=scale))))
    return reports


def test_a_perturbation_that_drowns_later_is_a_single_notice():
    notices = []
    reports = falling(notices)
    assert len(notices) == 1
    assert "rounding keeps too little of the perturbation" in notices[0]
    assert [report.kept.cosine > 0.7 for report in reports] == [True, True, False, False, False]
    assert all(report.pass_count == 1 for report in reports)


def test_a_minimum_of_0_turns_the_guard_off():
    notices = []
    falling(notices, min_perturbation_kept=0)
    assert notices == []
    model = network(dtype=BF16)
    report = regularizer(model, min_perturbation_kept=0).accumulate(one(regression(model, dtype=BF16)))
    assert report.kept.cosine < 0.7
    assert report.pass_count == 1


def test_a_perturbation_that_leaves_nothing_at_all_is_measured_as_0():
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, dtype=BF16))
    report = regularizer(model, perturbed="all", min_perturbation_kept=0).accumulate(one(lambda: model.weight.sum()))
    assert (report.kept.cosine, report.kept.norm) == (0.0, 0.0)


def test_central_differences_are_measured_with_the_sign_of_their_step():
    model = network(dtype=torch.float32)
    report = regularizer(model, difference="central", step=1e-2).accumulate(one(regression(model, dtype=torch.float32)))
    assert report.kept.cosine == pytest.approx(1.0, abs=1e-4)
    assert report.kept.norm == pytest.approx(1.0, abs=1e-4)


def test_a_second_pass_outside_float32_is_as_exact_as_the_perturbation_lets_it_be():
    # bf16 copies of float32 masters at a step that bf16 keeps: no three digits, but the direction.
    model, loss, masters = rounded()
    exact = network(dtype=torch.float64)
    wanted = exact_penalty(regularizer(exact).parameters, regression(exact))
    ours = regularizer(model, masters=masters, step=3e-2, step_scale="relative")
    assert cosine(measured_penalty(ours, loss), wanted) > 0.9


def test_the_metrics_of_an_update_are_the_values_by_hand():
    model = network()
    loss = regression(model)
    ours = regularizer(model, strength=0.5, difference="exact")
    g1 = joined(gradient(ours.parameters, loss))
    plain = joined(gradient(model.parameters(), loss))
    report = ours.accumulate(one(loss))
    penalty = (left_in_grad(ours.parameters) - g1) / 0.5
    metrics = report.metrics()
    assert metrics == {
        "gradreg/penalty_ratio": pytest.approx(float(0.5 * penalty.norm() / g1.norm()), rel=1e-10),
        "gradreg/cosine": pytest.approx(cosine(g1, penalty), rel=1e-10),
        "gradreg/g1_norm": pytest.approx(float(g1.norm()), rel=1e-12),
        "gradreg/strength": 0.5,
        "gradreg/skipped": 0.0,
    }
    assert not math.isclose(float(plain.norm()), metrics["gradreg/g1_norm"], rel_tol=1e-3)
    assert report.seconds > 0


def test_a_difference_adds_what_rounding_kept_to_the_metrics():
    model, loss, masters = rounded()
    report = regularizer(model, masters=masters, step=5e-3).accumulate(one(loss))
    metrics = report.metrics()
    assert metrics["gradreg/perturbation_kept"] == report.kept.cosine
    assert metrics["gradreg/perturbation_norm_kept"] == report.kept.norm
    assert report.kept.cosine < 1 < report.kept.norm


def probe(model, **changes):
    """The check before a run, and what it leaves behind: (weights unchanged, the numbers torch draws next)."""
    ours = regularizer(model, **{"step_scale": "relative"} | changes)
    before = values(model)
    torch.manual_seed(5)
    try:
        ours.guard.probe(ours.perturbation, ours.config)
    finally:
        assert unchanged(model, before)
        assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(5)))
        assert all(p.grad is None for p in model.parameters())
    return ours


@pytest.mark.parametrize("step_scale", ["relative", "radius"])
def test_a_step_that_rounding_swallows_is_refused_before_there_is_a_gradient(step_scale):
    for dtype, computed in ((BF16, None), (torch.float32, BF16)):
        with pytest.raises(UserError, match="rounding keeps too little of the perturbation"):
            probe(network(dtype=dtype), compute_dtype=computed, step=1e-5, step_scale=step_scale)
        assert probe(network(dtype=dtype), compute_dtype=computed, step=0.1, step_scale=step_scale).guard.passed


def test_what_the_probe_let_pass_is_a_notice_in_the_first_update():
    model, notices = network(dtype=torch.float32), []
    config = settings(step=1e-4, step_scale="relative", min_perturbation_kept=0.7)
    ours = GradientRegularizer(model, config, notice=notices.append)
    ours.guard.probe(ours.perturbation, ours.config)
    ours.perturbation.compute_dtype, ours.precision_known = BF16, True  # as if the weights had outgrown the step
    assert ours.accumulate(one(regression(model, dtype=torch.float32))).kept.cosine < 0.7
    assert len(notices) == 1


@pytest.mark.parametrize("changes", [{"step_scale": "absolute"}, {"difference": "exact"}])
def test_where_only_the_gradient_can_tell_or_nothing_moves_there_is_no_probe(changes):
    assert not probe(network(dtype=BF16), **{"step": 1e-9} | changes).guard.passed


def test_the_probe_minds_a_minimum_of_0():
    assert probe(network(dtype=BF16), step=1e-9, min_perturbation_kept=0).guard.passed
