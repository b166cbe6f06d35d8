"""The tokens that a truncated sampler (top-k, top-p, min-p, a least length) could have drawn, a set for each one drawn.

The policy that sampled is softmax over the set, and so is the trained one: a ratio of full-vocabulary probabilities
would be wrong by the shares of the set. A set is listed by its tokens, or by the others where these are fewer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

TokenSet = Sequence[int] | npt.NDArray[np.int32]
ALL_BUT: Final = -1
"""The first entry of a set that is listed by the tokens that are not in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTokens:
    """T sets of token ids, laid end to end."""

    ids_K: Tensor
    """int64 [K]: the listed tokens of all sets."""
    counts_T: Tensor
    """int64 [T]: how many each set lists."""
    others_T: Tensor
    """bool [T]: whether the set is that of all tokens but the listed ones."""

    @classmethod
    def of(cls, sets: Sequence[TokenSet], *, device: torch.device | str) -> KeptTokens:
        """The sets of T tokens; one that begins with `ALL_BUT` lists the tokens that are not in it."""
        others = [len(one) > 0 and one[0] == ALL_BUT for one in sets]
        arrays = [np.asarray(one[1:] if other else one, np.int64) for one, other in zip(sets, others, strict=True)]
        return cls(
            ids_K=torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *arrays])).to(device),
            counts_T=torch.tensor([len(one) for one in arrays], dtype=torch.int64, device=device),
            others_T=torch.tensor(others, dtype=torch.bool, device=device),
        )

    def __len__(self) -> int:
        """The number of sets."""
        return len(self.counts_T)

    def __getitem__(self, tokens: Tensor | slice) -> KeptTokens:
        """The sets of these tokens, in their order: indices, or a slice."""
        if isinstance(tokens, slice):
            tokens = torch.arange(len(self), device=self.counts_T.device)[tokens]
        if tokens.dtype == torch.bool:
            tokens = tokens.nonzero()[:, 0]
        counts_T = self.counts_T[tokens]
        first_T = (self.counts_T.cumsum(0) - self.counts_T)[tokens]
        within_K = torch.arange(int(counts_T.sum()), device=counts_T.device)
        within_K = within_K - (counts_T.cumsum(0) - counts_T).repeat_interleave(counts_T)
        ids_K = self.ids_K[first_T.repeat_interleave(counts_T) + within_K]
        return replace(self, ids_K=ids_K, counts_T=counts_T, others_T=self.others_T[tokens])

    def index_select(self, dim: int, tokens: Tensor) -> KeptTokens:
        """The sets of these tokens, by the name that tensors have for it."""
        return self[tokens]

    def mask(self, rows: slice, vocabulary: int) -> Tensor:
        """bool [C, V]: whether each token is in the set, for the sets of a chunk."""
        chunk = self[rows]
        mask_CV = chunk.others_T[:, None].expand(-1, vocabulary).clone()
        row_K = torch.arange(len(chunk), device=mask_CV.device).repeat_interleave(chunk.counts_T)
        mask_CV[row_K, chunk.ids_K] = ~chunk.others_T[row_K]
        return mask_CV


def list_sets(kept_RV: Tensor) -> list[npt.NDArray[np.int32]]:
    """Each row's set of tokens as `KeptTokens.of` reads it, by the tokens in it or by the others."""
    counts_R = kept_RV.sum(-1)
    others_R = counts_R * 2 > kept_RV.shape[-1]
    fewer_RV = kept_RV ^ others_R[:, None]
    ids = fewer_RV.nonzero()[:, 1].int().cpu().numpy()
    chunks = np.split(ids, fewer_RV.sum(-1).cumsum(0).cpu().numpy()[:-1])
    begin = np.array([ALL_BUT], np.int32)
    return [
        np.concatenate([begin, one]) if other else one.copy()
        for one, other in zip(chunks, others_R.tolist(), strict=True)
    ]
