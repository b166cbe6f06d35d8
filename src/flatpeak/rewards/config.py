"""Configuration of rewards: a mapping from a component's name to one of these, each of which builds its scorer.

A scorer's dependencies are imported when it is built: reading a recipe loads neither torch nor a grader.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, model_validator

from flatpeak.errors import UserError
from flatpeak.rewards.base import ChoiceExtraction, MathExtraction, NumberExtraction, TextExtraction
from flatpeak.rewards.component_config import ComponentConfig
from flatpeak.rewards.judge.config import JudgeConfig

if TYPE_CHECKING:
    from flatpeak.rewards.base import Scorer


class MathConfig(ComponentConfig):
    """1 if the last box or answer block is mathematically equal to the gold answer, else 0."""

    type: Literal["math"] = "math"
    extraction: MathExtraction = "auto"
    """`auto`: the last box or answer block. `boxed`: the last box. `any`: like auto; if there is neither box nor block,
    `#### x`, or a short text as a whole. `r1_zero`: the last answer block of a completion in the form
    `</think> <answer>...</answer>`."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 2.0
    """Seconds for an answer that the rules cannot decide; an answer that takes longer is wrong."""
    workers: Annotated[int, Field(ge=1)] = 2
    """Processes for answers that the rules cannot decide, started when the first such answer comes."""
    evaluated: bool = False
    """Require an answer to be worked out as far as the gold answer: it is wrong if it leaves operations that the gold
    answer lacks, or is copied from the question."""

    def build(self, name: str) -> Scorer:
        """The grader of extracted answers, with worker processes of its own."""
        from flatpeak.rewards.math_reward import MathReward

        return MathReward(self.extraction, timeout=self.timeout, workers=self.workers, evaluated=self.evaluated)


class SequenceClassifierConfig(ComponentConfig):
    """The score that a sequence-classification model gives to question and completion."""

    type: Literal["reward_model"] = "reward_model"
    path: str
    """A run of `flatpeak reward-model`, a checkpoint's directory, or a Hub name."""
    revision: str | None = None
    """A branch, tag or commit of a Hub name; null: main."""
    device: str = "auto"
    """auto: cuda if available, else cpu."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The type of the reward model's weights."""
    template: str = "auto"
    """auto: the template that the model was trained with, if recorded, else its tokenizer's chat template. chat. plain:
    question and completion, separated by an empty line. Or a text file with {prompt} and {completion} in it."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """The most tokens of a text. If a text is longer, the beginning of the question is cut off, and the completion
    stays whole; a completion that does not fit even without its question has no score. null: the limit in training,
    else the model's context."""
    batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens per forward pass, including padding. null: 4096 on a CPU, else 32768."""
    label: Annotated[int, Field(ge=0)] | None = None
    """The index, from 0, of the output to use as score if the model has several; null: it has only one."""
    normalization: Literal["none", "standardize"] = "none"
    """none: scores as the model gives them. standardize: (score - mean) / std, with the statistics recorded with the
    model unless `mean` and `std` are given."""
    mean: float | None = None
    """With standardize: the mean of the scores; null: the recorded mean."""
    std: Annotated[float, Field(gt=0)] | None = None
    """With standardize: the standard deviation of the scores; null: the recorded one."""
    clip: tuple[float, float] | None = None
    """The smallest and the largest score, after normalization; null: no bounds."""

    @model_validator(mode="after")
    def _consistent(self) -> SequenceClassifierConfig:
        if (self.mean is None) != (self.std is None):
            raise ValueError("a reward model's mean and std belong together: give both, or neither")
        if self.mean is not None and self.normalization == "none":
            raise ValueError("a reward model's mean and std do nothing without normalization=standardize: set it")
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            raise ValueError(f"clip={list(self.clip)}: give the smallest score first, then a larger one")
        return self

    def build(self, name: str) -> Scorer:
        """The loaded model; UserError if it does not load or does not fit the settings."""
        from flatpeak.rewards.reward_model import load_scorer

        return load_scorer(where=f"rewards.{name}", **self.model_dump(exclude={"type", "weight"}))


class NumberConfig(ComponentConfig):
    """1 if the number found in the completion equals the gold number, else 0."""

    type: Literal["number"] = "number"
    extraction: NumberExtraction = "whole"
    """The place of the number. whole: the whole text after the thinking. answer_tag: the last answer block. boxed: the
    last box. last_number: the last number after the thinking. gsm8k_strict: the last `#### 18`, unless it is part of a
    longer number or list. gsm8k_flexible: the last number anywhere, as in lm-evaluation-harness."""
    evaluated: bool = False
    """Require the answer to be worked out, as for `math`: `144/12` and `15 + 6/2` are not answers. Only for extractions
    that read a text as a whole: `last_number` and the two for GSM8K read digits."""

    def build(self, name: str) -> Scorer:
        """The rule that compares numbers."""
        from flatpeak.rewards.numeric_answer import NumberReward

        # A reward that is only watched may know the truth for some rows alone.
        return NumberReward(extraction=self.extraction, evaluated=self.evaluated, numbers_only=bool(self.weight))


class ExactConfig(ComponentConfig):
    """1 if the text found in the completion is a gold answer of the row, else 0; spaces and line breaks count alike."""

    type: Literal["exact"] = "exact"
    extraction: TextExtraction = "whole"
    """The place of the answer. whole: all text after the thinking. answer_tag: the last answer block. boxed: the last
    box. last_line: the last line that is not blank."""
    ignore_case: bool = False
    """Whether `Paris` and `paris` are the same answer."""

    def build(self, name: str) -> Scorer:
        """The rule that compares texts."""
        from flatpeak.rewards.exact import ExactReward

        return ExactReward(extraction=self.extraction, ignore_case=self.ignore_case)


class FormatConfig(ComponentConfig):
    """A third for each rule of the r1_zero form: the thinking is closed, one answer block, nothing around them."""

    type: Literal["format"] = "format"

    def build(self, name: str) -> Scorer:
        """The rule that checks the tags."""
        from flatpeak.rewards.format import FormatReward

        return FormatReward()


class LengthConfig(ComponentConfig):
    """1 up to `target` tokens, falling linearly to 0 at `limit`."""

    type: Literal["length"] = "length"
    target: Annotated[int, Field(ge=0)]
    """The most tokens with score 1."""
    limit: Annotated[int, Field(ge=1)]
    """The number of tokens from which the score is 0; more than `target`."""

    @model_validator(mode="after")
    def _limit_beyond_target(self) -> LengthConfig:
        if self.limit <= self.target:
            raise ValueError(f"limit={self.limit} must be greater than target={self.target}")
        return self

    def build(self, name: str) -> Scorer:
        """The rule that counts sampled tokens."""
        from flatpeak.rewards.format import LengthReward

        return LengthReward(target=self.target, limit=self.limit)


class EnvironmentConfig(ComponentConfig):
    """The reward that an episode's environment gives; missing where it gives none."""

    type: Literal["environment"] = "environment"

    def build(self, name: str) -> Scorer:
        """The rule that passes it on."""
        from flatpeak.rewards.format import EnvironmentReward

        return EnvironmentReward()


class CountdownConfig(ComponentConfig):
    """1 if the arithmetic in the answer block uses each of the row's `nums` once and makes its `target`."""

    type: Literal["countdown"] = "countdown"
    format_score: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The score of an answer block without a correct expression; 0.1 in TinyZero's reward."""

    def build(self, name: str) -> Scorer:
        """The rule that evaluates the arithmetic."""
        from flatpeak.rewards.countdown import CountdownReward

        return CountdownReward(format_score=self.format_score)


class ReasoningGymRewardConfig(ComponentConfig):
    """The score that a reasoning-gym data set gives to the answer."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    extraction: Literal["answer_tag", "whole"] = "answer_tag"
    """The text to score. answer_tag: the last answer block after the thinking. whole: everything after the thinking."""
    timeout: Annotated[float, Field(ge=0.1, allow_inf_nan=False)] = 5.0
    """Seconds that a worker process may take for one answer; if it takes longer, the score is 0."""

    def build(self, name: str) -> Scorer:
        """The scorer that calls the data set, in a worker process if there are any."""
        from flatpeak.rewards.reasoning_gym import ReasoningGymReward

        return ReasoningGymReward(extraction=self.extraction, timeout=self.timeout)


class ChoiceConfig(ComponentConfig):
    """1 if the letter found in the completion is the gold letter of a multiple-choice question, else 0."""

    type: Literal["choice"] = "choice"
    extraction: ChoiceExtraction = "robust"
    """robust: the last stated letter. letter: the first letter of the completion. official: MMLU-Pro's extraction."""

    def build(self, name: str) -> Scorer:
        """The rule that compares letters."""
        from flatpeak.rewards.multiple_choice import ChoiceReward

        return ChoiceReward(extraction=self.extraction)


class FunctionConfig(ComponentConfig):
    """Your function, module:name or file.py:name; its parameter names determine how it is called."""

    type: Literal["function"] = "function"
    function: str
    """The function: file.py:name or module:name."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments, equal in every call."""
    timeout: Annotated[float, Field(ge=0.1, allow_inf_nan=False)] | Literal["auto"] | None = "auto"
    """Seconds that one call may take in a worker process; if it takes longer, its completions have no score. auto:
    run.grading_timeout for a function of one completion or one group; async functions and functions of all completions
    are called in the trainer's process, without a limit. null: call any function there. A number: a worker calls any
    function."""
    on_timeout: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The score of completions whose call ran out of time, memory or the step's run.grading_budget. null: the score is
    missing, so that nothing is learned from them."""

    @model_validator(mode="after")
    def _can_time_out(self) -> FunctionConfig:
        if self.on_timeout is not None and self.timeout is None:
            raise ValueError("on_timeout has no effect with timeout: null, which calls the function in this process")
        return self

    def build(self, name: str) -> Scorer:
        """The loaded function; UserError if it is missing, or does not match these settings."""
        from flatpeak.rewards.functions import FunctionReward
        from flatpeak.utils.user_code import load_function

        try:
            return FunctionReward(
                load_function(self.function),
                arguments=self.arguments,
                timeout=self.timeout,
                on_timeout=self.on_timeout,
            )
        except UserError as error:
            raise UserError(f"rewards.{name}: {error}") from error


RewardConfig = Annotated[
    NumberConfig
    | ExactConfig
    | FormatConfig
    | ChoiceConfig
    | LengthConfig
    | EnvironmentConfig
    | CountdownConfig
    | ReasoningGymRewardConfig
    | MathConfig
    | FunctionConfig
    | JudgeConfig
    | SequenceClassifierConfig,
    Field(discriminator="type"),
]
