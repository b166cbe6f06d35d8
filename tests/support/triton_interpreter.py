"""Triton in processes of its own: its interpreter and its compiler need no GPU.

It is the installed one, or that of `make .triton/installed`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
BESIDE = TESTS.parent / ".triton"
_BESIDE = (BESIDE / "installed").exists()

has_triton = pytest.mark.skipif(
    not _BESIDE and find_spec("triton") is None, reason="triton is not installed: make .triton/installed"
)
has_interpreter = pytest.mark.skipif(
    not _BESIDE and (find_spec("triton") is None or version("triton").startswith("3.6")),
    reason="triton is not installed (make .triton/installed), or its interpreter is too old for numpy 2.4",
)


def run(*command: str, **environment: str) -> str:
    """What Python prints for these arguments, with Triton on its path."""
    path = os.pathsep.join([str(TESTS), *([str(BESIDE)] if _BESIDE else []), os.environ.get("PYTHONPATH", "")])
    variables = os.environ | {"PYTHONPATH": path} | environment
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    return done.stdout
