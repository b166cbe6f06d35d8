"""The two ranks themselves: results come in order, and neither an error nor a rank that hangs gets lost."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from flatpeak.distributed import ranks
from flatpeak.distributed.config import DistributedConfig
from flatpeak.errors import LostRankError
from support.ranks import RankError, Ranks

pytestmark = pytest.mark.slow

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


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


@pytest.mark.parametrize("words", ["Timed out waiting for clients. 1/2 clients joined.", "Connection reset by peer"])
def test_a_rank_that_ends_while_the_others_start_is_named(words, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError(words)

    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "stop_with_launcher", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(LostRankError, match=words), ranks.open_ranks(DistributedConfig(processes=2)):
        pass
