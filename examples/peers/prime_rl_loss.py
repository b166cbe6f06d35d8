"""DAPO's loss in prime-rl 559b447 (August 2026).

A loss is a function of one sequence that returns a sum. The trainer divides by the number of tokens of the whole batch.

    [trainer.loss]
    type = "custom"
    import_path = "prime_rl_loss.dapo"

    [trainer.loss.kwargs]
    clip_high = 0.28
"""

from prime_rl.trainer.rl.loss import LossInputs, LossOutputs

from flatpeak.functional import clipped_surrogate, importance_ratio


def dapo(inputs: LossInputs, clip_low: float = 0.2, clip_high: float = 0.28) -> LossOutputs:
    ratio = importance_ratio(inputs.trainer_logprobs, inputs.inference_logprobs)
    losses = clipped_surrogate(ratio, inputs.advantages, clip_low=clip_low, clip_high=clip_high)
    if inputs.loss_weights is not None:
        losses = losses * inputs.loss_weights
    clipped = (ratio < 1 - clip_low) | (ratio > 1 + clip_high)
    return LossOutputs(
        loss=losses[inputs.loss_mask].sum(),
        metrics={"outside_clip": clipped[inputs.loss_mask].float().mean()},
    )
