"""Configuration of trackers. Keys are not settings: they come from the environment or from a library's login."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from flatpeak.utils.redaction import redact
from flatpeak.utils.schema import StrictConfig

_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]*")
_URI = re.compile(r"(https?|sqlite|postgresql|mysql|mssql)(\+\w+)?:/{2,}|file:|databricks|/")
_LONGEST_TAG = 60
"""Maximum length of `name=value`; Weights & Biases accepts 64 characters."""


class _ProjectConfig(StrictConfig):
    project: str = "flatpeak"
    """The project in which the run is recorded."""

    @field_validator("project")
    @classmethod
    def _usable(cls, value: str) -> str:
        if not _PROJECT.fullmatch(value) or len(value) > 100:
            raise ValueError(
                f"project={value!r} of a tracker: use up to 100 letters, digits, spaces, and . _ -, "
                "a letter or digit first"
            )
        return value


class WandbConfig(_ProjectConfig):
    """A run in Weights & Biases."""

    entity: str | None = None
    """User or team; null: the login's default."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """online; or offline, which keeps the run on this machine. auto: WANDB_MODE if it is set, else online if a key and
    a network are available, else offline."""
    directory: str | None = None
    """The directory in which the folder `wandb` is created; null: `tracking` in the run's directory."""


class TensorBoardConfig(StrictConfig):
    """Event files of TensorBoard."""

    directory: str | None = None
    """The directory in which a folder named after the run is created, with the suffix -2 if the name is taken; null:
    `tracking/tensorboard` in the run's directory."""


class TrackioConfig(_ProjectConfig):
    """A run in trackio's local store, whose location the environment variable TRACKIO_DIR sets."""


class MlflowConfig(StrictConfig):
    """A run in MLflow."""

    experiment: Annotated[str, Field(min_length=1, max_length=200)] = "flatpeak"
    """The experiment in which the run is recorded."""
    uri: str | None = None
    """The tracking store, a server or a database; null: MLFLOW_TRACKING_URI, else `mlflow.db` in the working
    directory."""

    @field_validator("uri")
    @classmethod
    def _known_kind(cls, value: str | None) -> str | None:
        if value is not None and not _URI.match(value):
            raise ValueError(
                f"tracking.mlflow.uri={redact(value)!r} is not the address of a store: write http://HOST:PORT, "
                "or sqlite:///FILE for a database"
            )
        return value


class TrackingConfig(StrictConfig):
    """The trackers of a run, and what they record in addition to its metrics."""

    wandb: WandbConfig | None = None
    """Record the run with Weights & Biases; `{}`: with the defaults; null: do not record."""
    tensorboard: TensorBoardConfig | None = None
    """Write TensorBoard event files; `{}`: with the defaults; null: write none."""
    trackio: TrackioConfig | None = None
    """Record the run with trackio; `{}`: with the defaults; null: do not record."""
    mlflow: MlflowConfig | None = None
    """Record the run with MLflow; `{}`: with the defaults; null: do not record."""
    group: str | None = None
    """The group under which runs are shown; null: none. Sweeps set it to the sweep's name unless you give one."""
    tags: dict[str, str | int | float | bool] = Field(default={})
    """Names and values for finding runs; a sweep adds `sweep`, `arm` and `seed`."""
    completions_every: Annotated[int, Field(ge=0)] = 10
    """RL steps between tables of completions; 0: no tables."""
    completions: Annotated[int, Field(ge=1, le=1000)] = 16
    """The number of rows in a table of completions, and in the table of an evaluation's answers."""

    @field_validator("tags")
    @classmethod
    def _short_tags(cls, value: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        for name, content in value.items():
            if not name or len(f"{name}={content}") > _LONGEST_TAG:
                raise ValueError(
                    f"tracking.tags.{name}: a tag's name and value must have 1 to {_LONGEST_TAG} characters together"
                )
        return value
