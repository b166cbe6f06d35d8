"""Runs of two ranks by vLLM servers: the first one asks, all learn what was drawn, and end together when it fails."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
from safetensors.torch import load_file

from support.distributed_runs import completions, largest_gap, recipe, rows, train, trainer_tensors, weights
from support.vllm_server import Call, Fault, VLLMServer, size_of_weights

pytestmark = pytest.mark.slow

Case = Literal["all weights", "adapters, drawn ahead"]


@pytest.fixture(autouse=True)
def _read_weights(monkeypatch):
    monkeypatch.setattr("support.vllm_server.read_weights", size_of_weights)


def served(directory: Path, server: VLLMServer, name: str, **sections: Any) -> dict[str, Any]:
    """The recipe of whole runs, sampled by a server."""
    engine = {"type": "vllm", "urls": [server.url], "directory": str(directory / "weights"), "timeout": 5.0}
    rollout = {"engine": engine, **sections.pop("rollout", {})}
    return recipe(directory, name, rollout={"prompts_per_step": 5, **rollout}, **sections)


def asked(server: VLLMServer) -> list[tuple[int, int, float]]:
    """The seed, the number and the temperature of the completions of every request, in no order."""
    sampling = [call.body["sampling_params"] for call in server.generated()]
    return sorted((one["seed"], one["n"], one["temperature"]) for one in sampling)


def logprobs(run: Path) -> list[float]:
    """The first log-probability of every completion, in the order of the log."""
    files = sorted((run / "rollouts").glob("*.jsonl"))
    return [json.loads(line)["logprobs"][0] for file in files for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def base(directory: Path) -> Path:
    """A model that adapters are trained on."""
    assert train(recipe(directory, "base", training={"steps": 1}))["code"] == 0
    return directory / "base" / "checkpoints" / "last"


@pytest.fixture(scope="module")
def sections(base: Path) -> dict[Case, dict[str, Any]]:
    adapted = {"model": {"path": str(base), "new": None, "lora": {"rank": 2}}, "sft": {"steps": 0}}
    return {"all weights": {}, "adapters, drawn ahead": {**adapted, "rollout": {"staleness": 1}}}


@pytest.fixture(scope="module")
def alone(directory: Path, sections: dict[Case, dict[str, Any]]) -> dict[Case, VLLMServer]:
    """The server that one process has asked, by case."""
    servers = {}
    for case, own in sections.items():
        with pytest.MonkeyPatch.context() as patch, VLLMServer(lora="model" in own) as servers[case]:
            patch.setattr("support.vllm_server.read_weights", size_of_weights)
            assert train(served(directory, servers[case], case, **own))["code"] == 0
    return servers


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("case", get_args(Case))
def test_two_ranks_ask_for_and_learn_what_one_process_does(directory, sections, alone, ranks, case, strategy):
    own, name = sections[case], f"{case}, {strategy}"
    with VLLMServer(lora="model" in own) as server:
        done = ranks(train, served(directory, server, name, processes=2, strategy=strategy, **own))
    assert [one.get("code") for one in done] == [0, 0], done
    run, expected_run = directory / name, directory / case
    assert (asked(server), server.paths()) == (asked(alone[case]), alone[case].paths())
    assert completions(run) == completions(expected_run)
    assert logprobs(run) == pytest.approx(logprobs(expected_run), abs=1e-6)
    # Of four steps; where they are drawn ahead, the first two have the same weights.
    assert len(set(logprobs(expected_run))) == (3 if "model" in own else 4)
    name = "adapter_model.safetensors" if "model" in own else "model.safetensors"
    left, right = (load_file(path / "checkpoints" / "last" / name) for path in (run, expected_run))
    assert largest_gap(left, right) < 1e-5
    for own, expected in zip(rows(run), rows(expected_run), strict=True):
        assert own == pytest.approx(expected, abs=1e-4, nan_ok=True)
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["decoder"] == "vllm"
    assert not list((directory / "weights").iterdir())


@pytest.mark.parametrize(("strategy", "staleness"), [("ddp", 1), ("fsdp2", 0)])
def test_a_run_that_a_signal_stops_goes_on_bit_for_bit(tmp_path, ranks, strategy, staleness):
    settings = {"processes": 2, "strategy": strategy, "rollout": {"staleness": staleness}}
    with VLLMServer() as server:
        assert [one["code"] for one in ranks(train, served(tmp_path, server, "whole", **settings))] == [0, 0]
        stopped = served(tmp_path, server, "stopped", **settings)
        assert [one["code"] for one in ranks(train, stopped, fault="signal")] == [143, 0]
        assert (tmp_path / "stopped" / "checkpoints" / "last").resolve().name == "step_000003"
        assert [one["code"] for one in ranks(train, stopped, resume=True)] == [0, 0]
    assert completions(tmp_path / "stopped") == completions(tmp_path / "whole")
    assert largest_gap(weights(tmp_path / "stopped"), weights(tmp_path / "whole")) == 0
    assert largest_gap(trainer_tensors(tmp_path / "stopped"), trainer_tensors(tmp_path / "whole")) == 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_servers_that_are_lost_end_all_ranks_with_the_last_step_saved(tmp_path, ranks, staleness):
    def script(call: Call) -> Fault | None:
        # The fourth version, of two names each: servers had those of the start, of SFT's end and of step 1 before.
        server.lost = server.lost or (call.path == "/update_weight_version" and call.earlier == 6)
        return Fault(reset=True) if server.lost and call.path.endswith("generate") else None

    with VLLMServer(script) as server:
        job = served(tmp_path, server, "lost", processes=2, rollout={"staleness": staleness}, evaluation={"every": 0})
        job["rollout"]["engine"]["timeout"] = 0.5
        first, second = ranks(train, job, timeout=60)
    assert first["error"] == "RunError"
    assert "resume=True" in first["text"]
    assert second["error"] == "ReportedElsewhereError"
    assert second["text"].startswith("rank 0: RunError: no server could be used for 0.5 s")
    last = (tmp_path / "lost" / "checkpoints" / "last").resolve().name
    with VLLMServer() as other:
        job = served(tmp_path, other, "lost", processes=2, rollout={"staleness": staleness}, evaluation={"every": 0})
        assert [one["code"] for one in ranks(train, job, resume=True)] == [0, 0]
    assert last == ("step_000003" if staleness else "step_000002")


def test_a_run_without_its_server_begins_on_no_rank(tmp_path, ranks):
    with VLLMServer() as server:  # which ends before the run begins
        job = served(tmp_path, server, "nowhere", processes=2)
    first, second = ranks(train, job, timeout=60)
    assert (first["error"], second["error"]) == ("UserError", "ReportedElsewhereError")
    assert "flatpeak serve" in first["text"]
    assert not (tmp_path / "nowhere").exists()


def test_a_signal_ends_the_wait_for_an_answer_on_all_ranks(tmp_path, ranks):
    pids = ranks(os.getpid)

    def script(call: Call) -> Fault | None:
        if call.path.endswith("generate") and server.version.endswith("3"):
            if not server.lost:
                server.lost = True
                os.kill(pids[0], signal.SIGTERM)
            return Fault(wait=30.0)
        return None

    with VLLMServer(script) as server:
        job = served(tmp_path, server, "waits", processes=2, evaluation={"every": 0})
        done = ranks(train, job, timeout=60)
    assert [one["code"] for one in done] == [143, 0]
    assert (tmp_path / "waits" / "checkpoints" / "last").resolve().name == "step_000001"
