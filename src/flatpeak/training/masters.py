"""Float32 masters of weights in a lower precision: what the optimizer steps, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from flatpeak.errors import UserError

PREFIX = "master."
"""Before the names of the masters in a checkpoint."""


class MasterWeights:
    """Steps a master in a weight's stead and writes it, rounded, back into the weight.

    Half a bfloat16 step is 1/512 of a weight, far more than most updates: added to the weight itself they would round
    away. Gradients are summed over micro-batches in the master's type too, in `.grad` itself: autograd converts each
    micro-batch's as it adds it, so that a rounded copy of all of them never exists beside the sum.

    Nothing here touches a weight that is its own master.
    """

    def __init__(self, masters: Mapping[nn.Parameter, Tensor]) -> None:
        """Begin from the weights as they are: they are all that the stage before, or a checkpoint's model, left."""
        self.stepped = list(masters.values())
        """What the optimizer steps, in the parameters' order."""
        self.pairs = {index: (w, m) for index, (w, m) in enumerate(masters.items()) if m is not w}
        for weight, master in self.pairs.values():
            weight.grad = None
            weight.grad_dtype = master.dtype
            master.copy_(weight.detach())

    def zero_grad(self) -> None:
        """Forget the weights' gradients; the masters' are the optimizer's to forget."""
        for weight, _ in self.pairs.values():
            weight.grad = None

    def take_gradients(self) -> None:
        """Move each weight's gradient to its master, where it is clipped and stepped."""
        for weight, master in self.pairs.values():
            master.grad, weight.grad = weight.grad, None

    @torch.no_grad()
    def write(self) -> None:
        """Round the masters into the weights, in place: captured graphs and packed copies know their addresses."""
        for weight, master in self.pairs.values():
            weight.copy_(master)

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps: the masters, by the position of their weight."""
        return {f"{PREFIX}{index}": master for index, (_, master) in self.pairs.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on from `tensors`, and round them into the weights."""
        own = self.tensors()
        if own.keys() != tensors.keys():
            raise UserError(
                f"the checkpoint holds float32 masters of {len(tensors)} weights and this model needs those of "
                f"{len(own)}: resume with the model and the model.dtype that the run began with"
            )
        for name, master in own.items():
            master.copy_(tensors[name])
        self.write()


def split_masters(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A learner's tensors as (the masters, all others)."""
    own = {name: tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}
    return own, {name: tensor for name, tensor in tensors.items() if name not in own}
