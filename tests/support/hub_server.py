"""A Hugging Face Hub of one process: repositories, LFS objects and commits by the Hub's own protocol, with failures."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

TOKEN = "hf_" + "scriptedTokenOfTests"
LICENSES = {"apache-2.0", "mit", "cc-by-4.0", "llama3", "gemma", "other", "unknown"}
"""Some of the Hub's identifiers of licenses, `unknown` among them."""
RELATIONS = {"adapter", "finetune", "merge", "quantized"}
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


def card_errors(content: str) -> list[str]:
    """What the Hub's documents forbid in a model card's metadata, of the fields that cards of flatpeak have."""
    match = re.match(r"---\n(.*?)\n---\n", content, flags=re.DOTALL)
    if match is None:
        return ["no metadata between two lines of ---"]
    data = yaml.safe_load(match[1])
    errors = []
    if data.get("license") not in LICENSES:
        errors.append(f"license {data.get('license')}")
    for key in ("base_model", "datasets"):
        names = data.get(key, [])
        for name in [names] if isinstance(names, str) else names:
            if not REPOSITORY.fullmatch(name):
                errors.append(f"{key} {name}")
    if "base_model_relation" in data and data["base_model_relation"] not in RELATIONS:
        errors.append(f"base_model_relation {data['base_model_relation']}")
    if not all(isinstance(data.get(key), str) for key in ("library_name", "pipeline_tag")):
        errors.append("library_name, pipeline_tag")
    if not all(isinstance(tag, str) and 0 < len(tag) <= 100 for tag in data.get("tags", [])):
        errors.append("tags")
    for model in data.get("model-index", []):
        if not isinstance(model.get("name"), str) or not model.get("results"):
            errors.append("model-index")
        for result in model.get("results", []):
            whole = result.get("task", {}).get("type") and all(
                result.get("dataset", {}).get(k) for k in ("type", "name")
            )
            metrics = result.get("metrics", [])
            if (
                not whole
                or not metrics
                or not all(m.get("type") and isinstance(m.get("value"), float) for m in metrics)
            ):
                errors.append(f"model-index result {result}")
    return errors


@dataclass
class Repository:
    """The files of a repository, by their names."""

    private: bool = False
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[list[str]] = field(default_factory=list)
    """The operations of each commit, such as `add README.md`."""


@dataclass
class Hub:
    """The state of the server, and what tests look at."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """LFS objects by their SHA-256."""
    sent: list[str] = field(default_factory=list)
    """The LFS objects that were uploaded, one entry each time."""
    requests: list[str] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    failures: dict[str, list[int]] = field(default_factory=dict)
    """Statuses that the next requests whose line contains this text are answered with."""

    def download(self, repo: str, directory: Path) -> Path:
        """Write a repository's files as `hf download` would."""
        for name, content in self.repositories[repo].files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(content)
        return directory


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _reply(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else self._chunks()
        line = f"{self.command} {self.path}"
        self.hub.requests.append(line)
        if not self.path.startswith("/lfs/"):
            self.hub.bodies.append(body)
        for text, statuses in self.hub.failures.items():
            if text in line and statuses:
                self._reply({"error": "scripted"}, statuses.pop(0))
                return
        if not self.path.startswith("/lfs/") and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._reply({"error": "unauthorized"}, 401)
            return
        self._route(body)

    do_GET = do_POST = do_PUT = do_HEAD = _handle

    def _chunks(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return b""
        content = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            content += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return content

    def _route(self, body: bytes) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            errors = card_errors(json.loads(body)["content"])
            self._reply({"errors": [{"message": one} for one in errors], "warnings": []}, 400 if errors else 200)
        elif path.startswith("/lfs/"):
            oid = path.removeprefix("/lfs/")
            assert hashlib.sha256(body).hexdigest() == oid
            self.hub.objects[oid] = body
            self.hub.sent.append(oid)
            self._reply({})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            self._reply({"transfer": "basic", "objects": [self._object(one) for one in json.loads(body)["objects"]]})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(.*))?", path):
            repository = self.hub.repositories.get(match[1])
            if repository is None:
                self._reply({"error": "not found"}, 404)
            else:
                self._repository(match[1], repository, (match[2] or "").partition("/")[0], body)
        else:
            self._reply({"error": path}, 404)

    def _create(self, content: Mapping[str, Any]) -> None:
        name = f"{content['organization']}/{content['name']}"
        if name in self.hub.repositories:
            self._reply({"error": "exists", "url": f"{self.hub.url}/{name}"}, 409)
            return
        private = bool(content.get("private")) or content.get("visibility") == "private"
        self.hub.repositories[name] = Repository(private=private)
        self._reply({"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def _object(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        known = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] in self.hub.objects:
            return known
        return known | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{wanted['oid']}"}}}

    def _repository(self, name: str, repository: Repository, action: str, body: bytes) -> None:
        if action == "preupload":
            files = json.loads(body)["files"]
            modes = {one["path"]: "lfs" if one["path"].endswith(".safetensors") else "regular" for one in files}
            self._reply({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes.items()]})
        elif action == "tree":
            listed = repository.files.items()
            self._reply([{"type": "file", "path": p, "size": len(c), "oid": "0" * 40} for p, c in listed])
        elif action == "commit":
            self._commit(name, repository, [json.loads(line) for line in body.splitlines() if line])
        else:
            siblings = [{"rfilename": path} for path in repository.files]
            self._reply({"id": name, "private": repository.private, "sha": "0" * 40, "siblings": siblings})

    def _commit(self, name: str, repository: Repository, lines: list[Mapping[str, Any]]) -> None:
        done = []
        for line in lines[1:]:
            path, value = line["value"]["path"], line["value"]
            if line["key"] == "file":
                repository.files[path] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                repository.files[path] = self.hub.objects[value["oid"]]
            else:
                del repository.files[path]
            done.append(f"{'delete' if line['key'].startswith('deleted') else 'add'} {path}")
        repository.commits.append(done)
        oid = hashlib.sha1(str(len(repository.commits)).encode()).hexdigest()
        self._reply({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}"})


@contextmanager
def scripted_hub(patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A running Hub that the client talks to, with a token in HF_TOKEN and without waiting before it tries again."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    patch.setattr(constants, "ENDPOINT", hub.url)
    patch.setattr(constants, "HF_HUB_OFFLINE", False)
    # The transfer of hf_xet is another protocol, to a server of its own, behind the same call.
    patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    patch.setattr(_http.time, "sleep", lambda seconds: None)
    patch.setenv("HF_TOKEN", TOKEN)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
