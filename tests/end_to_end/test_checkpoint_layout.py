"""A checkpoint's top folder is the model alone, which other programs load."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from flatpeak.errors import UserError
from flatpeak.pipeline.model_source import locate_model
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.runs.notices import read_notices
from flatpeak.types import Example, Prompt, SamplingParams
from support.resumes import steps_of
from support.reward_functions import odd
from support.runs import Finished, Recipe, Train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
RESETS = {"kl": {"coefficient": 0.1}, "reference": {"reset_every": 1}, "sft": {"steps": 1, "batch_size": 4}}
VLLM = os.environ.get("FLATPEAK_VLLM_PYTHON")
"""The interpreter of an environment that has vLLM."""
VLLM_PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

model = LLM(model=sys.argv[1], dtype="float32", max_model_len=64, enforce_eager=True)
greedy = SamplingParams(temperature=0.0, max_tokens=8, min_tokens=8, detokenize=False)
found = model.generate([{"prompt_token_ids": ids} for ids in json.loads(sys.argv[2])], greedy)
print(json.dumps([list(one.outputs[0].token_ids) for one in found]))
"""


KEEPING: dict[str, Any] = {
    "run": {"name": "first", "checkpoint_every": 1, "keep_checkpoints": 9},
    "training": {"steps": 3},
}
"""A run of three steps that keeps all its checkpoints."""


def test_the_top_folder_of_a_trained_checkpoint_holds_the_models_tensors_alone(finished: Finished) -> None:
    run = finished(odd, **KEEPING, **RESETS)
    checkpoints = steps_of(run)
    assert [path.relative_to(run / "checkpoints").as_posix() for path in checkpoints] == [
        "sft/step_000001",
        *(f"step_{step:06d}" for step in range(4)),
    ]
    for path in checkpoints:
        model, info = AutoModelForCausalLM.from_pretrained(path, output_loading_info=True)
        assert [file.name for file in path.glob("*.safetensors")] == ["model.safetensors"]
        assert load_file(path / "model.safetensors").keys() <= model.state_dict().keys()
        assert not info["unexpected_keys"]
        assert not info["missing_keys"]
        assert sorted(file.name for file in (path / "trainer").iterdir()) == ["state.json", "state.safetensors"]
    kept = load_file(checkpoints[-1] / "trainer" / "state.safetensors")
    assert any(name.startswith("reference.") for name in kept)
    assert len(kept) > 20


def test_a_checkpoint_is_as_readable_as_its_directory_and_follows_its_logs_to_the_disk(
    recipe: Recipe, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(Path(f"/proc/self/fd/{number}").readlink().name))
    before = os.umask(0o027)
    try:
        run = train(recipe(run={"log_rollouts_every": 1}, training={"steps": 1})).path
    finally:
        os.umask(before)
    assert synced.count("manifest.json") == 2
    assert synced.index("metrics.jsonl") < synced.index("model.safetensors")
    last = len(synced) - synced[::-1].index("model.safetensors")
    for name in ("metrics.jsonl", "notices.jsonl", "step_000001.jsonl", "rollouts"):
        assert name in synced[:last]
    modes = {path.name: path.stat().st_mode & 0o777 for path in (run / "checkpoints" / "last").rglob("*")}
    assert modes.pop("trainer") == 0o750
    assert {"model.safetensors", "state.safetensors"} <= modes.keys()
    assert set(modes.values()) == {0o640}


def test_a_resumed_run_says_which_rows_its_log_has_lost(recipe: Recipe, train: Train, finished: Finished) -> None:
    run = finished(odd, **KEEPING)
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(row for row in rows if '"step": 2, "stage": "train"' not in row))
    train(recipe(**KEEPING | {"training": {"steps": 4}}), reward=odd, resume=True)
    lost = [row["text"] for row in read_notices(run / "notices.jsonl") if "has no row" in row["text"]]
    assert lost == [
        f"{run / 'metrics.jsonl'} has no row of 1 of the 3 steps before this start, the first is step 2: a power cut "
        "or a full disk lost them; step_000003 is whole, and the run goes on from it"
    ]


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
def test_a_checkpoint_that_lost_a_part_of_its_trainer_is_not_evaluated_as_whole(finished: Finished, name: str) -> None:
    last = finished(odd, **KEEPING) / "checkpoints" / "last"
    (last / "trainer" / name).unlink()
    with pytest.raises(UserError, match=f"trainer/{name}: missing"):
        locate_model(str(last))


def greedy_tokens(path: Path, prompts: list[list[int]]) -> list[list[int]]:
    engine = NativeEngine(load_policy(ModelConfig(path=str(path))))
    asked = [
        Prompt(id=f"{index}", token_ids=tuple(ids), text="", example=Example(id=f"{index}", question="", gold=""))
        for index, ids in enumerate(prompts)
    ]
    groups = engine.generate(
        asked, group_size=1, sampling=SamplingParams(temperature=0.0, max_new_tokens=8, min_new_tokens=8), seed=0
    )
    return [list(group.completions[0].token_ids) for group in groups]


@pytest.mark.skipif(VLLM is None, reason="FLATPEAK_VLLM_PYTHON names no interpreter with vLLM")
def test_vllm_loads_a_trained_checkpoint_and_continues_prompts_as_flatpeak_does(finished: Finished) -> None:
    # Heads of 32, which vLLM's kernels take, and weights so large that the likeliest tokens vary.
    sizes = {"hidden_size": 64, "intermediate_size": 128, "initializer_range": 0.5}
    run = finished(odd, **KEEPING, **RESETS, model={"new": {"config": sizes}})
    last = run / "checkpoints" / "last"
    assert (last / "trainer" / "state.safetensors").stat().st_size > (last / "model.safetensors").stat().st_size
    prompts = [[3, 13, 4], [5, 14, 6, 7], [8]]
    done = subprocess.run(
        [str(VLLM), "-c", VLLM_PROGRAM, str(last), json.dumps(prompts)],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        | {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert [len(tokens) for tokens in result] == [8, 8, 8]
    assert len({token for tokens in result for token in tokens}) > 4
    assert result == greedy_tokens(last, prompts)
