"""The base class of all configurations. It does not import torch, so a bad recipe fails before torch is imported."""

from pydantic import BaseModel, ConfigDict


class StrictConfig(BaseModel):
    """A frozen model without unknown keys: a typo is an error, never a silently ignored setting."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)
