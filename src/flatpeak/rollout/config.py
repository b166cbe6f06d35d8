"""The configuration of rollouts (the recipe's section `rollout`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from flatpeak.types import SamplingParams
from flatpeak.utils.schema import StrictConfig


class VLLMConfig(StrictConfig):
    """vLLM servers that sample the completions over HTTP (docs/engines.md); `flatpeak serve` starts one."""

    type: Literal["vllm"]
    urls: Annotated[tuple[str, ...], Field(min_length=1)] = ("http://127.0.0.1:8000",)
    """The addresses of the servers; each request goes to the server with the fewest requests. They may change on a
    resume."""
    model: str | None = None
    """The name of the model on the servers; null: the first name that they list."""
    sync: Literal["endpoint", "reload"] = "reload"
    """reload: the trainer writes weights to `directory`, and the servers load them. endpoint: the trainer sends weights
    from its memory, by sockets or NCCL as the servers were started; adapters are still written to `directory`."""
    directory: str | None = None
    """A directory for weights and adapters that trainer and servers share; null: a temporary directory, if the servers
    run on the trainer's machine."""
    timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds to wait for an answer, and for any server if none can be reached."""
    max_concurrency: Annotated[int, Field(ge=1)] = 64
    """The most groups requested from one server at a time."""
    api_key_env: str | None = None
    """The environment variable with the servers' key; null: no key."""

    @field_validator("urls")
    @classmethod
    def _addresses(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            _check_address(url)
        if len({url.rstrip("/") for url in urls}) < len(urls):
            raise ValueError(f"urls={list(urls)} lists a server twice: list each once")
        return urls


def _check_address(url: str) -> None:
    """ValueError if this is not the address of a server."""
    try:
        parts = urlsplit(url)
        valid = url.startswith(("http://", "https://")) and bool(parts.hostname) and parts.port != 0
    except ValueError:  # the port is not a number or too large, or a bracket is unbalanced
        valid = False
    if valid and "@" in parts.netloc:
        raise ValueError("urls: an address contains a user or password: remove them, and use api_key_env for a key")
    if not valid or parts.query or parts.fragment or not url.isascii() or " " in url or not url.isprintable():
        raise ValueError(f"urls: {url} is not the address of a server: give http://HOST:PORT")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"urls: {url} is the address of the chat endpoints: remove /v1")


def _engine_kind(value: object) -> str:
    """Whether an engine is given by name or as a section."""
    return "vllm" if isinstance(value, VLLMConfig | Mapping) else "name"


class RolloutConfig(StrictConfig):
    """The number of completions that a step samples, their distribution, and the engine."""

    prompts_per_step: Annotated[int, Field(ge=1)] = 32
    """Prompts per step; the completions of a prompt form a group."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Completions per prompt; at least 2 if advantages compare the completions of a group."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The divisor of the logits, both in sampling and in the log-probabilities of training (ratio, KL and entropy)."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the smallest set of tokens whose probabilities add up to this, after `min_p` and `top_k`; 1: from all
    tokens. Ratios and KL are then over the tokens that could be drawn, except with servers."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample from this many of the most probable tokens; 0: from all."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from the tokens of at least this share of the most probable one's probability; 0: from all."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 256
    """The most tokens of a completion; longer completions are cut off, see `objective.truncated`."""
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    """The fewest tokens of a completion: before that, neither end-of-sequence tokens nor stop strings end it. 0: no
    minimum."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion; they remain part of its text."""
    engine: Annotated[
        Annotated[Literal["auto", "native", "generate"], Tag("name")] | Annotated[VLLMConfig, Tag("vllm")],
        Discriminator(_engine_kind),
    ] = "auto"
    """auto: native if the architecture is tested, else transformers' generate, with a notice. A section with type vllm
    gives the servers."""
    staleness: Annotated[int, Field(ge=0, le=1)] = 0
    """0: each step samples with the policy that it updates. 1: servers or a second process sample the next step's
    completions during the update, with the policy from before it."""
    kernels: Literal["auto", "torch", "native"] = "auto"
    """The code for decoding and training passes on a CPU. auto: C++ kernels if they support the model, are shipped or
    can be compiled, and agree with torch on the run's weights; else torch, with a notice. native: kernels, or an error.
    torch: never kernels."""
    max_rows: Annotated[int, Field(ge=1)] = 512
    """The most completions that the native engine or generate decodes at a time; servers have their own limits."""
    batch_invariant: bool = True
    """On a CPU, pad slots and keys so that a completion's bits do not depend on the rest of the batch. The cost is
    within measurement noise (benchmarks/RESULTS.md), except with very small heads: with a head dimension of 8, rollouts
    of short answers take nearly three times as long."""

    @model_validator(mode="after")
    def _minimum_is_below_maximum(self) -> RolloutConfig:
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"rollout.min_new_tokens={self.min_new_tokens} exceeds rollout.max_new_tokens={self.max_new_tokens}, "
                "so every completion would be cut off: lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _served_sampling(self) -> RolloutConfig:
        """Reject filters with temperatures at which a server's log-probabilities cover only the remaining tokens."""
        if isinstance(self.engine, VLLMConfig) and self.temperature != 1:
            for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("min_new_tokens", 0)):
                if getattr(self, name) != off:
                    raise ValueError(
                        f"rollout.{name}={getattr(self, name)} with rollout.engine.type=vllm at "
                        f"rollout.temperature={self.temperature:g}: a server returns log-probs of the restricted "
                        "distribution, or those at temperature 1, but training needs those of the full one: set "
                        f"rollout.temperature=1, rollout.{name}={off:g}, or rollout.engine=auto"
                    )
        return self

    def sampling(self) -> SamplingParams:
        """The sampling parameters of training rollouts."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop=self.stop,
        )
