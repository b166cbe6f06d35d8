"""Each row of bad_input.yaml, given to what reads it, ends with the message beside it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from flatpeak.config.load import apply_overrides, load_recipe, parse_config
from flatpeak.episodes.build import episode_prompts, read_environment
from flatpeak.errors import UserError
from flatpeak.tasks.config import build_task
from support.tables import read_tables

TABLES = read_tables(Path(__file__).with_name("bad_input.yaml"))
FOLDERS = TABLES.pop("folders")
BASE = {"model": {"path": "somewhere"}}


def cases() -> Iterator[Any]:
    for group, rows in TABLES.items():
        for number, row in enumerate(rows):
            given = row.get("recipe", row.get("task"))
            yield pytest.param(row, id=f"{group} {number}: {json.dumps(row.get('set', given))[:60]}")


def lines(content: Any) -> str:
    """A text as it is, or a row, or a list of rows, as JSON lines."""
    if isinstance(content, str):
        return content
    rows = content if isinstance(content, list) else [content]
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_files(row: dict[str, Any]) -> None:
    """The files of a row into the working directory; null takes one out of its folder, a name ending in / makes one."""
    files = FOLDERS.get(row.get("folder"), {}) | row.get("files", {})
    for name, content in files.items():
        (Path(name) if name.endswith("/") else Path(name).parent).mkdir(parents=True, exist_ok=True)
        if content is not None and not name.endswith("/"):
            Path(name).write_text(lines(content), encoding="utf-8")
    for name, content in row.get("append", {}).items():
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(lines(content))


def read(row: dict[str, Any]) -> None:
    """Load the recipe of a row, apply its overrides, make its task, if the row is about that, and read its tools."""
    recipe = {"task": row["task"]} if "task" in row else row.get("recipe", {})
    loaded = load_recipe(recipe) if isinstance(recipe, str) else recipe
    config = parse_config(apply_overrides(BASE | loaded, row.get("set", [])))
    if "task" in row:
        build_task(config.task)
    environment = read_environment(config.tools, config.environment)
    if environment is not None:
        episode_prompts(config.prompt, environment, config.episodes, Mock())


@pytest.mark.parametrize("row", cases())
def test_bad_input_is_one_line_that_says_what_to_do(
    row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if row.get("task", {}).get("type") == "reasoning_gym":
        pytest.importorskip("reasoning_gym")
    write_files(row)
    with pytest.raises(UserError) as error:
        read(row)
    message = str(error.value).replace(f"{tmp_path}/", "")
    assert "\n" not in message
    assert re.fullmatch(".*".join(map(re.escape, row["says"].split("…"))), message), message
