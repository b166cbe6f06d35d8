"""Configuration of the optimizer, the training loop and its stages; that of the objective is beside it."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, model_validator

from flatpeak.rewards.config import RewardConfig
from flatpeak.tasks.config import TaskConfig
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, Normalization, ObjectiveConfig
from flatpeak.utils.schema import StrictConfig

__all__ = [
    "AdvantageConfig",
    "CurriculumConfig",
    "DifficultyConfig",
    "DynamicSamplingConfig",
    "KLConfig",
    "MinibatchOf",
    "MixtureItemConfig",
    "Normalization",
    "ObjectiveConfig",
    "OptimizerConfig",
    "RewardModelConfig",
    "RewardModelOptimizerConfig",
    "SFTConfig",
    "SFTOptimizerConfig",
    "StopWhenConfig",
    "TrainingConfig",
]

MinibatchOf = Literal["groups", "completions"]
Beta = Annotated[float, Field(ge=0, lt=1)]


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
    pass_rate: tuple[float, float] | None = None
    """Also replace groups whose pass rate, or mean reward where nothing says right or wrong, is outside of this band.
    null: no band."""
    min_std: Annotated[float, Field(ge=0)] = 0.0
    """Also replace groups whose rewards have a smaller standard deviation than this; for rewards of any size."""


class DifficultyConfig(StrictConfig):
    """Questions that were too easy or too hard the last time are passed over, but for some of them."""

    pass_rate: tuple[float, float] = (0.1, 0.9)
    """The band of pass rates, or mean rewards where nothing says right or wrong, of questions that are asked again."""
    keep: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The share of the other questions that is asked all the same, to see whether they have changed."""


class StopWhenConfig(StrictConfig):
    """A condition on a metric of the training steps, after which the run ends."""

    metric: str
    """Name of a metric of training steps, such as reward/exploit. Only where it is named here,
    patterns/spreads is measured: what a pattern of answers pays at most, in spreads of the rewards within groups."""
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
    difficulty: DifficultyConfig | None = None
    """Choose questions by their last pass rates; null: every question once in each pass over the data."""
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
