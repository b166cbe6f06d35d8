"""The configuration of rollouts (the recipe's section `rollout`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from flatpeak.types import SamplingParams
from flatpeak.utils.schema import StrictConfig


class VLLMConfig(StrictConfig):
    """vLLM servers that draw the completions, contacted over HTTP (docs/engines.md); `flatpeak serve` starts one."""

    type: Literal["vllm"]
    urls: Annotated[tuple[str, ...], Field(min_length=1)] = ("http://127.0.0.1:8000",)
    """The servers' addresses; a request goes to the server with the fewest at work. They may change on a resume."""
    model: str | None = None
    """The name of the model on the servers; null: the first that they list."""
    sync: Literal["endpoint", "reload"] = "reload"
    """reload: weights are written to `directory`, and the servers load them. endpoint: they are sent from the trainer's
    memory, by sockets or NCCL depending on how the servers were started; adapters are still written to `directory`."""
    directory: str | None = None
    """A directory that trainer and servers share, for weights and adapters; null: a temporary one, if the servers run
    on the trainer's machine."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds to wait for an answer, and for a server while none can be reached."""
    max_concurrency: Annotated[int, Field(ge=1)] = 64
    """The most groups that are requested from one server at a time."""
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
    """ValueError if this is not the address of a server."""
    try:
        parts = urlsplit(url)
        valid = url.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number or too large, or a bracket is unbalanced
        valid = False
    if valid and "@" in parts.netloc:
        raise ValueError("urls: an address contains a user or password: leave them out, and name a key by api_key_env")
    if not valid or parts.query or parts.fragment or not url.isascii() or " " in url or not url.isprintable():
        raise ValueError(f"urls: {url} is not the address of a server: write http://HOST:PORT")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"urls: {url} is the address of the endpoints for chat: leave /v1 out")


def _engine_kind(value: object) -> str:
    """Whether an engine is given by its name or as a section."""
    return "vllm" if isinstance(value, VLLMConfig | Mapping) else "name"


class RolloutConfig(StrictConfig):
    """The number of completions that a step draws, their distribution and their engine."""

    prompts_per_step: Annotated[int, Field(ge=1)] = 32
    """Prompts per step; the completions of a prompt form a group."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Completions per prompt; at least 2 if advantages compare the completions of a group."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The divisor of the logits, both when tokens are drawn and when training computes log-probabilities: for ratio, KL
    and entropy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Draw from the smallest set of tokens whose probabilities add up to this, after `top_k`; 1: from all.
    Log-probabilities are still over all tokens."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Draw from this many of the most probable tokens; 0: from all. Log-probabilities are still over all tokens."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """The most tokens of a completion; longer completions are cut there, see `objective.truncated`."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """The fewest tokens of a completion: until then, neither end-of-sequence tokens nor stop strings end it. 0: no
    minimum."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion once complete; they stay part of the text."""
    engine: Annotated[
        Annotated[Literal["auto", "native", "generate"], Tag("name")] | Annotated[VLLMConfig, Tag("vllm")],
        Discriminator(_engine_kind),
    ] = "auto"
    """auto: native if the architecture is proven, else transformers' generate, with a notice. A section of type vllm
    names servers."""
    staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """0: each step draws with the policy that it updates. 1: servers or a second process draw the next step's
    completions during the update, with the policy from before it."""
    kernels: Literal["auto", "torch", "native"] = "auto"
    """The code for decoding and training passes on a CPU. auto: C++ kernels if they support the model, can be compiled
    or were shipped, and agree with torch on the run's weights; else torch, with a notice. native: kernels, or an error.
    torch: never kernels."""
    max_rows: Annotated[int, Field(ge=1)] = 512
    """The most completions that the native engine or generate decodes side by side; servers have their own limits."""
    batch_invariant: bool = True
    """On a CPU, pad slots and keys so that a completion's bits do not depend on what else is decoded. The cost is
    within the spread of measurements (benchmarks/RESULTS.md), except with very small heads: with a head dimension of 8,
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
        """Reject filters at temperatures at which a server's log-probabilities cover only the remaining tokens."""
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
