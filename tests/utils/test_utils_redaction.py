import pytest

from flatpeak.utils.redaction import Secret, redact


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("token hf_abcdefghijKLMNOP1234 end", "token [redacted] end"),
        ("OPENAI=sk-proj-abcdefghijklmnop_1234", "OPENAI=[redacted]"),
        ("https://me:hunter2@example.org/x", "https://[redacted]@example.org/x"),
        ("https://sk-abcdefghijklm:hunter2@example.org", "https://[redacted]@example.org"),
        ("ghp_abcdefghijklmnopqrstuvwx", "[redacted]"),
        ("gsk_abcdefghijkl", "[redacted]"),
        ("key=AIzaabcdefghijkl", "key=[redacted]"),
        ("xai-abcdefghijkl", "[redacted]"),
        ("provided: sk-ab*********yz", "provided: [redacted]"),
        ("Authorization: bearer abcd.efg=", "Authorization: [redacted]"),
        ("ask-me-anything", "ask-me-anything"),
        ("https://example.org:80/a@b", "https://example.org:80/a@b"),
        ("hf_small", "hf_small"),
        ("url?key%3dsk-abcdefghijkl", "url?key%3d[redacted]"),
        ("a task-oriented-dialog, risk-adjusted-returns-2024", "a task-oriented-dialog, risk-adjusted-returns-2024"),
        ("the bearer instruments", "the bearer instruments"),
    ],
)
def test_text_shaped_like_a_secret_is_hidden_in_runs_and_in_judges_replies(text, clean):
    assert redact(text) == clean
    assert Secret("none").scrub(text) == clean


def test_a_judges_key_is_hidden_beside_the_secrets_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse")
    secret = Secret("correct-horse-battery")
    assert secret.scrub("correct-horse-battery, correct-horse") == "[redacted], [redacted]"
    assert Secret("short").scrub("short") == "short"


def test_values_of_secret_variables_are_hidden_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("MY_SERVICE_TOKEN", "correct-horse")
    monkeypatch.setenv("WANDB_API_KEY", "correct-horse-battery")
    monkeypatch.setenv("SHORT_KEY", "1234")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "untouched")
    content = {"command": ["x", "--k=correct-horse-battery"], "n": 1234, "t": ("correct-horse", "1234", "untouched")}
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
