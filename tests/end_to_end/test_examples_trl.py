"""The two TRL examples train from start to end, on tiny models and a judge that is a local server."""

from __future__ import annotations

import json
import math
import os
import runpy
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config

from flatpeak.policy.config import TokenizerConfig
from flatpeak.policy.loading import build_tokenizer

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL = ["--steps", "2", "--batch", "16", "--max-tokens", "4", "--plain"]

if not os.environ.get("CI"):
    pytest.importorskip("trl")


@pytest.fixture(autouse=True)
def quiet_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRL_EXPERIMENTAL_SILENCE", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., str]:
    """Saves a tiny model with its tokenizer and gives its path."""

    def save(name: str, auto: Any, **changes: Any) -> str:
        tokenizer = build_tokenizer(TokenizerConfig(type="characters"), ["0123456789+= "])
        special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        config = Qwen2Config(
            vocab_size=len(tokenizer), max_position_embeddings=64, num_key_value_heads=2, **SIZES, **special, **changes
        )
        torch.manual_seed(0)
        auto.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return save


@pytest.fixture
def rows(tmp_path: Path) -> str:
    lines = [json.dumps({"question": f"{n}+{n}=", "answer": f"#### {2 * n}", "prompt": f"{n}+{n}="}) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "rows.jsonl")


class ScriptedJudge(BaseHTTPRequestHandler):
    """Scores by the parity of the answer's length; every fifth reply is not a score."""

    asked: list[dict[str, Any]]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        text = body["messages"][1]["content"].split("\n")[-2]
        content = "I like it" if len(self.asked) % 5 == 0 else f"SCORE: {10 if len(text) % 2 else 2}"
        reply = json.dumps({"choices": [{"message": {"content": content}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        """Quiet."""


@pytest.fixture
def judge() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    asked: list[dict[str, Any]] = []
    handler = type("Handler", (ScriptedJudge,), {"asked": asked})
    # With torch's threads at work the accepting thread may be late, and a full queue would lose a request.
    server = type("Server", (ThreadingHTTPServer,), {"request_queue_size": 64})(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1", asked
    server.shutdown()
    server.server_close()


def steps_of(trainer: Any) -> list[dict[str, float]]:
    return [row for row in trainer.state.log_history if "loss" in row]


def test_the_judge_example_trains_on_verdicts_and_watches_the_truth(
    checkpoint: Callable[..., str], rows: str, judge: tuple[str, list[dict[str, Any]]], tmp_path: Path
) -> None:
    url, asked = judge
    example = runpy.run_path(str(EXAMPLES / "trl_judge.py"))
    model = checkpoint("model", AutoModelForCausalLM)
    given = ["--model", model, "--rows", rows, "--judge-url", url, "--judge-model", "j"]
    trainer = example["main"]([*given, "--output", str(tmp_path / "out"), *SMALL])
    assert len(asked) == 2 * 16
    assert {body["model"] for body in asked} == {"j"}
    logged = steps_of(trainer)
    assert len(logged) == 2
    for row in logged:
        assert 0.2 <= row["rewards/judge/mean"] <= 1
        assert math.isfinite(row["rewards/exact/mean"])
        assert row["gradreg/penalty_ratio"] > 0
    assert logged[0]["gradreg/penalty_ratio"] == pytest.approx(3, rel=1e-4)
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_verdict_is_a_score_or_missing(judge: tuple[str, list[dict[str, Any]]]) -> None:
    url, asked = judge
    example = runpy.run_path(str(EXAMPLES / "trl_judge.py"))
    ask = example["Judge"](url=url, model="j")
    answers = {"prompts": ["q"] * 5, "completions": ["abc", "ab", "a", "x", "abcd"], "answer": ["1"] * 5}
    result = ask(**answers)
    assert sorted(result, key=str).count(None) == 1
    assert {score for score in result if score is not None} <= {0.2, 1.0}
    gone = example["Judge"](url="http://127.0.0.1:9/v1", model="j", timeout=1.0)
    assert gone(**answers) == [None] * 5
    question = asked[0]["messages"][1]["content"].split("\n")
    assert question[-1] == question[-3]
    assert question[-1] != asked[1]["messages"][1]["content"].split("\n")[-1]
    assert example["exact"](completions=["so 1,234", "no", "5 6"], answer=["1234", "1", "5"]) == [1.0, 0.0, 0.0]


def test_the_rlhf_example_trains_against_a_reward_model(
    checkpoint: Callable[..., str], rows: str, tmp_path: Path
) -> None:
    example = runpy.run_path(str(EXAMPLES / "trl_rlhf.py"))
    model = checkpoint("model", AutoModelForCausalLM)
    reward = checkpoint("reward", AutoModelForSequenceClassification, num_labels=1)
    trainer = example["main"](
        ["--model", model, "--reward-model", reward, "--rows", rows, "--output", str(tmp_path / "out"), *SMALL]
    )
    logged = steps_of(trainer)
    assert len(logged) == 2
    assert all(math.isfinite(row["reward"]) for row in logged)
    assert logged[0]["gradreg/penalty_ratio"] == pytest.approx(3, rel=1e-4)
    assert (tmp_path / "out" / "model.safetensors").exists()
