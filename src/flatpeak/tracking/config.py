"""Configuration of trackers. None of them takes a key: keys come from the environment or a library's own login."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator

from flatpeak.utils.redaction import redact
from flatpeak.utils.schema import StrictConfig

_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]*")
_URI = re.compile(r"(https?|sqlite|postgresql|mysql|mssql)(\+\w+)?:/{2,}|file:|databricks|/")
_LONGEST_TAG = 60
"""Characters of `name=value`; Weights & Biases takes 64."""


class _ProjectConfig(StrictConfig):
    project: str = "flatpeak"
    """The project that the run is recorded in."""

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
    """A run of Weights & Biases."""

    entity: str | None = None
    """User or team; null: the default of the login."""
    mode: Literal["auto", "online", "offline"] = "auto"
    """online, or offline, which keeps the run on this machine. auto: WANDB_MODE where it is set, else online where
    there are a key and a network."""
    directory: str | None = None
    """The directory that gets a folder `wandb`; null: `tracking` in the run's own."""


class TensorBoardConfig(StrictConfig):
    """Event files of TensorBoard."""

    directory: str | None = None
    """The directory that gets a folder named after the run, with -2 where another has it; null: `tracking/tensorboard`
    in the run's own."""


class TrackioConfig(_ProjectConfig):
    """A run in trackio's local store, which the environment variable TRACKIO_DIR places."""


class MlflowConfig(StrictConfig):
    """A run of MLflow."""

    experiment: Annotated[str, Field(min_length=1, max_length=200)] = "flatpeak"
    """The experiment that the run is recorded in."""
    uri: str | None = None
    """The tracking store, a server or a database; null: MLFLOW_TRACKING_URI, else `mlflow.db` in the working
    directory."""

    @field_validator("uri")
    @classmethod
    def _known_kind(cls, value: str | None) -> str | None:
        if value is not None and not _URI.match(value):
            raise ValueError(
                f"tracking.mlflow.uri={redact(value)!r} is no address of a store: write http://HOST:PORT, "
                "or sqlite:///FILE for a database"
            )
        return value


class TrackingConfig(StrictConfig):
    """The trackers of a run, and what they get beside its metrics."""

    wandb: WandbConfig | None = None
    """Record the run with Weights & Biases; `{}` takes the defaults, null: do not."""
    tensorboard: TensorBoardConfig | None = None
    """Write event files of TensorBoard; `{}` takes the defaults, null: do not."""
    trackio: TrackioConfig | None = None
    """Record the run with trackio; `{}` takes the defaults, null: do not."""
    mlflow: MlflowConfig | None = None
    """Record the run with MLflow; `{}` takes the defaults, null: do not."""
    group: str | None = None
    """The group that runs are shown in; null: none. A sweep sets its own name where none is given."""
    tags: dict[str, str | int | float | bool] = Field(default={})
    """Names and values to find runs by; a sweep adds `sweep`, `arm` and `seed`."""
    completions_every: Annotated[int, Field(ge=0)] = 10
    """Steps of RL between tables of completions; 0: none."""
    completions: Annotated[int, Field(ge=1, le=1000)] = 16
    """Rows of a table of completions, and of the answers of an evaluation."""

    @field_validator("tags")
    @classmethod
    def _short_tags(cls, value: dict[str, str | int | float | bool]) -> dict[str, str | int | float | bool]:
        for name, content in value.items():
            if not name or len(f"{name}={content}") > _LONGEST_TAG:
                raise ValueError(
                    f"tracking.tags.{name}: a tag's name and value have 1 to {_LONGEST_TAG} characters together"
                )
        return value
