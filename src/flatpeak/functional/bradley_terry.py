"""The Bradley-Terry loss of reward models and related measures, elementwise: the caller weights and sums.

P preference pairs; `chosen_P` and `rejected_P` are the reward model's scores of the preferred and rejected answers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def bradley_terry_loss(chosen_P: Tensor, rejected_P: Tensor, *, margin: float | Tensor = 0.0) -> Tensor:
    """-log sigmoid(chosen - rejected - margin). Bradley and Terry 1952; with a margin, Touvron et al. 2023 (Llama 2).

    Only differences matter: adding the same number to both scores changes nothing.
    """
    return -logsigmoid(chosen_P - rejected_P - margin)


def centering_penalty(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """(chosen + rejected)^2, which pulls the mean score to 0. Eisenstein et al. 2023."""
    return (chosen_P + rejected_P).square()


def preference_accuracy(chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
    """1 if the chosen answer scores higher, 0 if it scores lower, 1/2 for equal scores, NaN for NaN."""
    difference_P = chosen_P - rejected_P
    right_P = (torch.sign(difference_P) + 1) / 2
    return torch.where(difference_P.isnan(), difference_P, right_P)  # the sign of NaN is 0


def calibration_error(probabilities_N: Tensor, outcomes_N: Tensor, *, bins: int = 10) -> Tensor:
    """Expected calibration error: sum over bins of n_b / N * |mean probability - mean outcome|. Guo et al. 2017.

    `probabilities_N` in [0, 1] fall into `bins` bins of equal width. `outcomes_N` are in [0, 1].
    NaN for empty input.
    """
    if bins < 1:
        raise ValueError(f"bins={bins}: give at least 1")
    index_N = (probabilities_N * bins).long().clamp(0, bins - 1)
    gaps_N = (probabilities_N - outcomes_N).double()
    gaps_B = torch.zeros(bins, dtype=torch.float64, device=gaps_N.device).index_add(0, index_N, gaps_N)
    return gaps_B.abs().sum() / probabilities_N.numel()
