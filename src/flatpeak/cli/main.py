"""The `flatpeak` command: one function per command, errors as lines and exit codes."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from io import TextIOWrapper
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from flatpeak.cli import evaluate, publish, recipes, report, train
from flatpeak.config.foreign_names import translate
from flatpeak.distributed.launch import LOST_RANK_CODE, is_repeated, job_rank, job_size
from flatpeak.errors import LostRankError, ReportedElsewhereError, RunError, UserError, explanation, nearest

_python_format = warnings.formatwarning
_USAGE_ERROR: Final = typer.BadParameter.__mro__[1]
"""The class of typer's errors about arguments; typer exports only this subclass of it."""
ELSEWHERE: Final = {
    "compare": "flatpeak report RUN RUN compares runs, flatpeak eval MODEL MODEL compares models",
    "evaluate": "flatpeak eval MODEL",
    "generate": "flatpeak chat MODEL",
    "help": "flatpeak --help",
    "version": "flatpeak --version",
}
"""Names of commands that users look for, and where to find what they want."""


class CommandGroup(TyperGroup):
    """The commands of flatpeak, with a hint if a command has another name."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command with which the arguments begin. Raises UserError if another command does what its name says."""
        if args[0] in ELSEWHERE:
            raise UserError(f"no command {args[0]}: {ELSEWHERE[args[0]]}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands in groups."""
        commands: dict[str, Any] = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        longest = max(map(len, commands))
        for title in dict.fromkeys(command.rich_help_panel for command in commands.values()):
            rows = [
                (name.ljust(longest), command.get_short_help_str(formatter.width - longest - 6))
                for name, command in commands.items()
                if command.rich_help_panel == title
            ]
            with formatter.section(title):
                formatter.write_dl(rows)


class SettingsCommand(TyperCommand):
    """A command that takes settings as KEY=VALUE."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Raises UserError if a setting is written as an option, or if there is no recipe."""
        options = [name for parameter in self.get_params(ctx) for name in parameter.opts]
        for argument, following in pairwise([*args, ""]):
            if _is_setting(argument.partition("=")[0], options):
                raise UserError(_without_dashes(argument, following))
        first = next((argument for argument in args if not argument.startswith("-")), "")
        needs_recipe = any(one.name == "recipe" and one.param_type_name == "argument" for one in self.params)
        is_missing = not first or ("=" in first and not Path(first).exists())
        if needs_recipe and is_missing and "--help" not in args:
            raise UserError(
                "RECIPE is missing: give a YAML file or a shipped recipe, such as flatpeak:demo, flatpeak:tasks/gsm8k "
                "or flatpeak:math_qwen_24gb; `flatpeak recipes` lists them"
                + (f" ({first} comes after it)" if first else "")
            )
        return super().parse_args(ctx, args)


def _is_setting(name: str, options: list[str]) -> bool:
    """Whether an unknown option must be meant as a setting: by its characters, or as a known or a distant name."""
    if not name.startswith("--") or len(name) == 2 or name in options or name.replace("_", "-") in options:
        return False
    return "_" in name or "." in name or translate([name[2:]]) is not None or not nearest(name, options)


def _without_dashes(argument: str, following: str) -> str:
    from flatpeak.config.load import apply_overrides, parse_config

    key, equals, value = argument.removeprefix("--").partition("=")
    key, value = key.replace("-", "_"), value if equals else following
    try:
        parse_config(apply_overrides({}, [f"{key}={value}"]))
    except UserError as error:
        if str(error).startswith("unknown key"):
            return f"--{key}: settings are key=value, without dashes; {error}"
    return f"--{key}: settings are key=value, without dashes: {key}={value}"


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON list of objects.")] = False,
) -> None:
    """Check this machine and installation, and name a fix for each problem.

    Changes and downloads nothing. The exit code is 1 if there is a problem, else 0.
    """
    from flatpeak.apps.doctor.checks import report

    raise typer.Exit(report(as_json=as_json))


app = typer.Typer(
    name="flatpeak",
    cls=CommandGroup,
    help="GRPO post-training that climbs to flat reward peaks. A recipe is a YAML file, or a shipped one such as "
    "flatpeak:demo; key.path=value changes any of its settings.",
    add_completion=True,
    no_args_is_help=True,
    # Plain help, because importing rich to draw boxes would double the time of `--help`.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
TRAIN, LOOK, PREPARE, SHARE = "Train", "Look at runs and models", "Prepare", "Share"
# The list of commands would cut off the first sentence of some help texts; these have a shorter one.
for name, command, title, is_changed_by_settings, short_help in (
    ("demo", train.demo, TRAIN, True, None),
    ("train", train.train, TRAIN, True, "Train by reinforcement learning, after SFT if set."),
    ("sft", train.sft, TRAIN, True, None),
    ("reward-model", train.reward_model, TRAIN, True, None),
    ("fork", train.fork, TRAIN, True, "Train on from a checkpoint, with changed settings."),
    ("sweep", train.sweep, TRAIN, True, "Run arms, axes and seeds in parallel, into one table."),
    ("report", report.report, LOOK, False, "Rebuild report pages; compare runs, or a sweep's arms."),
    ("explain", report.explain, LOOK, False, "Show one group of a step as the algorithm saw it."),
    ("patterns", report.patterns, LOOK, False, "Show what the reward pays for in any prompt."),
    ("chat", evaluate.chat, LOOK, False, None),
    ("eval", evaluate.evaluate, LOOK, True, None),
    ("grade", evaluate.grade, LOOK, False, "Grade answers against gold answers."),
    ("recipes", recipes.recipes, PREPARE, False, "List the shipped recipes, or print one."),
    ("settings", recipes.settings, PREPARE, False, "Explain the settings of a recipe."),
    ("plan", recipes.plan, PREPARE, True, "Show what a recipe will run, and whether it fits."),
    ("doctor", doctor, PREPARE, False, "Check this machine and installation."),
    ("serve", publish.serve, PREPARE, False, "Start a vLLM server for rollouts."),
    ("export", publish.export, SHARE, False, "Write a run's model as one Hugging Face directory."),
    ("push", publish.push, SHARE, False, "Upload a run's model to the Hugging Face Hub."),
):
    kind = SettingsCommand if is_changed_by_settings else TyperCommand
    app.command(name, cls=kind, rich_help_panel=title, short_help=short_help)(command)


@app.callback(invoke_without_command=True)
def version(show: bool = typer.Option(False, "--version", help="Show the version and exit.")) -> None:
    """The options of `flatpeak` itself."""
    if show:
        from flatpeak import __version__

        typer.echo(f"flatpeak {__version__}")
        raise typer.Exit


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 failed, 2 bad command or recipe, 130 and 143 stopped by a signal."""
    atexit.register(gc.freeze)  # the interpreter would search all of torch for garbage as it ends, for a second
    warnings.formatwarning = _format_warning
    _open_streams()
    try:
        if (code := _run_doctor(sys.argv[1:])) is not None:
            sys.exit(code)
        sys.exit(app(prog_name="flatpeak", standalone_mode=False))
    except ReportedElsewhereError:
        sys.exit(0)  # the process that reports the error ends the run with its code
    except LostRankError:
        sys.exit(LOST_RANK_CODE)
    except UserError as error:
        if is_repeated():
            sys.exit(0)
        _fail(f"error: {' '.join(str(error).split())}", code=1 if isinstance(error, RunError) else 2)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, _USAGE_ERROR):
            _fail(_usage_text(error), code=2)
        line = explanation(error)
        _fail(traceback.format_exc().rstrip() if line is None else f"error: {' '.join(line.split())}", code=1)


def _usage_text(error: Any) -> str:
    """An error in the arguments as one line; without any arguments, the help text."""
    text = error.format_message().rstrip(".")
    if "\n" in text:
        return str(text)
    command = error.ctx.command_path if error.ctx is not None else "flatpeak"
    return f"error: {text[0].lower()}{text[1:]} (see {command} --help)"


def _run_doctor(arguments: Sequence[str]) -> int | None:
    """Run the doctor without typer's parsing of arguments, which needs pydantic; None for another command."""
    if list(arguments) not in (["doctor"], ["doctor", "--json"]):
        return None
    from flatpeak.apps.doctor.checks import main

    return main(as_json="--json" in arguments)


def _open_streams() -> None:
    """Open standard streams that cron or a supervisor has closed as null devices, for child processes too.

    Standard output that is open escapes characters that its encoding lacks, as standard error does.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115 - open until the process ends
            os.set_inheritable(stream.fileno(), True)  # it has the free number, which a run's file would get next
            setattr(sys, name, stream)
    if isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")


def _format_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """A warning by flatpeak as one line, like a notice; warnings of other libraries as Python shows them."""
    own = Path(filename).is_relative_to(Path(__file__).parents[1])
    return f"warning: {message}\n" if own else _python_format(message, category, filename, lineno, line)


def _fail(text: str, *, code: int) -> None:
    from flatpeak.utils.redaction import redact

    whose = f"rank {job_rank()}: " if job_size() > 1 and code == 1 else ""
    typer.echo(redact(whose + text), err=True)
    sys.exit(code)
