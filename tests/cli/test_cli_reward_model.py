"""What `flatpeak reward-model` hands to the library, and what it makes of its answer."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from flatpeak import __version__, pipeline
from flatpeak.cli.train import reward_model, reward_model_line
from flatpeak.runs.summary import EvaluationStage, RunSummary, StageEvaluation

FIRST_LINE = f"flatpeak {__version__}: x on preferences, run directory runs/mine"


def evaluation(stage: EvaluationStage, step: int, accuracy: float, interval: tuple[float, float]) -> StageEvaluation:
    metrics = {"accuracy": accuracy, "longer_wins": 0.698}
    return StageEvaluation(
        stage=stage, step=step, task="pairs", size=99, metrics=metrics, intervals={"accuracy": interval}
    )


def summary(*evaluations: StageEvaluation, signal: int | None = None) -> RunSummary:
    return RunSummary(
        name="judge",
        status="done" if signal is None else "stopped",
        metric="accuracy",
        best_step=20,
        last_step=30,
        evaluations=evaluations,
        checkpoints=("step_000030",),
        wall_seconds=20.6,
        signal=signal,
    )


STAGES = (
    evaluation("start", 0, 0.491, (0.44, 0.54)),
    evaluation("train", 20, 0.75, (0.7, 0.8)),
    evaluation("train", 30, 0.747, (0.702, 0.788)),
)


class Library:
    """Stands in for flatpeak.pipeline.train_reward_model; remembers how it was called."""

    def __init__(self, *, signal: int | None) -> None:
        self.signal = signal
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def train_reward_model(self, config: Any, **options: Any) -> Any:
        options.pop("progress").notice("hello")
        self.calls.append((config, options))
        path = Path(config.run.directory) / config.run.name
        return SimpleNamespace(
            path=path,
            report=path / "report.html",
            summary=summary(*STAGES, signal=self.signal),
            exit_code=0 if self.signal is None else 128 + self.signal,
            stopped_rank=None,
        )


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, signal: int | None = None) -> tuple[Library, Any]:
    library = Library(signal=signal)
    monkeypatch.setitem(sys.modules, "flatpeak.pipeline.train_reward_model", library)  # type: ignore[arg-type]
    monkeypatch.setattr(pipeline, "train_reward_model", library, raising=False)
    app = typer.Typer()
    app.command("reward-model")(reward_model)
    return library, CliRunner().invoke(app, list(arguments))


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: x}\nrun: {name: mine}\ntask: {type: preferences}\n")
    return str(path)


def test_the_last_line_has_the_accuracy_its_interval_and_what_length_would_have(
    monkeypatch: pytest.MonkeyPatch, recipe: str
) -> None:
    library, done = run(monkeypatch, recipe, "reward_model.steps=7", "--overwrite")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        FIRST_LINE,
        "hello",
        "reward-model: held-out accuracy 0.49 -> 0.75 [0.70, 0.79] (longer wins 0.70) in 21 s, "
        "report: runs/mine/report.html",
    ]
    [(config, options)] = library.calls
    assert config.reward_model.steps == 7
    assert (options["overwrite"], options["resume"], options["command"][0]) == (True, False, "flatpeak")


def test_a_run_without_evaluations_has_a_last_line_too() -> None:
    line = reward_model_line(summary(), report=Path("r.html"))
    assert line == "reward-model: held-out accuracy unknown -> unknown (longer wins unknown) in 21 s, report: r.html"


def test_json_is_all_of_stdout(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    _, done = run(monkeypatch, recipe, "--json")
    content = json.loads(done.stdout)
    assert (content["path"], content["best_step"]) == ("runs/mine", 20)
    assert content["evaluations"][2]["metrics"]["accuracy"] == 0.747
    assert done.stderr == f"{FIRST_LINE}\nhello\n"


@pytest.mark.parametrize(("signal", "code"), [(2, 130), (15, 143)])
def test_a_run_stopped_by_a_signal_says_how_to_go_on(
    monkeypatch: pytest.MonkeyPatch, recipe: str, signal: int, code: int
) -> None:
    library, done = run(monkeypatch, recipe, "--resume", signal=signal)
    assert done.exit_code == code
    by = {2: "Ctrl-C", 15: "SIGTERM"}[signal]
    assert done.stdout.splitlines()[-2:] == [
        f"reward-model: stopped by {by} after step 30; resume it with",
        f"flatpeak reward-model {recipe} --resume",
    ]
    assert library.calls[0][1]["resume"] is True


def test_print_config_runs_nothing(monkeypatch: pytest.MonkeyPatch, recipe: str) -> None:
    library, done = run(monkeypatch, recipe, "reward_model.center=0.01", "--print-config")
    assert library.calls == []
    assert yaml.safe_load(done.stdout)["reward_model"]["center"] == 0.01
