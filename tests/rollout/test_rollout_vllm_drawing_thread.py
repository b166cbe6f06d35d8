"""Rollouts ahead by scripted servers: weights first, then a thread that draws by them, whatever happens beside it."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from flatpeak.errors import RunError, StoppedError, UserError
from flatpeak.rollout.ahead import RolloutsAhead
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.vllm import VLLMSampler
from flatpeak.rollout.vllm import sampler as vllm_sampler
from flatpeak.rollout.vllm.sampler import DrawingThread
from flatpeak.types import Example, Group, Prompt, SamplingParams
from support.vllm_server import Call, Fault, ScriptedPolicy, VLLMServer

SAMPLING = SamplingParams(max_new_tokens=6)
PROMPTS = [
    Prompt(id=str(p), token_ids=(3 + p, 5), text="", example=Example(id=str(p), question="", gold="")) for p in range(6)
]

MakeAhead = Callable[..., RolloutsAhead]


@pytest.fixture
def rollouts(tmp_path) -> Iterator[MakeAhead]:
    """`rollouts(server, policy, **settings)`: rollouts ahead by it, closed at the end."""
    made = []

    def make(server: VLLMServer, policy: ScriptedPolicy, **settings: Any) -> RolloutsAhead:
        config = VLLMConfig(type="vllm", urls=(server.url,), directory=str(tmp_path), **{"timeout": 10.0, **settings})
        sampler = VLLMSampler(policy, config, first_delay=0.01)
        made.append(RolloutsAhead(sampler, DrawingThread(sampler), staleness=1))
        return made[-1]

    yield make
    for source in made:
        source.close()
        source.sampler.close()


def ahead(source: RolloutsAhead, *, seed: int = 7) -> Any:
    return source.ahead(PROMPTS, group_size=3, sampling=SAMPLING, seed=seed)


def draw(source: Any, *, seed: int = 7) -> list[Group]:
    return source.generate(PROMPTS, group_size=3, sampling=SAMPLING, seed=seed)


def logprobs(groups: list[Group]) -> set[float]:
    return {logprob for group in groups for completion in group.completions for logprob in completion.logprobs}


def versions(groups: list[Group]) -> set[tuple[int | None, int | None]]:
    return {(group.version, completion.weight_version) for group in groups for completion in group.completions}


def drawing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(("rollouts-ahead", "vllm"))]


def on_generate(act: Callable[[Call], Any]) -> Callable[[Call], Any]:
    return lambda call: act(call) if call.path.endswith("generate") else None


def test_servers_draw_by_the_weights_that_they_got_before_the_update(rollouts):
    policy, updated = ScriptedPolicy(), threading.Event()
    with VLLMServer(on_generate(lambda call: updated.wait(10) and None)) as server:
        source = rollouts(server, policy)
        source.use_version(4)
        with ahead(source):
            policy.step()
            assert not server.paths()[6:]  # no second update
            updated.set()
        source.use_version(5)
        groups = draw(source)
        assert [group.prompt for group in groups] == PROMPTS
        assert (logprobs(groups), versions(groups)) == ({-0.5}, {(4, 1)})
        asked = len(server.generated())
        assert (logprobs(draw(source)), len(server.generated())) == ({-0.75}, asked + len(PROMPTS))


def test_what_is_drawn_ahead_are_the_completions_that_the_sampler_draws(rollouts):
    with VLLMServer() as server:
        source = rollouts(server, ScriptedPolicy())
        with ahead(source):
            pass
        first, again = draw(source), draw(source.sampler)
    assert [group.completions for group in first] == [group.completions for group in again]


def test_groups_beyond_the_bound_are_dropped(rollouts):
    policy = ScriptedPolicy()
    with VLLMServer() as server:
        source = rollouts(server, policy)
        with ahead(source):
            policy.step()
        source.use_version(2)
        groups = draw(source)
    assert (logprobs(groups), versions(groups)) == ({-0.75}, {(2, 2)})


def test_a_server_that_is_started_anew_while_it_draws_gets_the_same_weights_again(rollouts):
    policy, updated = ScriptedPolicy(), threading.Event()

    def script(call: Call) -> Fault | None:
        updated.wait(10)
        if call.earlier == 2:
            server.version, server.value = "default", 0.0
            return Fault(reset=True)
        return None

    with VLLMServer(on_generate(script)) as server:
        source = rollouts(server, policy, max_concurrency=1)
        with ahead(source):
            policy.step()
            updated.set()
        groups = draw(source)
        assert (logprobs(groups), versions(groups)) == ({-0.5}, {(0, 1)})
        assert server.paths().count("/collective_rpc") == 2
    assert source.measured()["rollout/retried_requests"] == 1


def test_what_is_wrong_with_an_answer_is_raised_where_the_groups_are_asked_for(rollouts):
    policy = ScriptedPolicy()

    def edit(answer: dict[str, Any]) -> dict[str, Any]:
        return answer | {"prompt_token_ids": [1]}

    with VLLMServer(edit=edit) as server:
        source = rollouts(server, policy)
        with ahead(source):
            policy.step()
        assert policy.weight.item() == -0.75  # the update was finished
        with pytest.raises(UserError, match="it must not change token ids"):
            draw(source)
    assert drawing() == []


def test_servers_that_stay_away_end_the_run_and_not_the_update(rollouts):
    with VLLMServer() as server:
        source = rollouts(server, ScriptedPolicy(), timeout=0.4)
        server.script = on_generate(lambda call: Fault(reset=True))
        entered = []
        with ahead(source):
            server.stop()
            entered.append(True)
        with pytest.raises(RunError, match="no server could be used"):
            draw(source)
    assert entered


@pytest.mark.parametrize("patience", [0.1, 30.0])
def test_a_stop_lets_a_drawing_end_if_that_takes_little_time(rollouts, monkeypatch, patience):
    monkeypatch.setattr(vllm_sampler, "STOP_PATIENCE", patience)
    stopping = threading.Event()

    def script(call: Call) -> Fault | None:
        stopping.set()
        return Fault(wait=20.0) if patience < 1 else None

    with VLLMServer(on_generate(script)) as server:
        source = rollouts(server, ScriptedPolicy(), timeout=60.0)
        source.background.stop_when(stopping.is_set)
        started = time.monotonic()
        with ahead(source):
            pass
        assert time.monotonic() - started < 10
        assert drawing() == []
        if patience < 1:
            assert source.state()["drawn"] is None
            with pytest.raises(StoppedError):
                draw(source)
        else:
            assert logprobs(draw(source)) == {-0.5}


def test_an_interrupt_in_the_update_breaks_the_drawing_off(rollouts):
    with VLLMServer(on_generate(lambda call: Fault(wait=20.0))) as server:
        source = rollouts(server, ScriptedPolicy(), timeout=60.0)
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt), ahead(source):
            raise KeyboardInterrupt
        assert time.monotonic() - started < 10
    assert drawing() == []


def test_after_an_interrupt_the_sampler_draws_as_before(rollouts):
    with VLLMServer() as server:
        source = rollouts(server, ScriptedPolicy())
        with pytest.raises(KeyboardInterrupt), ahead(source):
            raise KeyboardInterrupt
        with ahead(source):
            pass
        assert logprobs(draw(source)) == {-0.5}


def test_what_is_drawn_survives_a_checkpoint_with_its_weights(rollouts):
    policy = ScriptedPolicy()
    with VLLMServer() as server:
        source = rollouts(server, policy)
        with ahead(source):
            policy.step()
        saved = json.loads(json.dumps(source.state()))
        resumed = rollouts(server, policy)
        resumed.load(saved)
        resumed.use_version(1)
        groups = draw(resumed)
    assert (logprobs(groups), versions(groups)) == ({-0.5}, {(0, 1)})
