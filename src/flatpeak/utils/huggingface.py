"""Whether the Hugging Face Hub answers, found out at once: its client would try for half a minute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

PATIENCE: Final = 5.0
"""Seconds for one attempt to connect."""


@contextmanager
def hub_or_cache() -> Iterator[str | None]:
    """Within it the Hub is asked; or, where it does not answer one request, only what was fetched before is found.

    Yields None, or why the Hub does not answer, for the error message of what was not found. One request a time.
    """
    from huggingface_hub import constants  # here, because a run on local files never needs it

    problem = _problem()
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or problem is not None
    try:
        yield problem
    finally:
        constants.HF_HUB_OFFLINE = before


def _problem() -> str | None:
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and it was not fetched before"
    try:
        # Through the client's own session, which knows the proxies. Any reply will do.
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception as error:  # the session's library is a private choice of the client, and so are its errors
        return f"{constants.ENDPOINT} cannot be reached ({str(error).strip() or type(error).__name__})"
    return None
