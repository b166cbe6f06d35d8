from __future__ import annotations

from collections.abc import Callable

import pytest

from flatpeak.rewards.judge import rate_limits, reward


@pytest.fixture(autouse=True)
def endpoint_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Waits of a few milliseconds, and no endpoint that is taken to be down unless a test says when."""

    def change(*, first_delay: float = 0.001, failures: int = 1000, pause: float = 0.05) -> None:
        monkeypatch.setattr(rate_limits, "FIRST_DELAY", first_delay)
        monkeypatch.setattr(rate_limits, "FAILURES", failures)
        monkeypatch.setattr(rate_limits, "PAUSE", pause)

    change()
    return change


@pytest.fixture
def without_valid_fraction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a judge without verdicts go on."""
    monkeypatch.setattr(reward, "_MIN_VALID_FRACTION", 0.0)
