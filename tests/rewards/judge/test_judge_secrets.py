"""The key goes into one header of requests to its endpoint, and nowhere else."""

from __future__ import annotations

import logging
import traceback

import pytest

from flatpeak.errors import UserError
from flatpeak.rewards.judge.config import JudgeConfig
from flatpeak.rewards.judge.reward import build_judge_reward
from flatpeak.utils.redaction import Secret
from support.judge_server import Answer, JudgeServer, error, message
from support.judges import config, group

KEY = "Zq7-made-up-key-4f1c9d2e8b"
OTHERS = {"OPENAI_API_KEY": "sk-other-aaaaaaaaaaaaaaaaaaaa", "OPENAI_ADMIN_KEY": "sk-admin-bbbbbbbbbbbbbbbbbbbb"}


def echoes(earlier, body):
    """A different way to say the key back for each answer."""
    content = body["messages"][1]["content"]
    if "\n1\n" in content:
        return message(f"You sent Bearer {KEY}. No verdict.")
    if "\n2\n" in content:
        return error(500, text=f"crashed while checking {KEY}")
    if "\n3\n" in content:
        return error(400, text=f"bad request, key {KEY}")
    if "\n4\n" in content:
        return Answer(body=f"<html>{KEY}</html>", headers={"content-type": "text/html", "x-key": KEY})
    if "\n5\n" in content:
        return Answer(status=502, body=f"plain {KEY}", headers={"content-type": "text/plain", "retry-after": KEY})
    return message(f'{{"rationale": "your key is {KEY}", "quality": 1}}')


def files(directory):
    return b"".join(path.read_bytes() for path in directory.rglob("*") if path.is_file())


def test_the_key_is_in_no_file_error_notice_repr_or_line_of_output(tmp_path, monkeypatch, caplog, capfd):
    caplog.set_level(logging.INFO)
    for name, value in {"MY_JUDGE_KEY": KEY, **OTHERS}.items():
        monkeypatch.setenv(name, value)
    with JudgeServer(echoes) as server:
        backend = {"api_key_env": "MY_JUDGE_KEY"}
        settings = config(server.url, backend=backend, retries=1, cache=tmp_path / "cache.sqlite")
        judge = build_judge_reward("judge", settings)
        judge._examples = ()
        judge.attach(tmp_path / "run")
        result = judge.score([group(*(str(n) for n in range(1, 7)))])
        inner = judge._panel.judge
        said = [repr(judge), repr(inner), repr(vars(inner)), repr(settings), settings.model_dump_json(), str(result)]
        said += [repr(result.first_error), *judge.notices(), str(judge.metrics()), str(caplog.text)]
        judge.close()
        assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
        assert not any(value in str(server.headers) for value in OTHERS.values())
        server.script = lambda earlier, body: error(401, text=f"Incorrect API key provided: {KEY}")
        judge = build_judge_reward("judge", settings)
        with pytest.raises(UserError, match="api_key_env") as raised:
            judge.score([group("7")])
        judge.close()
        said.append("".join(traceback.format_exception(raised.value)))
    assert result.scores == [[None, None, None, None, None, 1.0]]
    captured = capfd.readouterr()
    everything = " ".join([*said, captured.out, captured.err]).encode() + files(tmp_path)
    assert KEY.encode() not in everything
    assert b"your key is [redacted]" in files(tmp_path / "run")
    assert b"your key is [redacted]" in files(tmp_path)


def test_the_key_is_in_no_log_where_everything_is_logged(monkeypatch, caplog):
    """What httpx, httpcore and openai log at DEBUG, with replies that do not say it back."""
    caplog.set_level(logging.DEBUG)
    for name in ("openai", "httpx", "httpcore"):
        caplog.set_level(logging.DEBUG, logger=name)
    monkeypatch.setenv("MY_JUDGE_KEY", KEY)
    with JudgeServer(lambda earlier, body: error(500) if earlier == 0 else None) as server:
        judge = build_judge_reward("judge", config(server.url, backend={"api_key_env": "MY_JUDGE_KEY"}))
        judge._examples = ()
        assert judge.score([group("18")]).scores == [[1.0]]
        judge.close()
    assert "/v1/chat/completions" in caplog.text
    assert KEY not in caplog.text


def test_without_a_named_variable_no_key_of_the_environment_is_sent(monkeypatch):
    for name, value in OTHERS.items():
        monkeypatch.setenv(name, value)
    with JudgeServer() as server:
        judge = build_judge_reward("judge", config(server.url))
        judge._examples = ()
        judge.score([group("18")])
        judge.close()
        assert not any(value in str(server.headers) for value in OTHERS.values())


def test_a_missing_key_is_an_error_that_names_its_variable(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UserError, match=r"rewards\.judge: backend\.api_key_env=NO_SUCH_KEY: set this"):
        build_judge_reward("judge", config("http://localhost:1/v1", backend={"api_key_env": "NO_SUCH_KEY"}))


def test_a_key_with_a_line_break_inside_is_refused_without_being_shown(monkeypatch):
    monkeypatch.setenv("BAD_KEY", f"{KEY}\nx")
    with pytest.raises(UserError) as raised:
        Secret.from_environment("BAD_KEY")
    assert KEY not in str(raised.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("api_key_env", "sk-abcdefghijklmnop"),
        ("base_url", "https://user:hunter2hunter2@host/v1"),
        ("base_url", "https://host/v1?key=hunter2hunter2"),
        ("extra_body", {"api_key": "hunter2hunter2"}),
    ],
)
def test_a_recipe_that_holds_a_key_is_refused_without_repeating_it(field, value):
    from flatpeak.config.load import parse_config

    backend = {"type": "endpoint", "base_url": "http://host/v1", "model": "m", field: value}
    with pytest.raises(UserError, match=f"backend.{field}") as raised:
        parse_config({"rewards": {"judge": {"type": "judge", "backend": backend}}})
    assert "hunter2" not in str(raised.value)
    assert "sk-abc" not in str(raised.value)


def test_text_shaped_like_a_key_is_hidden_too():
    secret = Secret("unrelated-key")
    assert (
        secret.scrub("Authorization: Bearer abcdefgh12345678, sk-abcdefghijklmnop")
        == "Authorization: [redacted], [redacted]"
    )
    assert Secret("none").scrub("none of it") == "none of it"
    assert repr(Secret("unrelated-key")) == "Secret([redacted])"


def test_the_config_prints_no_value_of_the_environment(monkeypatch):
    monkeypatch.setenv("MY_JUDGE_KEY", KEY)
    settings = JudgeConfig.model_validate(
        {"backend": {"type": "endpoint", "base_url": "http://h/v1", "model": "m", "api_key_env": "MY_JUDGE_KEY"}}
    )
    assert settings.model_dump(mode="json")["backend"]["api_key_env"] == "MY_JUDGE_KEY"
