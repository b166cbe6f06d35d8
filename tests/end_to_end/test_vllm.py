"""A real vLLM on this machine's CPU, in a Python of its own: `make test-vllm`."""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import flatpeak
from flatpeak.config.load import load_recipe, merge
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.policy.model import Policy
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.engine import NativeEngine
from flatpeak.rollout.vllm import VLLMSampler, weight_transfer
from flatpeak.rollout.vllm.http_client import HTTPClient
from flatpeak.runs.metrics import read_metrics
from flatpeak.types import Example, Group, Prompt, SamplingParams
from flatpeak.utils.adapters import LoraConfig

PYTHON = os.environ.get("FLATPEAK_VLLM_PYTHON")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(PYTHON is None, reason="FLATPEAK_VLLM_PYTHON names no Python with vLLM"),
]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    # As the demo's, but for heads of 32: vLLM's attention on CPUs has none of 8.
    "gpt2": {"n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "wide gpt2": {"n_embd": 256, "n_layer": 2, "n_head": 8, "n_positions": 64},
    "qwen2": {
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
    },
    "wide qwen2": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 64,
    },
}
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    # Compiling small functions would take longer than running them.
    "TORCHDYNAMO_DISABLE": "1",
}
LARGEST_GAP = 1e-4
QUESTIONS = 200
LORA = {"rank": 16}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(architecture)`: the demo's model after SFT, half right."""
    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            sections = {
                "run": {"directory": str(tmp_path_factory.mktemp("sft")), "name": "sft"},
                "model": {"new": {"architecture": architecture.split()[-1], "config": None}},
            }
            recipe = merge(load_recipe("flatpeak:demo"), sections)
            recipe["model"]["new"]["config"] = ARCHITECTURES[architecture]
            result = flatpeak.sft(recipe, progress=False)
            made[architecture] = (result.path / "checkpoints" / "sft" / "last").resolve()
        return made[architecture]

    return make


Serve = Callable[..., Any]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """`serve(model, port=0, lora_rank=None, arguments=())`: a server that is ready; all end with the test."""
    from flatpeak.apps.serve import ServeConfig, ServerProcess
    from flatpeak.rollout.vllm.vllm_python import find_python

    processes = []

    def start(
        model: Path, *, port: int = 0, lora_rank: int | None = None, arguments: Sequence[str] = ()
    ) -> ServerProcess:
        config = ServeConfig(
            model=str(model),
            port=port,
            dtype="float32",
            lora_rank=lora_rank,
            arguments=("--enforce-eager", "--max-num-seqs=1024", *arguments),
        )
        process = ServerProcess(config, python=find_python(PYTHON), environment=ENVIRONMENT)
        processes.append(process)
        process.wait_until_healthy(timeout=1800.0)
        return process

    yield start
    for process in processes:
        process.stop()


def recipe_over(start: Path, url: str, directory: Path, **sections: Any) -> dict[str, Any]:
    """The demo's GRPO from a checkpoint, sampled by a server."""
    base = load_recipe("flatpeak:demo")
    base["model"] = {"path": str(start)}
    engine = {"type": "vllm", "urls": [url], "directory": str(directory / "weights")}
    own = {
        "run": {"directory": str(directory / "runs"), "name": "vllm", "log_rollouts_every": 1},
        "rollout": {"engine": engine},
        "sft": {"steps": 0},
        "training": {"stop_at": 0.9},
    }
    return merge(merge(base, own), sections)


def questions(policy: Policy, count: int = QUESTIONS) -> list[Prompt]:
    """Sums of two numbers of two digits."""
    texts = [f"{10 + i * 37 % 90}+{10 + i * 53 % 90}=" for i in range(count)]
    return [
        Prompt(
            id=str(i),
            token_ids=tuple(policy.tokenizer.encode(text)),
            text=text,
            example=Example(id=str(i), question=text, gold=""),
        )
        for i, text in enumerate(texts)
    ]


def answers(groups: list[Group]) -> list[tuple[int, ...]]:
    return [completion.token_ids for group in groups for completion in group.completions]


def largest_gap(groups: list[Group], others: list[Group]) -> float:
    """The largest distance of two log-probabilities of first completions."""
    return max(
        abs(a - b)
        for one, other in zip(groups, others, strict=True)
        for a, b in zip(one.completions[0].logprobs, other.completions[0].logprobs, strict=True)
    )


def check_steps(path: Path) -> int:
    """Every step was sampled whole by the weights of the step before, whose log-probs agree; the number of steps."""
    rows = [row for row in read_metrics(path / "metrics.jsonl") if row["stage"] == "train"]
    for number, row in enumerate(rows, start=1):
        assert row["step"] == number
        assert row["rollout/logprob_gap_max"] < LARGEST_GAP
        lines = (path / "rollouts" / f"step_{number:06d}.jsonl").read_text(encoding="utf-8").splitlines()
        completions = [json.loads(line) for line in lines]
        assert len(completions) == 128 * 8
        assert {completion["weight_version"] for completion in completions} == {number}
    return len(rows)


@pytest.mark.parametrize(
    ("architecture", "lora", "sync"),
    [("gpt2", None, "reload"), ("qwen2", LORA, "reload"), ("gpt2", None, "endpoint"), ("qwen2", None, "endpoint")],
    ids=["whole", "lora", "sent", "sent qwen2"],
)
def test_after_every_update_the_servers_greedy_answers_are_the_trainers(
    architecture, lora, sync, checkpoint, serve, tmp_path
):
    start = checkpoint(architecture)
    server = serve(start, lora_rank=lora["rank"] if lora else None)
    policy = load_policy(ModelConfig(path=str(start), lora=LoraConfig(**lora) if lora else None))
    sampler = VLLMSampler(policy, VLLMConfig(type="vllm", urls=(server.url,), directory=str(tmp_path), sync=sync))
    native, greedy = NativeEngine(policy), SamplingParams(temperature=0.0, max_new_tokens=4)
    prompts, seen = questions(policy), set()
    for version in range(1, 5):
        served = sampler.generate(prompts, group_size=1, sampling=greedy, seed=0)
        own = native.generate(prompts, group_size=1, sampling=greedy, seed=0)
        assert answers(served) == answers(own)
        assert {completion.weight_version for group in served for completion in group.completions} == {version}
        assert largest_gap(served, own) < LARGEST_GAP
        seen.add(tuple(answers(served)))
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(version)) * 0.02)
    sampler.close()
    assert len(seen) > 1  # the updates changed answers


def test_a_server_that_lost_its_trainer_within_a_transfer_serves_the_next(checkpoint, serve, monkeypatch):
    start = checkpoint("qwen2")
    server = serve(start)
    policy = load_policy(ModelConfig(path=str(start)))
    config = VLLMConfig(type="vllm", urls=(server.url,), sync="endpoint", timeout=60.0)
    prompts, greedy = questions(policy), SamplingParams(temperature=0.0, max_new_tokens=4)
    # Cut in the middle of a layer whose matrices vLLM joins: their parts are counted.
    pushed = itertools.count()
    send = weight_transfer._send

    def die(*arguments: Any) -> None:
        if next(pushed) == 10:
            raise KeyboardInterrupt
        send(*arguments)

    abandoned = VLLMSampler(policy, config)
    monkeypatch.setattr(weight_transfer, "_send", die)
    post = HTTPClient.post
    monkeypatch.setattr(
        HTTPClient, "post", lambda self, path, *body, **query: path == "/resume" or post(self, path, *body, **query)
    )
    with pytest.raises(KeyboardInterrupt):
        abandoned.generate(prompts, group_size=1, sampling=greedy, seed=0)
    monkeypatch.undo()
    sampler = VLLMSampler(policy, config)
    served = sampler.generate(prompts, group_size=1, sampling=greedy, seed=0)
    sampler.close()
    own = NativeEngine(policy).generate(prompts, group_size=1, sampling=greedy, seed=0)
    assert answers(served) == answers(own)
    assert largest_gap(served, own) < LARGEST_GAP


def test_under_filters_raw_log_probs_are_those_of_the_trainers_full_distribution(checkpoint, serve, tmp_path):
    start = checkpoint("gpt2")
    server = serve(start, arguments=("--logprobs-mode=raw_logprobs",))
    policy = load_policy(ModelConfig(path=str(start)))
    config = VLLMConfig(type="vllm", urls=(server.url,), directory=str(tmp_path))
    prompts = questions(policy)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4)
    own = NativeEngine(policy).generate(prompts, group_size=1, sampling=greedy, seed=0)
    for filters in ({"top_k": 1}, {"top_p": 1e-6}):
        # Of one token that is left the log-probability is 0; of all it is the greedy one's.
        sampling = SamplingParams(max_new_tokens=4, **filters)
        sampler = VLLMSampler(policy, config, sampling=sampling)
        served = sampler.generate(prompts, group_size=1, sampling=sampling, seed=0)
        sampler.close()
        assert answers(served) == answers(own)
        assert largest_gap(served, own) < LARGEST_GAP
    sections = {"rollout": {"top_k": 5, "top_p": 0.9, "min_new_tokens": 3}, "training": {"steps": 2, "stop_at": None}}
    result = flatpeak.train(recipe_over(start, server.url, tmp_path, **sections), progress=False)
    assert check_steps(result.path) == 2
    lines = (result.path / "rollouts" / "step_000001.jsonl").read_text(encoding="utf-8").splitlines()
    assert {len(json.loads(line)["token_ids"]) for line in lines} == {4}  # sums of two digits would end after three


def test_a_server_that_is_killed_and_started_anew_loses_a_run_nothing(checkpoint, serve, tmp_path):
    start = checkpoint("gpt2")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = serve(start, port=port)
    restarts = []

    class Killer:
        def update(self, stage: str, *, step: int, total: int, metrics: Any) -> None:
            if stage == "train" and step == 2 and not restarts:
                restarts.append(threading.Timer(0.5, replace))
                restarts[0].start()

        def notice(self, text: str) -> None:
            pass

    def replace() -> None:
        server.kill()
        serve(start, port=port)

    recipe = recipe_over(start, server.url, tmp_path, training={"steps": 5, "stop_at": None}, evaluation={"every": 0})
    recipe["rollout"]["engine"]["timeout"] = 1800
    result = flatpeak.train(recipe, progress=Killer())
    restarts[0].join()
    assert result.exit_code == 0
    assert check_steps(result.path) == 5
    retried = sum(row.get("rollout/retried_requests", 0.0) for row in read_metrics(result.path / "metrics.jsonl"))
    assert retried > 0


# Eight heads of 32: the demo's sixteen are of 8, which vLLM's attention on CPUs lacks, and four learn less than this.
# Adapters take a larger rate than the recipe's.
@pytest.mark.parametrize(
    ("architecture", "lora", "rate", "goal"),
    [("wide gpt2", None, 3e-4, 0.9), ("wide qwen2", LORA, 2e-3, 0.9)],
    ids=["whole", "lora"],
)
def test_grpo_through_vllm_reaches_its_goal(architecture, lora, rate, goal, checkpoint, serve, tmp_path):
    start = checkpoint(architecture)
    server = serve(start, lora_rank=lora["rank"] if lora else None)
    sections = {"model": {"lora": lora}, "optimizer": {"learning_rate": rate}, "training": {"stop_at": goal}}
    result = flatpeak.train(recipe_over(start, server.url, tmp_path, **sections), progress=False)
    assert max(evaluation.metrics["accuracy"] for evaluation in result.summary.evaluations) >= goal
    assert check_steps(result.path) == result.summary.last_step
