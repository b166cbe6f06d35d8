"""What the commands hand to the library, and what they make of its answer."""

import json
import os
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from typer.testing import CliRunner

from flatpeak import __version__, pipeline
from flatpeak.cli.common import RunOutput, last_line
from flatpeak.cli.evaluate import split_arguments
from flatpeak.cli.main import app
from flatpeak.cli.train import reward_model_line
from flatpeak.errors import RunError
from flatpeak.runs.config import RunSectionConfig
from flatpeak.runs.directory import RunDirectory
from flatpeak.runs.rollout_log import write_answers
from support.summaries import evaluation, summary

FIRST_LINE = f"flatpeak {__version__}: x on arithmetic, run directory runs/mine"


STAGES = (
    evaluation("start", 0, accuracy=0.0),
    evaluation("sft", 9, accuracy=0.411),
    evaluation("train", 3, accuracy=0.968),
)
JUDGED = (
    evaluation("start", 0, accuracy=0.491, longer_wins=0.698, intervals={"accuracy": (0.44, 0.54)}),
    evaluation("train", 20, accuracy=0.75, longer_wins=0.698, intervals={"accuracy": (0.7, 0.8)}),
    evaluation("train", 30, accuracy=0.747, longer_wins=0.698, intervals={"accuracy": (0.702, 0.788)}),
)
SHORT = {"best_step": 2, "last_step": 3, "checkpoints": ("step_000003",)}


class Library:
    """Stands in for the modules that train and compare; remembers how it was called."""

    def __init__(self, *, signal=None) -> None:
        self.signal = signal
        self.calls: list[tuple[str, object, dict[str, object]]] = []

    def train(self, config, **options):
        return self._answer("train", config, options)

    def sft(self, config, **options):
        return self._answer("sft", config, options)

    def train_reward_model(self, config, **options):
        return self._answer("reward-model", config, options, JUDGED)

    def _answer(self, name, config, options, stages=STAGES):
        options.pop("progress").notice("hello")
        self.calls.append((name, config, options))
        code = 0 if self.signal is None else 128 + self.signal
        path = Path(config.run.directory) / config.run.name
        return SimpleNamespace(
            path=path,
            report=path / "report.html",
            summary=summary(*stages, **SHORT, signal=self.signal),
            exit_code=code,
            stopped_rank=None,
        )

    def compare_checkpoints(self, names, overrides, *, recipe, stages, progress):
        self.calls.append(("compare", names, {"overrides": overrides, "recipe": recipe, "stages": stages}))
        return SimpleNamespace(
            render=lambda width: "a table", as_dict=lambda: {"models": [{"accuracy": 0.5}]}, rows=lambda: [{"id": "é"}]
        )


def run(monkeypatch, *arguments, signal=None):
    library = Library(signal=signal)
    for name in ("train", "train_reward_model"):
        monkeypatch.setitem(sys.modules, f"flatpeak.pipeline.{name}", library)
        monkeypatch.setattr(pipeline, name, library, raising=False)
    monkeypatch.setitem(sys.modules, "flatpeak.apps.compare", library)
    return library, CliRunner().invoke(app, list(arguments))


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("model: {path: x}\nrun: {name: mine}\n")
    return str(path)


def test_the_demo_ends_with_accuracy_after_sft_and_after_rl(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # `make demo` leaves a run of this name, whose last line would be another
    library, done = run(monkeypatch, "demo", "training.steps=7")
    assert done.exit_code == 0
    last, following = done.stdout.splitlines()[-2:]
    assert following == "next: flatpeak chat runs/demo · flatpeak eval runs/demo · open runs/demo/report.html"
    assert last == "demo: held-out accuracy 0.41 -> 0.97 in 118 s, report: runs/demo/report.html"
    [(name, config, options)] = library.calls
    assert name == "train"
    assert config.training.steps == 7
    assert options["overwrite"] is True
    assert options["resume"] is False


@pytest.mark.parametrize(("command", "overwritten"), [("demo", True), ("train", False), ("sft", False)])
def test_the_demo_overwrites_only_a_run_that_the_demo_made(monkeypatch, tmp_path, command, overwritten):
    section = RunSectionConfig(directory=str(tmp_path), name="mine")
    RunDirectory.create(section, {}, command=["flatpeak", command, "run.name=mine"]).close()
    settings = (f"run.directory={tmp_path}", "run.name=mine")
    library, done = run(monkeypatch, "demo", *settings)
    assert [options["overwrite"] for _, _, options in library.calls] == [True] * overwritten
    if not overwritten:
        text = f"{tmp_path}/mine is a run that the demo did not make: choose another run.name, or delete it first"
        assert str(done.exception) == text
    RunDirectory.create(section, {}, resume=True, command=["flatpeak", "demo"]).close()
    assert bool(run(monkeypatch, "demo", *settings)[0].calls) is overwritten  # whatever resumed it


def test_train_hands_on_what_it_was_given(monkeypatch, recipe):
    library, done = run(monkeypatch, "train", recipe, "optimizer.learning_rate=1e-5", "--resume")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        FIRST_LINE,
        "hello",
        "train: held-out accuracy 0.00 -> 0.97 in 118 s, report: runs/mine/report.html",
        "next: flatpeak chat runs/mine · flatpeak eval runs/mine · open runs/mine/report.html",
    ]
    [(name, config, options)] = library.calls
    assert (name, config.optimizer.learning_rate, options["resume"], options["overwrite"]) == (
        "train",
        1e-5,
        True,
        False,
    )
    assert options["command"][0] == "flatpeak"


def test_sft_runs_only_sft(monkeypatch, recipe):
    library, done = run(monkeypatch, "sft", recipe, "--overwrite")
    assert done.exit_code == 0
    assert [(name, options["overwrite"]) for name, _, options in library.calls] == [("sft", True)]


def test_json_is_all_of_stdout(monkeypatch, recipe):
    _, done = run(monkeypatch, "train", recipe, "--json")
    content = json.loads(done.stdout)
    assert content["path"] == "runs/mine"
    assert content["report"] == "runs/mine/report.html"
    assert content["best_step"] == 2
    assert content["evaluations"][2]["metrics"] == {"accuracy": 0.968}
    assert done.stderr == f"{FIRST_LINE}\nhello\n"


def test_json_has_null_for_a_metric_without_a_value(monkeypatch, recipe):
    monkeypatch.setattr("flatpeak.cli.common.asdict", lambda summary: {"robustness/rename": float("nan")})
    _, done = run(monkeypatch, "train", recipe, "--json")
    assert '"robustness/rename": null' in done.stdout


@pytest.mark.parametrize(("signal", "code", "by"), [(2, 130, "Ctrl-C"), (15, 143, "SIGTERM"), (10, 138, "SIGUSR1")])
def test_a_run_stopped_by_a_signal_prints_the_command_that_resumes_it(monkeypatch, recipe, signal, code, by):
    said = ["prompt.system=be brief", "run.name=mine"]
    _, done = run(monkeypatch, "train", recipe, *said, "--overwrite", signal=signal)
    assert done.exit_code == code
    assert done.stdout.splitlines()[-2:] == [
        f"train: stopped by {by} after step 3; resume it with",
        f"flatpeak train {recipe} 'prompt.system=be brief' run.name=mine --resume",
    ]


def test_the_command_is_shown_beside_json_on_standard_error(monkeypatch, recipe):
    _, done = run(monkeypatch, "sft", recipe, "--json", signal=2)
    assert json.loads(done.stdout)["signal"] == 2
    assert done.stderr.splitlines()[-1] == f"flatpeak sft {recipe} --resume"


def test_the_demo_that_was_stopped_is_resumed_by_the_command_it_prints(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    library, done = run(monkeypatch, "demo", "training.steps=7", signal=2)
    assert done.stdout.splitlines()[-1] == "flatpeak demo training.steps=7 --resume"
    library, done = run(monkeypatch, *shlex.split(done.stdout.splitlines()[-1])[1:])
    assert done.exit_code == 0
    [(name, config, options)] = library.calls
    assert (name, config.training.steps, options["resume"], options["overwrite"]) == ("train", 7, True, False)


def test_a_second_ctrl_c_prints_the_command_too(monkeypatch, recipe):
    def interrupted(self, config, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(Library, "train", interrupted)
    _, done = run(monkeypatch, "train", recipe)
    assert done.exit_code == 130
    assert done.stdout.splitlines() == [
        FIRST_LINE,
        "train: interrupted; resume it with",
        f"flatpeak train {recipe} --resume",
    ]


def test_a_fork_that_was_stopped_is_resumed_by_its_own_recipe(monkeypatch, capsys, tmp_path):
    result = SimpleNamespace(
        path=tmp_path / "a b", report="r", summary=summary(*STAGES, **SHORT, signal=2), exit_code=130, stopped_rank=None
    )
    with pytest.raises(typer.Exit):
        RunOutput(label="fork").finish(result, "fork: done")
    last = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(last) == ["flatpeak", "train", str(tmp_path / "a b" / "config.yaml"), "--resume"]


def test_a_run_that_is_done_shows_questions_with_the_answers_before_and_after(tmp_path, capsys):
    for stage, text in (("start_000000", "no\n idea " + 30 * "word "), ("train_000003", "7\x1b[2J")):
        row = {"id": "a", "question": "3+4=", "text": text}
        write_answers(tmp_path / "evaluations" / f"{stage}.jsonl", [row])
    result = SimpleNamespace(
        path=tmp_path, report="r", summary=summary(STAGES[0], STAGES[2]), exit_code=0, stopped_rank=None
    )
    RunOutput(label="train").finish(result, "train: done")
    heading, question, before, after, last, following = capsys.readouterr().out.splitlines()
    assert following.startswith("next: flatpeak chat ")
    assert heading == "held-out questions, with the answers before and after:"
    assert (question.strip(), after.split(), last) == ("3+4=", ["after", r"7\x1b[2J"], "train: done")
    assert before.startswith("    before no idea word")
    assert before.endswith("word ...")
    assert len(before) <= 111


def test_the_last_line_copes_with_stages_that_were_not():
    report = Path("r.html")
    line = last_line("demo", summary(STAGES[0], STAGES[2]), since="sft", report=report)
    assert line == "demo: held-out accuracy 0.00 -> 0.97 in 118 s, report: r.html"
    assert "unknown -> unknown" in last_line("demo", summary(), since="sft", report=report)


def test_eval_tells_models_from_settings(monkeypatch, tmp_path):
    odd = tmp_path / "a=b"
    odd.mkdir()
    assert split_arguments(["runs/x", "task.type=gsm8k", str(odd), "org/model"]) == (
        ["runs/x", str(odd), "org/model"],
        ["task.type=gsm8k"],
    )
    library, done = run(monkeypatch, "eval", "runs/x", "evaluation.size=5", "runs/y")
    assert done.stdout == "a table\n"
    expected = {"overrides": ["evaluation.size=5"], "recipe": None, "stages": False}
    assert library.calls == [("compare", ["runs/x", "runs/y"], expected)]
    assert json.loads(run(monkeypatch, "eval", "runs/x", "--json")[1].stdout) == {"models": [{"accuracy": 0.5}]}


def test_eval_refuses_a_file_of_answers_that_cannot_be_written_before_any_model_is_asked(monkeypatch, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    expected = "is not a regular file: name one"
    for rows in (folder, "/dev/null"):
        library, done = run(monkeypatch, "eval", "runs/x", "--rows", str(rows))
        assert (expected in str(done.exception), library.calls) == (True, [])
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    library, done = run(monkeypatch, "eval", "runs/x", "--rows", str(folder / "rows.jsonl"))
    assert f"{folder} cannot be written; choose another directory" in str(done.exception)
    assert library.calls == []


def test_eval_prints_its_figures_before_answers_that_fit_on_no_disk(monkeypatch, tmp_path):
    (tmp_path / ".tmp-rows.jsonl").symlink_to("/dev/full")
    rows = tmp_path / "rows.jsonl"
    _, done = run(monkeypatch, "eval", "runs/x", "--rows", str(rows))
    assert done.stdout == "a table\n"
    assert isinstance(done.exception, RunError)
    assert str(done.exception) == (
        f"--rows {rows}: not written (No space left on device); free space, or choose another file"
    )
    run(monkeypatch, "eval", "runs/x", "--rows", str(rows))
    assert rows.read_text() == '{"id": "é"}\n'


def test_eval_hands_on_the_recipe_that_says_how_models_are_evaluated(monkeypatch):
    library, _ = run(monkeypatch, "eval", "org/model", "evaluation.size=5", "--recipe", "r.yaml", "--stages")
    expected = {"overrides": ["evaluation.size=5"], "recipe": "r.yaml", "stages": True}
    assert library.calls == [("compare", ["org/model"], expected)]


def test_chat_hands_its_options_on(monkeypatch):
    seen = []
    chat_loop = lambda path, *, console, **options: seen.append((path, options, console))  # noqa: E731
    stand_in = SimpleNamespace(Console=SimpleNamespace, chat_loop=chat_loop)
    monkeypatch.setitem(sys.modules, "flatpeak.apps.chat", stand_in)
    options = ["--temperature", "0", "--max-new-tokens", "9", "--system", "hi", "--template", "chat", "--recipe", "r"]
    assert CliRunner().invoke(app, ["chat", "runs/x", *options]).exit_code == 0
    assert CliRunner().invoke(app, ["chat", "runs/y"]).exit_code == 0
    said = {"temperature": 0.0, "max_new_tokens": 9, "system": "hi", "template": "chat", "recipe": "r"}
    assert [(path, given) for path, given, _ in seen] == [("runs/x", said), ("runs/y", dict.fromkeys(said))]


def test_a_chat_in_a_pipe_has_only_answers_on_standard_output(monkeypatch):
    def chat_loop(path, *, console, **options):
        console.note("a note")
        with pytest.raises(EOFError):
            while True:
                console.write(f"={console.read('> ')}")

    monkeypatch.setitem(
        sys.modules, "flatpeak.apps.chat", SimpleNamespace(Console=SimpleNamespace, chat_loop=chat_loop)
    )
    done = CliRunner().invoke(app, ["chat", "runs/x"], input="1+1\n2+2\n")
    assert (done.stdout, done.stderr) == ("=1+1\n=2+2\n", "a note\n")


def test_several_runs_are_reported_with_a_table_that_compares_them(monkeypatch):
    page = SimpleNamespace(write_report=lambda run: run / "report.html")
    tables = SimpleNamespace(compared_runs=lambda runs: "a table", run_table=lambda runs: "run,status\n")
    monkeypatch.setitem(sys.modules, "flatpeak.report.page", page)
    monkeypatch.setitem(sys.modules, "flatpeak.report.run_tables", tables)
    report = lambda *arguments: CliRunner().invoke(app, ["report", *arguments]).stdout  # noqa: E731
    assert report("a") == "a/report.html\n"
    assert report("a", "b") == "a/report.html\nb/report.html\n\na table\n"
    assert report("a", "b", "--csv") == "run,status\n"


@pytest.fixture
def judge(tmp_path):
    path = tmp_path / "judge.yaml"
    path.write_text("model: {path: x}\nrun: {name: mine}\ntask: {type: preferences}\n")
    return str(path)


def test_a_reward_model_ends_with_its_accuracy_its_interval_and_what_length_would_have(monkeypatch, judge):
    library, done = run(monkeypatch, "reward-model", judge, "reward_model.steps=7", "--overwrite")
    assert done.exit_code == 0
    assert done.stdout.splitlines() == [
        FIRST_LINE.replace("arithmetic", "preferences"),
        "hello",
        "reward-model: held-out accuracy 0.49 -> 0.75 [0.70, 0.79] (longer wins 0.70) in 118 s, "
        "report: runs/mine/report.html",
    ]
    [(_, config, options)] = library.calls
    assert config.reward_model.steps == 7
    assert (options["overwrite"], options["resume"], options["command"][0]) == (True, False, "flatpeak")
    line = reward_model_line(summary(), report=Path("r.html"))
    assert line == "reward-model: held-out accuracy unknown -> unknown (longer wins unknown) in 118 s, report: r.html"


def test_the_json_of_a_reward_model_is_all_of_stdout(monkeypatch, judge):
    _, done = run(monkeypatch, "reward-model", judge, "--json")
    content = json.loads(done.stdout)
    assert (content["path"], content["best_step"]) == ("runs/mine", 2)
    assert content["evaluations"][2]["metrics"]["accuracy"] == 0.747
    assert done.stderr == f"{FIRST_LINE.replace('arithmetic', 'preferences')}\nhello\n"


@pytest.mark.parametrize(("signal", "code", "by"), [(2, 130, "Ctrl-C"), (15, 143, "SIGTERM")])
def test_a_reward_model_stopped_by_a_signal_says_how_to_go_on(monkeypatch, judge, signal, code, by):
    library, done = run(monkeypatch, "reward-model", judge, "--resume", signal=signal)
    assert done.exit_code == code
    assert done.stdout.splitlines()[-2:] == [
        f"reward-model: stopped by {by} after step 3; resume it with",
        f"flatpeak reward-model {judge} --resume",
    ]
    assert library.calls[0][2]["resume"] is True


def test_print_config_trains_no_reward_model(monkeypatch, judge):
    library, done = run(monkeypatch, "reward-model", judge, "reward_model.center=0.01", "--print-config")
    assert library.calls == []
    assert yaml.safe_load(done.stdout)["reward_model"]["center"] == 0.01
