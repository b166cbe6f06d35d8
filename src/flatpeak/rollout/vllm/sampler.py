"""A sampler over vLLM servers, and a thread that samples ahead with them.

The servers' weights follow the policy's, and completions of other weights are never returned.
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
"""Seconds that sampling may continue after a stop signal; the checkpoint keeps the groups complete by then."""
ATTEMPTS: Final = 8
"""Failed requests for a group before the run fails; failed connections do not count."""
_PLAIN: Final = SamplingParams()


class VLLMSampler(Sampler):
    """A sampler over servers that sample with the policy's current weights.

    Every call first publishes the weights if they have changed, and the servers load them. Each completion includes the
    version of its weights, and is requested again if that is not the current one. A dead server gets no requests until
    it answers a ping, and receives the weights first. Requests without a connection, a timely answer or a readable
    answer are repeated on other servers with the same seeds.

    Log-probabilities come from vLLM: they equal the trainer's up to rounding, not bit for bit.
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
        """Connect to the servers. Raises UserError if one does not answer, or cannot sample for this policy.

        `sampling`: the settings of training, whose log-probabilities it needs.
        """
        self._policy = policy
        self._config = config
        key = Secret.from_environment(config.api_key_env, where="rollout.engine.api_key_env")
        # Adapters are files in both modes.
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
            refused.callback(self._pool.close)  # closes earlier connections if a server fails
            self._pool.connect()
            # On a CPU vLLM computes with copies of matrices in another layout. The copy of a tied output layer is
            # rebuilt only if its weights are among the loaded ones.
            head = any(server.on_cpu for server in self._pool.servers)
            store = WeightTensors(policy, head=head) if sent else WeightFiles(policy, config.directory, head=head)
            refused.pop_all()
        self._weights = WeightVersions(policy, store)
        self._counts: Counter[str] = Counter()
        self._counting = threading.Lock()
        self._update_seconds = 0.0

    @property
    def sleeping_server(self) -> str | None:
        """The address of a server that sleeps between requests; None if there is none."""
        return next((server.url for server in self._pool.servers if server.sleeps), None)

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Raise StoppedError instead of waiting for a server, once `stopping()` is true."""
        self._pool.stopping = stopping

    def announce_with(self, notice: Callable[[str], None]) -> None:
        """Give a notice when no server can be used."""
        self._pool.notice = notice

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        """Pairs (index of the prompt, its group), in the order in which groups are completed."""
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
        """The groups of `stream`, sampled by a published version, even if the policy has changed since."""
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
        """Give the servers the current weights, unless they have them; every request starts with this.

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
        """Delete the weight files, and disconnect from the servers."""
        self._pool.close()
        self._weights.close()

    def _draw(
        self, request: CompletionRequest, prompt: Prompt, version: WeightVersion, abandoned: threading.Event
    ) -> list[Completion]:
        """The completions of a group, from any server that returns them."""
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
            "check the server's log, then continue with --resume"
        )

    def _note(self, server: Server, error: ServerError, group_size: int) -> None:
        """Count a failure, and discard outdated knowledge about the server."""
        stale = isinstance(error, StaleWeightsError)
        with self._counting:
            self._counts["stale" if stale else "retried"] += group_size if stale else 1
        if stale:
            server.mark_dead()
            return
        # 404: the adapter is no longer loaded, for example after a restart.
        if not isinstance(error, StatusError) or error.status == 404:
            server.mark_dead()
        self._pool.failed(server, error, after=error.retry_after if isinstance(error, StatusError) else None)


class DrawingThread(Background):
    """The background of `RolloutsAhead` over servers: a thread that samples one request at a time.

    Nothing else may use the servers until its result is fetched, because they have one set of weights.
    """

    def __init__(self, sampler: VLLMSampler) -> None:
        self._sampler = sampler
        self._stopping: Callable[[], bool] = lambda: False
        self._stopping_since: float | None = None
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._answer: Future[dict[str, Any]] = Future()

    def stop_when(self, stopping: Callable[[], bool]) -> None:
        """Abort sampling some seconds after `stopping()` becomes true, with StoppedError as the result."""
        self._stopping = stopping

    def begin(self, request: dict[str, Any]) -> None:
        """Give the servers the current weights, then start the thread."""
        version = self._sampler.update(freeze=True)
        self._closed.clear()
        self._stopping_since = None
        self._sampler.stop_when(self._given_up)
        self._answer = Future()
        # A daemon, so that a trainer that ends without `close` does not wait for servers.
        self._thread = threading.Thread(
            target=self._draw, args=(request, version, self._answer), name="rollouts-ahead", daemon=True
        )
        self._thread.start()

    def result(self) -> dict[str, Any]:
        """Wait for the groups. Raises the errors of the thread."""
        answer = self._answer.result()
        self._end()
        return answer

    def close(self) -> None:
        """Abort sampling, and wait for the thread."""
        self._closed.set()
        self._end()

    def _draw(self, request: dict[str, Any], version: WeightVersion, answer: Future[dict[str, Any]]) -> None:
        try:
            answer.set_result(answer_request(_ByVersion(self._sampler, version), request))
        except BaseException as error:  # `result` raises it in the training thread
            answer.set_exception(error)

    def _given_up(self) -> bool:
        """Whether sampling was closed, or was to stop some seconds ago."""
        if self._closed.is_set() or not self._stopping():
            return self._closed.is_set()
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
        return time.monotonic() - self._stopping_since > STOP_PATIENCE

    def _end(self) -> None:
        """Wait for the thread; from now on, waiting for servers ends immediately if the run is to stop."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._sampler.stop_when(self._stopping)


@dataclass(frozen=True)
class _ByVersion(Sampler):
    """The servers with an earlier version of the weights."""

    sampler: VLLMSampler
    version: WeightVersion

    def stream(
        self, prompts: Sequence[Prompt], *, group_size: int, sampling: SamplingParams, seed: int
    ) -> Iterator[tuple[int, Group]]:
        return self.sampler.stream_by(self.version, prompts, group_size=group_size, sampling=sampling, seed=seed)
