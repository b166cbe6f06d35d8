"""One vLLM server: its abilities, the weights it has, and updates of them."""

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
"""Longest wait for an answer that takes a server no work."""
START_WITH: Final = "start it with flatpeak serve"
RESETS: Final = 20
"""Attempts to empty the prefix cache, which is refused while blocks are in use."""
RESET_PAUSE: Final = 0.1
UNFINISHED: Final = "-unfinished"
"""Ends the name of weights that are being replaced, and remains where that breaks off."""


class Server:
    """A server, the weights that it was last known to have, and its number of open requests."""

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
        """`model` is the name that the server serves its model under; None: the first of its list.

        `modes` are vLLM's modes of log-probabilities that serve the run. `sent_from` is the device of the weights where
        they are sent; None: the server loads them from files.
        """
        self.url = url
        self.in_flight = 0
        """Open requests; the pool counts them."""
        self.on_cpu = False
        """Whether it computes on a CPU."""
        self.mode = PROCESSED
        """The log-probabilities that it gives."""
        self._modes = modes
        self._timeout = timeout
        self._client = HTTPClient(url, timeout=timeout, key=key)
        self._sent_from = sent_from
        self._transfer: WeightTransfer | None = None
        self._wanted_model = model
        self._adapted = adapted
        self._model: str | None = None
        self.sleeps = False
        """Whether it has sleep mode."""
        self._asleep = False
        self._tag: str | None = None
        self._lock = threading.Lock()

    def connect(self) -> None:
        """Read what the server is. Raises UserError where it cannot sample for this run, ServerError without an answer.

        Earlier knowledge of the server is discarded first.
        """
        self._tag = self._model = None
        self._close_transfer()
        models = self._client.get("/v1/models", timeout=PROBE_SECONDS)
        name = _choose_model(models, self._wanted_model, url=self.url)
        try:
            # It describes the machine too, which takes a server many seconds the first time.
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
            raise UserError(f"{self.url} takes no adapters: {START_WITH} --lora-rank R, or with --enable-lora")
        self.sleeps = bool(model.get("enable_sleep_mode"))
        # Every run leaves it asleep, and so does one that was killed; asleep it has no memory to load weights into.
        self._asleep = self.sleeps and self._is_asleep()
        self.on_cpu = "cpu" in str(config.get("device_config"))
        if self.on_cpu and (config.get("scheduler_config") or {}).get("enable_chunked_prefill"):
            raise UserError(
                f"{self.url} reads long prompts in pieces, and vLLM's workers on CPUs end where such a prompt has a "
                f"seed: {START_WITH}, or with --no-enable-chunked-prefill"
            )
        tag = self.weights()
        if self._adapted and tag.startswith(WHOLE):
            raise UserError(
                f"the weights of {self.url} were replaced by another run, and adapters belong to those it started "
                "with: start it anew"
            )
        backend = (config.get("weight_transfer_config") or {}).get("backend")
        if backend is not None and tag.endswith(UNFINISHED):
            end_unfinished_update(self._client)
        if self._sent_from is not None:
            self._transfer = WeightTransfer(self._client, backend, device=self._sent_from, timeout=self._timeout)
        self._model = name

    def open_transfer(self) -> None:
        """Connect to the workers if weights are sent to them; ServerError if that fails."""
        if self._transfer is not None:
            self._transfer.open()

    def weights(self) -> str:
        """The version of the weights that the server says it has."""
        answer = self._client.get("/weight_info", timeout=PROBE_SECONDS)
        return str(answer.get("weight_version")) if isinstance(answer, Mapping) else "unknown"

    def ping(self) -> None:
        """Return if the server answers anything at all, else raise ServerError."""
        with suppress(StatusError):
            self._client.get("/health", timeout=PROBE_SECONDS)

    def _is_asleep(self) -> bool:
        answer = self._client.get("/is_sleeping", timeout=PROBE_SECONDS)
        return isinstance(answer, Mapping) and bool(answer.get("is_sleeping"))

    def prepare(self, version: WeightVersion) -> str:
        """Make sure that the server is awake and has these weights; the name under which it serves them.

        A server that has them is not disturbed.
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
        """Give the GPU's memory back until the next request, if the server has sleep mode."""
        if self.sleeps and not self._asleep:
            try:
                self._client.post("/sleep", level="1", mode="wait")
                self._asleep = True
            except ServerError:  # it has died, or sleeps: `connect` finds out before the next request
                self.mark_dead()

    def abort(self) -> None:
        """Break off all requests that have no answer yet."""
        self._client.abort()

    def mark_dead(self) -> None:
        """Note that the server may have died: `prepare` then connects anew."""
        with self._lock:
            self._tag, self._model, self._asleep = None, None, False
            self._close_transfer()

    def close(self) -> None:
        """Close the connection through which weights are sent."""
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
        """Put the version in place of the weights; requests of other clients wait meanwhile."""
        self.open_transfer()
        self._client.post("/pause", mode="wait")
        try:
            # Whatever breaks off, the server never takes a mixture of weights for those that it had.
            self._client.post("/update_weight_version", {"new_version": f"{version.tag}{UNFINISHED}"})
            if self._transfer is not None:
                self._transfer.send(version.weights)
            else:
                self._reload(version)
            self._reset_prefix_cache()
            self._client.post("/update_weight_version", {"new_version": version.tag})
        except ServerError:
            if self._transfer is not None:
                self._model = None  # so that `prepare` connects anew, and both sides begin again
            raise
        finally:
            with suppress(ServerError):  # if this fails, so does the next request, and the update is repeated
                self._client.post("/resume")

    def _reload(self, version: WeightVersion) -> None:
        """Let the server load the version's files."""
        try:
            self._client.post(
                "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(version.path)}}
            )
        except StatusError as error:
            raise _unreadable(self.url, version, error) from error

    def _load_adapter(self, version: WeightVersion) -> None:
        """Load the version as an adapter under its tag, then unload earlier adapters, of any run."""
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
        """Empty the cache of keys and values that earlier weights computed; StatusError if the server refuses."""
        for _ in range(RESETS):
            answer = self._client.post("/reset_prefix_cache")
            if not isinstance(answer, Mapping) or answer.get("success", True):
                return
            time.sleep(RESET_PAUSE)
        raise StatusError(503, "the prefix cache is in use", retry_after=None)


def _choose_model(answer: Any, wanted: str | None, *, url: str) -> str:
    """The name to ask for."""
    names = _model_names(answer)
    if not names:
        raise UserError(f"{url} lists no models: is it a vLLM server? {START_WITH}")
    if wanted is not None and wanted not in names:
        raise UserError(f"rollout.engine.model={wanted}: {url} serves {', '.join(names)}; name one of them, or null")
    return wanted or names[0]


def _unfit_mode(url: str, mode: str, modes: Set[str]) -> str:
    """The error for a server whose log-probabilities are not those that training needs."""
    if PROCESSED in modes:
        return f"{url} gives {mode}, which leave the temperature out: {START_WITH}, or with --logprobs-mode {PROCESSED}"
    return (
        f"{url} gives {mode}, which are those of what rollout.top_p, top_k and min_new_tokens leave: start it with "
        f"flatpeak serve MODEL -- --logprobs-mode={RAW}"
    )


def _model_names(answer: Any) -> list[str]:
    """The names in a list of models, those of adapters after the model's own."""
    rows = answer.get("data") if isinstance(answer, Mapping) else None
    return [str(row.get("id")) for row in rows if isinstance(row, Mapping)] if isinstance(rows, list) else []


def _unreadable(url: str, version: WeightVersion, error: StatusError) -> Exception:
    """The error for weights that a server does not load; a UserError where trying again would not help."""
    hint = (
        f"{url} cannot load {version.path} ({error.text}): does it see that directory (rollout.engine.directory), and "
        "serve the model that is trained?"
    )
    return StatusError(error.status, hint, retry_after=error.retry_after) if error.retried else UserError(hint)
