"""The HTTP application: OpenAI's API in front of an `EngineWorker`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import FileResponse, Response

import siftkv
from siftkv.errors import SiftKVError
from siftkv.server import routes_generate, routes_model, stats
from siftkv.server.errors import ApiError, api_error, validation_error
from siftkv.server.middleware import ApiKey, BodyLimit, Head, RequestLog, TooLarge
from siftkv.server.service import Service
from siftkv.server.settings import ServerSettings
from siftkv.server.worker import EngineWorker

DASHBOARD = Path(__file__).parent / "dashboard"
OPEN_PATHS = ("/", "/health", "/ready", "/dashboard/*")
"""What needs no key: probes, and the page that asks for the key."""


def create_app(worker: EngineWorker, settings: ServerSettings | None = None) -> FastAPI:
    """An application for one worker, which the caller starts and stops.

    Raises PolicyError for an unknown policy in `settings.allow_kv`.
    """
    settings = settings or ServerSettings()
    service = Service(worker, settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    app = FastAPI(title="SiftKV", version=siftkv.__version__, lifespan=lifespan)
    app.state.service = service
    app.include_router(routes_generate.router(service))
    app.include_router(routes_model.router(service))
    app.include_router(stats.router(worker))
    _handle_errors(app)
    _add_middleware(app, settings)
    _add_dashboard(app)
    return app


def _add_dashboard(app: FastAPI) -> None:
    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(DASHBOARD / "index.html")

    app.mount("/dashboard", StaticFiles(directory=DASHBOARD))


def _handle_errors(app: FastAPI) -> None:
    async def known(request: Request, error: Exception) -> Response:
        return api_error(error).response()

    async def invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return validation_error(error).response()

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = error.detail
        if error.status_code == 404 and message == "Not Found":
            message = f"there is no {request.url.path} here: /docs lists what there is"
        code = "body_too_large" if isinstance(error, TooLarge) else None
        response = ApiError(error.status_code, str(message), code=code).response()
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ApiError, known)
    app.add_exception_handler(SiftKVError, known)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(HTTPException, http)


def _add_middleware(app: FastAPI, settings: ServerSettings) -> None:
    """The last one added is the outermost: preflight requests of browsers carry no key."""
    app.add_middleware(Head, endless=[stats.STREAM_PATH])
    app.add_middleware(BodyLimit, most=settings.max_body_bytes)
    if settings.api_keys:
        app.add_middleware(ApiKey, keys=settings.api_keys, open_paths=OPEN_PATHS)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestLog)
