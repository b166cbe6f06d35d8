"""One real run with four trackers and a resume in the middle, read back by the libraries themselves."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from flatpeak.runs.metrics import read_metrics
from support.runs import Watcher, speed_up_runs, tiny_recipe
from support.tracked_runs import expected, read_mlflow, read_tensorboard, read_trackio, read_wandb

pytestmark = pytest.mark.slow

for library in ("wandb", "tensorboard", "trackio", "mlflow"):
    pytest.importorskip(library, reason="pip install -e '.[dev]'")

KEYS = {"WANDB_API_KEY": "w" * 40, "MLFLOW_TRACKING_PASSWORD": "mlflow-pass-123456", "HF_TOKEN": "hf_" + "a" * 30}
IN_RECIPE = "sk-" + "recipe0" * 4


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A run of SFT and RL, stopped after RL's step 2 and resumed; the run's directory, notices, and what is stored."""
    import trackio.sqlite_storage
    import trackio.utils

    import flatpeak.pipeline.train
    from flatpeak.tracking import trackers

    root = tmp_path_factory.mktemp("tracked")
    with pytest.MonkeyPatch.context() as patch:
        speed_up_runs(patch)
        # On a busy machine the libraries may need longer than a stopped run would wait for them.
        patch.setattr(trackers, "INTERRUPTED_END", 120.0)
        patch.setattr(trackers, "LONGEST_END", 120.0)
        patch.setenv("WANDB_DATA_DIR", str(root / "wandb-data"))
        patch.setenv("WANDB_MODE", "offline")
        for name, key in KEYS.items():
            patch.setenv(name, key)
        patch.chdir(root)  # for MLflow's artifacts
        for module in (trackio.utils, trackio.sqlite_storage):
            patch.setattr(module, "TRACKIO_DIR", root / "trackio")
        config = tiny_recipe(
            root / "runs",
            sft={"steps": 2, "batch_size": 4},
            training={"steps": 4},
            evaluation={"every": 2, "samples": 2, "k": [1, 2]},
            tracking={
                "wandb": {},
                "tensorboard": {},
                "trackio": {"project": "tests"},
                "mlflow": {"uri": f"sqlite:///{root}/mlflow.db"},
                "group": "pairs",
                "tags": {"arm": "gr", "secret": IN_RECIPE},
                "completions_every": 2,
                "completions": 3,
            },
        )
        first = Watcher({("train", 2): lambda: signal.raise_signal(signal.SIGTERM)})
        assert flatpeak.pipeline.train.train(config, progress=first).exit_code == 143
        second = Watcher()
        result = flatpeak.pipeline.train.train(config, progress=second, resume=True)
        assert result.exit_code == 0
        run = result.path
        yield {
            "root": root,
            "run": run,
            "notices": first.notices + second.notices,
            "wandb": read_wandb(run / "tracking" / "wandb"),
            "tensorboard": read_tensorboard(run / "tracking" / "tensorboard"),
            "trackio": read_trackio("tests"),
            "mlflow": read_mlflow(f"sqlite:///{root}/mlflow.db"),
        }


TRACKERS = pytest.mark.parametrize("tracker", ["wandb", "tensorboard", "trackio", "mlflow"])


@TRACKERS
def test_every_metric_is_stored_once_with_its_value(stores: dict[str, Any], tracker: str) -> None:
    curves, wanted = stores[tracker].curves, expected(stores["run"])
    assert {row["stage"] for row in read_metrics(stores["run"] / "metrics.jsonl")} == {"sft", "train", "eval"}
    assert "eval/arithmetic/pass@2" in wanted
    assert curves.keys() == wanted.keys()
    for name, points in wanted.items():
        assert curves[name].keys() == points.keys(), name
        for step, value in points.items():
            # Event files hold single precision.
            assert curves[name][step] == pytest.approx(value, rel=1e-6 if tracker == "tensorboard" else 1e-12)
    # Two steps of SFT, then four of RL.
    assert list(curves["reward/mean"]) == [3, 4, 5, 6]


@TRACKERS
def test_completions_are_readable(stores: dict[str, Any], tracker: str) -> None:
    rows = stores[tracker].completions
    logged = [json.loads(line) for line in (stores["run"] / "rollouts/step_000002.jsonl").read_text().splitlines()]
    assert [row[0] for row in rows] == [4, 4, 4, 6, 6, 6]
    for row, wanted in zip(rows[:3], logged, strict=False):
        _, question, text, reward, part, advantage = row
        assert (question, text.strip()) == (wanted["prompt"], wanted["text"].strip())
        assert float(reward) == pytest.approx(wanted["reward"])
        assert float(part) == pytest.approx(wanted["rewards"]["correctness"])
        assert float(advantage) == pytest.approx(wanted["advantage"], abs=1e-5)


@TRACKERS
def test_recipe_versions_hardware_group_and_tags_are_stored(stores: dict[str, Any], tracker: str) -> None:
    texts = stores[tracker].texts
    manifest = json.loads((stores["run"] / "manifest.json").read_text())
    for wanted in ("learning_rate", manifest["versions"]["torch"], manifest["hardware"]["cpu"], "pairs", "arm"):
        assert wanted in texts, wanted


def test_offline_is_told_once_a_start_with_the_command_that_syncs(stores: dict[str, Any]) -> None:
    told = [text for text in stores["notices"] if "tracking.wandb" in text]
    assert len(told) == 2  # the second start has a directory of its own
    assert all("wandb sync" in text and "offline-run-" in text for text in told)
    assert not [text for text in stores["notices"] if "tracking." in text and "offline" not in text]


def test_no_key_is_in_any_file(stores: dict[str, Any]) -> None:
    files = [path for path in stores["root"].rglob("*") if path.is_file()]
    assert len(files) > 30
    for secret in (*KEYS.values(), IN_RECIPE):
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_every_tracker_has_one_run_of_both_starts(stores: dict[str, Any]) -> None:
    for tracker in ("wandb", "tensorboard", "trackio", "mlflow"):
        state = json.loads((stores["run"] / "tracking" / f"{tracker}.json").read_text())
        assert state.keys() == {"id", "destination"}
    parts = {path.name.rpartition("-")[2] for path in (stores["run"] / "tracking" / "wandb").glob("offline-run-*")}
    assert parts == {json.loads((stores["run"] / "tracking" / "wandb.json").read_text())["id"]}
