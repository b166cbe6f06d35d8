"""The settings of episodes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from flatpeak.utils.schema import StrictConfig


class EpisodesConfig(StrictConfig):
    """The limits of an episode; rollout.max_new_tokens bounds all tokens after its prompt, answers included."""

    max_turns: Annotated[int, Field(ge=1)] = 8
    """The most messages of the policy. After the last one no tool is called."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens that the policy samples in a turn; null: what rollout.max_new_tokens leaves."""
    max_calls: Annotated[int, Field(ge=1)] | None = None
    """The most calls of tools in an episode; null: as many as the policy writes."""
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds of an episode after which no further turn begins; null: none. Which episodes end by it depends on the
    machine."""
    call_timeout: Annotated[float, Field(gt=0)] = 10.0
    """Seconds for a call of a function, or for all calls of a turn in an environment."""
    answer_tokens: Annotated[int, Field(ge=1)] = 256
    """The most tokens of an answer; a longer one is cut, and says so."""
    format: Literal["auto", "plain"] = "auto"
    """The form of calls and answers. auto: that of the chat template with prompt.template=chat, else plain. plain:
    flatpeak's own text, `<call>name(x=1)</call>` and `<result>2</result>`."""
