"""Runs whose completions come from servers: built, trained, evaluated, resumed elsewhere, and closed."""

import json
import os
import signal
from pathlib import Path

import pytest

from flatpeak.apps.compare import compare_checkpoints
from flatpeak.config.load import apply_settings, parse_config
from flatpeak.config.run_config import RunConfig
from flatpeak.errors import RunError, UserError
from flatpeak.pipeline.request import resolve_config
from flatpeak.pipeline.rollout_engines import build_sampler
from flatpeak.policy.model import Policy
from flatpeak.policy.native_decoding import KernelChoice
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.vllm import VLLMSampler
from flatpeak.runs.manifest import check_resumable
from flatpeak.utils.adapters import LoraConfig, add_adapters
from support.models import letter_tokenizer, tiny_model
from support.reward_functions import lengths
from support.runs import Watcher
from support.vllm_server import Fault, VLLMServer, unused_url

SERVED = RunConfig.model_validate({"rollout": {"engine": {"type": "vllm"}}})


@pytest.fixture
def served(recipe, tmp_path, monkeypatch):
    """`served(*servers, **sections)`: a tiny recipe that is sampled by these servers."""
    # The scripted server reads a number where a real one reads weights.
    monkeypatch.setattr("support.vllm_server.read_weights", lambda directory: -float(len(str(directory)) > 0))

    def make(*servers, **sections):
        engine = {"type": "vllm", "urls": [server.url for server in servers], "directory": str(tmp_path / "weights")}
        rollout = {**sections.pop("rollout", {}), "engine": {**engine, "timeout": 5.0}}
        return recipe(rollout=rollout, **sections)

    return make


def test_a_run_is_trained_and_evaluated_by_servers(served, train, tmp_path):
    with VLLMServer() as server:
        result = train(served(server, training={"steps": 2}, evaluation={"every": 1}), reward=lengths)
        asked = server.generated()
    assert result.exit_code == 0
    rows = [json.loads(line) for line in (result.path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "time/weight_update" in json.dumps(row)]
    assert len(steps) == 2
    assert {call.body["sampling_params"]["temperature"] for call in asked} == {0.0, 1.0}
    written = [json.loads(line) for line in (result.path / "rollouts" / "step_000002.jsonl").read_text().splitlines()]
    assert {row["weight_version"] for row in written} == {2}
    assert list((tmp_path / "weights").iterdir()) == []


def test_a_run_by_servers_chooses_no_decoder_of_its_own(served, train, monkeypatch):
    monkeypatch.setattr(KernelChoice, "pack", lambda choice, policy: pytest.fail("kernels were chosen"))
    with VLLMServer() as server:
        recipe = served(server, training={"steps": 1})
        result = train(recipe)
        state = json.loads((result.path / "checkpoints" / "last" / "trainer" / "state.json").read_text())
        assert state["kernels"].endswith("in training passes")
        watcher = Watcher()
        train(recipe, settings={"training.steps": 2}, resume=True, progress=watcher)
    assert not [notice for notice in watcher.notices if "other kernels" in notice]


def test_a_run_goes_on_with_servers_elsewhere(served, train):
    with VLLMServer() as server:
        recipe = served(server, training={"steps": 1})
        train(recipe)
    with VLLMServer() as other:
        recipe = served(other, training={"steps": 2})
        result = train(recipe, resume=True)
        assert other.generated()
    assert result.summary.last_step == 2


def test_a_run_without_its_server_does_not_begin(served, train, tmp_path):
    class Nowhere:
        url = unused_url()

    with pytest.raises(UserError, match="flatpeak serve"):
        train(served(Nowhere))
    assert not (tmp_path / "runs" / "tiny").exists()


def test_a_run_that_loses_its_servers_leaves_a_checkpoint(served, train):
    def script(call):
        server.lost = server.lost or (call.path == "/resume" and call.earlier == 1)
        return Fault(reset=True) if server.lost else None

    with VLLMServer(script) as server:
        recipe = served(server, training={"steps": 3}, evaluation={"every": 0})
        recipe["rollout"]["engine"]["timeout"] = 0.5
        with pytest.raises(RunError, match="resume=True"):
            train(recipe, reward=lengths)
    checkpoints = Path(recipe["run"]["directory"]) / "tiny" / "checkpoints"
    assert (checkpoints / "last").resolve().name == "step_000001"


STALE = {"rollout": {"staleness": 1}, "evaluation": {"every": 0}}


def rows_of(path, name):
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def test_servers_draw_the_next_step_ahead_by_the_weights_before_the_update(served, train):
    with VLLMServer() as server:
        result = train(
            served(server, training={"steps": 4}, run={"log_rollouts_every": 1, "threads": 1}, **STALE), reward=lengths
        )
    rows = [row for row in rows_of(result.path, "metrics.jsonl") if row["stage"] == "train"]
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1]
    logs = [rows_of(result.path, f"rollouts/step_{step:06d}.jsonl") for step in (1, 2, 3, 4)]
    assert [{row["weight_version"] for row in log} for log in logs] == [{1}, {1}, {2}, {3}]
    assert json.loads((result.path / "manifest.json").read_text())["decoder"] == "vllm"


def test_rollouts_ahead_by_a_server_that_sleeps_between_rollouts_are_refused(served, train):
    with VLLMServer(sleep=True) as server:
        with pytest.raises(UserError, match=r"rollout.staleness=1 with http.*without sleep mode"):
            train(served(server, **STALE))
        assert train(served(server, evaluation={"every": 0}, training={"steps": 1})).exit_code == 0


def test_a_run_that_is_stopped_with_rollouts_ahead_goes_on_to_the_same_weights(served, train):
    def stale(name):
        return served(server, training={"steps": 4}, run={"name": name, "threads": 1}, **STALE)

    def weights(result):
        return (result.path / "checkpoints" / "last" / "model.safetensors").read_bytes()

    with VLLMServer() as server:
        whole = train(stale("whole"), reward=lengths)
        watcher = Watcher({("train", 2): lambda: os.kill(os.getpid(), signal.SIGINT)})
        stopped = train(stale("stopped"), reward=lengths, progress=watcher)
        assert (stopped.exit_code, stopped.summary.last_step) == (130, 2)
        half = weights(stopped)
        resumed = train(stale("stopped"), reward=lengths, resume=True)
    assert weights(resumed) == weights(whole) != half


def test_a_run_that_loses_its_servers_while_they_draw_ahead_saves_the_step_of_the_update(served, train):
    def script(call):
        # The first weights draw the evaluation at the start, step 1 and step 2; the second ones step 3.
        server.lost = server.lost or (call.path == "/resume" and call.earlier == 1)
        return Fault(reset=True) if server.lost and call.path.endswith("generate") else None

    with VLLMServer(script) as server:
        recipe = served(server, training={"steps": 5}, **STALE)
        recipe["rollout"]["engine"]["timeout"] = 0.5
        with pytest.raises(RunError, match="resume=True"):
            train(recipe, reward=lengths)
    checkpoints = Path(recipe["run"]["directory"]) / "tiny" / "checkpoints"
    assert (checkpoints / "last").resolve().name == "step_000002"


def test_type_vllm_over_the_default_and_over_a_name_makes_a_section():
    expected = VLLMConfig(type="vllm", urls=("http://a:1",))
    settings = ["rollout.engine.urls=[http://a:1]", "rollout.engine.type=vllm"]
    for recipe in ({}, {"rollout": {"engine": "auto"}}, {"rollout": {"engine": {"type": "vllm", "model": None}}}):
        assert parse_config(apply_settings(recipe, settings)).rollout.engine == expected
    back = apply_settings({"rollout": {"engine": expected.model_dump(mode="json")}}, ["rollout.engine=native"])
    assert parse_config(back).rollout.engine == "native"


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("rollout.engine.urls=[localhost:8000]", "http://HOST:PORT"),
        ("rollout.engine.urls=[http://a:1,http://a:1/]", "twice"),
        ("rollout.engine.urls=['http://a:port']", "http://HOST:PORT"),
        ("rollout.engine.urls=['http://a:99999']", "http://HOST:PORT"),
        ("rollout.engine.urls=['http://[::1']", "http://HOST:PORT"),
        ("rollout.engine.urls=['http://:8000']", "http://HOST:PORT"),
        ("rollout.engine.urls=['http://a b:8000']", "http://HOST:PORT"),
        ("rollout.engine.urls=['http://a:1?key=2']", "http://HOST:PORT"),
        ("rollout.engine.urls=['http://a:1/v1/']", "remove /v1"),
        ("rollout.engine.url=http://a:1", "urls"),
        ("rollout.engine.type=sglang", "rollout.engine.type=sglang: allowed values are vllm"),
        ("rollout.engine.sync=nccl", "rollout.engine.sync=nccl"),
    ],
)
def test_settings_that_servers_cannot_honour_are_refused(setting, said):
    with pytest.raises(UserError, match=said):
        parse_config(apply_settings({}, ["rollout.engine.type=vllm", setting]))


@pytest.mark.parametrize("setting", ["rollout.top_p=0.9", "rollout.top_k=5", "rollout.min_new_tokens=2"])
def test_filters_by_servers_take_temperature_1(setting):
    settings = ["rollout.engine.type=vllm", setting]
    parse_config(apply_settings({}, settings))
    with pytest.raises(UserError, match=f"{setting} .*rollout.temperature=0.5.*set rollout.temperature=1"):
        parse_config(apply_settings({}, [*settings, "rollout.temperature=0.5"]))


def test_a_run_with_a_filter_needs_a_server_with_raw_log_probs(served, train):
    rollout = {"top_k": 5}
    with VLLMServer() as server, pytest.raises(UserError, match="--logprobs-mode=raw_logprobs"):
        train(served(server, rollout=rollout))
    with VLLMServer(logprobs_mode="raw_logprobs") as server:
        assert train(served(server, rollout=rollout, training={"steps": 1})).exit_code == 0


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_an_evaluation_of_a_run_with_a_filter_takes_either_log_probs(served, train, mode):
    with VLLMServer(logprobs_mode="raw_logprobs") as server:
        result = train(served(server, rollout={"top_k": 5}, training={"steps": 1}))
    with VLLMServer(logprobs_mode=mode) as server:
        compared = compare_checkpoints([str(result.path)], [f"rollout.engine.urls=[{server.url}]"])
        assert len(compared.evaluations) == 1
        assert server.generated()


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_sends_its_weights_and_goes_on_by_reload(served, train, staleness, tmp_path):
    rollout = {"staleness": staleness}
    with VLLMServer(transfer="flatpeak-sockets") as server:
        recipe = served(server, rollout=rollout, training={"steps": 2}, evaluation={"every": 0})
        recipe["rollout"]["engine"]["sync"] = "endpoint"
        result = train(recipe, reward=lengths)
        assert server.paths().count("/update_weights") == 3 - staleness  # the last for the evaluation at the end
        assert "/collective_rpc" not in server.paths()
        recipe["rollout"]["engine"]["sync"] = "reload"
        recipe["training"]["steps"] = 4
        resumed = train(recipe, reward=lengths, resume=True)
        assert server.paths().count("/collective_rpc") >= 2
    assert resumed.exit_code == 0
    written = [json.loads(line) for line in (result.path / "rollouts" / "step_000002.jsonl").read_text().splitlines()]
    assert {row["weight_version"] for row in written} == {2 - staleness}


def test_credentials_in_an_address_are_refused_and_not_repeated():
    with pytest.raises(UserError, match="api_key_env") as caught:
        parse_config({"rollout": {"engine": {"type": "vllm", "urls": ["http://me:of-mine@a:1"]}}})
    assert "of-mine" not in str(caught.value)


def test_where_servers_are_may_change_and_the_engine_may_not():
    def resolved(*settings):
        return parse_config(apply_settings({}, list(settings))).model_dump(mode="json")

    before = resolved("rollout.engine.type=vllm", "rollout.engine.urls=[http://a:1]")
    after = resolved(
        "rollout.engine.type=vllm", "rollout.engine.urls=[http://b:2,http://c:3]", "rollout.engine.timeout=9"
    )
    assert set(check_resumable(before, after)) == {
        "rollout.engine.timeout",
        "rollout.engine.urls.0",
        "rollout.engine.urls.1",
    }
    with pytest.raises(UserError, match=r"rollout\.engine"):
        check_resumable(before, resolved())


def test_a_resolved_recipe_reads_as_it_was():
    config = parse_config(apply_settings({}, ["rollout.engine.type=vllm", "rollout.engine.sync=reload"]))
    assert resolve_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("setting", [{"dora": True}, {"modules_to_save": ("lm_head",)}])
def test_adapters_that_vllm_does_not_load_are_refused(setting):
    model = add_adapters(tiny_model("llama", tie_word_embeddings=False), LoraConfig(rank=2, **setting), seed=0)
    with pytest.raises(UserError, match=f"model.lora.{next(iter(setting))}"):
        build_sampler(Policy(model, letter_tokenizer()), SERVED)


@pytest.mark.parametrize("pattern", [{"rank_pattern": {"q_proj": 4}}, {"alpha_pattern": {"q_proj": 1}}])
def test_adapters_that_vllm_would_scale_otherwise_are_refused(pattern):
    model = add_adapters(tiny_model("llama"), LoraConfig(rank=2), seed=0)
    vars(model.active_peft_config).update(pattern)
    with pytest.raises(UserError, match=next(iter(pattern))):
        build_sampler(Policy(model, letter_tokenizer()), SERVED)


def test_a_base_in_4_bits_is_refused():
    policy = Policy(tiny_model(), letter_tokenizer())
    quantized = SERVED.model.model_copy(update={"quantization": "nf4"})
    with pytest.raises(UserError, match=r"model.quantization=nf4 with rollout.engine.type=vllm"):
        build_sampler(policy, SERVED.model_copy(update={"model": quantized}))


@pytest.mark.parametrize("unfit", [{"rollout": {"staleness": 1}}, {"reference": {"model": "/nowhere"}}])
def test_a_run_that_is_refused_after_servers_were_met_leaves_them(served, train, unfit):
    closed = []
    with VLLMServer(sleep="rollout" in unfit) as server, pytest.MonkeyPatch.context() as patch:
        close = VLLMSampler.close
        patch.setattr(VLLMSampler, "close", lambda sampler: (closed.append(sampler), close(sampler)))
        with pytest.raises(UserError, match=r"sleep|reference\.model"):
            train(served(server, **unfit))
    assert len(closed) == 1
