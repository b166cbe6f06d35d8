"""Hints for mistyped arguments: settings as options, commands under other names, a missing recipe."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

from flatpeak.config.foreign_names import translate
from flatpeak.errors import UserError, nearest

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


class SettingsCommand(TyperCommand):
    """A command that takes settings as KEY=VALUE."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the arguments. Raises UserError if a setting is written as an option, or if there is no recipe."""
        options = [name for parameter in self.get_params(ctx) for name in parameter.opts]
        for argument, following in pairwise([*args, ""]):
            if _is_setting(argument.partition("=")[0], options):
                raise UserError(_without_dashes(argument, following))
        words = [argument for argument in args if not argument.startswith("-")]
        if not words and "recipe" in {parameter.name for parameter in self.params} and "--help" not in args:
            raise UserError(
                "RECIPE is missing: give a YAML file or a shipped recipe, such as flatpeak:demo, flatpeak:tasks/gsm8k "
                "or flatpeak:math_qwen_24gb; `flatpeak recipes` lists them"
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
