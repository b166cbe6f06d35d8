"""What the documents say is so: names, links, paths, recipes and commands."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import flatpeak
from flatpeak.config.load import load_recipe, parse_config, read_recipe, shipped_recipes
from flatpeak.experiments.config import read_sweep
from flatpeak.experiments.plan import build_plan
from flatpeak.pipeline.request import resolve_config
from flatpeak.policy.compatibility import PROVEN
from flatpeak.rewards.base import ComponentScores, Scorer
from flatpeak.rewards.numeric_answer import NumberReward
from flatpeak.rollout.engine import NativeEngine
from flatpeak.runs.directory import RUN_FILES
from flatpeak.runs.metrics import read_metrics
from flatpeak.tasks.dataset import task_of
from flatpeak.training.objective_config import AdvantageConfig, KLConfig, ObjectiveConfig
from flatpeak.training.step_metrics import episode_metrics
from flatpeak.training.user_functions import make_advantages, make_objective
from flatpeak.types import Completion, Example, Group, Prompt, Score, ToolCall, Turn
from flatpeak.utils.peak_memory import ProcessPeak
from support.recipes import unsaid
from support.reward_functions import varied
from support.sentences import pages, sentences
from support.structure import LAYERS

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted(ROOT.glob("docs/*.md")),
    ROOT / "docs" / "results" / "README.md",
]
TEXTS = [*DOCUMENTS, *sorted(ROOT.glob("examples/*.py"))]
SOURCES = [path for path in sorted((ROOT / "src").rglob("*")) if path.suffix in (".py", ".yaml")]
PARTS, TASK = ("correctness", "neat"), "sums"
COMPLETION = Completion(token_ids=(0,), logprobs=(0.0,), finish_reason="length")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> Iterator[str]:
    """The fenced code blocks of a language."""
    yield from re.findall(rf"^```{language}\n(.*?)^```", read(path), flags=re.MULTILINE | re.DOTALL)


def every_block(language: str, *, without: str | None = None) -> list[Any]:
    return [
        pytest.param(block, id=f"{path.stem}-{index}")
        for path in DOCUMENTS
        if path.stem != without
        for index, block in enumerate(blocks(path, language))
    ]


def general(name: str) -> str:
    """A metric's name as the documents write it."""
    name = re.sub(r"@\d+$", "@k", name.replace(f"eval/{TASK}/", "eval/<task>/"))
    name = name.replace(f"reward/{TASK}/mean", "reward/<task>/mean").replace("eval/mixture/", "eval/<task>/")
    name = re.sub(r"(robustness|episodes/failed)/\w+$", r"\1/<kind>", name)
    name = re.sub(r"(episodes/ended)/\w+$", r"\1/<reason>", name)
    name = re.sub(r"(sharpness/\w*fall)_[\d.]+", r"\1_<radius>", name)
    for component in PARTS:
        name = name.replace(f"reward/{component}/", "reward/<part>/")
    head, _, last = name.rpartition("/")
    return f"{head}/<part>" if last in PARTS else name


class Faulty(Scorer):
    """A reward that has no score for the first completion, ran out of time over the second, and logs a metric."""

    def score(self, groups: Sequence[Group]) -> ComponentScores:
        sizes = [len(group.completions) for group in groups]
        scores: list[list[Score]] = [[0.0] * size for size in sizes]
        late = [[False] * size for size in sizes]
        scores[0][0], late[-1][-1] = None, True
        return ComponentScores(
            scores=scores,
            timed_out=late,
            failed=1,
            first_error=ValueError("no"),
            logged={"<metric>": [1.0]},
            tolerated=True,
        )

    def answer(self, completion: Completion, prompt: Prompt) -> None:
        return None


class Versioned(NativeEngine):
    """A sampler that states the version of the policy."""

    def generate(self, prompts: Sequence[Prompt], **settings: Any) -> list[Group]:
        return [replace(group, version=0) for group in super().generate(prompts, **settings)]


def defined_metrics() -> list[str]:
    rows = re.findall(r"^\| `([^`]+)` \|", read(ROOT / "docs" / "metrics.md").partition("## Files of a run")[0], re.M)
    assert len(rows) > 30
    return rows


def test_docs_define_just_the_metrics_that_a_run_writes(recipe: Callable[..., Any], train: Callable[..., Any]) -> None:
    sums = [
        Example(id=f"{n}", question=f"{n}+1=", gold=f"{n + 1}", rationale=f"{n + 1}", columns={"near_train": n % 2})
        for n in range(8)
    ]
    config = recipe(
        reference={"keep": True, "reset_every": 1},
        gradient_regularization={"strength": "ratio:0.3"},
        training={"steps": 1},
        sft={"steps": 1, "batch_size": 2},
        evaluation={
            "samples": 2,
            "k": [1, 2],
            "robustness": ["framing"],
            "sharpness": {"radii": [0.1], "draws": 1, "samples": 2, "eigenvalue": True, "iterations": 1},
        },
    )
    task = SimpleNamespace(name=TASK, train=sums[:6], test=sums[6:])
    reward = {PARTS[0]: varied, PARTS[1]: (Faulty(), 0)}
    rows = read_metrics(train(config, task=task, reward=reward).path / "metrics.jsonl")
    corrected = recipe(
        objective={
            "sampler_correction": {"type": "truncate"},
            "token_weights": {"function": "damp_rare"},
            "adaptive_entropy": {"target": 1.0},
        },
        kl={"coefficient": 0.1, "adaptive": {"target": 0.1}},
        training={"steps": 1},
        evaluation={"every": 0, "samples": 2},
    )
    extracted = {PARTS[0]: NumberReward(), PARTS[1]: (varied, 1)}
    again = train(corrected, task=task, reward=extracted, sampler=Versioned, overwrite=True)
    rows += read_metrics(again.path / "metrics.jsonl")
    stop_when = {"metric": "patterns/spreads", "above": 9.0}
    mixture = recipe(training={"steps": 1, "stop_when": stop_when}, evaluation={"every": 0})
    mixture["tasks"] = [{"task": mixture.pop("task"), "name": TASK}]
    rows += read_metrics(train(mixture, overwrite=True).path / "metrics.jsonl")
    call = ToolCall(name="add", failure="raised")
    episode = replace(COMPLETION, turns=(Turn(sampled=1, calls=(call,)),), stop_reason="max_turns")
    rows.append({"stage": "train", **episode_metrics([episode])})
    assert {row["stage"] for row in rows} == {"sft", "train", "eval"}
    defined = defined_metrics()
    if not ProcessPeak().reset():  # in a sandbox, or on another system than Linux
        defined = [name for name in defined if not re.fullmatch(r"memory/\w+_peak_gib", name)]
    assert sorted({general(name) for row in rows for name in row if "/" in name}) == sorted(defined)


def test_docs_list_every_file_that_a_run_writes() -> None:
    listed = re.findall(r"^\| `([\w.]+)", read(ROOT / "docs" / "metrics.md").partition("## Files of a run")[2], re.M)
    assert sorted(listed) == sorted(RUN_FILES)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_links_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]+)", read(path))
    assert [link for link in links if not (path.parent / link).exists()] == []


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"(?ms)^```.*?^```", "", read(path)), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted(ROOT.glob("docs/results/*.md"))], ids=lambda path: path.stem)
def test_links_to_a_heading_name_one_of_the_page(path: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#]*\.md)?#([^)]+)\)", read(path))
    assert [link for link in links if link[1] not in anchors(path.parent / link[0] if link[0] else path)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_files_named_in_prose_exist(path: Path) -> None:
    named = re.findall(r"`((?:src|docs|examples|tests)/[\w./]+|[a-z]+/[a-z_]+\.py)`", read(path))
    roots = (ROOT, ROOT / "src" / "flatpeak")
    assert [name for name in named if not any((root / name).exists() for root in roots)] == []


def test_recipes_that_are_named_exist() -> None:
    named = {
        (path.name, name)
        for path in [*TEXTS, *SOURCES]
        if path.name != "mistakes.md"
        for name in re.findall(r"\bflatpeak:[a-z_][\w/]*", read(path))
    }
    assert len(named) > 30
    known = set(shipped_recipes())
    assert {(path, name) for path, name in named if name not in known} == set()


def test_docs_list_every_shipped_recipe() -> None:
    listed = re.findall(r"^\| `(flatpeak:[\w/]+)` \|", read(ROOT / "docs" / "recipes.md"), flags=re.MULTILINE)
    assert sorted(listed) == shipped_recipes()
    presets = re.findall(r"^\| `(flatpeak:[\w/]+)` \|", read(ROOT / "docs" / "algorithms.md"), flags=re.MULTILINE)
    assert sorted(presets) == [name for name in shipped_recipes() if name.startswith("flatpeak:algorithms/")]


@pytest.mark.parametrize("block", every_block("yaml"))
def test_recipes_shown_parse_to_what_they_say(block: str, tmp_path: Path) -> None:
    (tmp_path / "shown.yaml").write_text(block, encoding="utf-8")
    if "seeds:" in block:
        assert build_plan(read_sweep(tmp_path / "shown.yaml")).runs
        return
    content = load_recipe(tmp_path / "shown.yaml")
    assert unsaid(content, parse_config(content).model_dump(mode="json")) == []


def training_commands() -> list[Any]:
    """(recipe, overrides) of every `flatpeak train`, `sft` and `plan` that the documents show."""
    result = []
    for path in DOCUMENTS:
        for block in blocks(path, "sh"):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                if words[:2] in (["flatpeak", "train"], ["flatpeak", "sft"], ["flatpeak", "plan"]):
                    # The number is the value of an option of `plan`.
                    arguments = [w for w in words[2:] if not w.startswith("--") and not re.fullmatch(r"[\d.]+", w)]
                    recipe, *overrides = arguments
                    result.append(pytest.param(recipe, overrides, id=f"{path.stem}-{len(result)}"))
    return result


@pytest.mark.parametrize(("recipe", "overrides"), training_commands())
def test_training_commands_shown_parse_to_what_they_say(recipe: str, overrides: list[str]) -> None:
    content = load_recipe(recipe, overrides)
    assert unsaid(content, parse_config(content).model_dump(mode="json")) == []


# tests/test_docs_tutorial.py runs the tutorial's, which build on each other.
@pytest.mark.parametrize("block", every_block("python", without="tutorial"))
def test_python_shown_has_a_config_that_parses_or_runs_as_it_is(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assigned = [node for node in ast.parse(block).body if isinstance(node, ast.Assign)]
    configs = [node.value for node in assigned if ast.unparse(node.targets[0]) == "config"]
    if configs:
        (config,) = configs
        parse_config(read_recipe(ast.literal_eval(config)))
    else:
        names: dict[str, Any] = {}
        train, load_run = Mock(), Mock(return_value=Mock(spec=flatpeak.RunResult))
        monkeypatch.setattr(flatpeak, "train", train)
        monkeypatch.setattr(flatpeak, "load_run", load_run)
        monkeypatch.setattr(
            flatpeak, "evaluate", Mock(return_value=Mock(spec=flatpeak.EvaluationResult, metrics={"accuracy": 1}))
        )
        exec(block, names)
        if load_run.called:  # its names are those of a result
            return
        if "reward" in names and not train.called:
            log_metric = Mock()
            assert names["reward"]("It is 4.", "4", log_metric) == 1
            log_metric.assert_called_once_with("words", 3)
            return
        if train.called and "dataset" not in train.call_args.kwargs:
            callbacks = train.call_args.kwargs.get("callbacks", ())
            assert all(isinstance(callback, flatpeak.Callback) for callback in callbacks)
            assert resolve_config(train.call_args.args[0], train.call_args.kwargs.get("settings"))
            return
        if train.called:  # a call without a recipe, whose model is on the Hub
            call = train.call_args.kwargs
            example = task_of(call["dataset"]).train[0]
            assert call["reward"](f"It is {example.gold}.", example.gold) == 1
            return
        if "spo" in names:  # the functions of docs/algorithms.md
            objective = ObjectiveConfig(loss="python:spo", arguments={"epsilon": 0.1})
            assert not make_objective(objective, KLConfig(), own=names["spo"]).needs_all_tokens
            assert make_advantages(AdvantageConfig(function="python:max_rl"), own=names["max_rl"]).own is not None
        else:
            assert names["report"].penalty_ratio == pytest.approx(3)


def test_the_command_of_the_custom_task_parses() -> None:
    command = re.search(r"flatpeak train (.*?)\n\n", read(ROOT / "examples" / "custom_task.py"), flags=re.DOTALL)
    assert command is not None
    recipe, *overrides = shlex.split(command[1].replace("\\\\\n", " "))
    config = parse_config(load_recipe(recipe, overrides))
    assert config.task.factory == "examples/custom_task.py:largest_number"
    assert config.task.arguments == {"numbers": 4, "test_size": 300}


def mapped_paths() -> list[str]:
    """The paths of the file map: two spaces are one level, further names stand on the same line."""
    (block,) = blocks(ROOT / "docs" / "architecture.md", "text")
    above: list[str] = []
    paths = []
    for line in block.splitlines():
        first, *others = line.split()
        names = [first, *takewhile(lambda word: word.endswith((".py", "/")), others)]
        depth = (len(line) - len(line.lstrip())) // 2
        paths += ["".join([*above[:depth], name]) for name in names]
        above = [*above[:depth], names[-1]]
    return paths


def test_the_file_map_has_every_folder() -> None:
    paths = mapped_paths()
    assert [path for path in paths if not (ROOT / path).exists()] == []
    folders = {path.parent.relative_to(ROOT).as_posix() + "/" for path in SOURCES}
    assert folders <= set(paths)
    top = {path.relative_to(ROOT).as_posix() for path in (ROOT / "src" / "flatpeak").glob("[a-z]*.py")}
    assert top <= set(paths)


GUIDES = [path for path in pages() if "results" not in path.parts and sentences(read(path))]


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_sentences_of_a_guide_have_at_most_twenty_words_on_average(path: Path) -> None:
    assert mean(sentences(read(path))) <= 20


def test_sentences_are_counted_without_code_tables_and_headings() -> None:
    page = "# A head\n\nOne two three `code in\nline` five. Dr. Who counts, e.g. 3.5 words: eight of them.\n\n"
    page += "| a | table |\n\n```sh\nnothing here counts\n```\n- an item here\n- `lonely tick\n\nends `here` again\n"
    assert sentences(page) == [5, 9, 3, 3]


def test_readme_is_short_and_its_afternoon_is_sixteen_files() -> None:
    readme = read(ROOT / "README.md")
    assert len(readme.splitlines()) <= 140
    afternoon = readme.partition("## GRPO in an afternoon")[2]
    files = re.findall(r"\]\((src/flatpeak/[\w/]+\.py)\)", afternoon)
    assert len(set(files)) == 16
    written = re.search(r"about ([\d,]+) lines", afternoon)
    assert written is not None
    lines = sum(len(read(ROOT / file).splitlines()) for file in files)
    assert int(written[1].replace(",", "")) == pytest.approx(lines, abs=150)


def test_readme_counts_the_model_families() -> None:
    assert f"{len(PROVEN)} model families" in read(ROOT / "README.md")


def test_the_layers_of_the_document_are_those_that_are_enforced() -> None:
    table = read(ROOT / "docs" / "architecture.md").partition("## The layers")[2].partition("## Why")[0]
    rows = [re.findall(r"`(\w+)`", row.split("|")[1]) for row in table.splitlines() if row.startswith("| `")]
    written = [name for row in rows for name in row]
    there = {path.stem for path in (ROOT / "src" / "flatpeak").iterdir()} & {name for line in LAYERS for name in line}
    assert set(written) == there
    ranks = [next(rank for rank, names in enumerate(LAYERS) if name in names) for name in written]
    assert ranks == sorted(ranks)
