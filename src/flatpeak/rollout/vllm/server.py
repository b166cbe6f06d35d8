"""A vLLM server: its abilities, its weights, and their updates."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Set
from contextlib import suppress
from typing import Any, Final

import torch

from flatpeak.errors import UserError
from flatpeak.rollout.vllm.http_client import HTTPClient, ServerError, StatusError
from flatpeak.rollout.vllm.responses import GENERATE, PROCESSED, RAW
from flatpeak.rollout.vllm.weight_transfer import WeightTransfer, end_unfinished_update
from flatpeak.rollout.vllm.weight_versions import ADAPTER, WHOLE, WeightVersion
from flatpeak.utils.redaction import Secret

PROBE_SECONDS: Final = 20.0
"""Timeout of answers that need no work by the server."""
START_WITH: Final = "start it with flatpeak serve"
RESETS: Final = 20
"""Attempts to empty the prefix cache, which the server refuses while blocks are in use."""
RESET_PAUSE: Final = 0.1
UNFINISHED: Final = "-unfinished"
"""Suffix of the version name during a replacement of weights, which remains after an interruption."""


class Server:
    """A server, its last known weights, and its number of open requests."""

    def __init__(
        self,
        url: str,
        *,
        timeout: float,
        key: Secret,
        model: str | None,
        adapted: bool,
        modes: Set[str],
        sent_from: torch.device | None = None,
    ) -> None:
        """`model` is the server's name of its model; None: the first name in its list.

        `modes` are the vLLM log-probability modes that suit the run. `sent_from` is the device of the weights if the
        trainer sends them; None: the server loads them from files.
        """
        self.url = url
        self.in_flight = 0
        """Open requests, counted by the pool."""
        self.on_cpu = False
        self.mode = PROCESSED
        """The server's log-probability mode."""
        self._modes = modes
        self._timeout = timeout
        self._client = HTTPClient(url, timeout=timeout, key=key)
        self._sent_from = sent_from
        self._transfer: WeightTransfer | None = None
        self._wanted_model = model
        self._adapted = adapted
        self._model: str | None = None
        self.sleeps = False
        self._asleep = False
        self._tag: str | None = None
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Read the server's properties. Raises UserError if it cannot sample for this run, ServerError without an
        answer.

        Earlier knowledge of the server is discarded first.
        """
        self._tag = self._model = None
        self._close_transfer()
        models = self._client.get("/v1/models", timeout=PROBE_SECONDS)
        name = _choose_model(models, self._wanted_model, url=self.url)
        try:
            # The answer describes the machine too, which takes many seconds the first time.
            info = self._client.get("/server_info", config_format="json")
        except StatusError as error:
            if error.status != 404:
                raise
            raise UserError(
                f"{self.url} has no endpoints to update weights: {START_WITH}, or set VLLM_SERVER_DEV_MODE=1 for it"
            ) from None
        config = info.get("vllm_config", {}) if isinstance(info, Mapping) else {}
        model, lora = config.get("model_config") or {}, config.get("lora_config")
        self.mode = str(model.get("logprobs_mode"))
        if self.mode not in self._modes:
            raise UserError(_unfit_mode(self.url, self.mode, self._modes))
        if self._adapted and not lora:
            raise UserError(f"{self.url} does not accept adapters: {START_WITH} --lora-rank R, or with --enable-lora")
        self.sleeps = bool(model.get("enable_sleep_mode"))
        # Runs leave the server asleep, even if they were killed; while asleep, it has no memory to load weights into.
        self._asleep = self.sleeps and self._is_asleep()
        self.on_cpu = "cpu" in str(config.get("device_config"))
        if self.on_cpu and (config.get("scheduler_config") or {}).get("enable_chunked_prefill"):
            raise UserError(
                f"{self.url} splits long prompts, and vLLM's CPU workers crash if such a prompt has a seed: "
                f"{START_WITH}, or with --no-enable-chunked-prefill"
            )
        tag = self.weights()
        if self._adapted and tag.startswith(WHOLE):
            raise UserError(
                f"another run has replaced the weights of {self.url}, but adapters need its original weights: restart "
                "the server"
            )
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        if backend is not None and tag.endswith(UNFINISHED):
            end_unfinished_update(self._client)
        if self._sent_from is not None:
            self._transfer = WeightTransfer(self._client, backend, device=self._sent_from, timeout=self._timeout)
        self._model = name

    def open_transfer(self) -> None:
        """Connect to the workers if the trainer sends weights; ServerError if that fails."""
        if self._transfer is not None:
            self._transfer.open()

    def weights(self) -> str:
        """The server's version of the weights."""
        answer = self._client.get("/weight_info", timeout=PROBE_SECONDS)
        return str(answer.get("weight_version")) if isinstance(answer, Mapping) else "unknown"

    def ping(self) -> None:
        """Return if the server gives any answer, else raise ServerError."""
        with suppress(StatusError):
            self._client.get("/health", timeout=PROBE_SECONDS)

    def _is_asleep(self) -> bool:
        answer = self._client.get("/is_sleeping", timeout=PROBE_SECONDS)
        return isinstance(answer, Mapping) and bool(answer.get("is_sleeping"))

    def prepare(self, version: WeightVersion) -> str:
        """Make sure that the server is awake and has these weights; return the model name for requests.

        A server that already has them keeps working.
        """
        with self._lock:
            if self._model is None:
                self.connect()
            name = version.tag if version.adapter else str(self._model)
            if self._tag == version.tag and not self._asleep:
                return name
            if self.sleeps and self._asleep:
                self._client.post("/wake_up")
                self._asleep = False
            if self._tag != version.tag and self.weights() != version.tag:
                self._update(version)
            self._tag = version.tag
            return name

    def generate(self, body: Mapping[str, Any]) -> Any:
        """The answer to a request for completions."""
        try:
            return self._client.post(GENERATE, body)
        except StatusError as error:
            if error.status == 403:
                raise UserError(f"{self.url}: {error.text} ({START_WITH}, or with --enable-scale-out)") from None
            raise

    def sleep(self) -> None:
        """Release the GPU's memory until the next request, if the server has sleep mode."""
        if self.sleeps and not self._asleep:
            try:
                self._client.post("/sleep", level="1", mode="wait")
                self._asleep = True
            except ServerError:  # it has died or sleeps; `connect` checks before the next request
                self.mark_dead()

    def abort(self) -> None:
        """Abort all requests without an answer."""
        self._client.abort()

    def mark_dead(self) -> None:
        """Note that the server may have died, so that `prepare` reconnects."""
        with self._lock:
            self._tag, self._model, self._asleep = None, None, False
            self._close_transfer()

    def close(self) -> None:
        """Close the connection for weights."""
        with self._lock:
            self._model = None
            self._close_transfer()

    def _close_transfer(self) -> None:
        if self._transfer is not None:
            self._transfer.close()
            self._transfer = None

    def _update(self, version: WeightVersion) -> None:
        if version.adapter:
            self._load_adapter(version)
        else:
            self._replace(version)

    def _replace(self, version: WeightVersion) -> None:
        """Replace the weights by this version; requests of other clients wait meanwhile."""
        self.open_transfer()
        self._client.post("/pause", mode="wait")
        try:
            # If this is interrupted, the server must not take a mixture of weights for its previous version.
            self._client.post("/update_weight_version", {"new_version": f"{version.tag}{UNFINISHED}"})
            if self._transfer is not None:
                self._transfer.send(version.weights)
            else:
                self._reload(version)
            self._reset_prefix_cache()
            self._client.post("/update_weight_version", {"new_version": version.tag})
        except ServerError:
            if self._transfer is not None:
                self._model = None  # `prepare` then reconnects, and both sides start over
            raise
        finally:
            with suppress(ServerError):  # if this fails, the next request fails too, and the update is repeated
                self._client.post("/resume")

    def _reload(self, version: WeightVersion) -> None:
        """Make the server load the version's files."""
        try:
            self._client.post(
                "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(version.path)}}
            )
        except StatusError as error:
            raise _unreadable(self.url, version, error) from error

    def _load_adapter(self, version: WeightVersion) -> None:
        """Load the version as an adapter under its tag, then unload older adapters of all runs."""
        try:
            self._client.post("/v1/load_lora_adapter", {"lora_name": version.tag, "lora_path": str(version.path)})
        except StatusError as error:
            if "already been loaded" not in error.text:
                raise _unreadable(self.url, version, error) from error
        for name in _model_names(self._client.get("/v1/models", timeout=PROBE_SECONDS)):
            if name.startswith(ADAPTER) and name != version.tag:
                with suppress(StatusError):  # already unloaded
                    self._client.post("/v1/unload_lora_adapter", {"lora_name": name})
        self._reset_prefix_cache()
        self._client.post("/update_weight_version", {"new_version": version.tag})

    def _reset_prefix_cache(self) -> None:
        """Empty the cache of keys and values from earlier weights; StatusError if the server refuses."""
        for _ in range(RESETS):
            answer = self._client.post("/reset_prefix_cache")
            if not isinstance(answer, Mapping) or answer.get("success", True):
                return
            time.sleep(RESET_PAUSE)
        raise StatusError(503, "the prefix cache is in use", retry_after=None)


def _choose_model(answer: Any, wanted: str | None, *, url: str) -> str:
    names = _model_names(answer)
    if not names:
        raise UserError(f"{url} lists no models: is it a vLLM server? {START_WITH}")
    if wanted is not None and wanted not in names:
        raise UserError(f"rollout.engine.model={wanted}: {url} serves {', '.join(names)}; give one of them, or null")
    return wanted or names[0]


def _unfit_mode(url: str, mode: str, modes: Set[str]) -> str:
    """The error for a server whose log-probabilities training cannot use."""
    if PROCESSED in modes:
        return f"{url} returns {mode}, which ignore the temperature: {START_WITH}, or with --logprobs-mode {PROCESSED}"
    return (
        f"{url} returns {mode}, of the distribution after rollout.top_p, top_k and min_new_tokens: start it with "
        f"flatpeak serve MODEL -- --logprobs-mode={RAW}"
    )


def _model_names(answer: Any) -> list[str]:
    """The names in a list of models, with adapters after the models."""
    rows = answer.get("data") if isinstance(answer, Mapping) else None
    return [str(row.get("id")) for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _unreadable(url: str, version: WeightVersion, error: StatusError) -> Exception:
    """The error for weights that a server does not load; a UserError if a retry would not help."""
    hint = (
        f"{url} cannot load {version.path} ({error.text}): can it read that directory (rollout.engine.directory), and "
        "does it serve the model in training?"
    )
    return StatusError(error.status, hint, retry_after=error.retry_after) if error.retried else UserError(hint)
