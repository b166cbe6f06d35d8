"""The Python with vLLM: the search for it, its minimum version, and its installation."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from flatpeak.errors import UserError

PYTHON_VARIABLE: Final = "FLATPEAK_VLLM_PYTHON"
OWN_ENVIRONMENT: Final = Path(".venv-vllm") / "bin" / "python"
OLDEST: Final = "0.32"
"""The first version with the endpoints and settings that flatpeak needs."""
INSTALL_COMMAND: Final = (
    "python3 -m venv .venv-vllm && .venv-vllm/bin/pip install vllm; "
    "for CPUs, in a checkout of flatpeak: make .venv-vllm/installed"
)
"""On a machine without a GPU, the first command downloads gigabytes, and the result does not start."""
INSTALL: Final = (
    f"vLLM is not installed. It pins its own torch, so install it in a separate environment: {INSTALL_COMMAND}; "
    f"or set {PYTHON_VARIABLE} to a Python that has it"
)


class NoVLLMError(UserError):
    """No Python with vLLM is known."""


def find_python(named: str | None = None) -> Path:
    """A Python with vLLM: `named`, FLATPEAK_VLLM_PYTHON, .venv-vllm's, or this one."""
    for where, path in (("--python", named), (PYTHON_VARIABLE, os.environ.get(PYTHON_VARIABLE))):
        if path:
            program = shutil.which(path)
            if program is None:
                raise UserError(f"{where}={path}: no such program; give the python of an environment with vLLM")
            return Path(program).absolute()  # not resolved, because the link determines the environment
    if OWN_ENVIRONMENT.exists():
        return OWN_ENVIRONMENT.absolute()
    if find_spec("vllm") is not None:
        return Path(sys.executable)
    raise NoVLLMError(INSTALL)
