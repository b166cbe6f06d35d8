"""Pages of results are what their committed tables give."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[1] / "docs" / "results"


@pytest.mark.parametrize("name", ["claims", "real_hacking", "real_model"])
def test_a_page_is_what_the_committed_tables_give(name: str) -> None:
    command = [sys.executable, str(RESULTS / name / "make_report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
