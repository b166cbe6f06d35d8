"""Whole runs with gradient regularization: what they report, how they stop and go on, and what they refuse."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from flatpeak.errors import UserError
from flatpeak.gradreg import schedule
from flatpeak.runs.checkpoints import newest_valid
from flatpeak.training import regularized
from flatpeak.training.regularized import second_pass_loss
from support.commands import command
from support.resumes import MakeRun, Whole, assert_same
from support.reward_functions import parity
from support.runs import MakeModel, Recipe, Send, Train

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = "penalty_ratio cosine g1_norm perturbation_kept perturbation_norm_kept strength skipped step time_share"
GRADREG = {f"gradreg/{name}" for name in NAMES.split()}
DROPOUT = {"dropout": True, "new": {"config": {"attention_dropout": 0.2}}}
SPARING = {"strength": "ratio:0.3", "every": 2, "group_fraction": 0.5}
"""What a resumed run could lose: the tracked strength, the remembered penalty, and which groups are drawn."""
STEPS = {"steps": 4, "epochs_per_rollout": 1, "minibatches": 3}
"""Three updates a step: every other step begins where the remembered penalty is due."""
REMEMBERING: dict[str, Any] = {"model": DROPOUT, "training": STEPS, "gradient_regularization": SPARING}


@pytest.fixture
def in_second_pass(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`in_second_pass(action, at=n)`: does it in the n-th micro-batch of a second pass, while the weights are moved."""

    def arrange(action: Callable[[], None], *, at: int) -> None:
        calls: list[None] = []

        def watched(*args: Any, **settings: Any) -> Any:
            calls.append(None)
            if len(calls) == at:
                action()
            return second_pass_loss(*args, **settings)

        monkeypatch.setattr(regularized, "second_pass_loss", watched)

    return arrange


def test_a_run_reports_what_regularization_did(recipe: Recipe, train: Train, watch: Any) -> None:
    progress = watch()
    config = recipe(training={"steps": 4}, sft={"steps": 1}, gradient_regularization={"strength": "ratio:0.3"})
    assert train(config, reward=parity, progress=progress).exit_code == 0
    rows = [row for stage, _, row in progress.rows if stage == "train"]
    assert len(rows) == 4
    assert rows[0].pop("gradreg/step_consistency") > 0.99  # of the first update, and of no other so soon
    for row in rows:
        assert {name for name in row if name.startswith("gradreg/")} == GRADREG
        assert all(math.isfinite(row[name]) for name in GRADREG)
        assert row["gradreg/perturbation_kept"] > 0.99
        assert row["gradreg/perturbation_norm_kept"] == pytest.approx(1, abs=0.02)
        assert row["gradreg/skipped"] == 0
        assert 0 < row["gradreg/time_share"] < 1
        assert -1 <= row["gradreg/cosine"] <= 1
        assert row["gradreg/strength"] > 0
    assert rows[0]["gradreg/penalty_ratio"] == pytest.approx(0.3, rel=1e-6)
    assert rows[-1]["gradreg/penalty_ratio"] != pytest.approx(0.3, rel=1e-6)
    assert not any(name.startswith("gradreg/") for stage, _, row in progress.rows if stage != "train" for name in row)


def test_strength_0_is_the_run_without_the_section(whole: Whole) -> None:
    without = whole(model=DROPOUT)
    off = whole(model=DROPOUT, gradient_regularization={**SPARING, "strength": 0})
    steps = [row for row in without["metrics"] if row["stage"] == "train"]
    assert all([name for name in row if name.startswith("gradreg/")] == ["gradreg/g1_norm"] for row in steps)
    assert not any(name.startswith("gradreg/") for row in without["metrics"] if row not in steps for name in row)
    assert_same(off, without)
    on = whole(model=DROPOUT, gradient_regularization=SPARING)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(on["weights"][name], off["weights"][name])


@pytest.fixture
def sparing(whole: Whole) -> dict[str, Any]:
    """The outcome of an uninterrupted run with dropout whose every other update remembers."""
    return whole(**REMEMBERING)


def test_the_uninterrupted_run_has_all_that_a_resumed_one_could_lose(sparing: dict[str, Any]) -> None:
    rows = [row for row in sparing["metrics"] if row["stage"] == "train"]
    assert [row["optimizer/updates"] for row in rows] == [3] * 4
    assert any(name.startswith("gradreg.") for name in sparing["optimizer"])
    assert sparing["state"]["learner"]["updates"] == 12
    assert len({row["gradreg/strength"] for row in rows}) == 4
    # Dropout: the ratio of a first update, on-policy, is not 1.
    assert max(row["policy/ratio_max_gap"] for row in rows) > 1e-3


@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_stopped_run_resumes_to_the_same_bits(make_run: MakeRun, sparing: dict[str, Any], step: int) -> None:
    run = make_run(**REMEMBERING)
    run.stop_at("train", step)
    assert_same(run.go_on(), sparing)


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_run_that_died_resumes_to_the_same_bits(make_run: MakeRun, sparing: dict[str, Any], step: int) -> None:
    run = make_run(**REMEMBERING)
    run.die_at("train", step)
    assert_same(run.go_on(), sparing)


def test_a_run_that_died_keeps_its_calibrated_strength(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "CALIBRATION_UPDATES", 3)  # a second pass in every other update: done in step 2
    sections = {"training": STEPS, "gradient_regularization": SPARING | {"strength": "calibrated:0.3"}}
    run = make_run(**sections)
    run.die_at("train", 3)
    result = run.go_on()
    assert_same(result, make_run("whole", **sections).finish())
    strengths = [row["gradreg/strength"] for row in result["metrics"] if row["stage"] == "train"]
    assert strengths[0] != strengths[2] == strengths[3]


def test_random_directions_move_no_dropout_mask_and_resume(make_run: MakeRun, whole: Whole) -> None:
    # A penalty of size 1e-30 is rounded away: what is left is the plain run, unless its random numbers moved.
    run = make_run(model=DROPOUT, training=STEPS, gradient_regularization={"strength": 1e-30, "direction": "random"})
    run.die_at("train", 2)
    plain, found = whole(model=DROPOUT, training=STEPS)["weights"], run.go_on()["weights"]
    assert all(torch.equal(tensor, found[name]) for name, tensor in plain.items())
    visible = {"training": STEPS, "gradient_regularization": {"strength": 0.1, "direction": "random"}}
    broken = make_run("broken", **visible)
    broken.die_at("train", 2)
    assert_same(broken.go_on(), whole(**visible))


@pytest.mark.parametrize("at", [1, 3, 5])
def test_an_interrupt_in_a_second_pass_leaves_a_valid_checkpoint(
    make_run: MakeRun, sparing: dict[str, Any], send: Any, in_second_pass: Callable[..., None], at: int
) -> None:
    in_second_pass(send(signal.SIGINT), at=at)
    run = make_run(**REMEMBERING)
    stopped = run.start()
    assert stopped.exit_code == 130
    assert (stopped.summary.status, stopped.summary.signal) == ("stopped", signal.SIGINT)
    last = stopped.summary.last_step
    assert 0 <= last < STEPS["steps"]
    assert newest_valid(run.path / "checkpoints") == run.path / "checkpoints" / f"step_{last:06d}"
    # Were the moved weights among what was saved, the end would be another.
    assert_same(run.go_on(), sparing)


@pytest.mark.parametrize("ending", ["interrupt", "error"])
def test_a_run_that_breaks_in_a_second_pass_leaves_the_weights_of_its_last_step(
    recipe: Recipe,
    train: Train,
    make_tiny_model: MakeModel,
    send: Send,
    in_second_pass: Callable[..., None],
    ending: str,
) -> None:
    def twice() -> None:
        send(signal.SIGINT)()
        send(signal.SIGINT)()

    def fail() -> None:
        raise RuntimeError("out of memory")

    in_second_pass(twice if ending == "interrupt" else fail, at=3)
    model, tokenizer = make_tiny_model()
    regularization = {"strength": 0.5, "check_every": 0}
    config = recipe(run={"checkpoint_every": 1}, training={"steps": 4}, gradient_regularization=regularization)
    with pytest.raises(KeyboardInterrupt if ending == "interrupt" else RuntimeError):
        train(config, model=model, tokenizer=tokenizer, reward=parity)
    checkpoints = Path(config["run"]["directory"]) / "tiny" / "checkpoints"
    assert newest_valid(checkpoints) == checkpoints / "step_000002"
    saved = load_file(checkpoints / "step_000002" / "model.safetensors")
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in saved.items())


@pytest.mark.parametrize(
    ("poisoned", "skips"),
    [(3, {"optimizer/skipped": 1.0, "gradreg/skipped": 1.0}), (4, {"optimizer/skipped": 0.0, "gradreg/skipped": 1.0})],
    ids=["first pass", "second pass"],
)
def test_a_gradient_that_is_not_a_number_never_reaches_the_weights(
    recipe: Recipe, train: Train, watch: Any, make_tiny_model: MakeModel, poisoned: int, skips: dict[str, float]
) -> None:
    model, tokenizer = make_tiny_model()
    calls: list[None] = []

    def poison(gradient: Tensor) -> Tensor:
        calls.append(None)
        return gradient * float("nan") if len(calls) == poisoned else gradient

    parameter = model.get_parameter("model.layers.0.mlp.up_proj.weight")
    parameter.register_hook(poison)
    before: list[Tensor] = []
    progress = watch({("train", step): lambda: before.append(parameter.detach().clone()) for step in (1, 2, 3)})
    config = recipe(training={"steps": 3}, gradient_regularization={"strength": 0.5, "check_every": 0})
    given = {"model": model, "tokenizer": tokenizer, "reward": parity}
    assert train(config, progress=progress, **given).exit_code == 0
    for name, at_step_2 in skips.items():
        assert progress.values(name) == [0.0, at_step_2, 0.0]
    assert torch.equal(before[0], before[1]) == bool(skips["optimizer/skipped"])
    assert not torch.equal(before[1], before[2])
    assert all(bool(component.isfinite().all()) for component in model.parameters())
    # Step 2 has nothing to say about a penalty; the others do.
    assert [math.isfinite(value) for value in progress.values("gradreg/penalty_ratio")] == [True, False, True]


NOT_THERE = {"strength": 0.1, "perturbed": ["*.nothing.*"]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"strength": -1}, r"gradient_regularization\.strength=-1.*at least 0"),
    ({"strength": "ratio:0"}, r"gradient_regularization\.strength=ratio:0: .*ratio:0\.3"),
    ({"strength": "half"}, r"gradient_regularization\.strength=half: .*ratio:0\.3"),
    ({"strength": 0.1, "step": 0}, r"gradient_regularization\.step=0: .*greater than 0"),
    ({"strength": 0.1, "step": float("inf")}, r"gradient_regularization\.step=inf"),
    ({"strength": 0.1, "step": 1e-12}, r"rounding keeps too little .*gradient_regularization\.step"),
    ({"strength": 0.1, "step_scale": "radius"}, r"step_scale=radius .*gradient_regularization\.step"),
    ({"strength": 0.1, "group_fraction": 0}, r"gradient_regularization\.group_fraction=0"),
    (NOT_THERE, r"gradient_regularization\.perturbed.*\*\.nothing\.\* matches no trainable parameter"),
    (
        {"strength": 0.1, "perturbed": "adapters"},
        r"gradient_regularization\.perturbed=adapters: .*no trainable adapter",
    ),
    ({"strength": 0.1, "perturbed": "block"}, r"gradient_regularization\.perturbed=block: .*blocks.*pattern"),
    ({"strength": 0.1, "ratio_mode": "reused"}, r"gradient_regularization\.ratio_mode=reused: did you mean reuse"),
]


@pytest.mark.parametrize(("section", "message"), REFUSED, ids=[str(section) for section, _ in REFUSED])
def test_bad_settings_are_one_line_and_leave_no_run(
    recipe: Recipe, train: Train, tmp_path: Path, section: dict[str, Any], message: str
) -> None:
    config = recipe(gradient_regularization=section, sft={"steps": 1})
    with pytest.raises(UserError, match=message) as caught:
        train(config, reward=parity)
    assert "\n" not in str(caught.value)
    assert "literal[" not in str(caught.value)
    # SFT included: minutes of it would be lost on a typo.
    assert {path.name for path in (tmp_path / "runs").rglob("*")} <= {"tiny", ".lock"}
    if section is NOT_THERE:
        assert train(recipe(gradient_regularization={"strength": 0.1}), reward=parity).exit_code == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gradient_regularisation.strength=0.1", "unknown key gradient_regularisation"),
        ("gradient_regularization.stength=0.1", "did you mean gradient_regularization.strength?"),
        ("gradient_regularization.strength=ratio:0", "strength=ratio:0"),
    ],
)
def test_the_command_says_a_bad_setting_in_one_line_with_exit_code_2(
    recipe: Recipe, tmp_path: Path, override: str, message: str
) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe()))
    done = command("train", str(file), override, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert {path.name for path in (tmp_path / "runs").rglob("*")} <= {"tiny", ".lock"}
