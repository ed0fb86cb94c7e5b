"""`/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from siftkv.server.generation import Generation
from siftkv.server.middleware import RECORD
from siftkv.server.protocol import ChatCompletionRequest, CompletionRequest, Generate
from siftkv.server.respond import Answer, EventStream, whole
from siftkv.server.service import Service


def router(service: Service) -> APIRouter:
    api = APIRouter(prefix="/v1", tags=["generate"])

    @api.post("/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        generation, answer = await service.chat(body, request.scope[RECORD])
        return await _respond(body, request, generation, answer)

    @api.post("/completions", response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        generation, answer = await service.complete(body, request.scope[RECORD])
        return await _respond(body, request, generation, answer)

    return api


async def _respond(body: Generate, request: Request, generation: Generation, answer: Answer) -> Response:
    record = request.scope[RECORD]
    if body.stream:
        return EventStream(generation, answer, body.stream_options, record)
    return await whole(generation, answer, request.receive, record)
