"""The command as users start it: a process, its output, its exit code, its time."""

import os
import shlex
import subprocess
import sys

import pytest

from flatpeak.cli import main as entry
from flatpeak.errors import UserError
from support.commands import Done, command

COMMANDS = ("demo", "sft", "train", "sweep", "eval", "chat", "explain", "report", "settings", "recipes")


def in_a_process(code: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, **options)


def test_help_answers_in_half_a_second_without_torch():
    code = (
        "import sys, time\n"
        "start = time.process_time()\n"
        "from flatpeak.cli.main import main\n"
        "sys.argv[1:] = ['--help']\n"
        "try:\n    main()\n"
        "except SystemExit as error:\n    print('exit', error.code)\n"
        "print('seconds', time.process_time() - start)\n"
        "print('heavy', [name for name in ('torch', 'transformers', 'pydantic', 'rich') if name in sys.modules])\n"
    )
    done = in_a_process(code)
    lines = done.stdout.splitlines()
    assert lines[-1] == "heavy []"
    assert float(lines[-2].split()[1]) < 0.5
    assert lines[-3] == "exit 0"
    assert all(f"  {command} " in done.stdout for command in COMMANDS)


def test_the_list_of_commands_cuts_no_sentence_short():
    done = command("--help")
    groups = done.stdout.split("Train:\n")[1].splitlines()
    listed = [line for line in groups if line.startswith("  ")]
    assert {line.split()[0] for line in listed} >= set(COMMANDS)
    assert [line for line in groups if line and line not in listed] == [
        "Look at runs and models:",
        "Prepare:",
        "Share:",
    ]
    assert all(line.endswith(".") and "..." not in line for line in listed), listed


@pytest.mark.parametrize(
    ("word", "completions"),
    [
        ("optimizer.learning", ["optimizer.learning_rate"]),
        ("optim", ["optimizer."]),
        ("task", ["task.", "tasks"]),
        ("nothing", []),
    ],
)
def test_a_shell_completes_the_keys_of_settings(word, completions):
    asked = {"_FLATPEAK_COMPLETE": "complete_bash", "COMP_WORDS": f"flatpeak train flatpeak:demo {word}"}
    done = command(env={**os.environ, **asked, "COMP_CWORD": "3"})
    assert done.stdout.split() == completions


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name):
    done = command(name, "--help")
    assert done.returncode == 0
    assert f"Usage: flatpeak {name} " in done.stdout
    assert "..." not in done.stdout.split("\n\n")[1]


def test_a_typo_in_a_recipe_is_one_line_and_exit_code_2(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {path: x}\n")
    start = os.times()
    start_command = "from flatpeak.cli.main import main; main()"
    done = in_a_process(start_command, "train", "r.yaml", "optimizer.lerning_rate=1e-5", cwd=tmp_path)
    # Computing time, of which a busy machine takes no more: about 0.3 s, to which torch would add seconds.
    assert os.times().children_user - start.children_user < 3
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "error: unknown key optimizer.lerning_rate: did you mean optimizer.learning_rate?\n"
    assert [path.name for path in tmp_path.iterdir()] == ["r.yaml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--json"], "error: RECIPE is missing"),
        (["version"], "error: no command version: flatpeak --version"),
        (
            ["train", "r.yaml", "--learning_rate", "1e-5"],
            "error: --learning_rate: settings are key=value, without dashes; unknown key learning_rate: did you mean "
            "optimizer.learning_rate",
        ),
        (
            ["train", "r.yaml", "--num-generations=8"],
            "without dashes; unknown key num_generations: here it is",
        ),
        (["train", "r.yaml", "--lr", "1e-5"], "without dashes; unknown key lr: here it is optimizer.learning_rate"),
        (["plan", "r.yaml", "--training.steps=3"], "settings are key=value, without dashes: training.steps=3"),
        (["eval", "here", "--evaluation.size", "8"], "settings are key=value, without dashes: evaluation.size=8"),
        (["train", "nothing.yaml"], "error: recipe nothing.yaml not found"),
        (["report", "nowhere"], "error: nowhere is not a run's directory"),
        (["report", "--csv", "nowhere"], "error: nowhere/summary.json does not exist"),
        (["eval", "task.type=gsm8k"], "error: eval needs a model"),
    ],
)
def test_a_bad_command_is_exit_code_2_and_says_why(tmp_path, arguments, message):
    done = command(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_print_config_shows_the_whole_recipe_and_can_be_read_back(tmp_path):
    (tmp_path / "r.yaml").write_text("model: {path: x}\n")
    displayed = command("train", "r.yaml", "optimizer.learning_rate=1e-5", "--print-config", cwd=tmp_path)
    assert displayed.returncode == 0
    assert "learning_rate: 1.0e-05\n" in displayed.stdout
    assert "  group_size: 8\n" in displayed.stdout
    (tmp_path / "all.yaml").write_text(displayed.stdout)
    assert command("sft", "all.yaml", "--print-config", cwd=tmp_path).stdout == displayed.stdout


def test_print_config_leaves_secrets_out_and_a_recipe_without_them_is_not_run(tmp_path):
    (tmp_path / "r.yaml").write_text(
        "model: {path: x}\n"
        "rewards: {f: {type: function, function: 'f.py:f', arguments: {token: tok-987-abc, also: see tok-987-abc}}}\n"
    )
    displayed = command("train", "r.yaml", "--print-config", cwd=tmp_path)
    assert "      token: '[redacted]'\n" in displayed.stdout
    assert "tok-987-abc" not in displayed.stdout
    (tmp_path / "all.yaml").write_text(displayed.stdout)
    refused = command("train", "all.yaml", cwd=tmp_path)
    key = "rewards.f.arguments.token"
    assert (refused.returncode, refused.stderr) == (
        2,
        f"error: {key} was left out of the run's config.yaml because it is a secret: give it again, {key}=...\n",
    )


def test_the_version_is_the_package_s():
    from flatpeak import __version__

    assert command("--version").stdout == f"flatpeak {__version__}\n"


PROBE = """
from flatpeak.cli import main as module
@module.app.command('probe')
def probe() -> None:
    {body}
module.sys.argv[1:] = ['probe']
module.main()
"""


def test_a_command_runs_with_its_streams_closed_and_its_files_have_other_numbers(tmp_path):
    body = f"""from flatpeak.cli.common import open_progress
    file = open({str(tmp_path / "numbers")!r}, 'w')
    with open_progress(module.sys.stderr) as progress:
        progress.notice('seen by no one')
    module.typer.echo('seen by no one')
    file.write(f'{{file.fileno() > 2}} {{module.os.get_inheritable(1)}}')"""
    command = f"exec {shlex.quote(sys.executable)} -c {shlex.quote(PROBE.format(body=body))} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command]).returncode == 0
    assert (tmp_path / "numbers").read_text() == "True True"


def test_a_standard_output_without_a_character_shows_its_code_and_goes_on() -> None:
    code = PROBE.format(body="print('a · b'); print('end')")
    done = in_a_process(code, env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.stdout, done.returncode) == ("a \\xb7 b\nend\n", 0)


def raised(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> Done:
    """How a command ends that raises this."""

    def fail(**options: str) -> None:
        raise error

    monkeypatch.setattr(entry, "app", fail)
    return command("report")


def test_a_user_s_error_is_one_line_even_where_it_has_several(monkeypatch):
    assert raised(monkeypatch, UserError("first\nsecond")) == Done(2, "", "error: first second\n")


def test_any_other_error_is_a_traceback_and_exit_code_1_without_secrets(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "swordfish-123")
    done = raised(monkeypatch, RuntimeError("key swordfish-123"))
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("RuntimeError: key [redacted]\n")


def test_an_interrupt_is_exit_code_130(monkeypatch):
    assert raised(monkeypatch, KeyboardInterrupt()).returncode == 130


def test_a_command_that_ends_leaves_nothing_to_search_for_garbage():
    """With torch and transformers loaded the interpreter would need a second for it."""
    code = (
        "import atexit, gc\n"
        "atexit.register(lambda: print(len(gc.get_objects())))\n"
        "from flatpeak.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    version, objects = done.stdout.splitlines()
    assert version.startswith("flatpeak ")
    assert int(objects) < 1000


@pytest.mark.parametrize(("given", "seen"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
def test_waiting_threads_sleep_unless_the_user_says_otherwise(given, seen):
    names = "module.os.environ['OMP_WAIT_POLICY'], module.os.environ['TOKENIZERS_PARALLELISM']"
    code = PROBE.format(body=f"print({names}, 'torch' in module.sys.modules)")
    unset = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    named = {} if given is None else {"OMP_WAIT_POLICY": given}
    done = in_a_process(code, env={**unset, "TOKENIZERS_PARALLELISM": "true", **named})
    assert done.stdout == f"{seen} true False\n"
