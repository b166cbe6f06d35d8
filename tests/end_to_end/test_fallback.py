"""An architecture the native engine does not serve trains all the same, by `generate` and padding, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flatpeak.errors import UserError
from flatpeak.pipeline.train import train
from flatpeak.policy import model as policy
from flatpeak.policy import outputs
from flatpeak.types import Batch
from support.runs import Watcher, tiny_recipe

pytestmark = pytest.mark.slow

GPT_NEO = {
    "architecture": "gpt_neo",
    "config": {
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "max_position_embeddings": 64,
    },
}


def recipe(directory: Path, **sections: Any) -> dict[str, Any]:
    made = tiny_recipe(directory, optimizer={"learning_rate": 1e-3}, **sections)
    made["model"] = {"new": GPT_NEO, "device": "cpu"}
    return made


def test_a_fallback_run_says_so_and_scores_what_it_sampled(tmp_path: Path) -> None:
    watcher = Watcher()
    result = train(recipe(tmp_path, kl={"coefficient": 0.1}), progress=watcher)
    assert any("not tested with the native engine" in notice for notice in watcher.notices)
    first = next(metrics for stage, step, metrics in watcher.rows if (stage, step) == ("train", 1))
    # generate decodes with a cache, training pads: the same log-probabilities to rounding.
    assert first["policy/ratio_max_gap"] < 1e-5
    assert first["policy/kl_reference"] == pytest.approx(0.0, abs=1e-7)
    assert first["policy/entropy"] > 1.0
    assert result.summary.status == "done"
    assert result.exit_code == 0


def test_no_pass_of_a_fallback_run_reads_more_padded_tokens_than_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[int, int]] = []
    scored = outputs.padded_outputs

    def spy(model: Any, batch: Batch, **settings: Any) -> Any:
        rows = [
            len(batch.prompts[p]) + n for p, n in zip(batch.prompt_N.tolist(), batch.lengths_N.tolist(), strict=True)
        ]
        read.append((len(rows), max(rows)))
        return scored(model, batch, **settings)

    monkeypatch.setattr(policy, "padded_outputs", spy)
    sections = {"gradient_regularization": {"strength": 0.1}, "kl": {"coefficient": 0.1}}
    train(recipe(tmp_path, training={"steps": 2, "micro_batch_tokens": 40}, **sections), progress=Watcher())
    assert max(count for count, _ in read) > 1
    assert all(count * longest <= 40 for count, longest in read if count > 1)


def test_the_native_engine_is_refused_where_it_would_be_wrong(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not tested with the native engine"):
        train(recipe(tmp_path, rollout={"engine": "native"}))
    assert not list(tmp_path.iterdir())


def test_generate_can_be_asked_for_and_draws_what_the_native_engine_draws(tmp_path: Path) -> None:
    rewards = []
    for engine in ("native", "generate"):
        watcher = Watcher()
        train(tiny_recipe(tmp_path, run={"name": engine}, rollout={"engine": engine}), progress=watcher)
        rewards.append([metrics["reward/mean"] for stage, _, metrics in watcher.rows if stage == "train"])
    assert rewards[0] == pytest.approx(rewards[1])
