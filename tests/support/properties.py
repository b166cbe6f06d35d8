"""How hypothesis runs here: the same examples every time, without a limit of time and without files."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

repeatable = settings(
    derandomize=True,
    max_examples=60,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
