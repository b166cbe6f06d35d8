"""What a run started from Python shows of itself, and the notices that it leaves to read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import flatpeak
import flatpeak.pipeline.train
from flatpeak.errors import UserError
from flatpeak.report.page import page_content, write_report
from flatpeak.runs.directory import RunPaths
from flatpeak.runs.notices import read_notices
from support.resumes import Death, die, steps_of
from support.reward_functions import odd
from support.runs import Recipe, Train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """No notice of native kernels where no compiler is at hand."""
    monkeypatch.setenv("FLATPEAK_KERNELS", "torch")


class Failing:
    """A reward that raises once in each of these rollouts, counted from 1; evaluations ask for one completion each."""

    by_group = False

    def __init__(self, *rollouts: int) -> None:
        self.rollouts, self.seen = rollouts, 0

    def __call__(self, group: Any) -> list[float | None]:
        drawn = len(group.completions) > 1
        self.seen += drawn
        if drawn and self.seen in self.rollouts:
            raise ValueError("oops in the reward")
        return [float(sum(completion.token_ids) % 2) for completion in group.completions]


def notices(path: Path) -> list[tuple[str, int, str]]:
    return [(row["stage"], row["step"], row["text"]) for row in read_notices(path / "notices.jsonl")]


@pytest.mark.parametrize("start", ["train", "sft"])
def test_a_run_from_python_shows_its_steps_and_notices_on_stderr(
    recipe: Recipe, train: Train, capsys: pytest.CaptureFixture[str], start: str
) -> None:
    config = recipe(sft={"steps": 2, "batch_size": 4}, prompt={"max_tokens": 3, "overlong": "truncate_left"})
    getattr(flatpeak.pipeline.train, start)(config, reward=odd)
    displayed = capsys.readouterr()
    lines = displayed.err.splitlines()
    assert any(line.startswith("arithmetic train: 0 overlong prompts dropped, ") for line in lines)
    assert any(line.startswith("sft 2/2 (") for line in lines)
    assert any(line.startswith("eval at step 0: accuracy 0.") for line in lines)
    assert any(line.startswith("train 2/2 (") for line in lines) == (start == "train")
    assert displayed.out == ""


def test_silence_is_asked_for_by_false_and_keeps_the_notices(
    recipe: Recipe, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(recipe(), reward=Failing(3), progress=False)
    assert capsys.readouterr() == ("", "")
    [(stage, step, text)] = [one for one in notices(result.path) if "oops" in one[2]]
    assert (stage, step) == ("train", 1)
    assert text.startswith(
        "reward 'correctness': 4 completions have had no score so far because of an error; now ValueError"
    )


def test_silence_holds_where_a_saved_model_is_loaded(
    recipe: Recipe, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe(), reward=odd, progress=False)
    resumed = train(recipe(training={"steps": 3}), reward=odd, progress=False, resume=True)
    assert resumed.summary.last_step == 3
    assert capsys.readouterr() == ("", "")
    train(recipe(training={"steps": 4}), reward=odd, resume=True)
    assert "train 4/4" in capsys.readouterr().err


class Collected(list[str]):
    """A Progress that is false as long as it holds nothing."""

    def update(self, *args: Any, **settings: Any) -> None:
        pass

    def notice(self, text: str) -> None:
        self.append(text)


def test_a_progress_of_the_callers_own_gets_every_notice_even_if_it_is_empty(
    recipe: Recipe, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = Collected()
    result = train(recipe(), reward=Failing(2), progress=seen)
    assert [text for _, _, text in notices(result.path)] == list(seen)
    assert any("oops" in text for text in seen)
    assert capsys.readouterr() == ("", "")


def test_rows_that_spell_control_tokens_are_counted(recipe: Recipe, train: Train, tmp_path: Path) -> None:
    rows = [{"question": f"{number}+1=" + "<eos>" * (number == 3), "answer": "5"} for number in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"why": row["question"]}) for row in rows))
    source = {"path": str(tmp_path / "rows.jsonl"), "rationale": "why"}
    seen = Collected()
    task = {"type": "rows", "train": [source], "test": [source]}
    config = recipe(sft={"steps": 1, "batch_size": 2}, training={"steps": 1})
    train(config | {"task": task}, progress=seen)
    told = "which the model reads as text: only templates make control tokens (see prompt.template)"
    assert [text for text in seen if "control tokens" in text] == [
        f"rows train: 1 of 9 questions spell control tokens (<eos>), {told}",
        f"rows test: 1 of 9 questions spell control tokens (<eos>), {told}",
        f"1 of 9 rationales spell control tokens (<eos>), {told}",
    ]


@pytest.mark.parametrize("progress", [Collected, print, "stderr", 1, object()])
def test_what_is_no_progress_is_refused_before_anything_is_loaded(recipe: Recipe, progress: Any) -> None:
    with pytest.raises(UserError, match=r"give an object with update\(.*\) and notice\(text\).* or False for silence"):
        flatpeak.pipeline.train.train(recipe(), progress=progress)
    assert not Path(recipe()["run"]["directory"]).exists()


def interrupted(recipe: Recipe, train: Train, watch: Any, stage: str, step: int, **sections: Any) -> list[Any]:
    """The notices of a run that is killed when a step is recorded, and goes on."""
    config = recipe(run={"checkpoint_every": 2}, training={"steps": 5}, **sections)
    with pytest.raises(Death):
        train(config, reward=Failing(6, 13), progress=watch({(stage, step): die}))
    result = train(config, reward=Failing(*FAILING_AFTER[stage, step]), progress=False, resume=True)
    return notices(result.path)


FAILING_AFTER = {("train", 3): (5,), ("train", 4): (5,), ("train", 5): (), ("eval", 0): (6, 13)}
"""The rollouts of a resumed run that fail where those of the whole one do, of four groups a step: in steps 2 and 4."""


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "step"), list(FAILING_AFTER))
def test_a_resumed_run_has_the_notices_of_an_uninterrupted_one_each_once(
    recipe: Recipe, train: Train, watch: Any, stage: str, step: int
) -> None:
    prompts = {"max_tokens": 3, "overlong": "truncate_left"}
    whole = recipe(run={"name": "whole"}, training={"steps": 5}, prompt=prompts)
    wanted = notices(train(whole, reward=Failing(6, 13), progress=False).path)
    assert [(stage, step) for stage, step, _ in wanted] == [("start", 0), ("start", 0), ("train", 2)]
    assert interrupted(recipe, train, watch, stage, step, prompt=prompts) == wanted


@pytest.mark.slow
def test_what_only_a_resumed_run_has_to_say_is_dated_by_its_step(recipe: Recipe, train: Train, watch: Any) -> None:
    config = recipe(run={"checkpoint_every": 1}, training={"steps": 3})
    path = train(config, reward=odd, progress=False).path
    (steps_of(path)[-1] / "config.json").unlink()
    for _ in range(2):
        train(config, reward=odd, progress=False, resume=True)
        (steps_of(path)[-1] / "config.json").unlink()
    result = [(stage, step) for stage, step, text in notices(path) if text.endswith("an older checkpoint is used")]
    assert result == [("train", 2)]


@pytest.mark.slow
def test_a_fork_takes_the_notices_up_to_its_step_along(recipe: Recipe, train: Train) -> None:
    config = recipe(run={"checkpoint_every": 1, "keep_checkpoints": 9}, training={"steps": 3})
    path = train(config, reward=Failing(2, 10), progress=False).path
    assert [(stage, step) for stage, step, _ in notices(path)] == [("train", 1)]
    late = flatpeak.fork(path, 2, name="late", reward=odd, progress=False)
    early = flatpeak.fork(path, 0, name="early", reward=odd, progress=False)
    (path / "notices.jsonl").unlink()  # as a full disk leaves it
    former = flatpeak.fork(path, 2, name="former", reward=odd, progress=False)
    assert notices(late.path)[0][:2] == ("train", 1)
    assert [len(notices(one.path)) for one in (late, early, former)] == [1, 0, 0]


def test_a_run_that_left_nothing_leaves_no_notices_and_its_name_is_free(
    recipe: Recipe, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(completion_ids: list[list[int]]) -> list[float]:
        raise ValueError("always")

    with pytest.raises(UserError, match="always"):
        train(recipe(), reward=wrong)
    assert "always" not in capsys.readouterr().err  # the error says it
    assert not (RunPaths(Path(recipe()["run"]["directory"]) / "tiny").notices).exists()
    assert train(recipe(), reward=odd, progress=False).summary.status == "done"


def test_a_new_run_of_the_same_name_forgets_the_notices_of_the_old_one(recipe: Recipe, train: Train) -> None:
    train(recipe(), reward=Failing(1), progress=False)
    result = train(recipe(), reward=odd, progress=False, overwrite=True)
    assert notices(result.path) == []


@pytest.mark.slow
def test_the_report_shows_the_notices(recipe: Recipe, train: Train) -> None:
    result = train(recipe(), reward=Failing(6), progress=False)
    displayed = page_content(RunPaths(result.path))["notices"]
    assert [place for place, _ in displayed] == ["training step 2"]
    page = write_report(result.path).read_text(encoding="utf-8")
    assert "<h2>Notices</h2>" in page
    assert "oops in the reward" in page
