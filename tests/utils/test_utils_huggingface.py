"""The Hub, asked with one request to servers on this machine, and the characters that tokenizers know."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from flatpeak.errors import UserError
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.tasks.config import build_task
from flatpeak.tasks.math import GSM8KConfig
from flatpeak.utils.huggingface import hub_or_cache, notice_of_unknown_characters, unknown_characters


class Answers(BaseHTTPRequestHandler):
    def do_HEAD(self):
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with HTTPServer(("127.0.0.1", 0), Answers) as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{one.server_address[1]}"
        one.shutdown()
        thread.join()


@pytest.fixture
def nobody(monkeypatch):
    with HTTPServer(("127.0.0.1", 0), Answers) as one:
        address = f"http://127.0.0.1:{one.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return address


def test_where_the_hub_answers_it_is_asked(monkeypatch, server):
    monkeypatch.setattr(constants, "ENDPOINT", server)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with hub_or_cache() as problem:
        assert problem is None
        assert not constants.is_offline_mode()


def test_where_nobody_answers_its_client_is_offline_for_that_while(nobody):
    with pytest.raises(KeyError), hub_or_cache() as problem:
        assert problem is not None
        assert problem.startswith(f"{nobody} cannot be reached (")
        assert constants.is_offline_mode()
        raise KeyError
    assert not constants.is_offline_mode()


def test_who_asked_to_be_offline_stays_so_and_no_request_is_made(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "get_session", lambda: pytest.fail("asked"))
    with hub_or_cache() as problem:
        assert problem == "HF_HUB_OFFLINE is set, and it was not fetched before"
    assert constants.is_offline_mode()


def test_data_and_models_that_cannot_be_fetched_are_told_within_seconds_with_the_local_way(nobody):
    begun = time.monotonic()
    with pytest.raises(
        UserError, match=rf"from the Hub: {nobody} cannot be reached \(.*\); .* task\.path, a directory"
    ):
        build_task(GSM8KConfig())
    with pytest.raises(
        UserError, match=rf"^model\.path=no/such does not load: it is not a directory here, {nobody} cannot be reached"
    ):
        load_policy(ModelConfig(path="no/such"))
    # The client's own five attempts take half a minute each time; importing it is most of this.
    assert time.monotonic() - begun < 25


def wrapped(backend: Tokenizer, **special: str) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def known_words() -> Any:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return wrapped(words, unk_token="<unk>")


def known_letters() -> Any:
    return wrapped(Tokenizer(models.BPE({"a": 0, "b": 1, " ": 2}, [])))


def known_bytes() -> Any:
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel()
    return wrapped(backend)


def test_unknown_pieces_are_found_in_tokenizers_of_every_kind():
    assert unknown_characters(known_words(), "one two one two") == ["two"]
    assert unknown_characters(known_letters(), "a?b? a") == ["?"]
    assert unknown_characters(known_bytes(), "a é 漢") == []
    assert unknown_characters(object(), "a") == []


def test_prompts_with_characters_that_no_token_has_are_counted_and_the_characters_listed():
    texts = ["a b", "a😀b", "b\x00", "é a 😀"]
    assert notice_of_unknown_characters(texts, known_letters()) == (
        "3 of 4 prompts have characters that the tokenizer lacks and the model cannot see: '😀' '\\x00' 'é'"
    )
    assert notice_of_unknown_characters(texts, known_bytes()) is None
    assert notice_of_unknown_characters([], known_letters()) is None
    many = notice_of_unknown_characters(["cdefghijklmn"], known_letters())
    assert many is not None
    assert many.endswith("'c' 'd' 'e' 'f' 'g' 'h' 'i' 'j' 'k' 'l' ...")


def test_words_whose_letters_are_no_tokens_are_not_taken_for_unknown():
    assert notice_of_unknown_characters(["one", "one one"], known_words()) is None
    assert "1 of 2 prompts" in str(notice_of_unknown_characters(["one", "one two"], known_words()))
