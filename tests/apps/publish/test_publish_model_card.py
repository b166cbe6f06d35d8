"""Model cards: the Hub takes their metadata, and every figure of them is in the run's files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from flatpeak.apps.publish.model_card import algorithm_tag, code_span, fenced
from flatpeak.apps.publish.push import push
from flatpeak.config.algorithm_name import algorithm_name
from flatpeak.config.load import load_recipe, parse_config, read_recipe, shipped_recipes
from flatpeak.runs.summary import read_summary
from support.hub_server import card_errors, scripted_hub
from support.pushed_runs import card_of, copied, python_of

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)*(?:e[-+]?\d+)?")


@pytest.fixture
def card(finished_run: Path, tmp_path: Path) -> str:
    push(finished_run, repo="me/tiny", checkpoint="2", dry_run=tmp_path / "dry")
    return (tmp_path / "dry" / "README.md").read_text()


def prose(card: str) -> str:
    """The card without metadata, code and hashes."""
    text = re.sub(r"^```.*?^```$", "", card.partition("\n---\n")[2], flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[0-9a-f]{40,}(-dirty)?`", "", text)


def values_in(run: Path) -> Iterator[str]:
    for name in ("summary.json", "config.yaml", "manifest.json", "metrics.jsonl"):
        yield from NUMBER.findall((run / name).read_text())


def is_in(figure: str, values: set[str]) -> bool:
    """Whether a figure is among the values, or one of them rounded to its decimals."""
    if figure in values:
        return True
    if figure.count(".") > 1:
        return False
    decimals = len(figure.partition(".")[2].partition("e")[0])
    numbers = {float(value) for value in values if value.count(".") < 2}
    return any(abs(float(figure) - number) <= (0.5 * 10**-decimals + 1e-12 if decimals else 0) for number in numbers)


def test_every_figure_of_the_card_is_in_the_runs_files(card: str, finished_run: Path) -> None:
    values = set(values_in(finished_run))
    figures = NUMBER.findall(prose(card).replace("95% intervals", "").replace("SHA-256", ""))
    assert len(figures) > 100
    evaluations = read_summary(finished_run / "summary.json").evaluations
    derived = {"2", str(sum(row.stage == "train" for row in evaluations))}  # the step that is pushed, and a count
    assert [figure for figure in figures if figure not in derived and not is_in(figure, values)] == []


def test_the_table_has_each_stages_own_figures(card: str, finished_run: Path) -> None:
    summary = read_summary(finished_run / "summary.json")
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in card.splitlines() if line.startswith("|")
    ]
    header, table = rows[0], {row[0].split(",")[0].strip("`"): row[1:] for row in rows[2:]}
    stages = {"before training": summary.evaluation("start"), "after SFT": summary.evaluation("sft")}
    of_step = {row.step: row for row in summary.evaluations if row.stage == "train"}
    stages |= {"this checkpoint": of_step[2], "last of RL, step 3": of_step[3]}
    for label, evaluation in stages.items():
        assert evaluation is not None
        (column,) = (index for index, name in enumerate(header[1:]) if label in name.split(" = "))
        assert table["held-out questions"][column] == str(evaluation.size)
        for metric in ("accuracy", "extraction_failed", "reward", "length", "pass@2"):
            low, high = evaluation.intervals[metric]
            expected = f"{evaluation.metrics[metric]:.3f} [{low:.3f}, {high:.3f}]"
            assert table[metric][column] == expected, (label, metric)


def test_no_sentence_of_the_card_is_said_twice(finished_run: Path, tmp_path: Path) -> None:
    def edit(run: Path) -> None:
        summary = json.loads((run / "summary.json").read_text())
        for evaluation in summary["evaluations"]:
            evaluation["metrics"] |= {"extraction_failed": 0.0, "sampled/extraction_failed": 0.0}
        (run / "summary.json").write_text(json.dumps(summary))

    push(copied(finished_run, tmp_path / "run", edit), repo="me/tiny", dry_run=tmp_path / "dry")
    limits = (tmp_path / "dry" / "README.md").read_text().partition("## Limits")[2].partition("\n## ")[0]
    sentences = [line.partition(" (`")[0] for line in limits.splitlines() if "A share of" in line]
    assert [sentence.partition("A share of ")[2] for sentence in sentences[:2]] == [
        "0.000 of its answers could not be graded",
        "0.000 of its sampled answers could not be graded",
    ]
    assert len(set(sentences)) == len(sentences)


def test_the_hubs_own_card_class_reads_it_and_a_hub_takes_it(card: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_hub(monkeypatch) as hub:
        monkeypatch.setattr("huggingface_hub.repocard.constants.ENDPOINT", hub.url)
        loaded = ModelCard(card)
        data = loaded.data.to_dict()
        assert card_errors(card) == []
        assert card_errors(card.replace("license: unknown", "license: of-mine")) == ["license of-mine"]
    assert (data["license"], data["library_name"], data["pipeline_tag"]) == (
        "unknown",
        "transformers",
        "text-generation",
    )
    assert {"flatpeak", "grpo", "reinforcement-learning"} <= set(data["tags"])
    assert "base_model" not in data
    results = {one.metric_name: one.metric_value for one in loaded.data.eval_results}
    assert results.keys() == {"accuracy", "sampled/accuracy", "reward", "pass@1", "pass@2", "maj@1", "maj@2"}


def test_the_metadata_of_a_model_from_the_hub_name_its_base_and_its_data(finished_run: Path, tmp_path: Path) -> None:
    def edit(run: Path) -> None:
        recipe = yaml.safe_load((run / "config.yaml").read_text())
        recipe["model"] |= {"path": "me/base", "new": None, "revision": "v1"}
        recipe["task"] = {"type": "gsm8k"}
        recipe["gradient_regularization"]["strength"] = "ratio:0.3"
        (run / "config.yaml").write_text(yaml.safe_dump(recipe))
        for path in (run / "checkpoints").glob("step_*"):
            record = json.loads((path / "flatpeak.json").read_text())
            record |= {"base_model": "me/base", "base_revision": "v1", "task": "gsm8k"}
            (path / "flatpeak.json").write_text(json.dumps(record))
            from flatpeak.runs.checkpoints import MANIFEST, write_manifest

            (path / MANIFEST).unlink()
            write_manifest(path, step=int(path.name[5:]))

    run = copied(finished_run, tmp_path / "run", edit)
    push(run, repo="me/tiny", checkpoint="last", license="apache-2.0", dry_run=tmp_path / "dry")
    card = (tmp_path / "dry" / "README.md").read_text()
    data = ModelCard(card).data.to_dict()
    assert card_errors(card) == []
    assert (data["base_model"], data["base_model_relation"]) == ("me/base", "finetune")
    assert (data["datasets"], data["license"]) == (["openai/gsm8k"], "apache-2.0")
    assert "gradient-regularization" in data["tags"]
    assert data["model-index"][0]["results"][0]["dataset"]["type"] == "openai/gsm8k"
    assert "fine-tuned from `me/base` at `v1`" in card
    assert "[openai/gsm8k](https://huggingface.co/datasets/openai/gsm8k). License: unknown to the recipe" in card
    assert "Gradient regularization of strength ratio:0.3." in card


@pytest.mark.parametrize(
    ("preset", "name"),
    [
        *(("grpo", "GRPO"), ("grpo_kl", "GRPO"), ("dr_grpo", "Dr. GRPO"), ("dapo", "DAPO"), ("gspo", "GSPO")),
        *(("cispo", "CISPO"), ("rloo", "RLOO"), ("reinforce", "REINFORCE"), ("grpo_no_clip", "policy gradient")),
    ],
)
def test_published_algorithms_have_their_names(preset: str, name: str) -> None:
    assert algorithm_name(parse_config(load_recipe(f"flatpeak:algorithms/{preset}"))) == name


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_every_shipped_recipe_has_words_without_gaps(recipe: str, tmp_path: Path) -> None:
    config = parse_config(load_recipe(recipe))
    training = card_of(config, tmp_path).partition("## How it was trained")[2].partition("## Versions")[0]
    assert "None" not in training
    assert f"- RL: Optimizer `{config.optimizer.name}`, learning rate {config.optimizer.learning_rate:g}" in training


def test_a_task_of_any_name_leaves_the_table_and_the_metadata_whole(finished_run: Path, tmp_path: Path) -> None:
    name = "sums | `of`\n---\n<b>two</b>: 'it'"

    def rename(run: Path) -> None:
        summary = json.loads((run / "summary.json").read_text())
        for row in summary["evaluations"]:
            row["task"] = name
        (run / "summary.json").write_text(json.dumps(summary))

    push(copied(finished_run, tmp_path / "run", rename), repo="me/tiny", checkpoint="last", dry_run=tmp_path / "dry")
    card = (tmp_path / "dry" / "README.md").read_text()
    assert ModelCard(card).data.eval_results[0].dataset_type == name
    table = prose(card).partition("## Results")[2].partition("In brackets")[0].strip().splitlines()
    assert [line for line in table if not line.startswith("| ")] == []
    assert table[2].count("``sums \\| `of` --- <b>two</b>: 'it'``") == table[0].count(" | ")


def test_tags_name_the_algorithm() -> None:
    names = ("GRPO", "GRPO with DAPO's normalization", "Dr. GRPO", "policy gradient")
    assert [algorithm_tag(name) for name in names] == ["grpo", "grpo", "dr-grpo", "policy-gradient"]


def test_code_in_a_card_survives_any_text() -> None:
    assert code_span("a`b") == "``a`b``"
    assert code_span("`a") == "`` `a ``"
    assert code_span("a|b\nc") == "`a|b c`"
    assert fenced("```\nx", "text") == "````text\n```\nx\n````"


def test_the_snippet_holds_template_system_and_stop_as_python(tmp_path: Path) -> None:
    def snippet(objects: tuple[str, ...] = (), **sections: Any) -> str:
        config = parse_config(read_recipe({"model": {"path": "me/base"}, "task": {"type": "gsm8k"}, **sections}))
        code = python_of(card_of(config, tmp_path, objects=objects))
        compile(code, "snippet", "exec")
        return code

    code = snippet(prompt={"template": "r1_zero"}, rollout={"stop": ["</answer>", "it's"]})
    assert """for stop in ['</answer>', "it's"]:\n""" in code
    assert "from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig" in code
    code = snippet(
        prompt={"template": "chat", "system": 'Say "yes"', "chat_template_kwargs": {"class": False, "a-b": "c"}}
    )
    assert """messages.insert(0, {"role": "system", "content": 'Say "yes"'})""" in code
    assert "add_generation_prompt=True, **{'class': False, 'a-b': 'c'})" in code
    code = snippet(prompt={"template": "chat", "user": "{question}\nAs JSON."})
    assert """user = '{question}\\nAs JSON.'\nmessages = """ in code
    assert """[{"role": "user", "content": user.replace('{question}', question)}]""" in code
    code = snippet(model={"path": "me/base", "trust_remote_code": True})
    assert code.count("from_pretrained(name, trust_remote_code=True)") == 2
    task = {"type": "arithmetic", "max_value": 99}
    assert "question = 'What is 12 + 30?'" in snippet(("task",), task=task)
    assert "question = 'What is 12 + 30?'" not in snippet(task=task)
    model = {"path": "me/base", "lora": {}, "quantization": "nf4", "dtype": "bfloat16"}
    code = snippet(model=model)
    assert "AutoPeftModelForCausalLM.from_pretrained(name, quantization_config=quantization)" in code
    assert "bnb_4bit_compute_dtype=torch.bfloat16" in code
