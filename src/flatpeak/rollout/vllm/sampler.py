"""A sampler over vLLM servers, and a thread that draws ahead from them.

The servers' weights follow the policy's, and no completion of other weights is returned.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Any, Final

from flatpeak.errors import RunError
from flatpeak.protocols import Sampler, ServedPolicy
from flatpeak.rollout.ahead import Background, answer_request
from flatpeak.rollout.config import VLLMConfig
from flatpeak.rollout.slots import check_request
from flatpeak.rollout.stopping import StopStrings
from flatpeak.rollout.vllm.http_client import ServerError, StatusError, UnreachableError
from flatpeak.rollout.vllm.responses import CompletionRequest, StaleWeightsError, logprobs_modes
from flatpeak.rollout.vllm.server import Server
from flatpeak.rollout.vllm.server_pool import FIRST_DELAY, ServerPool
from flatpeak.rollout.vllm.weight_versions import WeightFiles, WeightTensors, WeightVersion, WeightVersions, frozen
from flatpeak.types import Completion, Group, Prompt, SamplingParams
from flatpeak.utils.redaction import Secret

STOP_PATIENCE: Final = 10.0
"""Seconds that a drawing may go on once the run is to stop: what is whole by then is in the checkpoint."""
ATTEMPTS: Final = 8
"""Failed requests for a group before the run fails; attempts to connect do not count."""
_PLAIN: Final = SamplingParams()


class VLLMSampler(Sampler):
    """A sampler over servers that draw with the policy's current weights.

    At the beginning of every call the weights are published if they have changed, and servers load them; every
    completion names the weights that drew it, and is requested again if these are not the current weights. A server
    that died gets no requests until it answers a ping, and gets the weights first. Requests without a connection, a
    timely answer or a readable answer are repeated on other servers with the same seeds.

    Log-probabilities are vLLM's own: they agree with the trainer's to rounding, never to the bit.
    """

    decoder = "vllm"

    def __init__(
        self,
        policy: ServedPolicy,
        config: VLLMConfig,
        *,
        sampling: SamplingParams = _PLAIN,
        first_delay: float = FIRST_DELAY,
    ) -> None:
        """Connect to the servers. Raises UserError where one is not there, or cannot sample for this policy.

        `sampling` are the settings whose log-probabilities are trained on.
        """
        self._policy = policy
        self._config = config
        key = Secret.from_environment(config.api_key_env, where="rollout.engine.api_key_env")
        # Adapters are files in both.
        sent = config.sync == "endpoint" and not policy.adapted
        self._pool = ServerPool(
            [
                Server(
                    url,
                    timeout=config.timeout,
                    key=key,
                    model=config.model,
                    adapted=policy.adapted,
                    modes=logprobs_modes(sampling),
                    sent_from=policy.saved_weights()[0].device if sent else None,
                )
                for url in config.urls
            ],
            max_concurrency=config.max_concurrency,
            patience=config.timeout,
            first_delay=first_delay,
        )
        with ExitStack() as refused:
            refused.callback(self._pool.close)  # the connections to servers before the one that fails
            self._pool.connect()
            # On a CPU vLLM computes with copies of matrices in another layout. A tied output layer has one too, which
            # is made anew only where its weights are among those that are loaded.
            head = any(server.on_cpu for server in self._pool.servers)
            store = WeightTensors(policy, head=head) if sent else WeightFiles(policy, config.directory, head=head)
            refused.pop_all()
        self._weights = WeightVersions(policy, store)
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._update_seconds = 0.0

    @property
    def sleeping_server(self) -> str | None:
        """The address of a server that sleeps between requests; None where none does."""
        return next((server.url for server in self._pool.servers if server.sleeps), None)

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Raise StoppedError while waiting for a server, once `stopping()`."""
        self._pool.stopping = stopping

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        """Pairs (index of the prompt, its group), in the order in which groups are complete."""
        check_request(prompts, group_size, sampling, 1)
        if prompts:
            version = self.update()
            yield from self.stream_by(version, prompts, group_size=group_size, sampling=sampling, seed=seed)

    def stream_by(
        self,
        version: WeightVersion,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        sampling: SamplingParams,
        seed: int,
    ) -> Iterator[tuple[int, Group]]:
        """The groups of `stream`, drawn by the last published weights, whatever has become of the policy since."""
        request = CompletionRequest(
            group_size=group_size,
            sampling=sampling,
            seed=seed,
            eos_token_ids=self._policy.eos_token_ids,
            tokenizer=self._policy.tokenizer,
            vocabulary_size=self._policy.vocabulary_size,
            stop_strings=StopStrings(sampling.stop, self._policy.tokenizer) if sampling.stop else None,
        )
        abandoned = threading.Event()
        count = min(len(prompts), self._config.max_concurrency * len(self._pool.servers))
        try:
            with ThreadPoolExecutor(count, thread_name_prefix="vllm") as threads:
                drawn: dict[Future[list[Completion]], int] = {
                    threads.submit(self._draw, request, prompt, version, abandoned): p
                    for p, prompt in enumerate(prompts)
                }
                with closing(self._pool.completed(list(drawn), abandoned=abandoned)) as done:
                    for future in done:
                        p = drawn[future]
                        yield p, Group(prompt=prompts[p], completions=tuple(future.result()))
        finally:
            self._pool.sleep()

    def update(self, *, freeze: bool = False) -> WeightVersion:
        """Give the servers the current weights, if they do not have them; every request begins with it.

        `freeze` copies the weights for servers that return later, because the policy is about to change.
        """
        started = time.perf_counter()
        version = self._weights.current()
        self._pool.prepare(version)
        if freeze:
            version = frozen(version)
        self._update_seconds += time.perf_counter() - started
        return version

    def measured(self) -> Mapping[str, float]:
        """Seconds of weight updates, and counts of repeated requests, since the last call."""
        metrics = {
            "time/weight_update": self._update_seconds,
            "rollout/retried_requests": float(self._counts["retried"]),
            "rollout/stale_completions": float(self._counts["stale"]),
        }
        self._counts.clear()
        self._update_seconds = 0.0
        return metrics

    def close(self) -> None:
        """Delete the files of the weights, and disconnect from the servers."""
        self._pool.close()
        self._weights.close()

    def _draw(
        self, request: CompletionRequest, prompt: Prompt, version: WeightVersion, abandoned: threading.Event
    ) -> list[Completion]:
        """A group's completions, from whichever server gives them."""
        failures: list[str] = []
        while len(failures) < ATTEMPTS:
            with self._pool.acquire(given_up=abandoned.is_set) as server:
                try:
                    answer = server.generate(request.body(prompt, model=server.prepare(version)))
                    completions = request.completions(
                        answer, prompt, tag=version.tag, version=version.number, mode=server.mode
                    )
                except ServerError as error:
                    self._note(server, error, request.group_size)
                    if not isinstance(error, UnreachableError):
                        failures.append(f"{server.url}: {error}")
                    if isinstance(error, StatusError) and not error.retried and error.status != 404:
                        raise RunError(f"{server.url} refused the prompt {prompt.id}: {error.text}") from error
                else:
                    self._pool.succeeded(server)
                    return completions
        raise RunError(
            f"the prompt {prompt.id} got no usable answer in {len(failures)} attempts; the last, {failures[-1:]}: "
            "look into the server's log, then go on with --resume"
        )

    def _note(self, server: Server, error: ServerError, group_size: int) -> None:
        """Count a failure, and discard what it shows to be outdated about the server."""
        stale = isinstance(error, StaleWeightsError)
        with self._counting:
            self._counts["stale" if stale else "retried"] += group_size if stale else 1
        if stale:
            server.mark_dead()
            return
        # 404: an adapter that is no longer loaded, as after a restart.
        if not isinstance(error, StatusError) or error.status == 404:
            server.mark_dead()
        self._pool.failed(server, error, after=error.retry_after if isinstance(error, StatusError) else None)


class DrawingThread(Background):
    """The background of `RolloutsAhead` over servers: a thread that draws one request at a time.

    Until its result is fetched nothing else may ask the servers, which have one set of weights.
    """

    def __init__(self, sampler: VLLMSampler) -> None:
        self._sampler = sampler
        self._stopping: Callable[[], bool] = lambda: False
        self._stopping_since: float | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._answer: Future[dict[str, Any]] = Future()

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Break a drawing off, with StoppedError as its result, some seconds after `stopping()`."""
        self._stopping = stopping

    def begin(self, request: dict[str, Any]) -> None:
        """Give the servers the weights of now, then start the thread."""
        version = self._sampler.update(freeze=True)
        self._closed.clear()
        self._stopping_since = None
        self._sampler.stop_when(self._given_up)
        self._answer = Future()
        # A daemon: a trainer that ends without `close` does not wait for servers.
        self._thread = threading.Thread(
            target=self._draw, args=(request, version, self._answer), name="rollouts-ahead", daemon=True
        )
        self._thread.start()

    def result(self) -> dict[str, Any]:
        """Wait for the groups. Raises what the thread has raised."""
        answer = self._answer.result()
        self._end()
        return answer

    def close(self) -> None:
        """Break off what is drawn, and wait for the thread."""
        self._closed.set()
        self._end()

    def _draw(self, request: dict[str, Any], version: WeightVersion, answer: Future[dict[str, Any]]) -> None:
        try:
            answer.set_result(answer_request(_ByVersion(self._sampler, version), request))
        except BaseException as error:  # raised by `result`, in the thread that trains
            answer.set_exception(error)

    def _given_up(self) -> bool:
        """Whether the drawing is closed, or was to stop some seconds ago."""
        if self._closed.is_set() or not self._stopping():
            return self._closed.is_set()
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
        return time.monotonic() - self._stopping_since > STOP_PATIENCE

    def _end(self) -> None:
        """Wait for the thread to end; from then on waiting for servers ends at once where the run is to stop."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._sampler.stop_when(self._stopping)


@dataclass(frozen=True)
class _ByVersion(Sampler):
    """The servers with weights that were published before."""

    sampler: VLLMSampler
    version: WeightVersion

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        return self.sampler.stream_by(self.version, prompts, group_size=group_size, sampling=sampling, seed=seed)
