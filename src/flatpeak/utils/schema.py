"""The base of every component's configuration. Free of torch, so that a bad recipe fails before torch is imported."""

from pydantic import BaseModel, ConfigDict


class StrictConfig(BaseModel):
    """Frozen, and strict about unknown keys: a typo is an error, never a silently ignored setting."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
