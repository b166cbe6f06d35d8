"""A recipe and its changes, as the Python functions take them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import flatpeak.pipeline.train
from flatpeak.config.load import load_recipe, parse_config
from flatpeak.errors import UserError
from flatpeak.pipeline.request import resolve_config
from flatpeak.runs.metrics import read_metrics
from support.reward_functions import odd
from support.runs import Recipe, Train

pytestmark = pytest.mark.usefixtures("one_thread")
CHANGED: dict[str, Any] = {
    "mapping": {"training.steps": 2, "rollout": {"group_size": 8}},
    "strings": ["training.steps=2", "rollout.group_size=8"],
}


def put(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "given",
    [
        "flatpeak:demo",
        {"extends": "flatpeak:demo"},
        {"extends": ["flatpeak:demo"]},
        parse_config(load_recipe("flatpeak:demo")),
    ],
    ids=["name", "mapping", "list", "config"],
)
@pytest.mark.parametrize("kind", CHANGED)
def test_a_recipe_and_its_changes_are_the_same_however_they_are_given(given: Any, kind: str) -> None:
    wanted = parse_config(load_recipe("flatpeak:demo", ["training.steps=2", "rollout.group_size=8"]))
    result = resolve_config(given, CHANGED[kind])
    assert result == wanted
    assert (result.training.steps, result.rollout.group_size, result.run.name) == (2, 8, "demo")
    assert resolve_config(given).training.steps > 2


def test_train_and_sft_take_settings_over_an_extended_recipe(recipe: Recipe, train: Train, tmp_path: Path) -> None:
    base = put(tmp_path / "base.yaml", recipe(sft={"steps": 2, "batch_size": 4}))
    config = {"extends": str(base), "training": {"steps": 3}}
    both = train(config, settings={"run.name": "both", "training.steps": 1}, reward=odd, progress=False)
    rows = read_metrics(both.path / "metrics.jsonl")
    assert [(row["stage"], row["step"]) for row in rows if row["stage"] != "eval"] == [
        ("sft", 1),
        ("sft", 2),
        ("train", 1),
    ]
    alone = flatpeak.pipeline.train.sft(config, settings=["run.name=alone", "sft.steps=1"], reward=odd, progress=False)
    assert [row["step"] for row in read_metrics(alone.path / "metrics.jsonl") if row["stage"] == "sft"] == [1]
    assert yaml.safe_load((alone.path / "config.yaml").read_text())["training"]["steps"] == 3
    with pytest.raises(UserError, match=r"sft\.steps=0: there is nothing to train"):
        flatpeak.pipeline.train.sft(config, settings={"sft.steps": 0}, reward=odd)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training.stepps": 2}, r"unknown key training\.stepps: did you mean training\.steps"),
        ({"training": {"steps": "many"}}, r"training\.steps=many"),
        (["training.steps"], r"override 'training\.steps': write key\.path=value"),
    ],
)
def test_wrong_settings_are_one_line_before_anything_is_made(recipe: Recipe, settings: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        flatpeak.pipeline.train.train(recipe(), settings=settings)
    assert not Path(recipe()["run"]["directory"]).exists()


@pytest.mark.parametrize("start", ["train", "sft"])
def test_a_model_beside_the_callers_is_refused_where_the_caller_names_it_and_left_out_where_it_is_inherited(
    recipe: Recipe, train: Train, make_tiny_model: Any, watch: Any, tmp_path: Path, start: str
) -> None:
    base = put(tmp_path / "base.yaml", recipe(sft={"steps": 1, "batch_size": 4}, training={"steps": 1}))
    model, tokenizer = make_tiny_model()
    run = getattr(flatpeak.pipeline.train, start)
    brought: dict[str, Any] = {"model": model, "tokenizer": tokenizer, "reward": odd}
    with pytest.raises(UserError, match=r"^model\.dtype beside train\(model=...\)"):
        run({"extends": str(base), "model": {"dtype": "float32"}}, **brought)
    with pytest.raises(UserError, match=r"^model\.revision beside train\(model=...\)"):
        run(base, settings={"model.revision": "main"}, **brought)
    seen = watch()
    assert run({"extends": str(base), "model": {"dropout": False}}, **brought, progress=seen).exit_code == 0
    assert "model.new, model.device of the recipe not used: train(model=...) brings the model" in seen.notices


def test_every_step_under_autocast_trains_at_the_weights_of_the_step(recipe: Recipe, train: Train) -> None:
    """Autocast keeps the weights that it has cast for as long as it lasts, here a whole run."""
    gaps: dict[bool, list[float]] = {}
    for cached in (True, False):
        sections: dict[str, Any] = {
            "run": {"name": f"cached-{cached}"},
            "evaluation": {"every": 0, "accuracy": None, "metric": "reward"},
            "training": {"steps": 3},
            "optimizer": {"learning_rate": 1e-2},
        }
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
            result = train(recipe(**sections), reward=odd, progress=False)
            assert torch.is_autocast_cache_enabled() == cached
        rows = [row for row in read_metrics(result.path / "metrics.jsonl") if row["stage"] == "train"]
        gaps[cached] = [row["rollout/logprob_gap_mean"] for row in rows]
    assert gaps[True] == gaps[False]
    assert max(gaps[True]) < 2e-3


STATES: dict[str, Callable[[], Any]] = {
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "no gradients": torch.no_grad,
    "inference": torch.inference_mode,
    "meta device": lambda: torch.device("meta"),
}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """A context in which new tensors have this type."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_the_caller_has_set_in_torch_changes_no_run_and_stays(recipe: Recipe, train: Train) -> None:
    threads = set()

    def reward(completion_ids: list[list[int]]) -> list[float]:
        threads.add(torch.get_num_threads())
        return odd(completion_ids)

    def steps(name: str) -> list[dict[str, Any]]:
        sections: dict[str, Any] = {"run": {"name": name, "threads": 2}, "training": {"steps": 2}}
        result = train(recipe(**sections, sft={"steps": 1, "batch_size": 4}), reward=reward, progress=False)
        rows = read_metrics(result.path / "metrics.jsonl")
        return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]

    figures = ("loss", "policy/grad_norm", "reward/mean", "rollout/logprob_gap_max", "sft/loss")
    expected = [{key: row.get(key) for key in figures} for row in steps("plain")]
    assert (threads, torch.get_num_threads()) == ({2}, 1)
    for name, state in STATES.items():
        with state():
            before = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device())
            made = steps(name.replace(" ", "-"))
            assert (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device()) == before
        assert [{key: row.get(key) for key in figures} for row in made] == expected
