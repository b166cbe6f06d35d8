import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

import flatpeak
from flatpeak.errors import UserError
from flatpeak.runs.config import RunSectionConfig
from flatpeak.runs.directory import RunDirectory, RunPaths, check_no_secret_missing, check_start
from flatpeak.runs.manifest import git_commit, read_starts

RESOLVED = {
    "run": {"name": "one", "checkpoint_every": 50},
    "optimizer": {"learning_rate": 1e-5, "schedule": "constant", "betas": (0.9, 0.95)},
    "training": {"steps": 100},
}


def create(tmp_path, resolved=RESOLVED, name="one", **options):
    return RunDirectory.create(RunSectionConfig(name=name, directory=str(tmp_path)), resolved, **options)


def changed(section, **values):
    return RESOLVED | {section: RESOLVED[section] | values}


def test_a_new_run_has_its_recipe_and_folders(tmp_path):
    with create(tmp_path) as run:
        assert run.path == tmp_path / "one"
        assert not run.resumed
        assert yaml.safe_load(run.config.read_text()) == {
            "run": {"name": "one", "checkpoint_every": 50},
            "optimizer": {"learning_rate": 1e-5, "schedule": "constant", "betas": [0.9, 0.95]},
            "training": {"steps": 100},
        }
        assert run.rollouts.is_dir()
        assert run.checkpoints.is_dir()


def test_the_manifest_tells_how_the_run_was_made(tmp_path):
    with create(tmp_path, command=["flatpeak", "train", "r.yaml"]) as run:
        manifest = json.loads(run.manifest.read_text())
    assert manifest["command"] == ["flatpeak", "train", "r.yaml"]
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["versions"]["python"] == platform.python_version()
    assert manifest["versions"]["flatpeak"] == flatpeak.__version__
    assert manifest["hardware"]["host"] == socket.gethostname()
    assert manifest["hardware"]["cores"] >= 1
    assert manifest["hardware"]["memory_gib"] > 0
    assert manifest["started"].endswith("+00:00")


def test_a_used_name_is_refused_and_both_ways_out_are_named(tmp_path):
    create(tmp_path).close()
    with pytest.raises(UserError, match=r"one exists: .*--resume.*--overwrite"):
        create(tmp_path)


def test_overwriting_deletes_what_the_run_wrote_and_nothing_else(tmp_path):
    with create(tmp_path) as run:
        (run.checkpoints / "step_000001").mkdir()
        run.metrics.write_text("{}\n")
        run.summary.write_text("{}")
        (run.path / "notes.txt").write_text("mine")
    with create(tmp_path, resolved=changed("training", steps=5), overwrite=True) as run:
        assert not run.resumed
        assert list(run.checkpoints.iterdir()) == []
        assert not run.metrics.exists()
        assert not run.summary.exists()
        assert (run.path / "notes.txt").read_text() == "mine"
        assert yaml.safe_load(run.config.read_text())["training"]["steps"] == 5


@pytest.mark.parametrize("options", [{}, {"overwrite": True}, {"resume": True}])
def test_a_folder_that_was_never_a_run_is_left_alone(tmp_path, options):
    precious = tmp_path / "one" / "checkpoints" / "weights"
    precious.mkdir(parents=True)
    for _ in range(2):
        with pytest.raises(UserError, match="holds files that are not a run's"):
            create(tmp_path, **options)
    assert precious.is_dir()
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["checkpoints"]


def test_resume_and_overwrite_together_are_refused(tmp_path):
    with pytest.raises(UserError, match="give only one of them"):
        create(tmp_path, resume=True, overwrite=True)
    assert not (tmp_path / "one").exists()


def test_resuming_a_run_that_never_began_starts_it(tmp_path):
    with create(tmp_path, resume=True) as run:
        assert not run.resumed


def test_resuming_keeps_the_first_manifest_and_adds_to_it(tmp_path):
    create(tmp_path, command=["first"]).close()
    with create(tmp_path, resolved=changed("training", steps=200), resume=True, command=["second"]) as run:
        assert run.resumed
        manifest = json.loads(run.manifest.read_text())
        assert yaml.safe_load(run.config.read_text())["training"]["steps"] == 200
    assert manifest["command"] == ["first"]
    assert [start["command"] for start in manifest["resumed"]] == [["second"]]
    assert manifest["resumed"][0]["changed"] == {"training.steps": "100 -> 200"}


@pytest.mark.parametrize(
    ("checkpoint", "anew"), [(None, True), ("step_000000", True), ("step_000007", False), ("sft/step_000002", False)]
)
def test_the_manifest_says_whether_a_resumed_run_has_steps_of_an_earlier_start(tmp_path, checkpoint, anew):
    with create(tmp_path) as run:
        if checkpoint is not None:
            (run.checkpoints / checkpoint).mkdir(parents=True)
    with create(tmp_path, resume=True) as run:
        assert json.loads(run.manifest.read_text())["resumed"][0]["anew"] is anew


def test_resuming_with_a_changed_recipe_shows_the_keys_and_changes_nothing(tmp_path):
    with create(tmp_path) as run:
        before = {path: path.read_bytes() for path in (run.config, run.manifest)}
    other = changed("optimizer", learning_rate=1e-3, eps=1e-8)
    with pytest.raises(UserError) as error:
        create(tmp_path, resolved=other, resume=True)
    assert "optimizer.learning_rate: 1e-05 -> 0.001" in str(error.value)
    assert "optimizer.eps: (absent) -> 1e-08" in str(error.value)
    assert {path: path.read_bytes() for path in before} == before
    create(tmp_path, resume=True).close()  # the refused one let go of the lock


def test_the_length_may_not_change_under_a_schedule_that_depends_on_it(tmp_path):
    create(tmp_path, resolved=changed("optimizer", schedule="cosine")).close()
    longer = changed("optimizer", schedule="cosine") | {"training": {"steps": 200}}
    with pytest.raises(UserError, match=r"training\.steps: 100 -> 200"):
        create(tmp_path, resolved=longer, resume=True)


def test_a_run_that_was_moved_is_resumed_under_its_new_name(tmp_path):
    create(tmp_path).close()
    (tmp_path / "one").rename(tmp_path / "two")
    with create(tmp_path, resolved=changed("run", name="two"), name="two", resume=True) as run:
        assert run.resumed


def test_results_of_calls_are_kept_until_the_code_changes(tmp_path):
    create(tmp_path, code={"environment": "a"}).close()
    (tmp_path / "one" / "calls").mkdir()
    create(tmp_path, resume=True, code={"environment": "a"}).close()
    assert (tmp_path / "one" / "calls").exists()
    create(tmp_path, resume=True, code={"environment": "b"}).close()
    assert not (tmp_path / "one" / "calls").exists()


def test_a_second_trainer_is_refused_and_told_who_holds_the_run(tmp_path):
    with create(tmp_path):
        for options in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(UserError, match=f"process {os.getpid()} on {socket.gethostname()}"):
                create(tmp_path, **options)
    create(tmp_path, resume=True).close()


def test_the_lock_of_a_killed_trainer_is_free(tmp_path):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from flatpeak.runs.directory import RunLock\n"
        "lock = RunLock(Path(sys.argv[1]))\n"
        "print('held', flush=True)\n"
        "time.sleep(60)\n"
    )
    create(tmp_path).close()
    lock = tmp_path / "one" / ".lock"
    with subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(UserError, match=f"process {holder.pid} on "):
            create(tmp_path, resume=True)
        holder.kill()
    create(tmp_path, resume=True).close()


def test_a_forked_worker_that_outlives_the_trainer_does_not_hold_the_run(tmp_path):
    run = create(tmp_path)
    worker = os.fork()
    if worker == 0:
        time.sleep(60)
        os._exit(0)
    try:
        # As the kernel does for a killed trainer: its own descriptor closes, without a word to the worker. Another file
        # takes its number, which Python closes once more when the lock is collected.
        with Path(os.devnull).open() as other:
            os.dup2(other.fileno(), run._lock._file.fileno())
        deadline = time.monotonic() + 5
        while True:
            try:
                create(tmp_path, resume=True).close()
                break
            except UserError:
                assert time.monotonic() < deadline, "the worker still holds the lock"
                time.sleep(0.02)
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)


def test_resuming_clears_what_a_kill_left_in_the_checkpoints(tmp_path):
    with create(tmp_path) as run:
        (run.checkpoints / ".tmp-step_000002").mkdir()
        (run.sft_checkpoints / ".tmp-step_000009").mkdir(parents=True)
    with create(tmp_path, resume=True) as run:
        assert [path.name for path in run.checkpoints.iterdir()] == ["sft"]
        assert list(run.sft_checkpoints.iterdir()) == []


def test_rewinding_forgets_later_metrics_and_rollouts(tmp_path):
    with create(tmp_path) as run:
        stages = [("eval", 0), ("sft", 7), ("train", 1), ("train", 2), ("train", 3)]
        lines = [json.dumps({"step": step, "stage": stage}) + "\n" for stage, step in stages]
        run.metrics.write_text("".join(lines))
        for step in (1, 2, 3):
            (run.rollouts / f"step_{step:06d}.jsonl").write_text("")
        run.rewind(2)
        assert run.metrics.read_text() == "".join(lines[:4])
        assert sorted(path.name for path in run.rollouts.iterdir()) == ["step_000001.jsonl", "step_000002.jsonl"]
        run.rewind(7, stage="sft")
        assert run.metrics.read_text() == "".join(lines[:2])
        assert list(run.rollouts.iterdir()) == []
        run.rewind(None)
        assert run.metrics.read_text() == ""


def test_secrets_reach_neither_the_recipe_nor_the_manifest(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "swordfish-1234")
    resolved = RESOLVED | {"rewards": {"judge": {"arguments": {"api_key": "abc123", "url": "http://u:pw@host"}}}}
    command = ["flatpeak", "train", "rewards.judge.arguments.key=swordfish-1234", "hf_abcdefghijKLMNOP1234"]
    with create(tmp_path, resolved=resolved, command=command) as run:
        written = b"".join(path.read_bytes() for path in run.path.iterdir() if path.is_file()).decode()
    for secret in ("swordfish-1234", "abc123", "pw@", "hf_abcdefghijKLMNOP1234"):
        assert secret not in written
    # The redacted recipe is no changed recipe.
    create(tmp_path, resolved=resolved, resume=True).close()


@pytest.mark.parametrize(
    ("key", "value"),
    [("rewards.f.arguments.note", "see [redacted]"), ("tracking.mlflow.uri", "http://[redacted]@host")],
)
def test_a_secret_that_is_missing_within_a_text_is_asked_for_and_a_prompt_may_say_redacted(key, value):
    check_no_secret_missing({"prompt": {"system": "Write [redacted] for names."}})
    with pytest.raises(UserError, match=f"^{key} was left out"):
        check_no_secret_missing({key: value})


@pytest.mark.parametrize("name", ["", "..", "../up", "/tmp/x", "a/../b"])
def test_a_name_that_leaves_the_directory_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"run\.name="):
        create(tmp_path, name=name)


@pytest.mark.parametrize("name", ["n" * 256, "sweep/" + "é" * 128, "a\0b"])
def test_a_name_that_no_directory_can_have_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"run\.name has a part of (256|3|5) bytes") as error:
        create(tmp_path, name=name)
    assert "\0" not in str(error.value)
    create(tmp_path, name="n" * 255).close()


@pytest.mark.parametrize("content", ["", "a: [\n", "- 1\n"])
def test_a_damaged_recipe_of_a_run_is_named_and_the_run_goes_on_without_it(tmp_path, content):
    with create(tmp_path) as run:
        run.config.write_text(content)
    with pytest.raises(UserError, match=r"one/config\.yaml is empty or damaged, .* or delete it") as error:
        create(tmp_path, resume=True)
    assert len(str(error.value).splitlines()) == 1
    run.config.unlink()
    create(tmp_path, resume=True).close()


def test_a_run_whose_recipe_was_deleted_is_resumed_and_keeps_its_history(tmp_path):
    with create(tmp_path, command=["flatpeak", "train"]) as run:
        run.config.unlink()
    with create(tmp_path, resume=True, command=["flatpeak", "again"]) as run:
        assert run.resumed
        starts = read_starts(run.manifest)
    assert [start["command"][1] for start in starts] == ["train", "again"]


def test_a_name_may_have_folders(tmp_path):
    with create(tmp_path, name="sweep/01") as run:
        assert run.path == tmp_path / "sweep" / "01"


def test_a_commit_is_named_only_for_files_that_git_tracks(tmp_path):
    def git(*arguments):
        command = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x", *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert git_commit(tmp_path) is None
    git("init")
    (tmp_path / "in.py").write_text("1")
    (tmp_path / "out.py").write_text("1")
    git("add", "in.py")
    git("commit", "-m", "x")
    commit = git("rev-parse", "HEAD")
    assert git_commit(tmp_path / "in.py") == commit
    assert git_commit(tmp_path / "out.py") is None
    assert git_commit(tmp_path) == commit
    (tmp_path / "in.py").write_text("2")
    assert git_commit(tmp_path / "in.py") == f"{commit}-dirty"


def test_paths_of_a_foreign_folder_are_no_run(tmp_path):
    (tmp_path / "manifest.json").write_text('{"versions": ["other"]}')
    assert not RunPaths(tmp_path).is_run()
    create(tmp_path).close()
    assert RunPaths(tmp_path / "one").is_run()


def look(tmp_path, resolved=RESOLVED, name="one", *, resume=False, overwrite=False):
    section = RunSectionConfig(name=name, directory=str(tmp_path))
    return check_start(section, resolved, resume=resume, overwrite=overwrite)


def refusal(call, *arguments, **options):
    with pytest.raises(UserError) as error:
        call(*arguments, **options)
    return str(error.value)


def test_a_look_at_a_start_refuses_what_the_start_would_and_writes_nothing(tmp_path):
    create(tmp_path).close()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.yaml").write_text("mine: 1\n")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    cases = [
        ((tmp_path,), {}),
        ((tmp_path,), {"resume": True, "overwrite": True}),
        ((tmp_path, changed("optimizer", learning_rate=2e-5)), {"resume": True}),
        ((tmp_path, RESOLVED, "other"), {}),
        ((tmp_path, RESOLVED, "../one"), {}),
    ]
    for arguments, options in cases:
        assert refusal(look, *arguments, **options) == refusal(create, *arguments, **options)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_a_look_at_a_start_passes_what_may_begin(tmp_path):
    look(tmp_path)
    assert list(tmp_path.iterdir()) == []
    look(tmp_path, resume=True)
    create(tmp_path).close()
    look(tmp_path, resume=True)
    look(tmp_path, changed("training", steps=200), resume=True)
    look(tmp_path, overwrite=True)


def test_a_look_at_a_start_names_who_writes_to_the_run(tmp_path):
    with create(tmp_path):
        assert f"is being written by process {os.getpid()} on " in refusal(look, tmp_path)
        assert refusal(look, tmp_path, overwrite=True) == refusal(create, tmp_path, overwrite=True)
    look(tmp_path, resume=True)
