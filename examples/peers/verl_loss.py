"""DAPO's loss with dual clipping, in verl 1dda039 (August 2026).

Import this module in every worker with `VERL_USE_EXTERNAL_MODULES=verl_loss`, and choose the loss with
`actor_rollout_ref.actor.policy_loss.loss_mode=dapo_dual_clip`.
"""

from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

from flatpeak.functional import clipped_surrogate, importance_ratio


@register_policy_loss("dapo_dual_clip")
def dapo_dual_clip(
    old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, rollout_is_weights=None
):
    ratio = importance_ratio(log_prob, old_log_prob)
    losses = clipped_surrogate(ratio, advantages, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    if rollout_is_weights is not None:
        losses = losses * rollout_is_weights
    batch = config.global_batch_info
    return agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **batch), {}
