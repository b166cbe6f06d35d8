"""The Hub data sets of a task, by its configuration."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from flatpeak.tasks.config import TaskConfig, hub_datasets, is_generated
from support.tables import read_tables

TABLES = read_tables(__file__)


@pytest.mark.parametrize(("section", "names"), TABLES["data_sets"], ids=str)
def test_a_task_names_the_hub_data_sets_that_it_reads_and_no_others(section: dict[str, Any], names: Any) -> None:
    config: Any = TypeAdapter(TaskConfig).validate_python(section)
    assert list(hub_datasets(config)) == names
    generated = section["type"] == "arithmetic" or (section["type"] == "countdown" and "source" not in section)
    assert is_generated(config) == generated
