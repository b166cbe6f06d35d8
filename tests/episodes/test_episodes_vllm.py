"""Episodes by a vLLM server: every turn is asked for by the tokens so far, which are never changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from support import vllm_server
from support.episodes import TOKENIZER, ids
from support.models import tiny_model
from support.runs import Recipe, Train
from support.vllm_server import EOS, VLLMServer

ADD = '''
def add(a: int, b: int) -> int:
    """Add."""
    return a + b
'''


def written(index: int, results: list[str]) -> str:
    """The turn of an episode of this index in its group: it adds up so many numbers by calls, then says the sum."""
    if len(results) <= index % 3:
        return f"<call>add(a={results[-1] if results else 5},b={10 * index})</call>"
    return results[-1]


def script(answer: dict[str, Any]) -> dict[str, Any]:
    """The completions that a server writes after a prompt, in place of its own."""
    prompt = TOKENIZER.decode(answer["prompt_token_ids"])
    results = [part.partition("</result>")[0] for part in prompt.split("<result>")[1:]]
    for index, choice in enumerate(answer["choices"]):
        # The first call of an episode tells its index.
        index = int(prompt.partition(",b=")[2].partition(")")[0]) // 10 if results else index
        text = written(index, results)
        tokens = [*ids(text), *([] if text.endswith(">") else [EOS])]
        value = choice["logprobs"]["content"][0]["logprob"]
        rows = [{"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []} for token in tokens]
        choice |= {"token_ids": tokens, "finish_reason": "stop", "logprobs": {"content": rows}}
        choice["weight_versions"][0]["end"] = len(tokens)
    return answer


def test_turns_are_asked_for_by_what_was_read_and_drawn_token_by_token_and_trained_on(
    train: Train, recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_server, "read_weights", vllm_server.size_of_weights)
    (tmp_path / "add.py").write_text(ADD)
    model = tiny_model("qwen2", vocab_size=len(TOKENIZER), eos_token_id=EOS, max_position_embeddings=256)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with VLLMServer(edit=script) as server:
        config = recipe(
            tools=[f"{tmp_path / 'add.py'}:add"],
            rollout={"max_new_tokens": 200, "engine": {"type": "vllm", "urls": [server.url], "timeout": 10.0}},
            training={"steps": 1},
            evaluation={"size": 1},
        )
        done = train(config, model=model, tokenizer=TOKENIZER, progress=False)
        requests = [tuple(call.body["token_ids"]) for call in server.generated()]
    rows = [json.loads(line) for line in (Path(done.path) / "rollouts" / "step_000001.jsonl").read_text().splitlines()]
    assert [len(row["turns"]) for row in rows] == [2, 3, 4, 2] * 4
    # The first turns of four groups, 28 later ones, and two evaluations of one question in two turns.
    assert len(requests) == 4 + 28 + 4
    for row in rows:
        prompt, tokens, place = tuple(row["prompt_token_ids"]), tuple(row["token_ids"]), 0
        assert row["turns"][-1]["text"] == row["turns"][-2]["answer"]
        for turn in row["turns"]:
            assert prompt + tokens[:place] in requests
            assert TOKENIZER.decode(tokens[place : place + turn["sampled"]], skip_special_tokens=True) == turn["text"]
            assert row["trained"][place : place + turn["sampled"]] == [1] * turn["sampled"]
            place += turn["sampled"]
            added = TOKENIZER.decode(tokens[place : place + turn["added"]])
            assert added == (f"<result>{turn['answer']}</result>" if turn["calls"] else "")
            place += turn["added"]
        assert place == len(tokens)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
