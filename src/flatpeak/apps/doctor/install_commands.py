"""Commands that install packages, and leave the environment as it is otherwise: its versions, its build of torch."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from flatpeak.apps.doctor.findings import shell_path
from flatpeak.apps.doctor.requirements import has_pip, module_name, requirements, unmet, version

TORCH_COMMANDS: Final = "https://pytorch.org/get-started/locally"
"""The page with the command for each build of torch, which changes with every release."""
_MEMORY_WORDS: Final = ("MemoryError", "annot allocate memory", "failed to map segment", "SIGKILL")
"""Words of errors of too little memory; what ends a process by SIGKILL is the system's own killer."""


def install(needed: Sequence[str], *options: str) -> str:
    """The commands that install these requirements, by what installed the packages before; torch first and alone.

    Builds of torch that PyPI does not have are not at hand by name: their command is on torch's own page.
    """
    torch = [one for one in needed if _name(one) == "torch"]
    conda = [one for one in needed if one not in torch and _is_condas(one)]
    rest = [one for one in needed if one not in torch and one not in conda]
    commands, first = [], ""
    if torch and _is_condas(torch[0]):
        conda = [f"py{torch[0]}", *conda]
    elif torch:
        build = torch_build(version("torch"))
        first = built_torch(torch[0], build, *options) if build else ""
        commands += [] if build else [f"{pip_command()} {_words(torch, options)}"]
    if conda and "--upgrade" in options:
        commands.append(f"conda update {' '.join(map(_name, conda))}")
    elif conda:
        plain = [re.sub(r"\[.*?\]", "", one) for one in conda]
        commands.append(f"conda install {_words(plain, options)}")
    if rest:
        commands.append(f"{pip_command()} {_words(rest, options)}")
    return ", then ".join(filter(None, [first, " && ".join(commands)]))


def reinstall(needed: Sequence[str]) -> str:
    """The commands that install packages anew in the versions that are there, if these fit."""
    if any(version(_name(one)) is None for one in needed):
        return install(needed)
    # A torch for GPUs comes with libraries in packages of their own; a reinstalled peft must not bring another torch.
    alone = [_name(one) for one in needed] != ["torch"] or (version("torch") or "").endswith("+cpu")
    return install([_pinned(one) for one in needed], "--force-reinstall", *(["--no-deps"] if alone else []))


def built_torch(requirement: str, build: str, *options: str) -> str:
    """The words for installing a build of torch, such as cpu or "the highest CUDA", by pip with these options."""
    given = f", with {' '.join(options)}" if options else ""
    return f"install {_words([requirement], ())} built for {build}, as {TORCH_COMMANDS} says{given}"


def replace_torch(requirement: str, which: str) -> str:
    """The words for putting a build of torch for another CUDA, `which`, in the place of the one that is there."""
    if _is_condas(requirement):
        return f"conda install \"pytorch[version='{requirement.removeprefix('torch')}',build='cuda*']\""
    return f"{pip_command('uninstall')} torch, then {built_torch(requirement, which)}"


def import_fix(error: str, needed: Sequence[str]) -> str:
    """The fix of a failed import. `needed`: requirements of the packages at fault, none for flatpeak's own code."""
    missing = re.search(r"No module named '(\w+)", error)
    if outer := _fix_around(error, missing and missing[1]):
        return outer
    if not needed:
        return "report it with this output; until then, install an older version of the package that the error names"
    own = {module_name(_name(one)) for one in needed}
    if missing and missing[1] not in own:
        return _install_module(missing[1], needed)
    lacking = re.search(r"cannot import name .* from '(\w+)|module '(\w+)\S*' has no attribute", error)
    if lacking and own.isdisjoint({*lacking.groups(), "torch"}):
        return install(needed, "--upgrade")  # it is older than what it imports
    if "did not answer" in error:
        return f"try again, as a slow disk may be all; if the same module hangs, {reinstall(needed)}"
    libraries = os.environ.get("LD_LIBRARY_PATH") and (".so" in error or "undefined symbol" in error)
    return ("unset LD_LIBRARY_PATH; if that is not it, " if libraries else "") + reinstall(needed)


def _fix_around(error: str, missing: str | None) -> str | None:
    """The fix of a failed import for which no package is at fault, but what is around them."""
    if is_memory(error):
        return "end other programs, or allow more memory: ulimit -v unlimited, or a larger container"
    if "valid value for backend" in error:  # a notebook hands its own backend on to what it starts
        return "unset MPLBACKEND"
    if missing in sys.stdlib_module_names:  # it was built where a library was not there
        return f"install another Python: this one lacks {missing}, a part of Python's own library"
    return None


def _install_module(module: str, needed: Sequence[str]) -> str:
    """The command for a module that these packages ask for and do not find; its package may have another name."""
    asked = (one.requirement for name in map(_name, needed) for one in unmet(name, requirements(name)))
    line = next((one for one in asked if module_name(_name(one)) == module), None)
    return install([line]) if line else f"install the package that has the module {module}"


def is_memory(error: str) -> bool:
    """Whether an error is a lack of memory, for which there are many words."""
    return any(words in error for words in _MEMORY_WORDS) and "not permitted" not in error


def torch_build(installed: str | None) -> str | None:
    """The build of an installed torch, cpu or cu128 say; None for PyPI's, and for those of other makers."""
    build = re.search(r"\+(cpu|cu\d+|rocm[\d.]+|xpu)$", installed or "")
    return build[1] if build else None


def pip_command(command: str = "install") -> str:
    """The beginning of the command that changes this Python's environment."""
    python = shell_path(sys.executable)
    if not has_pip():  # as uv makes environments
        return f"uv pip {command} --python {python}"
    program = shutil.which("pip")
    # The pip on the path may be another environment's, which would install to no effect.
    own = program is not None and Path(program).absolute().parent == Path(sys.executable).absolute().parent
    return f"{'pip' if own else f'{python} -m pip'} {command}{' -y' if command == 'uninstall' else ''}"


def _words(needed: Sequence[str], options: Sequence[str]) -> str:
    return " ".join([*options, *(f'"{one}"' if set(one) & set("<>=!~;[]* ") else one for one in needed)])


def _pinned(requirement: str) -> str:
    """The version that is there, since the newest one may not fit its neighbours."""
    from packaging.requirements import Requirement

    installed, asked = version(_name(requirement)), Requirement(requirement)
    fits = installed is not None and asked.specifier.contains(installed, prereleases=True)
    return f"{asked.name}=={installed}" if fits else requirement


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0].lower()


def _is_condas(requirement: str) -> bool:
    """Whether conda installed a package: pip would put its own files among conda's."""
    try:
        return (distribution(_name(requirement)).read_text("INSTALLER") or "").strip() == "conda"
    except PackageNotFoundError:
        return False
