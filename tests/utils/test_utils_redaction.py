from pathlib import Path

import pytest

from flatpeak.config.load import RECIPES, load_recipe, parse_config, parse_file
from flatpeak.utils import redaction
from flatpeak.utils.redaction import (
    Secret,
    hide_secrets_of,
    local_roots,
    redact,
    redact_command,
    without_local_paths,
)
from support.cpu_time import cpu_time
from support.tables import read_tables

TABLES = read_tables(__file__)


@pytest.fixture(autouse=True)
def no_secrets_of_other_tests(monkeypatch):
    """Their recipes ran in this process, and some texts here have the same secrets."""
    monkeypatch.setattr(redaction, "_recipe_secrets", set())


@pytest.mark.parametrize(("text", "clean"), TABLES["secrets"])
def test_text_shaped_like_a_secret_is_hidden_in_runs_and_in_judges_replies(text, clean):
    assert redact(text) == clean
    assert Secret("none").scrub(text) == clean


@pytest.mark.parametrize(
    "text",
    [
        "seconds_per_token: 0.00012345",
        "kl_per_token=1.2345e-05, n=2",
        "logprob of the token: -12.345678",
        "max_token: 123456789",
        "auth = True",
    ],
)
def test_figures_behind_the_word_token_stay_in_notices_answers_and_commands(text: str) -> None:
    assert (redact(text), redact(text, prose=True)) == (text, text)
    assert redact_command([f"f={{{text}}}"]) == [f"f={{{text}}}"]
    assert redact("with token='123456789'") == "with token='[redacted]'"


@pytest.mark.parametrize(
    "unit", ["eyJ", "://a:", "token=", "token={", "a=", "--token ", "api key ", "('token', ", "://a-"]
)
def test_no_text_takes_long(unit: str) -> None:
    with cpu_time() as spent:
        redact(unit * (150_000 // len(unit)))
        redact_command(["f=" + "a=" * 75_000])
    assert spent.seconds < 3  # 6 to 11 s where time grows by the square


def test_a_judges_key_is_hidden_beside_the_secrets_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse")
    secret = Secret("correct-horse-battery")
    assert secret.scrub("correct-horse-battery, correct-horse") == "[redacted], [redacted]"
    assert Secret("short").scrub("short") == "short"


def test_values_of_secret_variables_are_hidden_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse")
    monkeypatch.setenv("WANDB_API_KEY", "correct-horse-battery")
    monkeypatch.setenv("SHORT_KEY", "1234")
    monkeypatch.setenv("PGPASSWORD", "pg-battery")
    monkeypatch.setenv("SMTP_PASS", "mail-battery")
    monkeypatch.setenv("DB_PASSWORD", "password")
    monkeypatch.setenv("AZURE_PAT", "staple-battery")
    monkeypatch.setenv("SOME_PATH", "/usr/ordinary")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "untouched")
    content = {"command": ["x", "--k=correct-horse-battery"], "n": 1234, "t": ("correct-horse", "1234", "untouched")}
    assert redact("staple-battery in /usr/ordinary") == "[redacted] in /usr/ordinary"
    assert redact("pg-battery, mail-battery, a password") == "[redacted], [redacted], a password"
    assert redact(content) == {
        "command": ["x", "--k=[redacted]"],
        "n": 1234,
        "t": ["[redacted]", "1234", "untouched"],
    }


def test_fields_named_like_secrets_are_hidden_and_others_are_not():
    content = {"api_key": "abc", "judge": {"password": "p", "eos_token": "</s>", "max_tokens": 5, "secret": None}}
    assert redact(content) == {
        "api_key": "[redacted]",
        "judge": {"password": "[redacted]", "eos_token": "</s>", "max_tokens": 5, "secret": None},
    }


@pytest.mark.parametrize("name", TABLES["names"])
def test_the_usual_names_of_secrets_are_known_in_every_spelling(name: str) -> None:
    nested = {"arguments": [{"headers": {name: "plain"}}], name: ["one", {"two": "three"}]}
    assert redact(nested) == {
        "arguments": [{"headers": {name: "[redacted]"}}],
        name: ["[redacted]", {"two": "[redacted]"}],
    }
    assert redact_command([f"rewards.f.arguments.{name}=plain"]) == [f"rewards.f.arguments.{name}=[redacted]"]


def test_settings_that_only_resemble_secrets_stay() -> None:
    settings = {
        "max_tokens": 5,
        "tokens_per_minute": 1000,
        "token_mean": "x",
        "token_limit": "x",
        "normalization": "token_mean",
        "ratio": "token",
        "stop_token": "x",
        "eos_token": "END",
        "pad_token": "x",
        "token": "</think>",
        "token_id": 3,
        "pat": r"(\d+)",
        "api_key_env": "OPENAI_API_KEY",
        "private_key_path": "/x/id",
        "key": "answer",
        "answer_key": "gold",
        "password": None,
        "secret": False,
        "rewards": {"secret": {"type": "number", "extraction": "whole"}},
        "arms": {"token": {"recipe": None, "settings": {"objective.ratio": "token"}, "axes": {}}},
        "second_pass": "x",
        "target_token": "x",
        "eos_token_2": "END",
    }
    assert redact(settings) == settings


def test_nothing_in_a_shipped_recipe_or_among_the_defaults_is_taken_for_a_secret() -> None:
    recipes = [parse_file(path) for path in sorted(RECIPES.rglob("*.yaml"))]
    assert len(recipes) > 30
    assert redact(recipes) == recipes
    whole = parse_config(load_recipe("flatpeak:demo")).model_dump(mode="json")
    assert redact(whole) == whole


def test_a_recipes_secrets_are_hidden_wherever_they_stand_once_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = {"token": "tok-987-abc", "password": "word", "n": "plain-987-abc"}
    hide_secrets_of({"rewards": {"f": {"arguments": arguments}}})
    assert redact("tok-987-abc refused, a word, plain-987-abc") == "[redacted] refused, a word, plain-987-abc"


@pytest.mark.parametrize(("secret", "printed"), [("correcthorse", "[redacted]"), ("swordfishes", "swordfishes")])
def test_a_recipes_secret_without_a_digit_is_hidden_from_twelve_characters_on(
    secret: str, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_secrets_of({"password": secret})
    assert redact(f"login with {secret} refused") == f"login with {printed} refused"


@pytest.mark.parametrize(
    ("secret", "printed"),
    [
        ("pl'a\"i\\n-987-abc", "{!r}"),
        ("schlüssel-987-abc", '"schl\\u00fcssel-987-abc"'),
        ("two+/987-abc==", "two%2B%2F987-abc%3D%3D"),
        ("line-one-987\nline-two-987", "line-one-987 line-two-987"),
        (987654321012, "987654321012"),
    ],
)
def test_a_recipes_secret_is_hidden_as_python_json_and_addresses_write_it(
    secret: str | int, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_secrets_of({"password": secret})
    hidden = redact(printed.format(secret))
    assert "987" not in hidden
    assert "[redacted]" in hidden


def test_an_answer_that_only_names_a_secret_stays_in_prose() -> None:
    assert redact("Secret: 24") == "Secret: [redacted]"
    assert redact(["Secret: 24", "Password: swordfish"], prose=True) == ["Secret: 24", "Password: swordfish"]
    assert redact("Password: tok-987-abc", prose=True) == "Password: [redacted]"
    assert redact("so secret = 987654321", prose=True) == "so secret = 987654321"
    assert redact("so secret = 987654321") == "so secret = [redacted]"


@pytest.mark.parametrize("key", ["EMPTY", "assistant", "none"])
def test_a_word_that_serves_as_a_key_stays_in_texts(key: str) -> None:
    assert Secret(key).scrub(f"an {key} role") == f"an {key} role"


@pytest.mark.parametrize(("argument", "clean"), TABLES["commands"])
def test_a_command_keeps_its_settings_without_secret_values(argument, clean):
    assert redact_command(["flatpeak", argument]) == ["flatpeak", clean]


@pytest.mark.parametrize(("text", "clean"), TABLES["paths"])
def test_absolute_paths_lose_their_directories_and_other_slashes_stay(text: str, clean: str) -> None:
    assert without_local_paths({"a": [text, 1, None]}, ["/srv/me"]) == {"a": [clean, 1, None]}


def test_a_directory_that_is_there_is_a_path_whatever_its_name(tmp_path: Path) -> None:
    (tmp_path / "my data").mkdir()
    assert without_local_paths(str(tmp_path / "my data"), []) == "path/to/my data"


def test_the_roots_are_the_given_ones_home_and_the_working_directory_the_longest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    roots = local_roots(Path("runs/x"))
    assert {str(tmp_path / "runs" / "x"), str(tmp_path), str(Path.home())} <= set(roots)
    assert roots == sorted(roots, key=len, reverse=True)
    assert "/" not in roots
