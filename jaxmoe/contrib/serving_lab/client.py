# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Client of any endpoint in the form of OpenAI's API, with the times of its answers."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Iterator
from typing import Any

from jaxmoe.json_bounds import parse_json

_MOST_BYTES = 2**24
"""Bytes of an answer that is read whole, and of one line of a stream."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutcome:
    """What became of one request; exactly one for each."""

    first: float | None = None
    """Time of the first part of the answer, seconds of `time.monotonic`."""
    last: float | None = None
    """Time of its last part."""
    num_prompt: int = 0
    """Tokens of the prompt, as the server counts them."""
    num_cached: int = 0
    """Those of them that it found in its cache."""
    num_written: int = 0
    """Tokens of the answer."""
    failure: str = ""
    """Why there is no whole answer; empty if there is one."""


class Client:
    """Client of one endpoint; may be used from several threads.

    Every request opens its own connection.
    """

    def __init__(self, url: str, *, key: str = "", timeout: float = 600.0):
        """Take the address.

        Args:
            url: Address of the server, with or without the final /v1.
            key: Bearer key; none when empty.
            timeout: Seconds without a byte after which a request has failed.

        Raises:
            ValueError: The address is none of HTTP.
        """
        parts = urllib.parse.urlsplit(url)
        try:
            port = parts.port
        except ValueError as error:
            raise ValueError(f"url={url} has a wrong port ({error})") from error
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={url} must be an address such as http://127.0.0.1:8000")
        is_plain = parts.scheme == "http"
        self._kind = http.client.HTTPConnection if is_plain else http.client.HTTPSConnection
        self._host = parts.hostname
        self._port = port
        self._base = parts.path.rstrip("/").removesuffix("/v1") + "/v1"
        self._url = url
        self._timeout = timeout
        self._open: set[socket.socket] = set()
        self._is_closed = False
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def model(self) -> dict[str, Any]:
        """Return the first model of the server: its `id`, and `max_model_len` where it tells.

        Raises:
            ValueError: The server cannot be reached, refuses, or has no model.
        """
        connection = self._connect()
        try:
            connection.request("GET", f"{self._base}/models", headers=self._headers)
            answer = connection.getresponse()
            text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise ValueError(
                f"url={self._url} cannot be reached ({_words(error)}): start a server, such as"
                " jaxmoe serve, or correct the address"
            ) from error
        finally:
            connection.close()
        if answer.status != 200:
            raise ValueError(f"url={self._url}: {_refusal(answer.status, text)}")
        try:
            return dict(parse_json(text)["data"][0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(
                f"url={self._url} does not list its models at {self._base}/models as OpenAI's API"
                " does: name another server"
            ) from error

    def complete(self, body: dict[str, Any]) -> RequestOutcome:
        """Ask for one completion as a stream, and read it to its end.

        Args:
            body: Fields of /v1/completions; those of the stream are added.

        Returns:
            Times and counts, or why it failed; nothing is raised for what the server does.
        """
        request = body | {"stream": True, "stream_options": {"include_usage": True}}
        connection = self._connect()
        outcome = RequestOutcome()
        opened = None
        content = json.dumps(request).encode()
        try:
            connection.connect()
            opened = connection.sock
            self._open.add(opened)
            if self._is_closed:
                return RequestOutcome(failure="the client was closed")
            connection.request("POST", f"{self._base}/completions", content, self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                text = answer.read(_MOST_BYTES).decode("utf-8", "replace")
                return RequestOutcome(failure=_refusal(answer.status, text))
            for part in _events(answer):
                outcome = _after(outcome, part, time.monotonic())
                if outcome.failure:
                    return outcome
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
            return dataclasses.replace(outcome, failure=_words(error))
        finally:
            self._open.discard(opened)
            connection.close()
        if outcome.first is None or not outcome.num_written:
            return dataclasses.replace(outcome, failure="the stream has no token or no usage")
        return outcome

    def close(self) -> None:
        """End the completions that other threads wait for, and all later ones; they fail."""
        self._is_closed = True
        for connection in tuple(self._open):
            with contextlib.suppress(OSError):  # it has ended by itself
                connection.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> http.client.HTTPConnection:
        return self._kind(self._host, self._port, timeout=self._timeout)


def _events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    """Yield the JSON values of a stream until its mark of the end.

    Raises:
        ValueError: It ends without the mark, or a line is no JSON.
    """
    while line := answer.readline(_MOST_BYTES):
        name, _, value = line.decode("utf-8").strip().partition(":")
        if name != "data":
            continue
        if value.strip() == "[DONE]":
            return
        yield parse_json(value)
    raise ValueError("the stream broke off")


def _after(outcome: RequestOutcome, part: Any, now: float) -> RequestOutcome:
    """Return the outcome with one more part of the stream."""
    if "error" in part:
        return dataclasses.replace(outcome, failure=f"in the stream: {_message(part)}")
    if part.get("choices"):
        first = now if outcome.first is None else outcome.first
        outcome = dataclasses.replace(outcome, first=first, last=now)
    if counts := part.get("usage"):
        details = counts.get("prompt_tokens_details") or {}
        outcome = dataclasses.replace(
            outcome,
            num_prompt=int(counts["prompt_tokens"]),
            num_written=int(counts["completion_tokens"]),
            num_cached=int(details.get("cached_tokens") or 0),
        )
    return outcome


def _refusal(status: int, text: str) -> str:
    try:
        message = _message(parse_json(text))
    except (ValueError, KeyError, TypeError):
        message = text.strip().partition("\n")[0][:200]
    return f"status {status}: {message}" if message else f"status {status}"


def _message(body: Any) -> str:
    error = body["error"]
    return str(error["message"] if isinstance(error, dict) else error)[:200]


def _words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no byte within the timeout"
    return (error.strerror if isinstance(error, OSError) else "") or str(error) or repr(error)
