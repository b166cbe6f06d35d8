"""The configuration of rollouts (the recipe's section `rollout`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from flatpeak.types import SamplingParams
from flatpeak.utils.schema import StrictConfig


class VLLMConfig(StrictConfig):
    """vLLM servers that draw the completions, asked over HTTP (docs/engines.md); `flatpeak serve` starts one."""

    type: Literal["vllm"]
    urls: Annotated[tuple[str, ...], Field(min_length=1)] = ("http://127.0.0.1:8000",)
    """The servers; requests go to the one with the fewest at work. Where they are may change on a resume."""
    model: str | None = None
    """The name under which the servers serve the model; null: the first that they list."""
    sync: Literal["endpoint", "reload"] = "reload"
    """reload: weights are written to `directory`, and the servers load them. endpoint: they are sent from the trainer's
    memory, by sockets or NCCL as the servers were started; adapters are written to `directory` all the same."""
    directory: str | None = None
    """A directory that trainer and servers share, for weights and adapters; null: a temporary one, for servers on the
    trainer's machine."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that an answer may take, and that a run waits while no server can be reached."""
    max_concurrency: Annotated[int, Field(ge=1)] = 64
    """Most groups that one server is asked for at a time."""
    api_key_env: str | None = None
    """The environment variable that holds the servers' key; null: none."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            _check_address(url)
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError(f"urls={list(urls)} has a server twice: name each once")
        return urls


def _check_address(url: str) -> None:
    """ValueError for what is not the address of a server."""
    try:
        parts = urlsplit(url)
        valid = url.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or too large, or a bracket without its other
        valid = False
    if valid and "@" in parts.netloc:
        raise ValueError("urls: an address has a user or password in it: leave them out, and name a key by api_key_env")
    if not valid or parts.query or parts.fragment or not url.isascii() or " " in url or not url.isprintable():
        raise ValueError(f"urls: {url} is no address of a server: write http://HOST:PORT")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"urls: {url} is the address of the endpoints for chat: leave /v1 out")


def _engine_kind(value: object) -> str:
    """Whether an engine is given by its name or as a section."""
    return "vllm" if isinstance(value, VLLMConfig | Mapping) else "name"


class RolloutConfig(StrictConfig):
    """The number of completions that a step draws, their distribution and their engine."""

    prompts_per_step: Annotated[int, Field(ge=1)] = 32
    """Prompts that a step samples completions for, each of which makes a group."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Completions of each prompt; at least 2 where advantages compare those of a group."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The divisor of the logits, as tokens are drawn and wherever training computes log-probabilities: ratio, KL and
    entropy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the smallest set of tokens whose probabilities reach this, after `top_k`; 1: from all.
    Log-probabilities stay those over all tokens."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many of the most probable tokens; 0: from all. Log-probabilities stay those over all tokens."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """The most tokens of a completion; a longer one is cut there, see `objective.truncated`."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """The fewest tokens of a completion: before, no end-of-sequence token is drawn, and no stop string ends it. 0:
    none."""
    stop: tuple[str, ...] = ()
    """Strings, each of which ends a completion once it is complete; it stays part of the text."""
    engine: Annotated[
        Annotated[Literal["auto", "native", "generate"], Tag("name")] | Annotated[VLLMConfig, Tag("vllm")],
        Discriminator(_engine_kind),
    ] = "auto"
    """auto: native where the architecture is proven, else transformers' generate, with a notice. A section of type vllm
    names servers."""
    staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """0: each step draws with the policy that it updates. 1: the next step's completions are drawn while the policy is
    updated, by the policy before that update: by servers or in a second process."""
    kernels: Literal["auto", "torch", "native"] = "auto"
    """The decoder on a CPU, and what computes training passes. auto: kernels in C++ where they serve the model, can be
    compiled or were shipped, and agree with torch on the run's own weights; else torch, with a notice. native: kernels
    or an error. torch: none."""
    max_rows: Annotated[int, Field(ge=1)] = 512
    """The most completions that the native engine or generate decodes side by side; servers have limits of their
    own."""
    batch_invariant: bool = True
    """On a CPU, pad slots and keys so that no bit of a completion depends on what else is decoded. What it costs
    is within the spread of measurements (benchmarks/RESULTS.md), but for very small heads: with those of 8 dimensions
    rollouts of short answers take nearly three times as long."""

    @model_validator(mode="after")
    def _minimum_is_below_maximum(self) -> RolloutConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"rollout.min_new_tokens={self.min_new_tokens} exceeds rollout.max_new_tokens={self.max_new_tokens}, "
                "so that every completion would be cut off: lower one or raise the other"
            )
        return self

    @model_validator(mode="after")
    def _served_sampling(self) -> RolloutConfig:
        """Refuse filters at temperatures at which a server gives the log-probabilities of what is left alone."""
        if isinstance(self.engine, VLLMConfig) and self.temperature != 1:
            for name, off in (("top_p", 1.0), ("top_k", 0), ("min_new_tokens", 0)):
                if getattr(self, name) != off:
                    raise ValueError(
                        f"rollout.{name}={getattr(self, name)} with rollout.engine.type=vllm at "
                        f"rollout.temperature={self.temperature:g}: a server gives the log-probs of the restricted "
                        "distribution, or those at temperature 1, and training needs those of the full one: set "
                        f"rollout.temperature=1, rollout.{name}={off:g}, or rollout.engine=auto"
                    )
        return self

    def sampling(self) -> SamplingParams:
        """The sampling parameters of training rollouts."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop=self.stop,
        )
