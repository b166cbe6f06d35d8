"""A vLLM server that is honest and whose network, memory and manners are not: each test scripts what goes wrong.

Its model is the number in the file of the weights that it was told to load: every token it draws has that number as its
log-probability, so that a completion shows which weights drew it.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import torch
from safetensors.torch import load_file

from support.models import EOS, LETTERS, letter_tokenizer
from support.weight_transfer import Workers

MODEL = "base"
WEIGHTS = "weights.json"
WEIGHT = "weight"
"""The name of the number among the tensors that are sent."""
VOCABULARY = len(LETTERS) + 3
FIRST, LETTERS_USED = 3, 10
"""The tokens that it draws, which are letters of every tokenizer of the tests."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request that the server got."""

    path: str
    query: Mapping[str, str]
    body: Mapping[str, Any]
    earlier: int
    """Requests to the same path before it."""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What the server does in place of its duty."""

    status: int = 500
    body: bytes = b'{"error": {"message": "something broke"}}'
    headers: Mapping[str, str] = field(default_factory=dict)
    wait: float = 0.0
    """Seconds before anything is sent."""
    drops: float = 0.0
    """Seconds between the bytes that are sent."""
    reset: bool = False
    """Break the connection instead of answering."""
    missing: int = 0
    """Announce so many bytes more than are sent."""


Script = Callable[[Call], Fault | None]
Edit = Callable[[dict[str, Any]], Any]
"""Changes the honest answer to a request for completions."""


class VLLMServer:
    """Listens on localhost; `stop` and `start` are the death of its process and a new one on the same port."""

    def __init__(self, script: Script = lambda call: None, *, edit: Edit = lambda answer: answer, **settings: Any):
        """`settings`: logprobs_mode, sleep, lora, development (dev mode's endpoints), scale_out, device, chunked;
        transfer (the backend that takes weights from the trainer), workers."""
        self.script = script
        self.edit = edit
        self.settings = {
            "logprobs_mode": "processed_logprobs",
            "sleep": False,
            "lora": False,
            "development": True,
            "scale_out": True,
            "device": "cuda",
            "chunked": True,
            "transfer": None,
            "workers": 1,
        } | settings
        self.lost = False
        """For scripts."""
        self.calls: list[Call] = []
        self.most_at_once = 0
        self._now = 0
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server: ThreadingHTTPServer | None = None
        self._port = 0
        self.start()
        self.url = f"http://127.0.0.1:{self._port}"

    def start(self) -> None:
        """A new process: weights, version and adapters are those it began with."""
        self.version, self.value, self.adapters = "default", 0.0, dict[str, float]()
        self.paused = self.asleep = False
        self.workers = Workers(self.settings["transfer"], self.settings["workers"])
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._serve(self)

            do_POST = do_GET

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._server.daemon_threads = True
        self._port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def stop(self) -> None:
        """The end of the process."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def __enter__(self) -> VLLMServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def paths(self) -> list[str]:
        """The paths of all requests but for completions and looks, in their order."""
        looks = {"/inference/v1/generate", "/health", "/v1/models", "/server_info", "/weight_info", "/is_sleeping"}
        looks |= {"/get_world_size"}
        return [call.path for call in self.calls if call.path not in looks]

    def generated(self) -> list[Call]:
        """The requests for completions."""
        return [call for call in self.calls if call.path == "/inference/v1/generate"]

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        raw = handler.rfile.read(int(handler.headers.get("content-length") or 0))
        parts = urlsplit(handler.path)
        headers = {name.lower(): value for name, value in handler.headers.items()}
        with self._lock:
            call = Call(
                path=parts.path,
                query=dict(parse_qsl(parts.query)),
                body=json.loads(raw) if raw else {},
                earlier=self._seen[parts.path],
                headers=headers,
            )
            self._seen[parts.path] += 1
            self.calls.append(call)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            answer = self.script(call) or self._answer(call)
            time.sleep(answer.wait)
        finally:
            with self._lock:  # before the client can read its answer and send the next request
                self._now -= 1
        _send(handler, answer)

    def _answer(self, call: Call) -> Fault:
        name = call.path.rpartition("/")[2]
        routes = {
            "models": self._models,
            "generate": self._generate,
            "load_lora_adapter": self._load_adapter,
            "unload_lora_adapter": self._unload_adapter,
        }
        development = {
            "server_info": self._info,
            "weight_info": lambda call: _json({"weight_version": self.version}),
            "pause": lambda call: self._set(paused=True),
            "resume": lambda call: self._set(paused=False),
            "collective_rpc": self._reload,
            "reset_prefix_cache": lambda call: _json({"success": True}),
            "update_weight_version": lambda call: self._set(version=call.body["new_version"]),
            "is_sleeping": lambda call: _json({"is_sleeping": self.asleep}),
            "sleep": lambda call: self._set(asleep=True),
            "wake_up": lambda call: self._set(asleep=False),
            "get_world_size": lambda call: _json({"world_size": len(self.workers.loaded)}),
            "init_weight_transfer_engine": lambda call: self._do(self.workers.init, call.body["init_info"]),
            "shutdown_weight_transfer_engine": lambda call: self._do(self.workers.shutdown),
            "start_weight_update": lambda call: self._do(self.workers.start),
            "update_weights": lambda call: self._do(self.workers.update, call.body["update_info"]),
            "finish_weight_update": lambda call: self._finish(),
        }
        if self.settings["development"]:
            routes |= development
        return routes[name](call) if name in routes else _json({"detail": "Not Found"}, status=404)

    def _set(self, **state: Any) -> Fault:
        for name, value in state.items():
            setattr(self, name, value)
        return _json({"status": "ok"})

    def _do(self, act: Callable[..., None], *arguments: Any) -> Fault:
        try:
            act(*arguments)
        except Exception as error:
            return _json({"error": {"message": f"Worker failed with error '{error}'"}}, status=500)
        return _json({"message": "done"})

    def _finish(self) -> Fault:
        whole = not self.workers.torn and all(self.workers.loaded)
        answer = self._do(self.workers.finish)
        values = {float(loaded.get(WEIGHT, -1.0)) for loaded in self.workers.loaded} if whole else {math.nan}
        (self.value,) = values
        return answer

    def _models(self, call: Call) -> Fault:
        return _json({"data": [{"id": name} for name in (MODEL, *self.adapters)]})

    def _info(self, call: Call) -> Fault:
        model = {"logprobs_mode": self.settings["logprobs_mode"], "enable_sleep_mode": self.settings["sleep"]}
        lora = {"max_lora_rank": 16} if self.settings["lora"] else None
        config = {
            "model_config": model,
            "lora_config": lora,
            "device_config": {"device": self.settings["device"]},
            "scheduler_config": {"enable_chunked_prefill": self.settings["chunked"]},
            "weight_transfer_config": {"backend": self.settings["transfer"]} if self.settings["transfer"] else None,
        }
        return _json({"vllm_config": config})

    def _reload(self, call: Call) -> Fault:
        assert call.body["method"] == "reload_weights"
        assert self.paused
        assert not self.asleep
        self.value = read_weights(Path(call.body["kwargs"]["weights_path"]))
        return _json({"results": [None]})

    def _load_adapter(self, call: Call) -> Fault:
        if call.body["lora_name"] in self.adapters:
            return _json({"error": {"message": "The lora adapter has already been loaded."}}, status=400)
        self.adapters[call.body["lora_name"]] = read_weights(Path(call.body["lora_path"]))
        return Fault(status=200, body=b"Success: it was added.", headers={"content-type": "text/plain"})

    def _unload_adapter(self, call: Call) -> Fault:
        if self.adapters.pop(call.body["lora_name"], None) is None:
            return _json({"error": {"message": "The lora adapter cannot be found."}}, status=404)
        return Fault(status=200, body=b"Success: it was removed.", headers={"content-type": "text/plain"})

    def _generate(self, call: Call) -> Fault:
        if not self.settings["scale_out"]:
            return _json({"error": {"message": "Scale-out endpoints are disabled."}}, status=403)
        name = call.body["model"]
        if name != MODEL and name not in self.adapters:
            return _json({"error": {"message": f"The model {name} does not exist."}}, status=404)
        assert not self.asleep
        value = self.value if name == MODEL else self.adapters[name]
        sampling = call.body["sampling_params"]
        choices = [
            completion(sampling["seed"] + index, sampling["max_tokens"], value, self.version, index)
            for index in range(sampling["n"])
        ]
        return _json(self.edit({"choices": choices, "prompt_token_ids": call.body["token_ids"], "model": name}))


def completion(seed: int, limit: int, value: float, version: str, index: int) -> dict[str, Any]:
    """Letters, then the end, as far as the limit lets them; how many and which is a function of the seed."""
    drawn = [FIRST + (seed >> shift) % LETTERS_USED for shift in range(seed % 4 + 1)]
    tokens = [*drawn, EOS][:limit]
    rows = [{"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []} for token in tokens]
    return {
        "index": index,
        "finish_reason": "stop" if tokens[-1] == EOS else "length",
        "token_ids": tokens,
        "logprobs": {"content": rows},
        "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
    }


class ScriptedPolicy:
    """A policy whose only weight is a number, at most 0."""

    def __init__(self, *, adapted: bool = False) -> None:
        self.weight = torch.tensor([-0.5])
        self.adapted = adapted
        self.eos_token_ids = frozenset({EOS})
        self.tokenizer = letter_tokenizer()
        self.vocabulary_size = VOCABULARY
        self.others: dict[str, torch.Tensor] = {}
        """Further tensors, which are sent before its weight."""
        self.heads = list[bool]()
        """Whether each save was asked for the output layer by itself."""

    def saved_weights(self) -> list[torch.Tensor]:
        """Its weight."""
        return [self.weight]

    def named_weights(self, *, head: bool = False) -> list[tuple[str, torch.Tensor]]:
        """Its weight, and what is sent beside it."""
        self.heads.append(head)
        return [*self.others.items(), (WEIGHT, self.weight)]

    def save_weights(self, directory: Path, *, head: bool = False) -> None:
        """Write it where `read_weights` looks."""
        self.heads.append(head)
        (directory / WEIGHTS).write_text(json.dumps(self.weight.item()), encoding="utf-8")

    def step(self) -> None:
        """Change it."""
        self.weight.sub_(0.25)


def read_weights(directory: Path) -> float:
    """The number that `ScriptedPolicy` has written."""
    return float(json.loads((directory / WEIGHTS).read_text(encoding="utf-8")))


def size_of_weights(directory: Path) -> float:
    """A log-probability that says which weights a server has: less the mean size of all of their numbers."""
    tensors = [tensor for file in sorted(directory.glob("*.safetensors")) for tensor in load_file(file).values()]
    return -sum(float(tensor.double().abs().sum()) for tensor in tensors) / sum(tensor.numel() for tensor in tensors)


def unused_url() -> str:
    """An address without a listener."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def _json(content: Any, *, status: int = 200) -> Fault:
    return Fault(status=status, body=json.dumps(content).encode(), headers={"content-type": "application/json"})


def _send(handler: BaseHTTPRequestHandler, answer: Fault) -> None:
    handler.close_connection = True
    if answer.reset:
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        handler.connection.close()
        return
    handler.send_response(answer.status)
    for name, value in {"content-type": "application/json", **answer.headers}.items():
        handler.send_header(name, value)
    handler.send_header("content-length", str(len(answer.body) + answer.missing))
    handler.end_headers()
    pieces = [answer.body[i : i + 1] for i in range(len(answer.body))] if answer.drops else [answer.body]
    try:
        for piece in pieces:
            handler.wfile.write(piece)
            handler.wfile.flush()
            time.sleep(answer.drops)
    except OSError:  # the client would not wait
        pass
