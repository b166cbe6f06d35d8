"""Completions by scripted servers: what fails is asked again, what is stale is dropped, what is wrong is refused."""

import math
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from flatpeak.errors import DivergedError, RunError, StoppedError, UserError
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.vllm import VLLMSampler
from flatpeak.rollout.vllm.http_client import UnreachableError
from flatpeak.types import Example, Group, Prompt, SamplingParams
from support.vllm_server import EOS, Call, Fault, ScriptedPolicy, VLLMServer, unused_url

SAMPLING = SamplingParams(max_new_tokens=6)
PROMPTS = [
    Prompt(id=str(p), token_ids=(3 + p, 5), text="", example=Example(id=str(p), question="", gold="")) for p in range(6)
]
NAME = "/update_weight_version"
UPDATE = ["/pause", NAME, "/collective_rpc", "/reset_prefix_cache", NAME, "/resume"]

MakeSampler = Callable[..., VLLMSampler]


@pytest.fixture
def sample(tmp_path) -> Iterator[MakeSampler]:
    """`sample(*servers, policy=..., **settings)`: a sampler over them, closed at the end."""
    samplers = []

    def make(
        *servers: VLLMServer, policy: Any = None, sampling: SamplingParams = SAMPLING, **settings: Any
    ) -> VLLMSampler:
        config = VLLMConfig(
            type="vllm",
            urls=tuple(server.url for server in servers),
            directory=str(tmp_path),
            **{"timeout": 10.0, **settings},
        )
        samplers.append(VLLMSampler(policy or ScriptedPolicy(), config, sampling=sampling, first_delay=0.01))
        return samplers[-1]

    yield make
    for sampler in samplers:
        sampler.close()


def draw(sampler: VLLMSampler, *, sampling: SamplingParams = SAMPLING, seed: int = 7) -> list[Group]:
    return sampler.generate(PROMPTS, group_size=3, sampling=sampling, seed=seed)


def logprobs(groups: list[Group]) -> set[float]:
    return {logprob for group in groups for completion in group.completions for logprob in completion.logprobs}


def tokens(groups: list[Group]) -> list[tuple[int, ...]]:
    return [completion.token_ids for group in groups for completion in group.completions]


def versions(groups: list[Group]) -> set[int | None]:
    return {completion.weight_version for group in groups for completion in group.completions}


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> list[tuple[int, ...]]:
    """What an honest server draws."""
    with VLLMServer() as server:
        config = VLLMConfig(type="vllm", urls=(server.url,), directory=str(tmp_path_factory.mktemp("weights")))
        sampler = VLLMSampler(ScriptedPolicy(), config)
        drawn = tokens(draw(sampler))
        sampler.close()
    return drawn


def test_completions_are_drawn_by_the_weights_of_now(sample):
    policy = ScriptedPolicy()
    with VLLMServer() as server:
        sampler = sample(server, policy=policy)
        first = draw(sampler)
        assert (logprobs(first), versions(first)) == ({-0.5}, {1})
        policy.step()
        second = draw(sampler)
        assert (logprobs(second), versions(second)) == ({-0.75}, {2})
        assert server.paths() == UPDATE * 2


def test_weights_that_have_not_changed_are_not_sent_again(sample):
    policy = ScriptedPolicy()
    with VLLMServer() as server:
        sampler = sample(server, policy=policy)
        draw(sampler)
        draw(sampler, seed=8)
        assert (len(policy.heads), server.paths()) == (1, UPDATE)


def test_a_group_is_asked_for_by_token_ids_with_the_settings_of_the_recipe(sample):
    sampling = SamplingParams(temperature=0.7, max_new_tokens=5, stop=("xyz",))
    policy = ScriptedPolicy()
    policy.eos_token_ids = frozenset({20, EOS})
    with VLLMServer() as server:
        draw(sample(server, policy=policy), sampling=sampling)
        body = next(call.body for call in server.generated() if call.body["token_ids"] == [3, 5])
    assert body["return_token_ids"] is True
    assert body["sampling_params"] == body["sampling_params"] | {
        "n": 3,
        "temperature": 0.7,
        "top_p": 1.0,
        "top_k": 0,
        "max_tokens": 5,
        "min_tokens": 0,
        "stop_token_ids": [EOS, 20],
        "ignore_eos": True,
        "stop": ["xyz"],
        "include_stop_str_in_output": True,
        "detokenize": True,
        "logprobs": 0,
    }


def test_seeds_depend_on_seed_and_prompt_alone(sample):
    with VLLMServer() as one, VLLMServer() as other:
        first = draw(sample(one))
        second = sample(one, other, max_concurrency=1).generate(PROMPTS[::-1], group_size=3, sampling=SAMPLING, seed=7)
        third = draw(sample(one), seed=8)
    assert tokens(first) == tokens(second[::-1])
    assert len({call.body["sampling_params"]["seed"] for call in (*one.generated(), *other.generated())}) == 12
    assert tokens(third) != tokens(first)


@pytest.mark.parametrize(
    ("fault", "retries"),
    [
        (Fault(status=429, headers={"retry-after": "0.05"}), 2),
        (Fault(status=500), 2),
        (Fault(status=503, body=b""), 2),
        (Fault(reset=True), 2),
        (Fault(status=200, body=b"<html>welcome</html>"), 2),
        (Fault(status=200, body=b'{"choices": [{"index": 0'), 2),
        (Fault(status=200, body=b'{"choices": []}', missing=50), 2),
        (Fault(status=200, body=b"[]"), 2),
        (Fault(status=200, body=b"[" * 200_000), 2),
        (Fault(status=500, body=b"[" * 200_000), 2),
        (Fault(status=200, wait=1.5), 2),
        (Fault(status=200, body=b" " * 40, drops=0.1), 2),
    ],
    ids=[
        "busy",
        "error",
        "unavailable",
        "reset",
        "garbage",
        "truncated",
        "short",
        "no choices",
        "nested",
        "nested error",
        "slow",
        "in drops",
    ],
)
def test_what_fails_is_asked_again_with_the_same_seed(sample, honest, fault, retries):
    def script(call: Call) -> Fault | None:
        return fault if call.path.endswith("generate") and call.earlier in (1, 4) else None

    with VLLMServer(script) as server:
        sampler = sample(server, timeout=0.6 if fault.wait or fault.drops else 10.0)
        groups = draw(sampler)
    assert tokens(groups) == honest
    assert logprobs(groups) == {-0.5}
    assert sampler.measured()["rollout/retried_requests"] == retries


def test_a_completion_that_the_server_breaks_off_is_asked_again(sample, honest):
    broken = iter([True])

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        if next(broken, False):
            answer["choices"][1]["finish_reason"] = "abort"
        return answer

    with VLLMServer(edit=edit) as server:
        assert tokens(draw(sample(server))) == honest


@pytest.mark.parametrize("index", [[0], {}, "0", None, 0.0, False], ids=str)
def test_an_answer_whose_completions_have_no_numbers_is_asked_again(sample, honest, index):
    broken = iter([True])

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        if next(broken, False):
            answer["choices"][0]["index"] = index
        return answer

    with VLLMServer(edit=edit) as server:
        assert tokens(draw(sample(server))) == honest


def choice(**changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """An edit of the first completion of an answer."""

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        for name, value in changed.items():
            first = answer["choices"][0]
            first[name] = value(first[name]) if callable(value) else value
        return answer

    return edit


def with_logprob(value: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda content: {"content": [row | {"logprob": value} for row in content["content"]]}


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (choice(token_ids=[700, EOS]), "vocabulary has 24"),
        (choice(token_ids=[4.0, EOS]), "vocabulary has 24"),
        (choice(token_ids=lambda ids: [4 if ids[0] != 4 else 5, *ids[1:]]), "the log-prob"),
        (choice(token_ids=None), "tokens none"),
        (choice(logprobs=None), "no log-probs"),
        (choice(logprobs=lambda content: {"content": content["content"][1:]}), "one for each token"),
        (choice(logprobs=with_logprob(0.5)), "which is above 0"),
        (choice(logprobs=lambda content: {"content": [row | {"logprob": None} for row in content["content"]]}), "None"),
        (choice(weight_versions=None), "which weights"),
        (choice(finish_reason="length"), "max-model-len"),
        (
            choice(
                token_ids=lambda ids: ids[:-1],
                logprobs=lambda content: {"content": content["content"][:-1]},
                weight_versions=lambda spans: [spans[0] | {"end": spans[0]["end"] - 1}],
            ),
            "serve",
        ),
        (
            lambda answer: answer | {"prompt_token_ids": [1, *answer["prompt_token_ids"]]},
            "it must not change token ids",
        ),
        (
            lambda answer: answer | {"choices": answer["choices"][:-1]},
            r"2 completions with the indices \[0, 1\], instead of 3",
        ),
        (choice(index=1), r"3 completions with the indices \[1, 1, 2\], instead of 3"),
    ],
    ids=[
        "unknown tokens",
        "fractions",
        "log-probs of others",
        "no tokens",
        "no log-probs",
        "too few",
        "above 0",
        "null",
        "no version",
        "full context",
        "no end",
        "another prompt",
        "too few completions",
        "an index twice",
    ],
)
def test_an_answer_that_training_must_not_use_is_refused(sample, edit, said):
    with VLLMServer(edit=edit) as server, pytest.raises(UserError, match=said):
        draw(sample(server))


def test_logits_that_are_not_finite_end_the_run(sample):
    with VLLMServer(edit=choice(logprobs=with_logprob(-9999.0))) as server, pytest.raises(DivergedError):
        draw(sample(server))


def test_a_refused_request_ends_the_run_with_the_servers_words(sample):
    fault = Fault(status=400, body=b'{"error": {"message": "the prompt is too long"}}')
    with (
        VLLMServer(lambda call: fault if call.path.endswith("generate") else None) as server,
        pytest.raises(RunError, match="the prompt is too long"),
    ):
        draw(sample(server))


def test_completions_of_other_weights_are_dropped_and_drawn_anew(sample, honest):
    stale = iter([True, False, True])

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        if next(stale, False):
            answer["choices"][2]["weight_versions"] = [{"version": "flatpeak-model-of-another-run"}]
        return answer

    with VLLMServer(edit=edit) as server:
        sampler = sample(server)
        assert tokens(draw(sampler)) == honest
        assert sampler.measured()["rollout/stale_completions"] == 6
        assert sampler.measured()["rollout/stale_completions"] == 0


def cut(spans: list[dict[str, Any]], **changed: Any) -> list[dict[str, Any]]:
    return [spans[0] | changed]


@pytest.mark.parametrize(
    "spans",
    [
        lambda spans: [{"version": "older", "start": 0, "end": 1}, spans[0] | {"start": 1}],
        lambda spans: cut(spans, start=1),
        lambda spans: cut(spans, end=spans[0]["end"] - 1),
        lambda spans: cut(spans, end=spans[0]["end"] + 1),
        lambda spans: cut(spans, end=1) + cut(spans, start=2),
        lambda spans: [{"version": spans[0]["version"]}],
    ],
    ids=["two versions", "no beginning", "no end", "too long", "a gap", "no span"],
)
def test_a_completion_whose_version_does_not_cover_all_of_it_is_drawn_anew(sample, honest, spans):
    first = iter([True])

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        return choice(weight_versions=spans)(answer) if next(first, False) else answer

    with VLLMServer(edit=edit) as server:
        sampler = sample(server)
        assert tokens(draw(sampler)) == honest
        assert sampler.measured()["rollout/stale_completions"] == 3


def test_versions_that_follow_one_another_cover_a_completion(sample, honest):
    def split(spans: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return cut(spans, end=1) + cut(spans, start=1)

    with VLLMServer(edit=choice(weight_versions=split)) as server:
        assert tokens(draw(sample(server))) == honest


def test_a_server_that_never_has_the_weights_ends_the_run(sample):
    with VLLMServer(edit=choice(weight_versions=[{"version": "default"}])) as server:
        sampler = sample(server)
        with pytest.raises(RunError, match="default"):
            draw(sampler)


def test_a_server_that_comes_back_between_two_steps_gets_the_weights_before_it_is_asked(sample):
    with VLLMServer() as server:
        sampler = sample(server)
        draw(sampler)
        server.stop()
        server.start()
        groups = draw(sampler)
        assert (logprobs(groups), versions(groups)) == ({-0.5}, {1})
        assert server.paths() == UPDATE * 2


def test_a_server_that_is_replaced_within_a_step_unnoticed_contributes_no_stale_completion(sample, honest):
    def script(call: Call) -> None:
        if call.path.endswith("generate") and call.earlier == 2:  # as a new process, which no connection has seen die
            server.version, server.value = "default", 0.0

    with VLLMServer(script) as server:
        sampler = sample(server, max_concurrency=1)
        groups = draw(sampler)
        assert tokens(groups) == honest
        assert logprobs(groups) == {-0.5}
        assert sampler.measured()["rollout/stale_completions"] == 3


def test_a_server_that_dies_within_a_step_is_waited_for_and_a_notice_says_so(sample, honest, monkeypatch):
    monkeypatch.setattr("flatpeak.rollout.vllm.server_pool.ANNOUNCED_AFTER", 0.1)
    said: list[str] = []

    def script(call: Call) -> Fault | None:
        if call.path.endswith("generate") and call.earlier == 2:
            threading.Thread(target=restart).start()
            return Fault(reset=True)
        return None

    def restart() -> None:
        server.stop()
        time.sleep(1.0)
        server.start()

    with VLLMServer(script) as server:
        sampler = sample(server, max_concurrency=1)
        sampler.announce_with(said.append)
        groups = draw(sampler)
        assert tokens(groups) == honest
        assert logprobs(groups) == {-0.5}
        assert server.paths() == UPDATE * 2
        (notice,) = said
        assert notice.startswith(f"no server can be used ({server.url}: ")
        assert notice.endswith("): waiting up to 10 s for one")


def test_other_servers_do_the_work_of_one_that_died(sample, honest):
    with VLLMServer() as one, VLLMServer() as other:
        sampler = sample(one, other)
        one.stop()
        assert tokens(draw(sampler)) == honest
        assert len(other.generated()) == len(PROMPTS)


@pytest.mark.slow
def test_a_server_that_has_vanished_holds_up_no_update_after_the_first(sample):
    policy = ScriptedPolicy()
    # Vanished: it takes connections, and says nothing any more. Each look at it takes the two seconds of the timeout.
    with VLLMServer(lambda call: Fault(wait=30.0) if one.lost else None) as one, VLLMServer() as other:
        sampler = sample(one, other, policy=policy, timeout=2.0)
        draw(sampler)
        one.lost = True
        policy.step()
        draw(sampler)
        started = time.monotonic()
        for _ in range(5):
            policy.step()
            groups = draw(sampler)
            assert logprobs(groups) == {policy.weight.item()}
        assert time.monotonic() - started < 6
        asked = len(one.generated())
        one.lost = False
        deadline = time.monotonic() + 30
        while len(one.generated()) == asked and time.monotonic() < deadline:
            policy.step()
            groups = draw(sampler)
            assert logprobs(groups) == {policy.weight.item()}
        assert len(one.generated()) > asked


def test_an_address_that_takes_no_connection_is_given_up_soon(sample, monkeypatch):
    monkeypatch.setattr("flatpeak.rollout.vllm.http_client.CONNECT_SECONDS", 0.5)
    with socket.socket() as full, VLLMServer() as server, ExitStack() as callers:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(4):  # nobody accepts them, and once the queue is full the next one hears nothing
            caller = callers.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(full.getsockname())
        sampler = sample(server)
        port = full.getsockname()[1]
        monkeypatch.setattr(sampler._pool.servers[0]._client, "_address", f"127.0.0.1:{port}")
        started = time.monotonic()
        with pytest.raises(UnreachableError):
            sampler._pool.servers[0].ping()
        assert time.monotonic() - started < 5  # the timeout for answers is 10


def test_a_run_without_servers_fails_once_the_timeout_is_over(sample):
    with VLLMServer() as server:
        sampler = sample(server, timeout=0.5)
        server.stop()
        with pytest.raises(RunError, match=r"no server could be used for 0.5 s .*rollout.engine.urls"):
            draw(sampler)


def test_waiting_for_a_server_ends_where_the_run_is_to_stop(sample):
    with VLLMServer() as server:
        sampler = sample(server, timeout=60.0)
        server.stop()
        sampler.stop_when(lambda: True)
        with pytest.raises(StoppedError):
            draw(sampler)


@pytest.mark.parametrize("path", ["/inference/v1/generate", "/pause"])
def test_waiting_for_an_answer_ends_where_the_run_is_to_stop(sample, path):
    asked = threading.Event()

    def script(call: Call) -> Fault | None:
        if call.path == path:
            asked.set()
            return Fault(wait=20.0)
        return None

    with VLLMServer(script) as server:
        sampler = sample(server, timeout=60.0)
        sampler.stop_when(asked.is_set)
        started = time.monotonic()
        with pytest.raises(StoppedError):
            draw(sampler)
        assert time.monotonic() - started < 10


@pytest.fixture
def interruptible():
    """SIGINT raises KeyboardInterrupt, which processes that run tests side by side ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_does_not_wait_for_answers(sample, interruptible):
    main = threading.main_thread().ident
    assert main is not None

    def script(call: Call) -> Fault | None:
        if not call.path.endswith("generate"):
            return None
        if not call.earlier:
            threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT)).start()
        return Fault(wait=20.0)

    with VLLMServer(script) as server:
        sampler = sample(server, timeout=60.0)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            draw(sampler)
        assert time.monotonic() - started < 10


def test_requests_go_where_there_are_fewest(sample):
    def wait(call: Call) -> None:
        deadline = time.monotonic() + 20
        while call.path.endswith("generate") and len(idle.generated()) < 5 and time.monotonic() < deadline:
            time.sleep(0.01)

    with VLLMServer() as idle, VLLMServer(wait) as busy:
        draw(sample(busy, idle, max_concurrency=1))
        assert (len(busy.generated()), len(idle.generated())) == (1, 5)


def test_no_server_gets_more_groups_at_once_than_allowed(sample):
    with VLLMServer(lambda call: time.sleep(0.05)) as server:
        draw(sample(server, max_concurrency=2))
        assert server.most_at_once == 2


def test_a_server_with_sleep_mode_sleeps_between_requests(sample):
    policy = ScriptedPolicy()
    with VLLMServer(sleep=True) as server:
        sampler = sample(server, policy=policy)
        draw(sampler)
        assert server.asleep
        policy.step()
        assert logprobs(draw(sampler)) == {-0.75}
        assert server.paths() == [*UPDATE, "/sleep", "/wake_up", *UPDATE, "/sleep"]


def test_a_server_that_another_run_left_asleep_is_woken(sample):
    with VLLMServer(sleep=True) as server:
        draw(sample(server))
        assert server.asleep
        assert logprobs(draw(sample(server))) == {-0.5}
        assert server.paths() == [*UPDATE, "/sleep", "/wake_up", *UPDATE, "/sleep"]


def test_a_server_that_went_to_sleep_without_a_word_is_woken(sample):
    def script(call: Call) -> Fault | None:
        if call.path == "/sleep":
            server.asleep = True
            return Fault(reset=True)
        return None

    with VLLMServer(script, sleep=True) as server:
        sampler = sample(server)
        draw(sampler)
        assert logprobs(draw(sampler)) == {-0.5}


def test_adapters_are_swapped_without_an_update_of_the_weights(sample):
    policy = ScriptedPolicy(adapted=True)
    with VLLMServer(lora=True) as server:
        sampler = sample(server, policy=policy)
        assert logprobs(draw(sampler)) == {-0.5}
        policy.step()
        groups = draw(sampler)
        assert (logprobs(groups), versions(groups)) == ({-0.75}, {2})
        names = [call.body["lora_name"] for call in server.calls if "lora" in call.path]
        assert list(server.adapters) == [names[1]] == [names[-2]]
        loads = ["/v1/load_lora_adapter", "/reset_prefix_cache", "/update_weight_version"]
        assert server.paths() == [*loads, loads[0], "/v1/unload_lora_adapter", *loads[1:]]


def test_adapters_that_earlier_runs_and_broken_requests_left_are_dropped(sample):
    policy = ScriptedPolicy(adapted=True)
    resets = iter([True])

    def script(call: Call) -> Fault | None:
        return Fault(reset=True) if call.path.endswith("generate") and next(resets, False) else None

    with VLLMServer(script, lora=True) as server:
        server.adapters |= {"flatpeak-adapter-of-an-earlier-run": -1.0, "of-somebody-else": -2.0}
        sampler = sample(server, policy=policy)
        draw(sampler)  # a reset: what is known of the server is taken back
        policy.step()
        assert logprobs(draw(sampler)) == {-0.75}
        last = [call.body["lora_name"] for call in server.calls if call.path.endswith("/load_lora_adapter")][-1]
        assert set(server.adapters) == {"of-somebody-else", last}


def test_an_adapter_that_a_new_process_lacks_is_loaded_again(sample, honest):
    def script(call: Call) -> None:
        if call.path.endswith("generate") and call.earlier == 2:
            server.version, server.adapters = "default", {}

    with VLLMServer(script, lora=True) as server:
        groups = draw(sample(server, policy=ScriptedPolicy(adapted=True), max_concurrency=1))
        assert tokens(groups) == honest
        assert logprobs(groups) == {-0.5}


@pytest.mark.parametrize("status", [500, 503])
def test_an_update_that_fails_is_made_again(sample, honest, status):
    def script(call: Call) -> Fault | None:
        return Fault(status=status) if call.path == "/collective_rpc" and call.earlier < 2 else None

    with VLLMServer(script) as server:
        groups = draw(sample(server))
        assert (tokens(groups), logprobs(groups)) == (honest, {-0.5})


def test_weights_that_a_server_cannot_load_are_an_error_that_names_the_directory(sample):
    fault = Fault(status=400, body=b'{"detail": "no such file"}')
    with VLLMServer(lambda call: fault if call.path == "/collective_rpc" else None) as server:
        with pytest.raises(UserError, match=r"no such file.*rollout.engine.directory"):
            draw(sample(server))
        assert server.paths()[-1] == "/resume"


def test_a_prefix_cache_in_use_is_reset_again(sample):
    busy = Fault(status=200, body=b'{"success": false}')
    with VLLMServer(lambda call: busy if call.path == "/reset_prefix_cache" and not call.earlier else None) as server:
        draw(sample(server))
        assert server.paths().count("/reset_prefix_cache") == 2


@pytest.mark.parametrize(
    ("settings", "adapted", "said"),
    [
        ({"logprobs_mode": "raw_logits"}, False, "--logprobs-mode processed_logprobs"),
        ({"development": False}, False, "VLLM_SERVER_DEV_MODE"),
        ({}, True, "--enable-lora"),
        ({"device": "cpu"}, False, "--no-enable-chunked-prefill"),
    ],
    ids=["raw log-probs", "no endpoints", "no adapters", "prompts in pieces on a CPU"],
)
def test_a_server_that_cannot_serve_the_run_is_refused_at_the_start(sample, settings, adapted, said):
    with VLLMServer(**settings) as server, pytest.raises(UserError, match=said):
        sample(server, policy=ScriptedPolicy(adapted=adapted))


@pytest.mark.parametrize(
    ("mode", "sampling", "said"),
    [
        ("raw_logprobs", SamplingParams(temperature=0.5), "--logprobs-mode processed_logprobs"),
        ("processed_logprobs", SamplingParams(top_p=0.9), "--logprobs-mode=raw_logprobs"),
        ("processed_logprobs", SamplingParams(top_k=3), "--logprobs-mode=raw_logprobs"),
        ("processed_logprobs", SamplingParams(min_new_tokens=1), "--logprobs-mode=raw_logprobs"),
    ],
)
def test_a_server_with_other_log_probs_than_training_needs_is_refused(sample, mode, sampling, said):
    with VLLMServer(logprobs_mode=mode) as server, pytest.raises(UserError, match=said):
        sample(server, sampling=sampling)


def test_a_server_on_a_cpu_is_given_a_tied_output_layer_by_itself(sample):
    policy = ScriptedPolicy()
    with VLLMServer() as other:
        draw(sample(other, policy=policy))
    with VLLMServer(device="cpu", chunked=False) as server:
        draw(sample(server, policy=policy))
    assert policy.heads == [False, True]


def test_a_server_without_the_endpoint_of_token_ids_is_refused(sample):
    with VLLMServer(scale_out=False) as server, pytest.raises(UserError, match="--enable-scale-out"):
        draw(sample(server))


def test_adapters_on_weights_of_another_run_are_refused(sample):
    with VLLMServer(lora=True) as server:
        draw(sample(server))
        with pytest.raises(UserError, match="restart the server"):
            sample(server, policy=ScriptedPolicy(adapted=True))


def test_a_model_that_no_server_has_and_a_server_that_is_not_there_are_named(tmp_path, sample):
    with VLLMServer() as server, pytest.raises(UserError, match=r"rollout.engine.model=large: .* serves base"):
        sample(server, model="large")
    config = VLLMConfig(type="vllm", urls=(unused_url(),))
    with pytest.raises(UserError, match="flatpeak serve"):
        VLLMSampler(ScriptedPolicy(), config)


def test_the_key_is_sent_and_never_shown(sample, monkeypatch):
    monkeypatch.setenv("SERVER_KEY", "a-key-of-servers")
    refused = Fault(status=401, body=b'{"error": "a-key-of-servers is wrong"}')
    with VLLMServer(lambda call: refused if call.path.endswith("generate") else None) as server:
        sampler = sample(server, api_key_env="SERVER_KEY")
        with pytest.raises(RunError) as caught:
            draw(sampler)
        assert {call.headers.get("authorization") for call in server.calls} == {"Bearer a-key-of-servers"}
    assert "a-key-of-servers" not in str(caught.value)


def test_a_key_that_a_server_refuses_at_the_start_is_named(sample):
    refused = Fault(status=401, body=b'{"error": "Unauthorized"}')
    with VLLMServer(lambda call: refused) as server, pytest.raises(UserError, match=r"engine\.api_key_env"):
        sample(server)


def test_what_comes_after_a_stop_string_is_cut_off(sample):
    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        rows = [{"token_id": token, "logprob": -0.5} for token in (4, 5, 6, 7)]
        for one in answer["choices"]:
            one |= {"token_ids": [4, 5, 6, 7], "logprobs": {"content": rows}, "finish_reason": "stop"}
            one["weight_versions"][0]["end"] = 4
        return answer

    with VLLMServer(edit=edit) as server:
        groups = draw(sample(server), sampling=SamplingParams(max_new_tokens=6, stop=("c",)))
    completion = groups[0].completions[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == ("bc", (4, 5), "stop")
    assert completion.logprobs == (-0.5, -0.5)


def test_log_probs_under_a_filter_are_never_taken_for_those_of_the_full_distribution(sample):
    with VLLMServer() as server:
        groups = draw(sample(server), sampling=SamplingParams(max_new_tokens=6, top_p=0.9))
    completion = groups[0].completions[0]
    assert all(math.isnan(logprob) for logprob in completion.logprobs)
    assert set(completion.filtered_logprobs or ()) == {-0.5}


@pytest.mark.parametrize(
    "filters", [{"top_p": 0.9}, {"top_k": 4}, {"min_new_tokens": 1}], ids=["top_p", "top_k", "min"]
)
def test_raw_log_probs_at_temperature_1_are_those_of_the_full_distribution_under_a_filter(sample, filters):
    sampling = SamplingParams(max_new_tokens=6, **filters)
    with VLLMServer(logprobs_mode="raw_logprobs") as server:
        groups = draw(sample(server, sampling=sampling), sampling=sampling)
        sent = server.generated()[0].body["sampling_params"]
    assert logprobs(groups) == {-0.5}
    assert {completion.filtered_logprobs for group in groups for completion in group.completions} == {None}
    assert (sent["top_p"], sent["top_k"], sent["min_tokens"]) == (
        filters.get("top_p", 1.0),
        filters.get("top_k", 0),
        filters.get("min_new_tokens", 0),
    )


def test_raw_log_probs_are_no_log_probs_at_another_temperature(sample):
    with VLLMServer(logprobs_mode="raw_logprobs") as server:
        sampler = sample(server)
        warm = draw(sampler, sampling=SamplingParams(max_new_tokens=6, temperature=0.5))
        greedy = draw(sampler, sampling=SamplingParams(max_new_tokens=6, temperature=0.0))
    assert all(math.isnan(logprob) for logprob in logprobs(warm))
    assert logprobs(greedy) == {-0.5}


def test_a_ban_on_early_ends_makes_processed_log_probs_those_of_another_distribution(sample):
    with VLLMServer() as server:
        groups = draw(sample(server), sampling=SamplingParams(max_new_tokens=6, min_new_tokens=1))
    assert all(math.isnan(logprob) for logprob in logprobs(groups))


def test_greedy_completions_are_drawn_once_a_group(sample):
    with VLLMServer() as server:
        groups = draw(sample(server), sampling=SamplingParams(temperature=0.0, max_new_tokens=6))
        assert {call.body["sampling_params"]["n"] for call in server.generated()} == {1}
    assert [len(group.completions) for group in groups] == [3] * 6
    assert all(len({completion.token_ids for completion in group.completions}) == 1 for group in groups)
