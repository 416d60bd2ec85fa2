# Copyright 2026 The jaxmoe authors
# SPDX-License-Identifier: Apache-2.0
"""Errors of the endpoint, with the status and the JSON object that OpenAI's clients expect."""

from __future__ import annotations

from typing import Any

from jaxmoe.errors import JaxmoeError

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}


class HTTPError(JaxmoeError, RuntimeError):
    """A request that is answered with an error."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ):
        """Describe the error.

        Args:
            status: Status code of HTTP.
            message: What is wrong, and the way out.
            param: Field of the request.
            code: Word by which clients tell errors apart.
            retry_after: Seconds after which the same request may succeed.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        kind = _KINDS.get(self.status, "server_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def wrong(param: str, message: str, code: str | None = None) -> HTTPError:
    """Return the error of a field of the request.

    Args:
        param: Name of the field.
        message: What is wrong with it, after its name.
        code: Word by which clients tell errors apart.
    """
    return HTTPError(400, f"{param}{message}", param=param, code=code)
