"""A sampler that draws from the model being trained is made by a factory, and what cannot be one is said clearly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flatpeak.errors import UserError
from flatpeak.pipeline.rollout_engines import PlainSampler
from flatpeak.policy import model as policy_model
from flatpeak.policy.model import Policy
from flatpeak.rollout.engine import NativeEngine
from flatpeak.runs.metrics import read_metrics
from flatpeak.types import Group, Prompt, SamplingParams
from support.resumes import Death, die
from support.reward_functions import odd
from support.runs import Recipe, Train

pytestmark = pytest.mark.usefixtures("one_thread")


class Wrapped:
    """Hands every request to an engine on the policy; false, as an empty container is."""

    def __init__(self, policy: Policy) -> None:
        self.engine = NativeEngine(policy)
        self.requests = 0

    def __len__(self) -> int:
        return 0

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Group]:
        self.requests += 1
        return self.engine.generate(prompts, **settings)


class Plain:
    """Runs the model's own forward pass, as no held model allows."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def generate(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> list[Group]:
        self.model(input_ids=torch.tensor([prompts[0].token_ids]))
        return []


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "checkpoints" / "last" / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


FACTORIES: dict[str, Callable[[Policy], Any]] = {
    "class": Wrapped,
    "function": lambda policy: Wrapped(policy),
    "engine": NativeEngine,
}


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_that_wraps_the_engine_trains_as_the_engine_does(recipe: Recipe, train: Train, name: str) -> None:
    plain = train(recipe(run={"name": "plain"}), reward=odd, progress=False)
    made = train(recipe(run={"name": "made"}), reward=odd, sampler=FACTORIES[name], progress=False)
    assert equal(weights(made.path), weights(plain.path))
    start = load_file(plain.path / "checkpoints" / "step_000000" / "model.safetensors")
    assert not equal(weights(plain.path), start)


def test_a_run_with_a_factory_resumes_to_the_same_bits(recipe: Recipe, train: Train, watch: Any) -> None:
    sections: dict[str, Any] = {"training": {"steps": 4}}
    whole = train(recipe(**sections, run={"name": "whole"}), reward=odd, sampler=Wrapped, progress=False)
    config = recipe(**sections, run={"name": "cut", "checkpoint_every": 1})
    with pytest.raises(Death):
        train(config, reward=odd, sampler=Wrapped, progress=watch({("train", 3): die}))
    cut = train(config, reward=odd, sampler=Wrapped, progress=False, resume=True)
    assert equal(weights(cut.path), weights(whole.path))


def test_a_factory_gets_the_policy_of_the_callers_model_and_evaluations_use_it(
    recipe: Recipe, train: Train, make_tiny_model: Any
) -> None:
    model, tokenizer = make_tiny_model()
    made: list[tuple[Policy, Wrapped]] = []

    def make(policy: Policy) -> Wrapped:
        made.append((policy, Wrapped(policy)))
        return made[-1][1]

    brought = {"model": model, "tokenizer": tokenizer, "reward": odd, "sampler": make}
    train(recipe(), **brought, progress=False)
    [(policy, sampler)] = made
    assert policy.model is model
    assert sampler.requests == 4  # two steps, evaluated before and after


def test_generate_of_transformers_serves_as_a_sampler_of_the_policy(recipe: Recipe, train: Train) -> None:
    result = train(recipe(), reward=odd, sampler=lambda policy: PlainSampler(policy, max_rows=16), progress=False)
    rows = [row for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
    assert max(row["rollout/logprob_gap_mean"] for row in rows) < 1e-4


def test_a_model_that_the_callers_own_policy_holds_is_refused_and_names_the_factory(
    recipe: Recipe, train: Train, make_tiny_model: Any
) -> None:
    model, tokenizer = make_tiny_model()
    policy = Policy(model, tokenizer)
    brought: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "reward": odd}
    with pytest.raises(UserError, match=r"another flatpeak Policy holds this Qwen2ForCausalLM.*sampler=lambda policy"):
        train(recipe(), sampler=NativeEngine(policy), **brought)
    assert not Path(recipe()["run"]["directory"]).exists()
    policy.release()
    assert train(recipe(), sampler=NativeEngine, **brought, progress=False).summary.status == "done"


def test_a_forward_pass_of_a_held_model_names_the_factory_and_the_plain_attention(
    recipe: Recipe, train: Train, make_tiny_model: Any
) -> None:
    model, tokenizer = make_tiny_model()
    with pytest.raises(RuntimeError, match=r"with policy\.plain_attention\(\) as model.*sampler=lambda policy"):
        train(recipe(), model=model, tokenizer=tokenizer, reward=odd, sampler=Plain(model), progress=False)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (object(), r"sampler: <object .*> has no generate\("),
        ("native", r"sampler: 'native' has no generate\("),
        (lambda policy: None, r"sampler: the factory returned None has no generate\("),
        (lambda: Wrapped, r"cannot be called with the policy alone \(too many positional arguments\)"),
        (PlainSampler, r"cannot be called with the policy alone \(missing a required.* 'max_rows'\)"),
    ],
)
def test_what_is_neither_sampler_nor_factory_is_one_line_that_shows_both(
    recipe: Recipe, train: Train, sampler: Any, message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train(recipe(), sampler=sampler)
    assert "give a sampler, or a factory that is called with the policy" in str(caught.value)
    assert not Path(recipe()["run"]["directory"]).exists()


def test_an_engine_on_a_model_that_it_does_not_serve_is_refused_instead_of_drawing_nonsense(
    recipe: Recipe, train: Train, make_tiny_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy_model, "probe", lambda policy: "its logits differ")
    with pytest.raises(
        UserError, match=r"does not decode this model natively \(its logits differ\).*PlainSampler\(policy"
    ):
        train(recipe(), reward=odd, sampler=NativeEngine, progress=False)
