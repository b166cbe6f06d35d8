"""An OpenAI-compatible server whose judge is honest and whose network is not: each test scripts what goes wrong."""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BLOCK = re.compile(r"\[\[begin ([a-zA-Z ]+) ([0-9a-f]{16})\]\]\n(.*?)\n\[\[end \1 \2\]\]", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The server's reaction to one request."""

    status: int = 200
    body: str | bytes = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    wait: float = 0.0
    """Seconds before anything is sent."""
    reset: bool = False
    """Close the connection with a TCP reset instead of answering."""
    lie: int = 0
    """Announce so many bytes more than are sent."""


def texts(body: Mapping[str, Any]) -> dict[str, str]:
    """The delimited texts of a request by name."""
    content = next(m["content"] for m in body["messages"] if m["role"] == "user")
    return {name: text for name, _, text in BLOCK.findall(content)}


def message(content: str | None, *, finish: str = "stop", **fields: Any) -> Answer:
    """The body of a chat completion."""
    reply = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [
            {"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": content, **fields}}
        ],
        "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110},
    }
    return Answer(body=json.dumps(reply))


def error(
    status: int, *, text: str = "something broke", headers: Mapping[str, str] | None = None, **fields: Any
) -> Answer:
    """An error in OpenAI's layout."""
    return Answer(status=status, body=json.dumps({"error": {"message": text, **fields}}), headers=headers or {})


def honest(body: Mapping[str, Any]) -> Answer:
    """1 where the answer is the reference, word for word; 0.5 where it contains it; else 0. Asked by any rubric."""
    blocks = texts(body)
    answer, reference = blocks.get("answer", ""), blocks.get("reference answer", "")
    mark = 1.0 if answer == reference else 0.5 if reference and reference in answer.split() else 0.0
    if "answer A" in blocks:
        reference = blocks.get("reference answer", "")
        right = [blocks[name] == reference if reference else True for name in ("answer A", "answer B")]
        better = "tie" if right[0] == right[1] else "A" if right[0] else "B"
        return message(json.dumps({"rationale": "compared", "better": better}))
    return message(
        json.dumps({"rationale": "compared with the reference", "quality": mark, "correct": float(mark == 1)})
    )


Script = Callable[[int, Mapping[str, Any]], Answer | None]
"""(how often exactly this request was made before, its body) -> what to do; None is to answer honestly."""


class JudgeServer:
    """Listens on localhost while it is open; `requests` are the bodies it got, `headers` what came with them."""

    def __init__(self, script: Script = lambda earlier, body: None) -> None:
        self.script = script
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.most_at_once = 0
        self._now = 0
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer._serve(self)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def __enter__(self) -> JudgeServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers["content-length"]))
        body = json.loads(raw)
        with self._lock:
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            self.times.append(time.monotonic())
            self.requests.append(body)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            earlier = self._seen[raw.decode()]
            self._seen[raw.decode()] += 1
        answer = self.script(earlier, body) or honest(body)
        time.sleep(answer.wait)
        with self._lock:
            self._now -= 1
        if answer.reset:
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            handler.connection.close()
            handler.close_connection = True
            return
        payload = answer.body if isinstance(answer.body, bytes) else answer.body.encode()
        handler.send_response(answer.status)
        for name, value in {"content-type": "application/json", **answer.headers}.items():
            handler.send_header(name, value)
        handler.send_header("content-length", str(len(payload) + answer.lie))
        handler.end_headers()
        handler.wfile.write(payload)
        handler.wfile.flush()
        if answer.lie:
            handler.close_connection = True


def refused_url() -> str:
    """An address without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/v1"
