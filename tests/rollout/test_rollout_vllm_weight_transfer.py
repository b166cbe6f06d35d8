"""Weights sent into scripted servers: vLLM's endpoints in their order, all bytes to all workers, and every way to fail.

The workers run flatpeak's plugin itself; NCCL is a fake in this process.
"""

import math
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from flatpeak.errors import RunError, StoppedError, UserError
from flatpeak.rollout.ahead import RolloutsAhead
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.vllm import VLLMSampler, nccl_channel, weight_transfer
from flatpeak.rollout.vllm.http_client import HTTPClient, LostAnswerError
from flatpeak.rollout.vllm.sampler import DrawingThread
from flatpeak.rollout.vllm.weight_transfer import SocketChannel
from flatpeak.rollout.vllm.weight_versions import WeightTensors, WeightVersions, frozen
from flatpeak.types import Example, Group, Prompt, SamplingParams
from flatpeak.utils.redaction import NO_KEY, Secret
from support.vllm_server import Call, Fault, ScriptedPolicy, VLLMServer
from support.weight_transfer import FakeNCCL, use_fake_nccl

SAMPLING = SamplingParams(max_new_tokens=6)
PROMPTS = [
    Prompt(id=str(p), token_ids=(3 + p, 5), text="", example=Example(id=str(p), question="", gold="")) for p in range(6)
]
SOCKETS = "flatpeak-sockets"
OPEN = ["/shutdown_weight_transfer_engine", "/init_weight_transfer_engine"]
NAME = "/update_weight_version"
SEND = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
UPDATE = ["/pause", NAME, *SEND, "/reset_prefix_cache", NAME, "/resume"]
MEND = ["/start_weight_update", "/finish_weight_update"]

MakeSampler = Callable[..., VLLMSampler]


@pytest.fixture
def nccl(monkeypatch) -> FakeNCCL:
    return use_fake_nccl(monkeypatch)


@pytest.fixture(params=[SOCKETS, "nccl"])
def backend(request, monkeypatch) -> str:
    """Each of the two ways."""
    if request.param == "nccl":
        use_fake_nccl(monkeypatch)
    return request.param


@pytest.fixture
def sample(tmp_path, monkeypatch) -> Iterator[MakeSampler]:
    """`sample(*servers, policy=..., **settings)`: a sampler that sends weights, closed at the end."""
    monkeypatch.setattr("flatpeak.rollout.vllm.weight_transfer.GRACE", 0.5)
    samplers = []

    def make(*servers: VLLMServer, policy: Any = None, **settings: Any) -> VLLMSampler:
        urls = tuple(server.url for server in servers)
        own = {"timeout": 10.0, "sync": "endpoint", "directory": str(tmp_path)}
        config = VLLMConfig(type="vllm", urls=urls, **own | settings)
        samplers.append(VLLMSampler(policy or ScriptedPolicy(), config, first_delay=0.01))
        return samplers[-1]

    yield make
    for sampler in samplers:
        sampler.close()


def draw(sampler: Any, *, seed: int = 7) -> list[Group]:
    return sampler.generate(PROMPTS, group_size=3, sampling=SAMPLING, seed=seed)


def logprobs(groups: list[Group]) -> set[float]:
    return {logprob for group in groups for completion in group.completions for logprob in completion.logprobs}


def versions(groups: list[Group]) -> set[int | None]:
    return {completion.weight_version for group in groups for completion in group.completions}


def fails_once(path: str, fault: Fault) -> Callable[[Call], Fault | None]:
    return lambda call: fault if call.path == path and not call.earlier else None


def test_each_version_is_sent_once_in_the_order_of_vllms_endpoints(sample, backend, tmp_path):
    policy = ScriptedPolicy()
    with VLLMServer(transfer=backend) as server:
        sampler = sample(server, policy=policy)
        assert server.paths() == OPEN
        first = draw(sampler)
        assert (logprobs(first), versions(first)) == ({-0.5}, {1})
        draw(sampler, seed=8)
        policy.step()
        second = draw(sampler)
        assert (logprobs(second), versions(second)) == ({-0.75}, {2})
        assert server.paths() == OPEN + UPDATE * 2
        assert sampler.measured()["time/weight_update"] > 0
        names = [call.body["new_version"] for call in server.calls if call.path == NAME]
        assert [name.removesuffix("-unfinished") for name in names] == [names[1]] * 2 + [names[3]] * 2
        assert names[0].endswith("-unfinished")
    assert list(tmp_path.iterdir()) == []  # nothing is written


def test_every_worker_gets_every_tensor_in_its_own_type_and_shape(sample, backend):
    policy = ScriptedPolicy()
    policy.others = {
        "model.embed.weight": torch.randn(300, 70, dtype=torch.bfloat16),
        "model.transposed": torch.arange(12.0).reshape(3, 4).T,
        "model.part": torch.arange(10, dtype=torch.int64)[2:7],
        "model.half": torch.tensor([[math.nan, math.inf]], dtype=torch.float16),
        "model.scalar": torch.tensor(2.5),
        "model.none": torch.zeros(0, 4),
    }
    with VLLMServer(transfer=backend, workers=3) as server:
        assert logprobs(draw(sample(server, policy=policy))) == {-0.5}
        (call,) = [call for call in server.calls if call.path == "/update_weights"]
        info = call.body["update_info"]
        assert info["names"] == [*policy.others, "weight"]
        assert info["dtype_names"] == ["bfloat16", "float32", "int64", "float16", "float32", "float32", "float32"]
        assert info["shapes"] == [[300, 70], [4, 3], [5], [1, 2], [], [0, 4], [1]]
        for loaded in server.workers.loaded:
            assert list(loaded) == info["names"]
            for name, weight in policy.others.items():
                assert loaded[name].dtype == weight.dtype
                assert torch.equal(loaded[name].nan_to_num(), weight.nan_to_num())
                assert loaded[name].shape == weight.shape


def test_more_bytes_than_a_connection_holds_arrive_whole(sample):
    policy = ScriptedPolicy()
    policy.others = {"large": torch.randn(3_000_000)}
    with VLLMServer(transfer=SOCKETS, workers=2) as server:
        draw(sample(server, policy=policy))
        assert all(torch.equal(loaded["large"], policy.others["large"]) for loaded in server.workers.loaded)


def test_several_servers_get_the_weights_side_by_side(sample, backend):
    policy = ScriptedPolicy()
    with VLLMServer(transfer=backend) as one, VLLMServer(transfer=backend, workers=2) as other:
        sampler = sample(one, other, policy=policy)
        draw(sampler)
        policy.step()
        groups = draw(sampler)
        assert (logprobs(groups), versions(groups)) == ({-0.75}, {2})
        assert one.generated()
        assert other.generated()
        assert one.paths() == other.paths() == OPEN + UPDATE * 2


@pytest.mark.parametrize("path", [*SEND, "/reset_prefix_cache", NAME])
@pytest.mark.parametrize("fault", [Fault(status=500), Fault(reset=True)], ids=["500", "reset"])
def test_an_update_that_fails_is_made_again_from_the_beginning(sample, path, fault, backend):
    with VLLMServer(fails_once(path, fault), transfer=backend) as server:
        groups = draw(sample(server))
        assert (logprobs(groups), versions(groups)) == ({-0.5}, {1})
        begun = path != NAME  # the first name is given before the update begins
        # Once it had begun, the server's layers count what they were given, until the update is ended.
        assert server.paths()[-len(UPDATE) - len(OPEN) - 2 * begun :] == (MEND if begun else []) + OPEN + UPDATE


def test_a_worker_that_fails_within_the_update_gets_all_weights_again(sample, backend, monkeypatch):
    failures = iter([True])

    def fail_once(loaded: Any) -> None:
        if next(failures, False):
            raise RuntimeError("out of memory")

    with VLLMServer(transfer=backend, workers=2) as server:
        sampler = sample(server)
        receive = server.workers.update
        monkeypatch.setattr(server.workers, "update", lambda info: (receive(info), fail_once(info)))
        assert logprobs(draw(sampler)) == {-0.5}
        assert server.paths().count("/update_weights") == 2


def test_a_connection_that_breaks_within_the_tensors_is_made_anew(sample, monkeypatch):
    send, failures = weight_transfer._send, iter([False, True])

    def break_off(connection: socket.socket, *arguments: Any) -> None:
        if next(failures, False):
            connection.close()
            raise ConnectionResetError("reset by peer")
        send(connection, *arguments)

    policy = ScriptedPolicy()
    policy.others = {"first": torch.zeros(3), "second": torch.ones(3)}
    monkeypatch.setattr(weight_transfer, "_send", break_off)
    with VLLMServer(transfer=SOCKETS) as server:
        sampler = sample(server, policy=policy)
        reasons = []
        failed = sampler._pool.failed
        monkeypatch.setattr(
            sampler._pool, "failed", lambda server, error, **rest: (reasons.append(str(error)), failed(server, error))
        )
        assert logprobs(draw(sampler)) == {-0.5}
        assert reasons == ["status 500: Worker failed with error 'the trainer ended the transfer'"]
        assert server.paths()[-len(UPDATE) - 4 :] == [*MEND, *OPEN, *UPDATE]


def test_a_trainer_that_died_within_a_transfer_leaves_a_server_that_the_next_can_use(sample, backend):
    with VLLMServer(transfer=backend) as server:
        server.version = "flatpeak-model-0a0a0a0a-000003-unfinished"
        server.workers.active = server.workers.torn = True
        assert logprobs(draw(sample(server))) == {-0.5}
        assert server.paths()[:4] == MEND + OPEN


def test_weights_that_are_half_replaced_are_put_in_order_before_a_reload_too(sample):
    with VLLMServer(transfer=SOCKETS) as server:
        server.version = "flatpeak-model-0a0a0a0a-000003-unfinished"
        server.workers.active = server.workers.torn = True
        assert logprobs(draw(sample(server, sync="reload"))) == {-0.5}
        assert server.paths()[:2] == MEND


def test_adapters_are_refused_on_weights_that_are_half_replaced(sample):
    with VLLMServer(transfer=SOCKETS, lora=True) as server:
        server.version = "flatpeak-model-0a0a0a0a-000003-unfinished"
        with pytest.raises(UserError, match="restart the server"):
            sample(server, policy=ScriptedPolicy(adapted=True))


def test_a_server_that_never_takes_the_weights_ends_the_run_with_its_words(sample, backend):
    fault = Fault(body=b'{"error": {"message": "no such parameter"}}')
    with VLLMServer(lambda call: fault if call.path == "/update_weights" else None, transfer=backend) as server:
        sampler = sample(server, timeout=1.5)
        with pytest.raises(RunError, match="no such parameter"):
            draw(sampler)
        assert server.generated() == []
        assert server.paths()[-1] == "/resume"


def test_a_transfer_that_hangs_ends_at_the_timeout(sample, backend):
    script = fails_once("/update_weights", Fault(wait=5.0))
    with VLLMServer(script, transfer=backend) as server:
        started = time.monotonic()
        assert logprobs(draw(sample(server, timeout=1.5))) == {-0.5}
        assert time.monotonic() - started < 10
        assert server.paths().count("/init_weight_transfer_engine") == 2


@pytest.mark.parametrize("path", ["/update_weights", "/start_weight_update"])
def test_waiting_for_a_transfer_ends_where_the_run_is_to_stop(sample, path):
    stopping = threading.Event()

    def script(call: Call) -> Fault | None:
        if call.path == path and call.earlier:
            stopping.set()
            return Fault(wait=30.0)
        return None

    policy = ScriptedPolicy()
    with VLLMServer(script, transfer=SOCKETS) as server:
        sampler = sample(server, policy=policy, timeout=60.0)
        draw(sampler)
        sampler.stop_when(stopping.is_set)
        policy.step()
        started = time.monotonic()
        with pytest.raises(StoppedError):
            draw(sampler)
        assert time.monotonic() - started < 10


def test_a_server_that_is_started_anew_gets_the_weights_before_it_is_asked(sample, backend):
    policy = ScriptedPolicy()
    with VLLMServer(transfer=backend) as server:
        sampler = sample(server, policy=policy)
        draw(sampler)
        server.stop()
        server.start()
        groups = draw(sampler)
        assert (logprobs(groups), versions(groups)) == ({-0.5}, {1})
        assert server.paths() == (OPEN + UPDATE) * 2


def test_a_server_with_sleep_mode_is_woken_for_a_transfer(sample):
    policy = ScriptedPolicy()
    with VLLMServer(transfer=SOCKETS, sleep=True) as server:
        sampler = sample(server, policy=policy)
        draw(sampler)
        policy.step()
        assert logprobs(draw(sampler)) == {-0.75}
        assert server.paths() == [*OPEN, *UPDATE, "/sleep", "/wake_up", *UPDATE, "/sleep"]


def test_a_server_on_a_cpu_is_sent_a_tied_output_layer_by_itself(sample):
    policy = ScriptedPolicy()
    with VLLMServer(transfer=SOCKETS, device="cpu", chunked=False) as server:
        draw(sample(server, policy=policy))
    assert policy.heads == [True]


def test_adapters_are_files_with_either_setting(sample, tmp_path):
    with VLLMServer(lora=True) as server:
        assert logprobs(draw(sample(server, policy=ScriptedPolicy(adapted=True)))) == {-0.5}
        assert "/init_weight_transfer_engine" not in server.paths()


def test_a_server_that_comes_late_to_rollouts_ahead_gets_the_weights_before_the_update(sample):
    policy, updated = ScriptedPolicy(), threading.Event()

    def script(call: Call) -> Fault | None:
        if not call.path.endswith("generate"):
            return None
        updated.wait(10)
        if call.earlier == 2:
            server.version, server.value = "default", 0.0
            return Fault(reset=True)
        return None

    with VLLMServer(script, transfer=SOCKETS) as server:
        sampler = sample(server, policy=policy, max_concurrency=1)
        source = RolloutsAhead(sampler, DrawingThread(sampler), staleness=1)
        with source.ahead(PROMPTS, group_size=3, sampling=SAMPLING, seed=7):
            policy.step()
            updated.set()
        groups = draw(source)
        assert (logprobs(groups), versions(groups)) == ({-0.5}, {1})
        assert server.paths().count("/update_weights") == 2
        source.close()


def test_the_copy_of_a_sharded_model_is_kept_by_nothing_after_a_request(sample):
    copies = []

    class Gathered(ScriptedPolicy):
        def named_weights(self, *, head: bool = False) -> list[tuple[str, torch.Tensor]]:
            named = [(name, weight.clone()) for name, weight in super().named_weights(head=head)]
            copies.extend(weakref.ref(weight) for _, weight in named)
            return named

    with VLLMServer(transfer=SOCKETS) as server:
        sampler = sample(server, policy=Gathered())
        draw(sampler)
        assert [copy() for copy in copies] == [None]
        server.stop()
        server.start()
        assert logprobs(draw(sampler)) == {-0.5}  # by tensors that were listed anew
        assert server.paths().count("/update_weights") == 2


def test_frozen_weights_stay_as_they_were():
    policy = ScriptedPolicy()
    version = WeightVersions(policy, WeightTensors(policy)).current()
    kept = frozen(version)
    policy.step()
    assert (version.weights[0][1].item(), kept.weights[0][1].item()) == (-0.75, -0.5)


@pytest.mark.parametrize(
    ("transfer", "said"),
    [
        (None, r"does not receive weights .*flatpeak serve.*--weight-transfer-config.*rollout\.engine\.sync=reload"),
        ("ipc", r"only by ipc.*rollout\.engine\.sync=reload"),
        ("nccl", r"by NCCL.*policy is on cpu.*--transfer sockets.*rollout\.engine\.sync=reload"),
    ],
)
def test_a_server_that_cannot_take_weights_is_refused_at_the_start(sample, transfer, said):
    with VLLMServer(transfer=transfer) as server, pytest.raises(UserError, match=said):
        sample(server)


def test_an_nccl_that_cannot_be_loaded_is_named_at_the_start(sample, monkeypatch):
    load_library = nccl_channel.load_library
    use_fake_nccl(monkeypatch)
    monkeypatch.setattr(nccl_channel, "load_library", load_library)
    monkeypatch.setattr(nccl_channel, "LIBRARY", "libnccl-of-nowhere.so")
    with VLLMServer(transfer="nccl") as server, pytest.raises(UserError, match=r"cannot load it.*sync=reload"):
        sample(server)


def test_a_trainer_that_a_server_cannot_reach_is_an_error_at_the_start(sample, backend):
    fault = Fault(body=b'{"error": {"message": "No route to host"}}')
    with (
        VLLMServer(lambda call: fault if call.path == OPEN[1] else None, transfer=backend) as server,
        pytest.raises(
            UserError, match=r"cannot connect to the trainer .*No route to host.*rollout\.engine\.sync=reload"
        ),
    ):
        sample(server)


def test_a_server_that_does_not_count_its_workers_is_refused_at_the_start(sample):
    fault = Fault(status=404, body=b'{"detail": "Not Found"}')
    with (
        VLLMServer(lambda call: fault if call.path == "/get_world_size" else None, transfer=SOCKETS) as server,
        pytest.raises(
            UserError, match=r"its number of workers.*Not Found.*flatpeak serve.*rollout\.engine\.sync=reload"
        ),
    ):
        sample(server)


def test_a_trainer_that_cannot_listen_says_what_else_there_is(sample, monkeypatch):
    def refuse(*_: Any, **__: Any) -> socket.socket:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "create_server", refuse)
    with (
        VLLMServer(transfer=SOCKETS) as server,
        pytest.raises(UserError, match=r"Too many open files\): set rollout\.engine\.sync=reload"),
    ):
        sample(server)


def test_a_connection_that_cannot_be_taken_is_a_transfer_that_broke_off(sample, monkeypatch):
    accept, failures = socket.socket.accept, [OSError(24, "Too many open files")]

    def fail_once(listener: socket.socket) -> Any:
        if listener.gettimeout() == weight_transfer._POLL_SECONDS and failures and sampler:
            raise failures.pop()
        return accept(listener)

    sampler: list[VLLMSampler] = []
    monkeypatch.setattr(socket.socket, "accept", fail_once)
    with VLLMServer(transfer=SOCKETS) as server:
        sampler.append(sample(server))
        assert logprobs(draw(sampler[0])) == {-0.5}
        assert failures == []
        assert server.paths().count("/init_weight_transfer_engine") == 2


def test_an_answer_before_the_weights_were_taken_ends_the_transfer(sample):
    fault = Fault(status=200, body=b"{}")
    with VLLMServer(fails_once("/update_weights", fault), transfer=SOCKETS) as server:
        started = time.monotonic()
        assert logprobs(draw(sample(server, timeout=60.0))) == {-0.5}
        assert time.monotonic() - started < 30
        assert server.paths().count("/update_weights") == 2


def test_an_address_of_the_trainer_that_leads_nowhere_is_refused_at_the_start(sample, monkeypatch):
    with VLLMServer(transfer=SOCKETS) as server, socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        info = SocketChannel.init_info
        monkeypatch.setattr(SocketChannel, "init_info", lambda self: {**info(self), "port": nobody.getsockname()[1]})
        with pytest.raises(UserError, match=r"Connection refused.*rollout\.engine\.sync=reload"):
            sample(server)


def test_a_server_that_is_refused_leaves_no_communicator_with_those_before(sample, nccl):
    with VLLMServer(transfer="nccl") as one, VLLMServer() as other:
        with pytest.raises(UserError, match="does not receive weights"):
            sample(one, other)
        assert nccl.calls[-1] == "ncclCommAbort"


def test_nccl_is_called_in_the_order_that_vllms_workers_expect(sample, nccl):
    policy = ScriptedPolicy()
    policy.others = {"other": torch.zeros(2)}
    with VLLMServer(transfer="nccl", workers=2) as server:
        sampler = sample(server, policy=policy)
        assert nccl.calls == ["ncclCommInitRankConfig", "ncclAllReduce"]
        draw(sampler)
        policy.step()
        draw(sampler)
        assert nccl.calls[2:] == ["ncclBroadcast"] * 4
        sampler.close()
        assert nccl.calls[6:] == ["ncclCommAbort"]


@pytest.mark.parametrize("call", ["ncclCommInitRankConfig", "ncclAllReduce"])
def test_a_communicator_that_cannot_be_made_is_refused_at_the_start_with_the_reason(sample, nccl, call):
    nccl.refuses = call
    with (
        VLLMServer(transfer="nccl") as server,
        pytest.raises(UserError, match=r"Mismatched NCCL version.*same NCCL.*sync=reload"),
    ):
        sample(server, timeout=3.0)


def test_a_type_that_nccl_lacks_is_named(sample, nccl):
    policy = ScriptedPolicy()
    policy.others = {"mask": torch.tensor([True])}
    with VLLMServer(transfer="nccl") as server, pytest.raises(UserError, match=r"mask is torch.bool.*sync=reload"):
        draw(sample(server, policy=policy))


def test_a_broadcast_that_fails_makes_a_new_communicator(sample, nccl):
    with VLLMServer(transfer="nccl") as server:
        sampler = sample(server)
        nccl.refuses = "ncclBroadcast"
        threading.Timer(0.3, setattr, (nccl, "refuses", "")).start()
        assert logprobs(draw(sampler)) == {-0.5}
        assert nccl.calls.count("ncclCommAbort") == nccl.calls.count("ncclCommInitRankConfig") - 1 > 0


def test_a_broadcast_that_never_gets_on_is_aborted_at_the_timeout(sample, nccl):
    with VLLMServer(transfer="nccl") as server:
        sampler = sample(server, timeout=1.5)
        nccl.stalls = "ncclBroadcast"
        started = time.monotonic()
        with pytest.raises(RunError):
            draw(sampler)
        assert nccl.calls[-1] == "ncclCommAbort"
        assert time.monotonic() - started < 30


def test_a_connection_without_the_token_gets_no_weights():
    with VLLMServer() as server:
        channel = SocketChannel(1, HTTPClient(server.url, timeout=5.0, key=Secret(NO_KEY)), timeout=5.0)
        info = channel.init_info()
        weight = torch.arange(4.0)
        sent = threading.Thread(target=channel.send, args=([("weight", weight)], lambda: None))
        sent.start()
        with socket.create_connection((info["host"], info["port"])) as stranger:
            stranger.sendall(b"0" * len(info["token"]))
            assert stranger.recv(1) == b""
        with socket.create_connection((info["host"], info["port"])) as worker:
            worker.sendall(info["token"].encode())
            received = b""
            while piece := worker.recv(100):
                received += piece
        sent.join()
        channel.close()
    assert received == weight.numpy().tobytes()


@pytest.fixture
def channel() -> Iterator[SocketChannel]:
    with VLLMServer() as server:
        channel = SocketChannel(1, HTTPClient(server.url, timeout=5.0, key=Secret(NO_KEY)), timeout=5.0)
        yield channel
        channel.close()


def test_a_transfer_that_flows_ends_once_its_request_has_failed(channel):
    info, failed, received = channel.init_info(), threading.Event(), [0]

    def check() -> None:
        if failed.is_set():
            raise LostAnswerError("the request was given up")

    def receive() -> None:
        with socket.create_connection((info["host"], info["port"])) as worker:
            worker.sendall(info["token"].encode())
            while piece := worker.recv(1 << 16):
                received[0] += len(piece)
                failed.set()

    worker = threading.Thread(target=receive)
    worker.start()
    weight = torch.zeros(20_000_000)
    with pytest.raises(LostAnswerError, match="given up"):
        channel.send([("weight", weight)], check)
    worker.join()
    assert received[0] < weight.nbytes


def test_a_stranger_who_sends_a_token_in_drops_holds_no_transfer_up(channel, monkeypatch):
    monkeypatch.setattr(weight_transfer, "TOKEN_SECONDS", 0.8)
    info, dropped = channel.init_info(), threading.Event()

    def drip() -> None:
        with socket.create_connection((info["host"], info["port"])) as stranger, suppress(OSError):
            for _ in info["token"]:
                stranger.sendall(b"0")
                if dropped.wait(0.2):
                    return

    def take() -> None:
        with socket.create_connection((info["host"], info["port"])) as worker:
            worker.sendall(info["token"].encode())
            received.append(worker.recv(100))
            dropped.set()

    received: list[bytes] = []
    threads = [threading.Thread(target=drip), threading.Thread(target=take)]
    threads[0].start()
    time.sleep(0.1)
    threads[1].start()

    started = time.monotonic()

    def check() -> None:
        if time.monotonic() - started > 4.0:
            raise LostAnswerError("too long")

    channel.send([("weight", torch.zeros(1))], check)
    for thread in threads:
        thread.join()
    assert received == [bytes(4)]
