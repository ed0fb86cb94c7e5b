"""What goes wrong between a client and the engine, in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse

from siftkv.engine.sampling_params import SamplingParams
from siftkv.errors import FormatError, PolicyError, RequestError, SiftKVError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}
_LONGEST_MESSAGE = 2000
# Labels that pydantic puts into a location for the branches of a union: they name types, not fields.
_BRANCHES = {"str", "int", "float", "bool", "dict", "list", "none", "tagged-union"}


class ApiError(Exception):
    """An answer that is not the one asked for.

    status: HTTP status. param: the request's field at fault. code: a word that programs can act on. retry_after:
    seconds after which a client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        # A message may repeat what a client sent: megabytes, and JSON can carry half characters that UTF-8 cannot.
        self.message = message[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode("utf-8")
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        headers: Mapping[str, str] = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse(self.body(), self.status, headers)


class Unavailable(SiftKVError):
    """The server is starting or draining; the request was not taken, or was ended by the shutdown."""


class QueueFull(SiftKVError):
    """More requests wait than the operator allows. retry_after: seconds, a guess at when there will be room."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDied(SiftKVError):
    """The engine's thread has ended by an error of its own: nothing can be served any more."""


def api_error(error: Exception) -> ApiError:
    """The answer that an exception calls for."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        return ApiError(429, str(error), code="queue_full", retry_after=error.retry_after)
    if isinstance(error, Unavailable):
        return ApiError(503, str(error), code="unavailable", retry_after=5)
    if isinstance(error, (PolicyError, FormatError)):
        return ApiError(400, str(error), "kv", "invalid_kv")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), _param_of(str(error)), "invalid_value")
    if isinstance(error, SiftKVError):
        return ApiError(500, str(error), code="engine_error")
    return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


_PARAMS = {field.name for field in fields(SamplingParams)}


def _param_of(message: str) -> str | None:
    """The field that an error is about: the first word of those of `SamplingParams`, else what was to be read."""
    first = re.split(r"\W", message, maxsplit=1)[0]
    if first in _PARAMS:
        return first
    if "messages" in message:
        return "messages"
    return "prompt" if "prompt" in message or "token id" in message else None


def validation_error(error: RequestValidationError) -> ApiError:
    """400 for a body that is no JSON object, 422 for one with fields of the wrong type; the first field is named."""
    problems: Sequence[Mapping[str, Any]] = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not valid JSON: {reason}".rstrip(": "), code="invalid_json")
    field = _field(first["loc"])
    if not field:
        return ApiError(400, "the body must be a JSON object: send it with Content-Type: application/json", code="body")
    reasons = dict.fromkeys(p["msg"] for p in problems if _field(p["loc"]).split("[")[0] == field.split("[")[0])
    text = " or ".join(reason.removeprefix("Value error, ") for reason in reasons)
    return ApiError(422, f"{field}: {text}", field, first["type"])


def _field(location: Sequence[str | int]) -> str:
    """`messages[0].role` of a pydantic location."""
    path = ""
    for part in location[1:]:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.isidentifier() or part in _BRANCHES:
            break
        else:
            path += f".{part}" if path else part
    return path
