"""JSON over HTTP by the standard library, with error types by the possible remedy.

Every call opens a new connection, so restarted servers need no special treatment and threads share nothing. Proxies
from the environment are not used.
"""

from __future__ import annotations

import http.client
import json
import math
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from flatpeak.errors import brief
from flatpeak.utils.redaction import NO_KEY, Secret

RETRIED_STATUSES: Final = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Statuses of servers that are late, busy, starting or failing; a retry of any other status would fail again."""
CONNECT_SECONDS: Final = 10.0
"""Connection timeout in seconds: a machine that has vanished does not refuse connections."""
_PIECE: Final = 1 << 16


class ServerError(Exception):
    """A request without a usable answer."""


class UnreachableError(ServerError):
    """No connection: the server has stopped or is still starting."""


class LostAnswerError(ServerError):
    """A broken connection, or an answer that was late or incomplete."""


class UnreadableAnswerError(ServerError):
    """An answer that is not JSON, or not of the expected form."""


class StatusError(ServerError):
    """An HTTP status other than success."""

    def __init__(self, status: int, text: str, *, retry_after: float | None) -> None:
        super().__init__(f"status {status}: {text}")
        self.status = status
        self.text = text
        self.retry_after = retry_after
        """Seconds after which to retry, if the server gives them."""

    @property
    def retried(self) -> bool:
        """Whether the same request may succeed later."""
        return self.status in RETRIED_STATUSES


class HTTPClient:
    """Requests to one server."""

    def __init__(self, url: str, *, timeout: float, key: Secret) -> None:
        """`url` is http://HOST:PORT, with the path prefix of the server if it has one; `timeout` is in seconds."""
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        self._secure = parts.scheme == "https"
        self._address = parts.netloc.rpartition("@")[2]
        self._prefix = parts.path
        self._timeout = timeout
        self._key = key
        self._open: set[socket.socket] = set()
        self._changing = threading.Lock()

    def get(self, path: str, *, timeout: float | None = None, **query: str) -> Any:
        """The JSON of a GET request."""
        return self._request("GET", path, None, query, timeout)

    def post(self, path: str, body: Mapping[str, Any] | None = None, **query: str) -> Any:
        """The JSON of a POST request; None for an empty answer."""
        return self._request("POST", path, body, query, None)

    def own_address(self) -> tuple[str, socket.AddressFamily]:
        """This machine's address as the server sees it, and its family; UnreachableError if there is no route."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if self._secure else 80)
        try:
            with socket.create_connection((parts.hostname, port), timeout=CONNECT_SECONDS) as connection:
                host: str = connection.getsockname()[0]
                return host, connection.family
        except OSError as error:
            raise UnreachableError(f"no connection ({brief(error)})") from error

    def abort(self) -> None:
        """Abort all requests without an answer: the threads that made them get LostAnswerError."""
        with self._changing:
            for connected in self._open:
                with suppress(OSError):
                    # The method of a TLS socket would discard the session while another thread reads.
                    socket.socket.shutdown(connected, socket.SHUT_RDWR)

    def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str], timeout: float | None
    ) -> Any:
        limit = min(timeout or math.inf, self._timeout)
        deadline = time.monotonic() + limit
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = kind(self._address, timeout=min(limit, CONNECT_SECONDS))
        try:
            try:
                connection.connect()
            except OSError as error:
                raise UnreachableError(f"no connection ({brief(error)})") from error
            opened = connection.sock
            opened.settimeout(limit)
            with self._changing:
                self._open.add(opened)
            target = f"{self._prefix}{path}" + (f"?{urlencode(query)}" if query else "")
            try:
                status, headers, raw = self._exchange(connection, method, target, body, deadline)
            except (OSError, http.client.HTTPException) as error:
                raise LostAnswerError(f"the answer was lost ({type(error).__name__}: {brief(error)})") from error
            finally:
                with self._changing:
                    self._open.discard(opened)
        finally:
            connection.close()
        if not 200 <= status < 300:
            text = self._key.scrub(_error_text(raw))
            raise StatusError(status, text, retry_after=_seconds(headers.get("Retry-After")))
        return _content(headers, raw)

    def _exchange(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        target: str,
        body: Mapping[str, Any] | None,
        deadline: float,
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if self._key.reveal() != NO_KEY:
            headers["Authorization"] = f"Bearer {self._key.reveal()}"
        connected = connection.sock
        connection.request(method, target, body=None if body is None else json.dumps(body), headers=headers)
        response = connection.getresponse()
        pieces = []
        # The socket's timeout restarts with every byte, so a slow answer could take forever.
        while piece := response.read1(_PIECE):
            pieces.append(piece)
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out while receiving the answer")
            connected.settimeout(left)
        raw = b"".join(pieces)
        announced = response.headers.get("Content-Length")
        if announced is not None and announced.isdecimal() and len(raw) < int(announced):
            raise http.client.IncompleteRead(raw, int(announced) - len(raw))
        return response.status, response.headers, raw


def _content(headers: http.client.HTTPMessage, raw: bytes) -> Any:
    if not raw.strip():
        return None
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        if headers.get_content_type() == "text/plain":  # as the adapter endpoints answer
            return None
        raise UnreadableAnswerError(f"the answer is not JSON ({brief(error)})") from error


def _error_text(raw: bytes) -> str:
    """The message in a vLLM error, or the text as it is."""
    try:
        content = json.loads(raw)
        error = content.get("error", content.get("detail", content))
        text = error.get("message", error) if isinstance(error, dict) else error
    except (ValueError, RecursionError, AttributeError):
        text = raw.decode("utf-8", "replace")
    return brief(Exception(str(text) or "no text"))


def _seconds(text: str | None) -> float | None:
    try:
        seconds = float(text or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
