"""Configuration of an LLM judge as a reward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

from pydantic import Field, field_validator, model_validator

from flatpeak.rewards.component_config import ComponentConfig
from flatpeak.utils.schema import StrictConfig

if TYPE_CHECKING:
    from flatpeak.rewards.base import Scorer

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
_SECRET_NAME: Final = re.compile(r"(^|_)(api_?key|key|token|secret|password|authorization)$", re.IGNORECASE)

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class EndpointConfig(StrictConfig):
    """An OpenAI-compatible endpoint: a service, or a server of your own (`vllm serve`, `transformers serve`)."""

    type: Literal["endpoint"] = "endpoint"
    base_url: str
    """The address of the endpoint, which ends in /v1 for most servers."""
    model: str
    """The model's name at the endpoint."""
    api_key_env: str | None = None
    """The NAME of the environment variable that holds the key, never the key itself. null: the server wants none."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """More fields for every request, such as {chat_template_kwargs: {enable_thinking: false}}. A
    `max_completion_tokens` here replaces the request's `max_tokens`, as OpenAI's reasoning models want; give both the
    same number."""
    price_input: Price = 0.0
    """Price per million tokens of a prompt; the currency is yours."""
    price_output: Price = 0.0
    """Price per million tokens of a reply."""

    @field_validator("base_url")
    @classmethod
    def _plain_address(cls, value: str) -> str:
        if not value.startswith(("http://", "https://")):
            raise ValueError("backend.base_url must begin with http:// or https://")
        if "@" in value or "?" in value:
            # Not repeated in the message: what stands before the @ is a password.
            raise ValueError(
                "backend.base_url must hold no credentials and no query: name the key in backend.api_key_env"
            )
        return value

    @field_validator("api_key_env")
    @classmethod
    def _a_name(cls, value: str | None) -> str | None:
        if value is not None and not _VARIABLE.fullmatch(value):
            raise ValueError(
                "backend.api_key_env must be the name of an environment variable, such as OPENAI_API_KEY; if a key "
                "stands there, remove it: recipes are copied into run directories"
            )
        return value

    @field_validator("extra_body")
    @classmethod
    def _no_secrets(cls, value: dict[str, Any]) -> dict[str, Any]:
        if any(_SECRET_NAME.search(str(name)) for name in value):
            raise ValueError("backend.extra_body must hold no key or password: name the key in backend.api_key_env")
        return value


class LocalConfig(StrictConfig):
    """A transformers chat model on this machine."""

    type: Literal["local"] = "local"
    path: str
    """A directory or a Hub model, with a chat template."""
    revision: str | None = None
    """Of a Hub model: a branch, tag or commit; null: main."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of the judge's weights; auto: as they are saved."""
    device: str | None = None
    """The torch device, such as cuda:1; null: CUDA where there is one."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Prompts that are decoded side by side."""


class CustomJudgeConfig(StrictConfig):
    """A judge of your own: `factory` (module:name or file.py:name) is called with `arguments` and returns it."""

    type: Literal["custom"] = "custom"
    factory: str
    """The function that returns the judge: file.py:name or module:name."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of that function."""


class BudgetConfig(StrictConfig):
    """Caps for a run, resumed or not; completions beyond them have no score."""

    max_calls: Annotated[int, Field(ge=1)] | None = None
    """The most requests of a run, retries and repairs among them; null: no limit."""
    max_cost: Annotated[float, Field(gt=0)] | None = None
    """The highest cost of a run, in the currency of the prices; failed attempts count as free. null: no limit."""


class CanaryConfig(StrictConfig):
    """Worthless answers that are graded before training, as a test of the judge."""

    enabled: bool = True
    """Whether canaries are graded. The check that a right answer scores more than a wrong one is made all the same."""
    max_false_positive_rate: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Highest share of false positives among the canaries with a verdict; above it, training is refused."""


class JudgeConfig(ComponentConfig):
    """A language model's verdict on the final answer, from 0 to 1; missing where it gives none."""

    type: Literal["judge"] = "judge"
    backend: Annotated[EndpointConfig | LocalConfig | CustomJudgeConfig, Field(discriminator="type")]
    """The judge: an endpoint, a model on this machine, or one of your own."""
    rubric: str = "correctness"
    """A built-in rubric (correctness, weighted, weighted_gated, helpfulness, three_levels) or a YAML file of yours."""
    mode: Literal["score", "pairwise"] = "score"
    """score: marks by the rubric. pairwise: the win rate against the reference answer."""
    show: Literal["final_answer", "whole"] = "final_answer"
    """The text that the judge sees. final_answer: the last answer block, else the last box, else what follows the
    thinking. whole: all of the completion, whose thinking is then rewarded for how it sounds."""
    output: Literal["json_schema", "json"] = "json_schema"
    """The form of the verdict: json_schema, which the endpoint enforces; json, asked for in words."""
    temperature: Annotated[float, Field(ge=0)] | None = 0.0
    """The judge's temperature, 0 for the most probable reply; null sends none, since some models refuse any."""
    max_tokens: Annotated[int, Field(ge=16)] = 1024
    """Limit on the tokens of a reply: rationale and verdict (and thinking, where the judge thinks)."""
    concurrency: Annotated[int, Field(ge=1)] = 16
    """The most requests that wait for a reply at a time."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """The most requests in any 60 seconds; null: no limit."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """The most tokens in any 60 seconds, prompts and replies together; null: no limit. A call reserves `max_tokens` for
    its reply, and gives back what it did not use."""
    timeout: Seconds = 60.0
    """Seconds that one attempt may take."""
    deadline: Seconds | None = 1800.0
    """Seconds that all requests of one step may take; scores without a reply by then are missing. null: no limit."""
    retries: Annotated[int, Field(ge=0)] = 5
    """Further attempts of a request after 408, 409, 429, 500, 502, 503, 504, 529, broken connections and timeouts;
    nothing else is tried again. 0: none."""
    give_up: Seconds = 900.0
    """Seconds without an answer of the endpoint after which the run stops."""
    budget: BudgetConfig = BudgetConfig()
    cache: Path | None = None
    """A SQLite file for verdicts, which runs may share; null: no cache."""
    canaries: CanaryConfig = CanaryConfig()
    shadow: str | None = None
    """Name of a verifier among `rewards`, with weight 0: the gap to its scores is logged. null: none."""

    @model_validator(mode="after")
    def _fits_together(self) -> JudgeConfig:
        if self.budget.max_calls is not None and not isinstance(self.backend, EndpointConfig):
            raise ValueError("budget.max_calls needs backend.type=endpoint: other judges are not counted")
        if self.budget.max_cost is not None:
            priced = (
                isinstance(self.backend, EndpointConfig) and self.backend.price_input + self.backend.price_output > 0
            )
            if not priced:
                raise ValueError("budget.max_cost needs backend.price_input and backend.price_output")
        return self

    def build(self, name: str) -> Scorer:
        """The judge and its rubric as a scorer; UserError where the rubric, the key or the judge is not there."""
        from flatpeak.rewards.judge import build_judge_reward

        return build_judge_reward(name, self)
