"""What happens to every request before its handler: its id and its line in the log, the API key, the body's size."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Collection, Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from siftkv.server.errors import ApiError, api_error
from siftkv.server.logs import FIELDS

RECORD = "siftkv.record"
"""Key of the scope under which handlers leave what the log shall say."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")
_QUIET = {"/health", "/ready", "/metrics", "/api/snapshot"}
_log = logging.getLogger("siftkv.server")


class RequestLog:
    """Gives every request an id (the client's `x-request-id` where it sent one), and writes a line at its end. An
    exception that nothing handled becomes a 500 in OpenAI's shape.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        asked = Headers(scope=scope).get("x-request-id", "")
        record: dict[str, Any] = {"request_id": asked if _ID.fullmatch(asked) else uuid.uuid4().hex}
        scope[RECORD] = record
        begin, status = time.perf_counter(), 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record["request_id"]
            await send(message)

        try:
            await self.app(scope, receive, tagged)
        except Exception as error:
            _log.exception("a request failed", extra={FIELDS: {"request_id": record["request_id"]}})
            if not status:
                await api_error(error).response()(scope, receive, tagged)
        finally:
            level = logging.DEBUG if scope["path"] in _QUIET else logging.INFO
            line = {"method": scope["method"], "path": scope["path"], "status": status} | record
            line["seconds"] = round(time.perf_counter() - begin, 4)
            _log.log(level, "request", extra={FIELDS: line})


class Head:
    """Answers HEAD wherever GET is served, as probes of load balancers expect; uvicorn leaves the body out.

    endless: paths whose answers have no end.
    """

    def __init__(self, app: ASGIApp, endless: Collection[str] = ()) -> None:
        self.app = app
        self._endless = frozenset(endless)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD" and scope["path"] not in self._endless:
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


class ApiKey:
    """Asks for `Authorization: Bearer KEY`. keys: any of them will do. open_paths: need none; `/a/*` = all under it."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], open_paths: Collection[str]) -> None:
        self.app = app
        self._keys = [key.encode() for key in keys]
        self._open_paths = {path for path in open_paths if not path.endswith("*")}
        self._open_folders = tuple(path.removesuffix("*") for path in open_paths if path.endswith("*"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope["path"]) or self._allows(scope):
            await self.app(scope, receive, send)
            return
        error = ApiError(401, "a valid API key is needed: send Authorization: Bearer KEY", code="invalid_api_key")
        response = error.response()
        response.headers["WWW-Authenticate"] = "Bearer"
        await response(scope, receive, send)

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or path.startswith(self._open_folders)

    def _allows(self, scope: Scope) -> bool:
        kind, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        token = given.strip().encode("latin-1", "replace")
        # Every key is compared, in constant time: how long it takes tells nothing.
        matches = [hmac.compare_digest(token, key) for key in self._keys]
        return kind.lower() == "bearer" and any(matches)


class TooLarge(HTTPException):
    """A body that turns out to be above the limit while it is read; FastAPI lets only its own kind of error pass."""


class BodyLimit:
    """Refuses bodies of more than `most` bytes with 413, by their declared length or as they come."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdigit() and int(length) > self._most:
            await self._read_away(receive)
            await ApiError(413, self._message(), code="body_too_large").response()(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise TooLarge(413, self._message())
            return message

        await self.app(scope, counted, send)

    def _message(self) -> str:
        return f"the body is larger than the {self._most} bytes that this server takes"

    async def _read_away(self, receive: Receive) -> None:
        """Most clients read no answer before they have sent everything; those that send far too much may fail."""
        seen, more = 0, True
        while more and seen <= 4 * self._most:
            message = await receive()
            seen += len(message.get("body", b""))
            more = message.get("more_body", False)
