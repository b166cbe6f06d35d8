"""The two ranks themselves: results come in order, and neither an error nor a rank that hangs gets lost."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from support.ranks import RankError, Ranks


def rank_and_sum(value):
    total = torch.tensor([float(value + dist.get_rank())])
    dist.all_reduce(total)
    return dist.get_rank(), total.item()


def one_sleeps_and_one_raises():
    if dist.get_rank() == 0:
        time.sleep(60)
    raise ValueError("odd one out")


def test_ranks_reach_each_other_and_tell_why_a_job_failed():
    pair = Ranks()
    assert pair(rank_and_sum, 3) == [(0, 7.0), (1, 7.0)]  # 3 + 4 on both
    with pytest.raises(RankError) as failure:
        pair(one_sleeps_and_one_raises, timeout=1.0)
    assert "rank 0:\ndid not come back in time" in str(failure.value)
    assert "ValueError: odd one out" in str(failure.value)
    assert pair.workers == []
    assert not pair.folder.exists()
