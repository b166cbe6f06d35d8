import json
import math
from dataclasses import replace

import pytest

from flatpeak.errors import UserError
from flatpeak.runs.summary import RunSummary, StageEvaluation, read_summary, write_summary


def evaluation(stage, step, accuracy):
    return StageEvaluation(
        stage=stage,
        step=step,
        task="sums",
        size=200,
        metrics={"accuracy": accuracy, "reward": 0.5},
        intervals={"accuracy": (0.25, 0.75)},
        methods={"accuracy": "wilson"},
        counted={"reward": 198},
    )


SUMMARY = RunSummary(
    name="demo",
    status="stopped",
    metric="accuracy",
    best_step=4,
    last_step=6,
    evaluations=(evaluation("start", 0, 0.0), evaluation("train", 4, 0.9), evaluation("train", 6, 0.8)),
    checkpoints=("step_000000", "step_000004", "step_000006"),
    wall_seconds=12.5,
    signal=15,
)


def test_a_summary_comes_back_as_it_was(tmp_path):
    write_summary(tmp_path / "summary.json", SUMMARY)
    assert read_summary(tmp_path / "summary.json") == SUMMARY


def test_its_json_is_plain(tmp_path):
    write_summary(tmp_path / "summary.json", SUMMARY)
    content = json.loads((tmp_path / "summary.json").read_text())
    assert content["evaluations"][1] == {
        "stage": "train",
        "step": 4,
        "task": "sums",
        "size": 200,
        "metrics": {"accuracy": 0.9, "reward": 0.5},
        "intervals": {"accuracy": [0.25, 0.75]},
        "methods": {"accuracy": "wilson"},
        "counted": {"reward": 198},
        "subsets": {},
        "robustness": {},
        "choices": None,
        "sets": {},
    }
    assert content["signal"] == 15


def test_what_is_not_finite_is_null(tmp_path):
    write_summary(tmp_path / "summary.json", replace(SUMMARY, evaluations=(evaluation("start", 0, math.nan),)))
    assert read_summary(tmp_path / "summary.json").evaluations[0].metrics == {"accuracy": None, "reward": 0.5}


def test_the_evaluation_of_a_stage_is_its_last():
    assert SUMMARY.evaluation("train") is SUMMARY.evaluations[2]
    assert SUMMARY.evaluation("sft") is None


@pytest.mark.parametrize("text", ["", "[]", '{"name": "x"}', '{"evaluations": [{"intervals": {}}], "checkpoints": []}'])
def test_a_broken_summary_names_its_file(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UserError, match=r"summary\.json: not a run's summary"):
        read_summary(tmp_path / "summary.json")


def test_a_missing_summary_says_that_there_is_no_run(tmp_path):
    with pytest.raises(UserError, match="is not a run"):
        read_summary(tmp_path / "summary.json")
