"""The cost of gradient regularization, measured on a tiny run: a smoke test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.cpu import gradreg


def test_every_variant_of_regularization_is_timed(
    recipe: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    path, output = tmp_path / "tiny.yaml", tmp_path / "gradreg.json"
    path.write_text(yaml.safe_dump(recipe(sft={"steps": 1, "batch_size": 4}, rollout={"temperature": 2.0})))
    options = ["--recipe", str(path), "--rounds", "1", "--sft-steps", "1", "--json", str(output)]
    monkeypatch.setattr(sys, "argv", ["gradreg", *options])
    gradreg.main()
    rows = json.loads(output.read_text())["rows"]
    assert [row["name"] for row in rows] == list(gradreg.VARIANTS)
    assert all(row["update_seconds"][0] > 0 and row["step_seconds"][0] > 0 for row in rows)
