"""Whole runs of adapters from a recipe, in float32 and over 4 bits: what is trained, saved, resumed and loaded."""

from __future__ import annotations

import hashlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from flatpeak.apps.fork.fork_run import fork
from flatpeak.errors import UserError
from flatpeak.pipeline.train_reward_model import train_reward_model
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.rewards.reward_model import load_scorer
from flatpeak.runs.metrics import read_metrics
from support.models import run_model
from support.preferences import reward_model_recipe, write_pairs
from support.reward_functions import varied_text
from support.runs import Recipe

pytestmark = pytest.mark.slow

KINDS: dict[str, dict[str, Any]] = {
    "lora": {"lora": {"rank": 4, "alpha": 8}},
    "rslora": {"lora": {"rank": 4, "alpha": 8, "rslora": True, "target_modules": ["q_proj", "down_proj"]}},
    "dora": {"lora": {"rank": 4, "alpha": 8, "dora": True}},
    "whole_head": {"lora": {"rank": 4, "alpha": 8, "modules_to_save": ["lm_head"]}},
    "bfloat16": {"lora": {"rank": 4, "alpha": 8}, "dtype": "bfloat16"},
    "nf4": {"lora": {"rank": 4, "alpha": 8}, "quantization": "nf4"},
    "nf4_bfloat16": {"lora": {"rank": 4, "alpha": 8}, "quantization": "nf4", "dtype": "bfloat16"},
}


def digest(directory: Path) -> str:
    return hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture
def adapted(recipe: Recipe, base: Path) -> Callable[..., Any]:
    """`adapted(kind, **sections)`: a recipe that trains adapters of the base."""

    def make(kind: str, **sections: Any) -> dict[str, Any]:
        made = recipe(**{"kl": {"coefficient": 0.05}, "training": {"steps": 3}} | sections)
        return {**made, "model": {"path": str(base), "device": "cpu", **KINDS[kind]}}

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_trained_and_saved_and_the_base_stays_as_it_is(
    adapted: Any, base: Path, train: Any, watch: Any, kind: str
) -> None:
    before = digest(base)
    display = watch()
    result = train(adapted(kind), reward=varied_text, progress=display)
    files = {path.name for path in (result.path / "checkpoints" / "last").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "adapter_base.json"} <= files
    assert not {"model.safetensors", "pytorch_model.bin"} & files
    assert digest(base) == before
    assert not any("generate" in notice for notice in display.notices), display.notices
    rows = [row for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
    assert rows[0]["policy/kl_reference"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["policy/kl_reference"] > 1e-6
    bound = 0.1 if KINDS[kind].get("dtype") == "bfloat16" else 1e-5
    assert max(row["rollout/logprob_gap_max"] for row in rows) < bound


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_ends_in_the_same_bits(adapted: Any, train: Any, watch: Any, send: Any, kind: str) -> None:
    ends = []
    for name, stop in (("whole", {}), ("cut", {("train", 2): send(signal.SIGTERM)})):
        config = adapted(kind, run={"name": name}, training={"steps": 4})
        for resume in (False, True):
            result = train(config, reward=varied_text, progress=watch({} if resume else stop), resume=resume)
        ends.append((result.path / "checkpoints" / "last" / "adapter_model.safetensors").read_bytes())
    assert ends[0] == ends[1]


@pytest.mark.parametrize("kind", ["lora", "dora", "whole_head", "bfloat16"])
def test_peft_alone_loads_a_checkpoint_with_the_same_logits(adapted: Any, base: Path, train: Any, kind: str) -> None:
    last = train(adapted(kind), reward=varied_text).path / "checkpoints" / "last"
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    alone = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=dtype), str(last)).eval()
    policy = load_policy(ModelConfig(path=str(last), device="cpu", dtype=KINDS[kind].get("dtype", "float32")))
    assert policy.native
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad(), policy.plain_attention() as model:
        expected, ours = alone(input_ids=ids).logits, model.eval()(input_ids=ids).logits
    policy.release()
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).eval()
    with torch.no_grad():
        assert not torch.equal(plain(input_ids=ids).logits, expected)
    torch.testing.assert_close(ours, expected, atol=0, rtol=0)


@pytest.mark.parametrize("names", [("mine",), ("default", "mine")], ids="-".join)
def test_a_run_of_a_callers_named_adapter_resumes_in_the_same_bits_and_is_loaded(
    recipe: Any, base: Path, train: Any, watch: Any, send: Any, names: tuple[str, ...]
) -> None:
    ends = []
    for run, stop in (("whole", {}), ("cut", {("train", 2): send(signal.SIGTERM)})):
        for resume in (False, True):
            model, tokenizer = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), run_model()[1]
            settings = LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
            torch.manual_seed(1)
            adapted = get_peft_model(model, settings, adapter_name=names[0])
            for name in names[1:]:
                adapted.add_adapter(name, settings)
            adapted.set_adapter(names[-1])
            config = recipe(run={"name": run}, training={"steps": 4}, kl={"coefficient": 0.05})
            progress = watch({} if resume else stop)
            result = train(
                config, model=adapted, tokenizer=tokenizer, reward=varied_text, progress=progress, resume=resume
            )
        last = result.path / "checkpoints" / "last"
        ends.append((last / "adapter_model.safetensors").read_bytes())
    assert ends[0] == ends[1]
    policy = load_policy(ModelConfig(path=str(last), device="cpu"))
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad(), policy.plain_attention() as loaded:
        assert torch.equal(loaded.eval()(input_ids=ids).logits, adapted.eval()(input_ids=ids).logits)


def test_a_run_that_trains_an_adapter_on_with_dropout_goes_on_from_its_own_recipe(
    adapted: Any, train: Any, watch: Any, tmp_path: Path
) -> None:
    first = train(adapted("lora", training={"steps": 1}), reward=varied_text, progress=watch()).path
    source = {"path": str(first / "checkpoints" / "last"), "device": "cpu", "lora": {"dropout": 0.1}}
    config = {**adapted("lora", run={"name": "second", "checkpoint_every": 1}, training={"steps": 2}), "model": source}
    second = train(config, reward=varied_text, progress=watch()).path
    resumed = train(
        str(second / "config.yaml"), settings={"training.steps": 3}, reward=varied_text, progress=watch(), resume=True
    )
    assert resumed.summary.last_step == 3
    assert fork(second, 1, name="forked", reward=varied_text, progress=watch()).summary.last_step == 3


@pytest.mark.parametrize("quantization", [None, "nf4"])
def test_a_reward_model_of_adapters_learns_resumes_and_scores_as_a_reward(
    base: Path, tmp_path: Path, watch: Any, send: Any, quantization: str | None
) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")
    model: dict[str, Any] = {"path": str(base), "new": None, "device": "cpu", "lora": {"rank": 4}}
    ends = []
    for name, stop in (("whole", {}), ("cut", {("train", 2): send(signal.SIGTERM)})):
        config = reward_model_recipe(
            tmp_path / "runs",
            pairs,
            run={"name": name},
            model={**model, "quantization": quantization},
            reward_model={"template": "plain", "evaluate_every": 4},
        )
        for resume in (False, True):
            result = train_reward_model(config, progress=watch({} if resume else stop), resume=resume)
        last = result.path / "checkpoints" / "last"
        ends.append((last / "adapter_model.safetensors").read_bytes())
    assert ends[0] == ends[1]
    assert not (last / "model.safetensors").exists()
    scorer, again = (
        load_scorer(where="rewards.preference", path=str(path), device="cpu") for path in (result.path, last)
    )
    texts = [[3, 4, 5], [6, 7, 8, 9, 10, 11]]
    scores = scorer.classifier.score_all(texts)
    assert scores == again.classifier.score_all(texts)
    assert abs(scores[0] - scores[1]) > 1e-6
    peft_scores = [float(again.classifier.model(input_ids=torch.tensor([text])).logits[0, 0]) for text in texts]
    assert scores == pytest.approx(peft_scores, abs=1e-5)


def test_a_reward_model_begins_from_a_plain_model_or_from_the_adapter_of_a_reward_model(
    adapted: Any, train: Any, base: Path, tmp_path: Path, watch: Any
) -> None:
    pairs = write_pairs(tmp_path / "pairs.jsonl")

    def begin(name: str, **model: Any) -> Path:
        source = {"path": str(base), "new": None, "device": "cpu", **model}
        settings = {"template": "plain", "evaluate_every": 4}
        config = reward_model_recipe(tmp_path / "runs", pairs, run={"name": name}, model=source, reward_model=settings)
        return train_reward_model(config, progress=watch()).path / "checkpoints" / "last"

    language = (
        train(adapted("lora", training={"steps": 1}), reward=varied_text, progress=watch()).path
        / "checkpoints"
        / "last"
    )
    for index, model in enumerate(({"path": str(language)}, {"lora": {"adapter": str(language)}})):
        with pytest.raises(UserError, match="is the adapter of a language model, without a score head"):
            begin(f"refused{index}", **model)
    first = begin("first", lora={"rank": 4})
    for bare in first.glob("*token*"):
        bare.unlink()
    with pytest.raises(UserError, match=r"is already an adapter: remove model\.lora"):
        begin("again", path=str(first), lora={"rank": 2})
    for index, model in enumerate(({"path": str(first)}, {"lora": {"adapter": str(first)}})):
        weights = (begin(f"on{index}", **model) / "adapter_model.safetensors").read_bytes()
        assert weights != (first / "adapter_model.safetensors").read_bytes()
    with pytest.raises(UserError, match="is the adapter of a reward model, which scores texts"):
        load_policy(ModelConfig(path=str(first), device="cpu"))
