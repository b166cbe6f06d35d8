"""Whole runs with the memory savers together: recomputed layers, 8-bit moments, states and reference on the host."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

import flatpeak.training.optimizer
from flatpeak.config.load import merge
from support.host_memory import SimulatedHost, simulate_host
from support.preferences import reward_model_recipe, write_pairs
from support.resumes import MakeRun, Whole, assert_same
from support.reward_functions import varied_text
from support.runs import speed_up_runs

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
SAVERS: dict[str, Any] = {
    "training": {"activation_checkpointing": True},
    "optimizer": {"offload": True},
    "sft": {"optimizer": {"offload": True}},
    "reference": {"offload": True},
}
"""The savers that change no bit."""
PENALTY = {"gradient_regularization": {"strength": "ratio:0.3", "step": 5e-3, "min_perturbation_kept": 0.5}}
RESETS = {"reference": {"reset_every": 2, "reset_optimizer": True}}
RUNS: dict[str, dict[str, Any]] = {
    "eight_bit": {"optimizer": {"name": "adamw_8bit"}, **PENALTY, **RESETS},
    "bfloat16": {"model": {"dtype": "bfloat16"}, "optimizer": {"learning_rate": 1e-3}, **PENALTY, **RESETS},
}
ADAPTERS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "nf4": {"quantization": "nf4", "dtype": "bfloat16"},
}


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedHost]:
    """A host for the CPU, for states of any size: those of a tiny model are all below 4 KiB."""
    monkeypatch.setattr(flatpeak.training.optimizer, "SMALLEST_OFFLOADED", 0)
    return simulate_host(monkeypatch)


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_with_the_savers_ends_in_the_same_bits_and_so_does_its_resumption(
    hosts: list[SimulatedHost], make_run: MakeRun, whole: Whole, kind: str
) -> None:
    expected = whole(**RUNS[kind])
    assert hosts == []
    sections = merge(RUNS[kind], SAVERS)
    cut = make_run("cut", **sections)
    cut.stop_at("train", 3)
    assert_same(cut.go_on(), expected)
    # SFT, RL and the reference, and of the resumed run the last two.
    used = [host for host in hosts if host.tensors]
    assert len(used) == 5
    assert all(host.fetched > 0 for host in used)
    assert all(host.living == 0 for host in used)


@pytest.mark.parametrize(("kind", "optimizer"), [("float32", "adamw"), ("bfloat16", "adamw_8bit"), ("nf4", "adamw")])
def test_adapters_with_a_penalty_end_in_the_same_bits_with_the_savers(
    hosts: list[SimulatedHost], recipe: Any, train: Any, base: Path, watch: Any, send: Any, kind: str, optimizer: str
) -> None:
    model = {"new": None, "path": str(base), "lora": {"rank": 4, "alpha": 8}, **ADAPTERS[kind]}
    penalty = {"strength": "ratio:0.3", "perturbed": "adapters", "min_perturbation_kept": 0}
    shared = {
        "model": model,
        "kl": {"coefficient": 0.05},
        "training": {"steps": 3},
        "optimizer": {"name": optimizer},
        "reference": {"reset_every": 2},
        "gradient_regularization": penalty,
    }
    ends = []
    for name, sections in (("plain", {}), ("saved", SAVERS)):
        config = recipe(run={"name": name}, **merge(shared, sections))
        stop = {("train", 2): send(signal.SIGTERM)} if sections else {}
        result = train(config, reward=varied_text, progress=watch(stop))
        if sections:
            result = train(config, reward=varied_text, resume=True)
        assert result.summary.last_step == 3
        ends.append((result.path / "checkpoints" / "last" / "adapter_model.safetensors").read_bytes())
    assert ends[0] == ends[1]
    used = [host for host in hosts if host.tensors]
    assert len(used) == 4  # optimizer and reference, before and after
    assert all(host.fetched > 0 for host in used)


def test_on_a_cpu_a_notice_names_the_savers_without_effect(recipe: Any, train: Any, watch: Any) -> None:
    display = watch()
    train(recipe(**merge(SAVERS, {"kl": {"coefficient": 0.1}, "training": {"steps": 1}})), progress=display)
    assert [text for text in display.notices if "offload" in text] == [
        "optimizer.offload=true, reference.offload=true: no effect on device cpu, which keeps everything in host memory"
    ]


@pytest.mark.parametrize("simulated", [False, True])
def test_a_reward_model_trains_to_the_same_bits_with_its_states_on_the_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, watch: Any, simulated: bool
) -> None:
    from flatpeak.pipeline.train_reward_model import train_reward_model

    speed_up_runs(monkeypatch)
    hosts = simulate_host(monkeypatch) if simulated else []
    monkeypatch.setattr(flatpeak.training.optimizer, "SMALLEST_OFFLOADED", 0)
    pairs, ends, display = write_pairs(tmp_path / "pairs.jsonl"), [], watch()
    for offload in (False, True):
        section = {"model": {"dtype": "bfloat16"}, "reward_model": {"optimizer": {"offload": offload}}}
        config = reward_model_recipe(tmp_path / f"runs-{offload}", pairs, **section)
        last = train_reward_model(config, progress=display).path / "checkpoints" / "last"
        ends.append([(last / name).read_bytes() for name in ("model.safetensors", "trainer/state.safetensors")])
    assert ends[0] == ends[1]
    notices = [text for text in display.notices if "offload" in text]
    if simulated:
        assert hosts[-1].fetched > 0
        assert notices == []
    else:
        assert notices == [
            "reward_model.optimizer.offload=true: no effect on device cpu, which keeps everything in host memory"
        ]
