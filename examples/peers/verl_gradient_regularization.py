"""Gradient regularization in verl 1dda039 (August 2026), which has no extension point for it.

Import this module in every worker with `VERL_USE_EXTERNAL_MODULES=verl_gradient_regularization`: it wraps the method
that accumulates an update's gradient. It is for `strategy: fsdp2` with float32 weights, without dropout and without
parameter offloading. FSDP2 computes in bfloat16, so heed the guard's message. FSDP1's flat parameters are not
supported. The engines of critics inherit from the same class: do not import the module if there are critics.
"""

from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from flatpeak import GradientRegularizationConfig, GradientRegularizer

CONFIG = GradientRegularizationConfig(strength="calibrated:3")
accumulate = FSDPEngineWithLMHead.forward_backward_batch


def regularized(self, data, loss_function, forward_only=False):
    outputs = accumulate(self, data, loss_function, forward_only)
    if not forward_only:
        if not hasattr(self, "regularizer"):
            self.regularizer = GradientRegularizer(self.module, CONFIG)
        self.regularizer.regularize(lambda: accumulate(self, data, loss_function, False))
    return outputs


FSDPEngineWithLMHead.forward_backward_batch = regularized
