"""Whether the Hub answers is found out with one request, to servers on this machine."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest
from huggingface_hub import constants

from flatpeak.errors import UserError
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.tasks.config import build_task
from flatpeak.tasks.math import GSM8KConfig
from flatpeak.utils.huggingface import hub_or_cache


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
        UserError, match=rf"^model\.path=no/such does not load: it is no directory here, {nobody} cannot be reached"
    ):
        load_policy(ModelConfig(path="no/such"))
    # The client's own five attempts take half a minute each time; importing it is most of this.
    assert time.monotonic() - begun < 25
