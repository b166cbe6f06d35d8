"""Configuration of the objective, the optimizer and the training loop."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, FiniteFloat, model_validator

from flatpeak.errors import nearest
from flatpeak.rewards.config import RewardConfig
from flatpeak.tasks.config import TaskConfig
from flatpeak.utils.schema import StrictConfig

Normalization = Literal["sequence_mean", "constant", "token_mean", "longest", "sequence_sum"]
MinibatchOf = Literal["groups", "completions"]
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
    if name in ADVANTAGE_ARGUMENTS or is_reference(name):
        return name
    hint = "".join(f"did you mean {close}? " for close in nearest(name, tuple(ADVANTAGE_ARGUMENTS)))
    raise ValueError(
        f"advantage.function={name}: {hint}allowed values are {', '.join(ADVANTAGE_ARGUMENTS)}, or a function of "
        "yours: file.py:name or module:name"
    )


Beta = Annotated[float, Field(ge=0, lt=1)]


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
    whiten: Literal["none", "tokens", "completions"] = "none"
    """Subtract the step's mean from the advantages and divide by their standard deviation. tokens: over all trained
    tokens, REINFORCE++. completions: over all completions, GDPO. none: neither."""
    limit: Annotated[float, Field(gt=0)] | None = None
    """The largest advantage either way, after all else. null: no limit."""
    limit_spreads: Annotated[float, Field(gt=0)] | None = None
    """The largest advantage either way, in standard deviations of its group's advantages. null: no limit."""

    @model_validator(mode="after")
    def _no_scale_without_baseline(self) -> AdvantageConfig:
        if self.baseline == "none" and self.scale != "none":
            raise ValueError("advantage.baseline=none needs advantage.scale=none: raw rewards are not standardized")
        known = ADVANTAGE_ARGUMENTS.get(self.function or "", ())
        for name in self.arguments if self.function in ADVANTAGE_ARGUMENTS else ():
            if name not in known:
                takes = ", ".join(known) or "no arguments"
                raise ValueError(f"advantage.arguments.{name}: advantage.function={self.function} takes {takes}")
        return self


class SamplerCorrectionConfig(StrictConfig):
    """Importance weights for a sampler whose probabilities are not the trainer's; see functional.sampler_correction."""

    type: Literal["none", "truncate", "mask"] = "none"
    """none: no weights. truncate: weights above the cap become the cap. mask: weights above it become 0, so that those
    tokens, or with level=sequence whole completions, have no policy loss."""
    level: Literal["token", "sequence"] = "token"
    """token: a weight for each token. sequence: one per completion, the product over its tokens. The product spreads
    with the length, so that the cap takes more from long completions: at a noise of 0.01 nats per token (a bfloat16
    sampler) the mean weight under truncate is 1.00 at 1,000 tokens and 0.70 at 16,000; at 0.03, 0.83 and 0.08."""
    cap: Annotated[float, Field(ge=1)] = 2.0
    """The largest weight, which is 1 where sampler and trainer agree."""

    @property
    def enabled(self) -> bool:
        """Whether tokens have weights."""
        return self.type != "none"


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
    truncated: Literal["keep", "mask", "zero_reward", "soft_penalty"] = "keep"
    """Completions cut at max_new_tokens. keep: they count like all others. mask: they are out of the loss and its
    denominators, and still in the group's baseline. zero_reward: their reward is 0. soft_penalty: DAPO's soft overlong
    punishment is subtracted from the reward of every completion that reaches into the last `overlong_buffer` tokens,
    cut or not."""
    overlong_buffer: Annotated[int, Field(ge=1)] = 32
    """With soft_penalty: the number of tokens before max_new_tokens over which the penalty rises from 0 to 1."""
    sampler_correction: SamplerCorrectionConfig = SamplerCorrectionConfig()
    """Weights of the policy loss where another policy samples than is trained: another engine, dtype or version."""

    @model_validator(mode="after")
    def _coefficients_of_the_loss(self) -> ObjectiveConfig:
        if self.floor >= min(1.0, self.cap):
            raise ValueError(
                f"objective.floor={self.floor:g}: give less than 1, the ratio of equal policies, and less than the cap"
            )
        known = LOSS_ARGUMENTS.get(self.loss, ())
        for name, value in self.arguments.items() if self.loss in LOSS_SETTINGS else ():
            if name not in known:
                raise ValueError(
                    f"objective.arguments.{name}: objective.loss={self.loss} takes {', '.join(known) or 'no arguments'}"
                )
            if not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ValueError(f"objective.arguments.{name}={value}: give a number above 0")
        return self


class KLConfig(StrictConfig):
    """The penalty for leaving the reference."""

    coefficient: Annotated[float, Field(ge=0)] = 0.0
    """The weight of the KL; 0: no penalty, and no reference is kept unless `reference` asks for one."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """The KL of each token, with d = log reference - log policy. k1: -d, unbiased, of either sign. k2: d^2 / 2, biased,
    but as a loss its expected gradient is that of the KL. k3: exp(d) - d - 1, unbiased and never negative."""
    placement: Literal["loss", "reward", "reward_to_go"] = "loss"
    """loss: `coefficient` times the KL of each token is added to its loss. reward: `coefficient` times a completion's
    KL, summed over its tokens, is subtracted from its reward. reward_to_go: `coefficient` times the KL of a token and
    of those after it is subtracted from its advantage (REINFORCE++), before `advantage.whiten` and `limit`."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With placement=reward_to_go: the factor for each token that lies between."""
    ratio_weighted: bool = False
    """Multiply the per-token KL in the loss by the importance ratio (TRL's default), so that the expected gradient of
    k1 and k3 is that of the KL; that of k2 is so without it."""

    @model_validator(mode="after")
    def _k1_has_no_gradient(self) -> KLConfig:
        if self.coefficient > 0 and self.estimator == "k1" and self.placement == "loss" and not self.ratio_weighted:
            raise ValueError(
                "kl.estimator=k1 in the loss has zero expected gradient on-policy: use k3 or k2, "
                "kl.placement=reward, or kl.ratio_weighted=true"
            )
        return self


class OptimizerConfig(StrictConfig):
    """AdamW (or SGD) with warm-up and a schedule."""

    name: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    """adamw; sgd, without momentum; or adamw_8bit, which keeps the moments in 2 bytes per parameter instead of 8 and
    needs bitsandbytes."""
    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """The rate at the end of the warm-up, from which linear and cosine fall; 0: the weights stay as they are."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay of AdamW's first and second moment, per update."""
    eps: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-8
    """Added to AdamW's denominator."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay under AdamW, an L2 penalty under SGD; 0: none."""
    max_grad_norm: Annotated[float, Field(gt=0)] | None = 1.0
    """Gradients are clipped to this norm; null: not clipped."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """The rate after the warm-up. constant: learning_rate. linear, cosine: falling to final_fraction of it at the last
    step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly: step n has n / warmup_steps of learning_rate. 0: none."""
    final_fraction: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate of linear and cosine at the last step, as a fraction of learning_rate."""
    offload: bool = False
    """Keep the optimizer's states, and float32 masters, in host memory between updates: the same weights, bit for bit,
    for a copy to a CUDA device and back in every update. No effect on a CPU, which has them there anyway."""


class SFTOptimizerConfig(OptimizerConfig):
    """The optimizer with a learning rate that suits supervised training."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-4


class DynamicSamplingConfig(StrictConfig):
    """DAPO: groups whose rewards are all equal are replaced by fresh prompts, up to a budget."""

    max_resamples: Annotated[int, Field(ge=0)] = 0
    """The most further rounds of rollouts that a step may draw; 0 is off. Groups that are not replaced by then stay."""


class StopWhenConfig(StrictConfig):
    """A condition on a metric of the training steps, after which the run ends."""

    metric: str
    """Name of a metric of training steps, such as reward/exploit."""
    above: FiniteFloat | None = None
    """Met where the metric's mean over the window is greater than this; null: `below` decides."""
    below: FiniteFloat | None = None
    """Met where that mean is less than this; give exactly one of `above` and `below`. null: `above` decides."""
    window: Annotated[int, Field(ge=1)] = 1
    """The number of last steps in the mean, each of which has to have the metric, as a finite number."""

    @model_validator(mode="after")
    def _decidable(self) -> StopWhenConfig:
        if (self.above is None) == (self.below is None):
            raise ValueError("training.stop_when: give one of above and below, such as above: 0.9")
        if self.metric.startswith(("eval/", "sft/")):
            stage = "training" if self.metric.startswith("eval/") else "sft"
            raise ValueError(
                f"training.stop_when.metric={self.metric} is no metric of the RL steps: name one of them, or stop by "
                f"an evaluation with {stage}.stop_at"
            )
        return self

    def is_passed_by(self, mean: float) -> bool:
        """Whether a mean over the window lies beyond the threshold."""
        return mean > self.above if self.above is not None else self.below is not None and mean < self.below

    def reason(self, step: int, mean: float) -> str:
        """The condition in words, as it was met after a step."""
        bound = f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"
        steps = f"at step {step}" if self.window == 1 else f"on average over steps {step - self.window + 1} to {step}"
        return f"training.stop_when: {self.metric} was {mean:.4g} {steps}, {bound}"


class TrainingConfig(StrictConfig):
    """The length of training and how a rollout batch is used."""

    steps: Annotated[int, Field(ge=0)] = 100
    """Steps of RL: a rollout each, and the updates made of it. 0: none."""
    epochs_per_rollout: Annotated[int, Field(ge=1)] = 1
    """Passes over the completions of a step, each in minibatches of its own."""
    minibatches: Annotated[int, Field(ge=1)] = 1
    """Optimizer updates per epoch: the rollout batch is cut into so many minibatches."""
    minibatch_of: MinibatchOf = "groups"
    """Unit of which minibatches are made. groups: whole groups. completions: single ones of all groups, shuffled, as
    TRL does; nearly every prompt is then read again in each minibatch."""
    micro_batch_tokens: Annotated[int, Field(ge=1)] | None = None
    """Token budget of one forward and backward pass: memory only, never the gradient. A prompt counts once for its
    group; where the model trains by padding, once per completion, and padding counts. null: 4096 on a CPU, where more
    is no faster (benchmarks/RESULTS.md), else 16384."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the layer again in the backward pass: the same gradient from less
    memory, for one more forward pass of the layers."""
    compile: bool = False
    """Run the layers of passes with gradients through torch.compile. Needs a C++ compiler, and the first pass takes
    some tens of seconds more."""
    max_skipped_updates: Annotated[int, Field(ge=1)] = 10
    """An update whose gradient is NaN or infinite is skipped; after this many in a row a run (SFT and reward models
    included) ends as failed."""
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    stop_at: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop once `evaluation.metric` reaches this in an evaluation; null: do not."""
    stop_when: StopWhenConfig | None = None
    """Stop after the step at which the mean of a training metric over the last steps passes a threshold; null: do
    not."""


class CurriculumConfig(StrictConfig):
    """A first task, until a step or a pass rate is reached; then the main one."""

    task: TaskConfig
    """The first task."""
    steps: Annotated[int, Field(ge=1)]
    """The most steps of the first task."""
    until_pass_rate: Annotated[float, Field(gt=0, le=1)] | None = None
    """Move on as soon as a step's mean of the accuracy reward, over all groups drawn, reaches this; null: after
    `steps`."""
    rewards: dict[str, RewardConfig] | None = None
    """Rewards of the first task; null: the same as the main task's."""
    in_sft: bool = True
    """Whether SFT sees the first task's rationales too."""


class MixtureItemConfig(StrictConfig):
    """A task of a mixture."""

    task: TaskConfig
    """The task."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Its share of the prompts is this over the sum of all weights."""
    name: str | None = None
    """Its name in metrics, as in `eval/<name>/accuracy`; null: the task's own. Names differ within a mixture."""


class SFTConfig(StrictConfig):
    """Supervised fine-tuning on rationales before RL; loss on completions only."""

    steps: Annotated[int, Field(ge=0)] = 0
    """Steps of SFT, one update each; 0: no SFT."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Demonstrations per step."""
    optimizer: SFTOptimizerConfig = SFTOptimizerConfig()
    normalization: Normalization = "token_mean"
    """Normalization as in `objective.normalization`, over the demonstrations of a step; constant takes the tokens of
    the longest of all demonstrations for max_new_tokens."""
    stop_at: Annotated[float, Field(gt=0, le=1)] | None = None
    """Stop once accuracy (greedy, unless `evaluation.greedy` is false) on `check_size` training problems reaches this;
    checked every `check_every` steps. null: do not, and set no problems aside."""
    check_every: Annotated[int, Field(ge=1)] = 50
    """Steps between checks of `stop_at`."""
    check_size: Annotated[int, Field(ge=1)] = 200
    """With `stop_at`: the number of training problems that SFT leaves out and is checked on, the first ones. RL trains
    on them all the same."""


class RewardModelOptimizerConfig(OptimizerConfig):
    """The optimizer with a learning rate that suits fine-tuning a pretrained model on preferences."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-5


class RewardModelConfig(StrictConfig):
    """Training a reward model on preference pairs (`task.type: preferences`), by `flatpeak reward-model`."""

    steps: Annotated[int, Field(ge=1)] = 200
    """Steps of reward-model training, one update each."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Pairs per step."""
    max_tokens: Annotated[int, Field(ge=2)] | None = None
    """Longest text, question and answer. Of a longer one the beginning of the question is left out, never a part of
    the answer; a pair with an answer that does not fit by itself is dropped. Both are counted. null: the context."""
    template: str = "auto"
    """Wording of a pair, recorded with the model. auto: the tokenizer's chat template if it has one, else plain.
    chat; plain: question and answer with an empty line between; or a text file with {prompt} and {completion}."""
    optimizer: RewardModelOptimizerConfig = RewardModelOptimizerConfig()
    margin: Annotated[float, Field(ge=0)] = 0.0
    """Margin by which the chosen answer has to win: -log sigmoid(chosen - rejected - margin). 0: none."""
    center: Annotated[float, Field(ge=0)] = 0.0
    """Adds center * (chosen + rejected)^2 to a pair's loss, which keeps the scores around 0 (Eisenstein et al. 2023;
    0.01 is usual). 0: nothing."""
    evaluate_every: Annotated[int, Field(ge=0)] = 50
    """Steps between measurements of held-out accuracy, which also happen at step 0 and at the end; 0: only then."""
    evaluation_size: Annotated[int, Field(ge=1)] | None = None
    """The number of held-out pairs, from the first on; null is all."""
    seed: int = 0
    """Changes the order of the pairs and the weights of a new head, beside run.seed: for an ensemble, say."""
