"""Peaks of memory by phase: what counts where, on a mark by hand and on this process."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from flatpeak.policy.loading import cast_weights
from flatpeak.policy.model import Policy
from flatpeak.policy.reference import snapshot
from flatpeak.training.config import TrainingConfig
from flatpeak.training.objective_config import KLConfig
from flatpeak.utils.peak_memory import GIB, DevicePeak, PeakMemory, ProcessPeak
from support.models import letter_tokenizer, tiny_model
from support.regularized_training import make_regularized_trainer

CPU = torch.device("cpu")
STATUS = "Name:\tpython\nVmPeak:\t  999 kB\nVmHWM:\t  {kib} kB\nVmRSS:\t  100 kB\n"


class Allocator:
    """A mark whose memory in use is set by the test."""

    def __init__(self, *, resets: bool = True) -> None:
        self.used = self.peak = 0
        self.resets = resets

    def use(self, used: int) -> None:
        self.used, self.peak = used, max(self.peak, used)

    def read(self) -> int:
        return self.peak

    def reset(self) -> bool:
        if self.resets:
            self.peak = self.used
        return self.resets


def gib(values: dict[str, float]) -> dict[str, float]:
    return {f"memory/{name}": value / GIB for name, value in values.items()}


def test_each_phase_has_the_peak_of_its_own_time_and_the_run_that_of_all() -> None:
    mark = Allocator()
    memory = PeakMemory(CPU, mark=mark)
    mark.use(90)
    mark.use(10)
    with memory.phase("rollout"):
        mark.use(40)
        mark.use(20)
    mark.use(70)
    mark.use(20)
    with memory.phase("update"):
        mark.use(60)
        mark.use(5)
    expected = gib({"peak_gib": 90, "rollout_peak_gib": 40, "update_peak_gib": 60})
    assert memory.metrics() == expected
    mark.use(100)
    mark.use(5)
    with memory.phase("update"):
        mark.use(30)
    assert memory.metrics() == gib({"peak_gib": 100, "update_peak_gib": 30})


def test_an_inner_phase_counts_for_itself_alone() -> None:
    mark = Allocator()
    memory = PeakMemory(CPU, mark=mark)
    with memory.phase("update"):
        mark.use(30)
        mark.use(10)
        with memory.phase("reference"):
            mark.use(80)
            mark.use(10)
        mark.use(50)
    assert memory.metrics() == gib({"peak_gib": 80, "update_peak_gib": 50, "reference_peak_gib": 80})


def test_a_phase_that_is_repeated_or_fails_keeps_its_largest_peak() -> None:
    mark = Allocator()
    memory = PeakMemory(CPU, mark=mark)
    with memory.phase("reference"):
        mark.use(80)
        mark.use(10)
    with pytest.raises(MemoryError), memory.phase("reference"):
        mark.use(20)
        raise MemoryError
    mark.use(99)
    assert memory.metrics() == gib({"peak_gib": 99, "reference_peak_gib": 80})


def test_without_a_reset_the_phases_are_left_out() -> None:
    mark = Allocator(resets=False)
    memory = PeakMemory(CPU, mark=mark)
    with memory.phase("rollout"):
        mark.use(40)
    assert memory.metrics() == gib({"peak_gib": 40})


def test_the_peak_of_a_process_is_read_and_reset_as_proc_documents_it(tmp_path: Path) -> None:
    peak = ProcessPeak(tmp_path)
    (tmp_path / "status").write_text(STATUS.format(kib=2048))
    (tmp_path / "clear_refs").write_text("")
    assert peak.read() == 2 * 2**20
    assert peak.reset()
    assert (tmp_path / "clear_refs").read_text() == "5"


@pytest.mark.parametrize("status", [None, "Name:\tpython\n"])
def test_elsewhere_the_peak_is_the_systems_and_cannot_be_reset(tmp_path: Path, status: str | None) -> None:
    process = tmp_path / "self"
    if status is not None:
        process.mkdir()
        (process / "status").write_text(status)
        (process / "clear_refs").mkdir()  # a file that cannot be written
    peak = ProcessPeak(process)
    assert peak.read() > 10 * 2**20  # this process has loaded torch
    assert not peak.reset()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux alone resets a process's peak")
def test_this_processs_peak_falls_and_rises_with_what_is_allocated() -> None:
    peak, size = ProcessPeak(), 192 * 2**20
    if not peak.reset():
        pytest.skip("the sandbox forbids /proc/self/clear_refs")
    ctypes.CDLL(None).malloc_trim(0)  # or a block would fit into what earlier runs have freed
    peak.reset()
    before = peak.read()
    block = torch.ones(size // 4)
    assert peak.read() - before > 0.9 * size
    del block
    assert peak.read() - before > 0.9 * size
    assert peak.reset()
    assert peak.read() - before < 0.5 * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kl", [None, KLConfig(coefficient=0.1)])
def test_a_step_has_the_peaks_of_its_phases(kl: KLConfig | None, dtype: torch.dtype) -> None:
    model = tiny_model()
    cast_weights(model, dtype)
    policy = Policy(model, letter_tokenizer())
    reference = None if kl is None else snapshot(policy)
    trainer = make_regularized_trainer(policy, training=TrainingConfig(steps=2), kl=kl, reference=reference)
    mark = Allocator()
    trainer.learner.memory.mark = mark
    use_in(trainer, mark)
    mark.use(10)
    expected = {"peak_gib": 50, "rollout_peak_gib": 30, "update_peak_gib": 50}
    if kl is not None:
        expected["reference_peak_gib"] = 40
    for _ in range(2):
        metrics = trainer.train_step(1)
        assert {name: value for name, value in metrics.items() if name.startswith("memory/")} == gib(expected)


def use_in(trainer: object, mark: Allocator) -> None:
    """Let sampling use 30, a pass of the reference 40, and an update 50."""
    for owner, name, used in (
        (trainer.sampler, "generate", 30),  # type: ignore[attr-defined]
        (trainer.learner.reference, "token_logprobs", 40),  # type: ignore[attr-defined]
        (trainer.learner, "accumulate_gradients", 50),  # type: ignore[attr-defined]
    ):
        if owner is not None:
            setattr(owner, name, using(getattr(owner, name), mark, used))


def using(function: object, mark: Allocator, used: int) -> object:
    def run(*args: object, **settings: object) -> object:
        mark.use(used)
        result = function(*args, **settings)  # type: ignore[operator]
        mark.use(10)
        return result

    return run


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_the_peak_is_that_of_its_allocator() -> None:
    device = torch.device("cuda")
    memory = PeakMemory(device)
    assert isinstance(memory.mark, DevicePeak)
    held = torch.cuda.memory_allocated(device)
    with memory.phase("rollout"):
        block = torch.empty(2**28, dtype=torch.uint8, device=device)
        del block
    with memory.phase("update"):
        block = torch.empty(2**27, dtype=torch.uint8, device=device)
        del block
    metrics = memory.metrics()
    assert metrics["memory/rollout_peak_gib"] == pytest.approx((held + 2**28) / GIB)
    assert metrics["memory/update_peak_gib"] == pytest.approx((held + 2**27) / GIB)
    assert metrics["memory/peak_gib"] >= metrics["memory/rollout_peak_gib"]
