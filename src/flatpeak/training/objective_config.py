"""Configuration of the objective: advantages, policy loss, weights and KL, and what can be chosen by name."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from flatpeak.errors import nearest
from flatpeak.utils.schema import StrictConfig

Normalization = Literal["sequence_mean", "constant", "token_mean", "longest", "sequence_sum"]
PolicyLossName = Literal[
    "clipped_surrogate",
    "unclipped_surrogate",
    "policy_gradient",
    "truncated_policy_gradient",
    "sapo",
    "vespo",
    "topr",
    "gmpo",
    "dppo_tv",
    "dppo_kl",
]

LOSS_SETTINGS: dict[str, tuple[str, ...]] = {
    "clipped_surrogate": ("ratio", "clip_low", "clip_high", "dual_clip"),
    "unclipped_surrogate": ("ratio",),
    "policy_gradient": (),
    "truncated_policy_gradient": ("ratio", "cap", "floor"),
    "sapo": ("ratio",),
    "vespo": (),
    "topr": (),
    "gmpo": ("clip_low", "clip_high"),
    "dppo_tv": (),
    "dppo_kl": (),
}
"""The keys of `objective` that each loss reads; under the others they have no effect, and are refused where written."""
LOSS_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "sapo": ("temperature_positive", "temperature_negative"),
    "vespo": ("shape_positive", "rate_positive", "shape_negative", "rate_negative"),
    "dppo_tv": ("threshold_low", "threshold_high"),
    "dppo_kl": ("threshold_low", "threshold_high"),
}
"""The keys of `objective.arguments` under a loss of flatpeak's that has coefficients of its own, all above 0."""
ADVANTAGE_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "opo": (),
    "remax": (),
    "max_rl": (),
    "pass_at_k": ("k",),
    "gdpo": ("eps",),
}
"""The keys of `advantage.arguments` under each advantage function of flatpeak's."""
TOKEN_WEIGHT_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "top_entropy": ("fraction",),
    "clip_cov": ("fraction", "low", "high"),
    "kl_cov": ("fraction", "coefficient"),
    "m2po": ("threshold",),
    "off_policy_mask": ("threshold",),
    "stapo": ("probability", "entropy"),
    "damp_rare": ("alpha",),
}
"""The keys of `objective.token_weights.arguments` under each function of flatpeak's."""


def is_reference(name: str) -> bool:
    """Whether a name is that of a function of the user's, `file.py:name` or `module:name`."""
    return ":" in name


def _known_loss(name: str) -> str:
    known = get_args(PolicyLossName)
    if name in known or is_reference(name):
        return name
    hint = "".join(f"did you mean {close}? " for close in nearest(name, known))
    raise ValueError(f"objective.loss={name}: {hint}allowed values are {', '.join(known)}, or a function: file.py:name")


def _known_advantage(name: str) -> str:
    return _known_function(name, ADVANTAGE_ARGUMENTS, "advantage.function")


def _known_token_weights(name: str) -> str:
    return _known_function(name, TOKEN_WEIGHT_ARGUMENTS, "objective.token_weights.function")


def _known_function(name: str, known: Collection[str], key: str) -> str:
    if name in known or is_reference(name):
        return name
    hint = "".join(f"did you mean {close}? " for close in nearest(name, tuple(known)))
    raise ValueError(
        f"{key}={name}: {hint}allowed values are {', '.join(known)}, or a function of yours: file.py:name or "
        "module:name"
    )


def _check_arguments(
    arguments: Mapping[str, Any], function: str | None, known: Mapping[str, tuple[str, ...]], key: str
) -> None:
    """ValueError for arguments that a function of flatpeak's does not take."""
    taken = known.get(function or "", ())
    for name in arguments if function in known else ():
        if name not in taken:
            takes = ", ".join(taken) or "no arguments"
            raise ValueError(f"{key}.arguments.{name}: {key}.function={function} takes {takes}")


class AdvantageConfig(StrictConfig):
    """Baseline and scale of the advantages; see functional.group_advantages. Or a function in place of both."""

    baseline: Literal["mean", "leave_one_out", "none"] = "mean"
    """Subtracted from each reward. mean: the group's mean (GRPO). leave_one_out: the mean of the group's others (RLOO).
    none: nothing (REINFORCE), which needs scale=none."""
    scale: Literal["std", "batch_std", "none"] = "std"
    """The divisor of what is left. std: the group's standard deviation. batch_std: that of all rewards of the step,
    before the baseline is subtracted. none: 1 (Dr. GRPO)."""
    eps: Annotated[float, Field(ge=0)] = 1e-6
    """Added to the standard deviation, against division by almost 0; of no effect with scale=none."""
    function: Annotated[str, AfterValidator(_known_advantage)] | None = None
    """A function in place of baseline, scale and eps: opo, remax, max_rl, pass_at_k (with k) or gdpo, of the papers of
    these names, or one of yours, file.py:name or module:name. It is called with the rewards [P, G] and whether each is
    there (bool [P, G]), and by name with what else it asks for, and returns the advantages [P, G]. null: none."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of `function`."""
    credit: Literal["episode", "turn"] = "episode"
    """episode: one advantage for all tokens of a completion. turn: in a game, an advantage for each turn, by the
    rewards of its step and of the steps after it, compared with the same turn of the group's other episodes."""
    whiten: Literal["none", "tokens", "completions"] = "none"
    """Subtract the step's mean from the advantages and divide by their standard deviation. tokens: over all trained
    tokens, REINFORCE++. completions: over all completions, GDPO. none: neither."""
    limit: Annotated[float, Field(gt=0)] | None = None
    """The largest advantage either way, after all else. null: no limit."""
    limit_spreads: Annotated[float, Field(gt=0)] | None = None
    """The largest advantage either way, in standard deviations of its group's advantages: of G completions with the
    baseline mean none exceeds (G - 1) / sqrt(G) of them by itself. null: no limit."""

    @model_validator(mode="after")
    def _no_scale_without_baseline(self) -> AdvantageConfig:
        if self.baseline == "none" and self.scale != "none":
            raise ValueError("advantage.baseline=none needs advantage.scale=none: raw rewards are not standardized")
        if self.credit == "turn" and self.whiten == "completions":
            raise ValueError(
                "advantage.whiten=completions with advantage.credit=turn, which gives a completion several advantages: "
                "set advantage.whiten=tokens"
            )
        _check_arguments(self.arguments, self.function, ADVANTAGE_ARGUMENTS, "advantage")
        return self


class RejectionConfig(StrictConfig):
    """Tokens or completions without a policy loss, by an estimate of the KL of the sampler to the trainer."""

    estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimate of each token, as in kl.estimator: k1, k2 or k3. Of k1 tokens of either sign cancel in a sum or
    mean, and the size of the result counts."""
    over: Literal["token", "sum", "mean", "max"] = "mean"
    """token: each token by itself. sum, mean, max: a completion as a whole, by this of its tokens."""
    above: Annotated[float, Field(gt=0)] = 0.1
    """The largest estimate, in nats, that is trained on."""


class SamplerCorrectionConfig(StrictConfig):
    """Importance weights for a sampler whose probabilities are not the trainer's; see functional.sampler_correction."""

    type: Literal["none", "truncate", "mask"] = "none"
    """none: no weights. truncate: weights above the cap become the cap. mask: weights above it become 0, so that those
    tokens, or with level=sequence whole completions, have no policy loss."""
    level: Literal["token", "sequence", "sequence_mean"] = "token"
    """token: a weight for each token. sequence_mean: one per completion, the geometric mean over its tokens, which does
    not drift with the length. sequence: one per completion, the product over its tokens. The product spreads
    with the length, so that the cap takes more from long completions: at a noise of 0.01 nats per token (a bfloat16
    sampler) the mean weight under truncate is 1.00 at 1,000 tokens and 0.70 at 16,000; at 0.03, 0.83 and 0.08."""
    cap: Annotated[float, Field(ge=1)] = 2.0
    """The largest weight, which is 1 where sampler and trainer agree."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """truncate: the smallest weight. mask: weights below it become 0 too (IcePop: 0.5, with a cap of 5). 0: none."""
    normalize: bool = False
    """Divide the weights by their mean over the minibatch, for one more pass without gradients."""
    reject: RejectionConfig | None = None
    """Leave out what is too far from the trainer, beside or in place of weights. null: nothing."""

    @property
    def enabled(self) -> bool:
        """Whether tokens have weights."""
        return self.type != "none" or self.reject is not None


class TokenWeightsConfig(StrictConfig):
    """Weights of tokens in the policy loss that are computed over a whole minibatch; see functional.token_weights."""

    function: Annotated[str, AfterValidator(_known_token_weights)] | None = None
    """top_entropy (fraction 0.2): the tokens of highest entropy alone. clip_cov (fraction 2e-4, low 1, high 5), kl_cov
    (fraction 2e-4, coefficient 1): less change where advantage and log-probability vary together. m2po (threshold
    0.04), off_policy_mask (threshold 0.1): without tokens or completions that the sampler drew from too different a
    policy. stapo (probability 0.002, entropy 0.5), damp_rare (alpha 0.3): less weight for rare tokens. Or a function of
    yours, file.py:name or module:name. null: every token counts alike."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of `function`."""

    @model_validator(mode="after")
    def _known_arguments(self) -> TokenWeightsConfig:
        key = "objective.token_weights"
        _check_arguments(self.arguments, self.function, TOKEN_WEIGHT_ARGUMENTS, key)
        for name, value in self.arguments.items() if self.function in TOKEN_WEIGHT_ARGUMENTS else ():
            largest = 1.0 if name in ("fraction", "alpha", "probability") else float("inf")
            if not isinstance(value, int | float) or not 0 < value <= largest:
                raise ValueError(
                    f"{key}.arguments.{name}={value}: give a number above 0{' and at most 1' if largest == 1 else ''}"
                )
        return self


class AdaptiveEntropyConfig(StrictConfig):
    """An entropy bonus that keeps the policy's entropy from falling below a target. Skywork-OR1, arXiv 2505.22312."""

    target: Annotated[float, Field(gt=0)] = 0.2
    """Nats per token. The bonus acts on steps that follow one at or below it."""
    step: Annotated[float, Field(gt=0)] = 0.005
    """The change of the coefficient: up after a step at or below the target, down after one above it."""
    start: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient from which the first change goes. The first step has no bonus: nothing was measured before it."""
    largest: Annotated[float, Field(gt=0)] = 1.0
    """The largest coefficient."""

    def next(self, entropy: float) -> float:
        """The coefficient after a step of this entropy."""
        change = self.step if entropy <= self.target else -self.step
        return min(max(self.start + change, 0.0), self.largest)


class ObjectiveConfig(StrictConfig):
    """The per-token loss and how tokens are weighted."""

    loss: Annotated[str, AfterValidator(_known_loss)] = "clipped_surrogate"
    """clipped_surrogate (PPO, GRPO); unclipped_surrogate, the same without a clip; policy_gradient, -A log p without a
    ratio (REINFORCE); truncated_policy_gradient (CISPO); or a function of yours, file.py:name or module:name, called
    with log-probabilities, ratios and advantages of T tokens and this section. sapo, vespo, topr, gmpo, dppo_tv and
    dppo_kl are the losses of the papers of these names, see docs/algorithms.md."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments of a `loss` of yours, or of the losses that have coefficients of their own: sapo
    temperature_positive (1) and temperature_negative (1.05); vespo shape_positive (2), rate_positive (3),
    shape_negative (3) and rate_negative (2); dppo_tv and dppo_kl threshold_low and threshold_high (0.15 and 0.05)."""
    ratio: Literal["token", "sequence"] = "token"
    """token: an importance ratio for each token. sequence: one per completion, the exponential of its mean log-ratio
    (GSPO)."""
    normalization: Normalization = "sequence_mean"
    """A completion's weight, for the N completions of a minibatch and their lengths len: sequence_mean 1 / (N * len),
    GRPO; constant 1 / (N * max_new_tokens), Dr. GRPO; token_mean 1 / sum(len), DAPO; longest 1 / (N * max(len));
    sequence_sum 1 / N, LUSPO."""
    clip_low: Annotated[float, Field(ge=0)] = 0.2
    """With clipped_surrogate: the ratio is clipped at 1 - clip_low from below. With gmpo: the lowest log-ratio is
    -clip_low."""
    clip_high: Annotated[float, Field(ge=0)] = 0.2
    """With clipped_surrogate: the ratio is clipped at 1 + clip_high from above. With gmpo: the highest log-ratio."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """With clipped_surrogate: bound of the loss under a negative advantage A, at most -dual_clip * A (Ye et al. 2020; 3
    is usual). null: none."""
    cap: Annotated[float, Field(gt=0)] = 5.0
    """With truncated_policy_gradient (CISPO): the upper bound of the ratio itself, not a distance from 1."""
    floor: Annotated[float, Field(ge=0)] = 0.0
    """With truncated_policy_gradient: the lower bound of the ratio itself; below 1. 0: none."""
    entropy_coefficient: float = 0.0
    """Adds -coefficient * entropy per token to the loss."""
    adaptive_entropy: AdaptiveEntropyConfig | None = None
    """Change `entropy_coefficient` from step to step to hold an entropy; null: it stays."""
    truncated: Literal["keep", "mask", "zero_reward", "soft_penalty"] = "keep"
    """Completions cut at max_new_tokens. keep: they count like all others. mask: they are out of the loss and its
    denominators, and still in the group's baseline. zero_reward: their reward is 0. soft_penalty: DAPO's soft overlong
    punishment is subtracted from the reward of every completion that reaches into the last `overlong_buffer` tokens,
    cut or not."""
    overlong_buffer: Annotated[int, Field(ge=1)] = 32
    """With soft_penalty: the number of tokens before max_new_tokens over which the penalty rises from 0 to 1."""
    sampler_correction: SamplerCorrectionConfig = SamplerCorrectionConfig()
    """Weights of the policy loss where another policy samples than is trained: another engine, dtype or version."""
    token_weights: TokenWeightsConfig = TokenWeightsConfig()
    """Weights of the policy loss by what a whole minibatch has in it, for one more pass without gradients."""

    @property
    def has_entropy(self) -> bool:
        """Whether the loss has an entropy term."""
        return self.entropy_coefficient != 0 or self.adaptive_entropy is not None

    @model_validator(mode="after")
    def _coefficients_of_the_loss(self) -> ObjectiveConfig:
        if self.adaptive_entropy is not None and self.entropy_coefficient:
            raise ValueError(
                f"objective.entropy_coefficient={self.entropy_coefficient:g} with objective.adaptive_entropy, which "
                "sets it: set objective.adaptive_entropy.start, or objective.adaptive_entropy=null"
            )
        if self.floor >= min(1.0, self.cap):
            raise ValueError(
                f"objective.floor={self.floor:g}: give less than 1, the ratio of equal policies, and less than the cap"
            )
        known = LOSS_ARGUMENTS.get(self.loss, ())
        for name, value in self.arguments.items() if self.loss in LOSS_ARGUMENTS else ():
            if name not in known:
                raise ValueError(
                    f"objective.arguments.{name}: objective.loss={self.loss} takes {', '.join(known) or 'no arguments'}"
                )
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"objective.arguments.{name}={value}: give a number above 0")
        return self


class AdaptiveKLConfig(StrictConfig):
    """A coefficient that holds the KL near a target. Ziegler et al. 2019, arXiv 1909.08593, section 2.2."""

    target: Annotated[float, Field(gt=0)] = 0.1
    """The KL of each token to the reference, in nats: rollout/kl_reference, or policy/kl_reference without it."""
    horizon: Annotated[float, Field(gt=0)] = 10_000
    """Completions over which the coefficient changes by at most a factor of about 1.2 either way."""

    def next(self, coefficient: float, distance: float, completions: int) -> float:
        """The coefficient after a step of so many completions at this KL; the same where the KL is not finite."""
        if not math.isfinite(distance):
            return coefficient
        error = min(max(distance / self.target - 1, -0.2), 0.2)
        return coefficient * max(1 + error * completions / self.horizon, 0.1)


class KLConfig(StrictConfig):
    """The penalty for leaving the reference."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the KL; 0: no penalty, and no reference is kept unless `reference` asks for one."""
    estimator: Literal["k1", "k2", "k3", "exact"] = "k3"
    """The KL of each token, with d = log reference - log policy. k1: -d, unbiased, of either sign. k2: d^2 / 2, biased,
    but as a loss its expected gradient is that of the KL. k3: exp(d) - d - 1, unbiased and never negative. exact: the
    sum over the vocabulary, without the noise of sampling, at the cost of a pass of the reference in each update; in
    the loss only."""
    top_k: Annotated[int, Field(ge=1)] | None = None
    """With estimator=exact: sum over so many of the policy's most probable tokens, and estimate the rest by the sampled
    token, which is unbiased for tokens of the present policy (arXiv 2602.04417). null: sum over all."""
    placement: Literal["loss", "reward", "reward_to_go"] = "loss"
    """loss: `coefficient` times the KL of each token is added to its loss. reward: `coefficient` times a completion's
    KL, summed over its tokens, is subtracted from its reward. reward_to_go: `coefficient` times the KL of a token and
    of those after it is subtracted from its advantage (REINFORCE++), before `advantage.whiten` and `limit`."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With placement=reward_to_go: the factor for each token that lies between."""
    ratio_weighted: bool = False
    """Multiply the per-token KL in the loss by the importance ratio (TRL's default), so that the expected gradient of
    k1 and k3 is that of the KL; that of k2 is so without it."""
    groups: Literal["all", "informative"] = "all"
    """With placement=loss. all: the KL of every completion. informative: only of those of groups with an advantage."""
    adaptive: AdaptiveKLConfig | None = None
    """Change `coefficient` from step to step to hold a KL; null: it stays."""

    @model_validator(mode="after")
    def _has_an_effect(self) -> KLConfig:
        if self.adaptive is not None and self.coefficient == 0:
            raise ValueError("kl.adaptive has no effect with kl.coefficient=0: remove it, or set kl.coefficient=0.01")
        if self.estimator == "exact" and (self.placement != "loss" or self.ratio_weighted):
            raise ValueError(
                "kl.estimator=exact is a term of the loss at every context, with nothing to weigh: set "
                "kl.placement=loss and kl.ratio_weighted=false, or kl.estimator=k1 with kl.placement=reward"
            )
        if self.coefficient > 0 and self.estimator == "k1" and self.placement == "loss" and not self.ratio_weighted:
            raise ValueError(
                "kl.estimator=k1 in the loss has zero expected gradient on-policy: use k3 or k2, "
                "kl.placement=reward, or kl.ratio_weighted=true"
            )
        return self
