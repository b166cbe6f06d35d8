"""Runs that are made once and read by many tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.pushed_runs import make_finished_run, make_run_with_keys


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of rules alone; to be read, and changed only in copies."""
    return make_finished_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture(scope="session")
def run_with_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose recipe was given keys."""
    return make_run_with_keys(tmp_path_factory.mktemp("keys") / "home")
