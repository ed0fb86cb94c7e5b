"""What the server is and how it feels: models, tokens, health, version, metrics."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

import siftkv
from siftkv.server.chat import plain_messages, template_settings, tool_schema
from siftkv.server.errors import ApiError
from siftkv.server.protocol import DetokenizeRequest, TokenizeRequest
from siftkv.server.service import Service

_HEALTH = {"starting": 503, "failed": 500, "stopped": 503}


def router(service: Service) -> APIRouter:
    api = APIRouter()
    _add_state(api, service)
    _add_models(api, service)
    _add_tokens(api, service)
    return api


def _add_state(api: APIRouter, service: Service) -> None:
    worker = service.worker

    @api.get("/health")
    async def health() -> JSONResponse:
        """200 while the engine lives, also while it drains; 503 while it starts; 500 when it has failed."""
        return JSONResponse({"status": worker.state}, _HEALTH.get(worker.state, 200))

    @api.get("/ready")
    async def ready() -> JSONResponse:
        """200 while new requests are taken."""
        return JSONResponse({"status": worker.state}, 200 if worker.state == "ready" else 503)

    @api.get("/version")
    async def version() -> dict[str, str]:
        return {"version": siftkv.__version__}

    @api.get("/metrics")
    async def metrics() -> Response:
        worker.snapshot()
        body, content_type = worker.metrics.render()
        return Response(body, headers={"Content-Type": content_type})


def _add_models(api: APIRouter, service: Service) -> None:
    created = int(time.time())

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "siftkv",
            "root": service.worker.llm.model.name,
            "max_model_len": service.worker.llm.engine.max_model_len,
            "kv": service.worker.llm.kv.describe(),
        }

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in service.model_names]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return card(service.check_model(name))

    @api.post("/v1/embeddings")
    async def embeddings() -> None:
        raise ApiError(400, "embeddings are not served: the model here generates text", code="unsupported_endpoint")

    @api.post("/v1/responses")
    async def responses() -> None:
        raise ApiError(400, "responses are not served: use /v1/chat/completions", code="unsupported_endpoint")


def _add_tokens(api: APIRouter, service: Service) -> None:
    @api.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", "prompt", "invalid_value")
        ids = await service.renderer.run(_tokenize, body, service)
        answer: dict[str, Any] = {
            "count": len(ids),
            "max_model_len": service.worker.llm.engine.max_model_len,
            "tokens": ids,
        }
        if body.return_token_strs:
            answer["token_strs"] = service.renderer.tokenizer.convert_ids_to_tokens(ids)
        return answer

    @api.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        service.check_model(body.model)
        return {"prompt": await service.renderer.run(service.renderer.decode, body.tokens)}


def _tokenize(body: TokenizeRequest, service: Service) -> list[int]:
    renderer = service.renderer
    if body.messages is None:
        return renderer.encode(body.prompt or "", body.add_special_tokens is not False)
    settings = template_settings(body.chat_template_kwargs)
    settings["add_generation_prompt"] = body.add_generation_prompt is not False
    if body.tools:
        settings["tools"] = [tool_schema(tool) for tool in body.tools]
    text = renderer.chat(plain_messages(body.messages), **settings)
    return renderer.encode(text, bool(body.add_special_tokens))
