"""The lines that say what a run trains, before and after the model is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import flatpeak
from flatpeak.config.load import parse_config, read_recipe
from flatpeak.pipeline.progress import _count, first_line, model_line
from flatpeak.tasks.data_files import ExampleTask
from support.runs import Recipe, Train, tiny_recipe


def laptop(**settings: str):
    return parse_config(read_recipe("flatpeak:laptop", settings))


@pytest.mark.parametrize(
    ("path", "name"),
    [("org/SmolLM2-135M", "SmolLM2-135M"), ("models/a.Q4_1.gguf", "a.Q4_1"), ("runs/a/checkpoints/best/", "best")],
)
def test_the_first_line_names_model_task_and_directory(path: str, name: str) -> None:
    config = laptop(**{"model.path": path, "run.directory": "there", "run.name": "one/two"})
    assert first_line(config) == f"flatpeak {flatpeak.__version__}: {name} on numbers, run directory there/one/two"


def test_the_first_line_names_a_callers_own_model_and_task() -> None:
    task: Any = ExampleTask(name="own", train=(), test=())
    assert ": Linear on own, " in first_line(laptop(), model=torch.nn.Linear(1, 1), task=task)


def test_the_line_of_a_model_counts_its_parameters_and_those_that_are_trained() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=64, n_layer=1, n_head=1, n_positions=100))
    # Embeddings, the tied output layer being one of them; weights and biases of a layer; the last norm.
    embeddings, layer, norm = (1000 + 100) * 64, 12 * 64**2 + 13 * 64, 2 * 64
    size, threads = f"{embeddings + layer + norm:,}", f"cpu (threads: {torch.get_num_threads()})"
    assert model_line(model, data="all") == f"gpt2, {size} parameters, float32, {threads} · all"
    model.transformer.wte.requires_grad_(requires_grad=False)
    trained = f"{100 * 64 + layer + norm:,}"
    assert (
        model_line(model.bfloat16(), data="") == f"gpt2, {size} parameters, {trained} trained, bfloat16, {threads} · "
    )


@pytest.mark.parametrize(
    ("parameters", "count"), [(134_515_008, "134.5M"), (1_543_714_304, "1.5B"), (999_999, "999,999")]
)
def test_large_numbers_of_parameters_are_rounded(parameters: int, count: str) -> None:
    assert _count(parameters) == count


class Display:
    """A display of a caller's, with the optional method."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.notices: list[str] = []

    def update(self, stage: str, **_: object) -> None:
        if self.said[-1] != stage:
            self.said.append(stage)

    def notice(self, text: str) -> None:
        self.notices.append(text)

    def say(self, text: str) -> None:
        self.said.append(text)


def test_a_run_says_what_it_trains_and_checks_before_its_first_step_and_logs_none_of_it(tmp_path: Path) -> None:
    display = Display()
    result = flatpeak.train(tiny_recipe(tmp_path), progress=display)
    first, model, check, *stages = display.said
    assert first.startswith(f"flatpeak {flatpeak.__version__}: a new ")
    assert "parameters, float32, cpu" in model
    assert "questions to train on" in model
    assert check == "checking kernels and rollouts on this model"
    assert set(stages) <= {"eval", "sft", "train"}
    assert not set(display.said) & set(display.notices)
    report = result.report.read_text()
    assert report.startswith("<!")
    logged = (result.path / "notices.jsonl").read_text() + report
    assert "checking kernels" not in logged
    assert "questions to train on" not in logged


def test_silence_has_no_first_line_and_python_has_it_on_stderr(
    recipe: Recipe, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe(run={"name": "silent"}), progress=False)
    assert capsys.readouterr() == ("", "")
    train(recipe(run={"name": "plain"}))
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("flatpeak ")
    assert err.count("run directory") == 1
