"""torch's random-number state, so that the second pass draws the dropout masks of the first."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RandomState:
    """The generators of the CPU and of every CUDA device in use."""

    cpu: Tensor
    cuda: tuple[Tensor, ...]

    @classmethod
    def now(cls) -> RandomState:
        """As they are."""
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return cls(cpu=torch.get_rng_state(), cuda=tuple(cuda))

    def restore(self) -> None:
        """As they were."""
        torch.set_rng_state(self.cpu)
        if self.cuda:
            torch.cuda.set_rng_state_all(list(self.cuda))
