"""The configuration of held-out evaluation."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from flatpeak.gradreg.config import PerturbedSet, read_perturbed
from flatpeak.tasks.config import TaskConfig
from flatpeak.utils.schema import StrictConfig

Perturbation = Literal["numbers", "distractor", "framing", "rename", "typos"]
ChoiceAnswers = Literal["generate", "rank"]
AUTO = "auto"
_VERDICT = re.compile(r"(sampled/)?(accuracy|pass@\d+|maj@\d+)(/.*)?")


def is_verdict(metric: str) -> bool:
    """Whether a metric counts right answers, which requires a reward part that says which answers are right."""
    return _VERDICT.fullmatch(metric) is not None


class SharpnessConfig(StrictConfig):
    """The fall of the reward under random perturbations of the weights, and the top eigenvalue of the loss's Hessian.

    One evaluation draws (1 + len(radii) * draws) * size * samples completions.
    """

    radii: tuple[Annotated[float, Field(gt=0, le=1000)], ...] = (0.1, 0.3, 0.6)
    """The norms of each tensor's perturbation, relative to the norm of the tensor; at most 1000."""
    draws: Annotated[int, Field(ge=1)] = 8
    """The number of random directions, equal for every radius, evaluation and model; a fall is a mean over them."""
    size: Annotated[int, Field(ge=1)] = 32
    """The number of held-out questions, starting at the first, independent of `evaluation.size`."""
    samples: Annotated[int, Field(ge=1)] = 4
    """Sampled completions per question, drawn with `evaluation.temperature`, `top_p` and `top_k`."""
    perturbed: PerturbedSet = "blocks"
    """The parameters to perturb, named as in `gradient_regularization.perturbed`. In a named set, only tensors with two
    dimensions or more are perturbed: norms and biases stay."""
    eigenvalue: bool = False
    """Estimate the largest eigenvalue of the Hessian of the policy loss, with exact products through the plain model:
    slow and with much memory, like `gradient_regularization.difference=exact`."""
    iterations: Annotated[int, Field(ge=1)] = 20
    """The most Hessian-vector products per estimate."""
    tolerance: Annotated[float, Field(gt=0, lt=1)] = 0.01
    """The residual at which the estimate ends, relative to the eigenvalue."""
    judges: bool = False
    """Allow calls of judges for all of these completions."""

    @field_validator("perturbed", mode="before")
    @classmethod
    def _patterns(cls, value: object) -> object:
        return read_perturbed(value, key="evaluation.sharpness.perturbed")

    @model_validator(mode="after")
    def _consistent(self) -> SharpnessConfig:
        if len({f"{radius:g}" for radius in self.radii}) < len(self.radii):
            raise ValueError(f"evaluation.sharpness.radii={list(self.radii)} has a radius twice: name each once")
        if not self.radii and not self.eigenvalue:
            raise ValueError("evaluation.sharpness.radii is empty: name a radius, or set evaluation.sharpness=null")
        if self.perturbed == ():
            raise ValueError("evaluation.sharpness.perturbed is an empty list: name a pattern, or use blocks or all")
        return self

    def refusal_of(self, judge: str) -> str:
        """The message for a recipe whose reward of this name is a judge that may not be called."""
        return (
            f"evaluation.sharpness would ask rewards.{judge} about {self.completions} completions at each evaluation: "
            "set evaluation.sharpness.judges=true to have that, or evaluation.sharpness=null"
        )

    @property
    def completions(self) -> int:
        """The number of completions that one evaluation draws."""
        return (1 + len(self.radii) * self.draws) * self.size * self.samples


class EvaluationConfig(StrictConfig):
    """Evaluation on one fixed held-out set, with its own sampling settings."""

    every: Annotated[int, Field(ge=0)] = 50
    """Steps between evaluations; 0: none in between. Step 0 and the end are always evaluated."""
    size: Annotated[int, Field(ge=1)] | None = None
    """The number of held-out questions, starting at the first; null: all."""
    final_size: Annotated[int, Field(ge=1)] | None = None
    """The number of held-out questions after SFT, before RL, and at the end; null: `size`."""
    accuracy: str | None = AUTO
    """The reward part that says whether a completion is right, by a score of at least 1. auto: `correctness`; if that
    is a function with scores other than 0 and 1, there is no accuracy, and the reward chooses the best checkpoint.
    null: no part, as in RLHF; then `metric` must be reward or a reward part."""
    metric: str = "accuracy"
    """The metric whose highest value chooses the best checkpoint: accuracy, reward, pass@k, or a reward part."""
    greedy: bool = True
    """Give each question one greedy completion. false, with `samples`: only sampled completions, as in some published
    protocols; then `metric` must be sampled/accuracy, sampled/reward, pass@k or similar."""
    choices: ChoiceAnswers = "generate"
    """The kind of answer to questions with lettered options if `greedy` is on. generate: a completion. rank: the letter
    with the largest log-probability after the prompt, as in published results on MMLU."""
    samples: Annotated[int, Field(ge=0)] = 0
    """Sampled completions per question, in addition to the greedy one; 0: none."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """The temperature of the sampled completions."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sampled completions: draw from the smallest set of tokens whose probabilities add up to this; 1: from all."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sampled completions: draw from this many of the most probable tokens; 0: from all."""
    max_new_tokens: Annotated[int, Field(ge=1)] | None = None
    """The most tokens of a completion; null: rollout.max_new_tokens."""
    stop: tuple[str, ...] | None = None
    """Strings that end a completion; null: rollout.stop."""
    k: tuple[Annotated[int, Field(ge=1)], ...] = (1,)
    """The k of pass@k and maj@k, each at most `samples`."""
    robustness: tuple[Perturbation, ...] = ()
    """Also ask perturbed questions (docs/evaluation.md): before training, after SFT, at the end and in `flatpeak
    eval`."""
    robustness_size: Annotated[int, Field(ge=1)] | None = None
    """The number of questions to perturb, starting at the first evaluated question; null: all."""
    sharpness: SharpnessConfig | None = None
    """At every evaluation, measure how the reward falls as weights are perturbed (docs/evaluation.md); null: do not."""
    sets: dict[str, TaskConfig] | None = None
    """Further evaluation sets by name: tasks whose test parts are measured at every evaluation, as
    `eval/<name>/accuracy`. They do not choose the best checkpoint. null: none."""
    seed: int = 0
    """The seed of sampled completions, perturbed questions and sharpness; every evaluation uses the same."""

    @model_validator(mode="after")
    def _measurable(self) -> EvaluationConfig:
        if not self.greedy and not self.samples:
            raise ValueError("greedy=false with samples=0 asks nothing: set evaluation.samples, or greedy=true")
        if self.choices == "rank" and (not self.greedy or self.accuracy is None):
            missing = "greedy=false" if not self.greedy else "accuracy=null"
            fix = "greedy=true" if not self.greedy else "accuracy to the reward part that reads letters"
            raise ValueError(
                f"choices=rank with {missing}: the most probable letter is the greedy answer, and right or wrong; set "
                f"evaluation.{fix}, or evaluation.choices=generate"
            )
        if not self.greedy and self.metric == "accuracy" and self.accuracy is not None:
            raise ValueError(
                "evaluation.metric=accuracy is of greedy answers: with evaluation.greedy=false set "
                "evaluation.metric=sampled/accuracy"
            )
        if self.accuracy is None:
            if is_verdict(self.metric):
                raise ValueError(
                    f"metric={self.metric} with accuracy=null: nothing says which answers are right; set "
                    "evaluation.metric to reward or a reward part, or name the part in evaluation.accuracy"
                )
            if self.robustness:
                raise ValueError(
                    "robustness with accuracy=null: nothing says which answers are right; name the reward part that "
                    "does in evaluation.accuracy, or leave robustness empty"
                )
        return self

    @property
    def accuracy_part(self) -> str | None:
        """The reward part that says right or wrong; None: no part does."""
        return "correctness" if self.accuracy == AUTO else self.accuracy

    @property
    def may_lack_accuracy(self) -> bool:
        """Whether accuracy is measured by default only: no setting names its reward part or needs right and wrong."""
        needed = self.metric != "accuracy" and is_verdict(self.metric)
        return self.accuracy == AUTO and not (needed or self.robustness or self.choices == "rank")
