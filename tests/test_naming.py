"""Names are the field's, and first lines of docstrings are noun phrases or imperatives."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import typer

import flatpeak
from flatpeak.cli.main import app
from support.naming import bad_sentence, defined_names, findings, is_banned

PACKAGE = Path(flatpeak.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_and_docstrings_are_those_of_the_field(path: Path) -> None:
    assert [str(finding) for finding in findings(path)] == []


@pytest.mark.parametrize("name", ["found", "_found", "found_P", "ToldCompletion", "Journal", "_places", "part", "Kept"])
def test_a_banned_name_is_noticed(name: str) -> None:
    assert is_banned(name)


@pytest.mark.parametrize("name", ["foundation", "partial", "kept", "layer", "CircuitBreaker", "component", "rows"])
def test_other_names_are_free(name: str) -> None:
    assert not is_banned(name)


def test_recipe_keys_arguments_and_fields_are_told_apart() -> None:
    source = """
class JudgeConfig:
    breaker: int

class Other:
    breaker: int

def read(found, *, gold): ...
"""
    named = {name for _, name in defined_names(ast.parse(source))}
    assert named == {"JudgeConfig", "Other", "breaker", "read", "found", "gold"}
    assert [name for _, name in defined_names(ast.parse(source.partition("class Other")[0]))] == ["JudgeConfig"]


@pytest.mark.parametrize(
    "sentence",
    [
        "So far.",
        "Back.",
        "As they were.",
        "The learner's.",
        "What a judge sees of a completion.",
        "Which way to go on.",
        "The score that the trainer is told.",
    ],
)
def test_fragments_riddles_and_persons_are_noticed(sentence: str) -> None:
    assert bad_sentence(sentence) is not None


@pytest.mark.parametrize(
    "sentence",
    ["The mean of each group's rewards.", "Whether the loss has a KL term.", "Write the report page of a run."],
)
def test_noun_phrases_and_imperatives_pass(sentence: str) -> None:
    assert bad_sentence(sentence) is None


def test_help_texts_follow_the_same_rules() -> None:
    command = typer.main.get_command(app)
    texts = {}
    for name, sub in command.commands.items():  # type: ignore[attr-defined]
        texts[name] = (sub.help or "", 4)
        texts |= {f"{name} {one.name}": (one.help, 1) for one in sub.params if getattr(one, "help", None)}
    rules = {name: bad_sentence(text, fewest_words=fewest) for name, (text, fewest) in texts.items()}
    assert {name: rule for name, rule in rules.items() if rule} == {}
