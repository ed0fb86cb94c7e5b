"""From a checked body to a generation: model, policy, prompt, sampling, grammar."""

from __future__ import annotations

import logging
import time
import uuid
from typing import Any

from siftkv.engine.guide import Guide
from siftkv.engine.sampling_params import SamplingParams
from siftkv.policies import Policy
from siftkv.server.answer_chat import ChatAnswer
from siftkv.server.answer_text import TextAnswer
from siftkv.server.chat import active_tools, render
from siftkv.server.errors import ApiError
from siftkv.server.generation import Generation, GenerationRequest
from siftkv.server.guides import guide_for
from siftkv.server.logs import FIELDS
from siftkv.server.protocol import ChatCompletionRequest, CompletionRequest
from siftkv.server.renderer import Renderer
from siftkv.server.respond import Answer, Record
from siftkv.server.sampling import check_context, sampling_params
from siftkv.server.settings import AllowedKv, ServerSettings
from siftkv.server.worker import EngineWorker

_log = logging.getLogger("siftkv.server")
Body = ChatCompletionRequest | CompletionRequest


class Service:
    """What the handlers share: the worker, the settings, and the model's renderer once it is loaded."""

    def __init__(self, worker: EngineWorker, settings: ServerSettings) -> None:
        self.worker = worker
        self.settings = settings
        self.allowed = AllowedKv(settings.allow_kv)
        self._renderer: Renderer | None = None

    @property
    def renderer(self) -> Renderer:
        """Raises Unavailable while the model is being loaded."""
        if self._renderer is None:
            self._renderer = Renderer(self.worker.llm)
        return self._renderer

    def prepare(self) -> None:
        """Make the renderer, so that the first request does not wait for it."""
        self.renderer  # noqa: B018

    def close(self) -> None:
        if self._renderer is not None:
            self._renderer.close()

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names under which the model is served; the first is reported."""
        return self.settings.model_names or (self.worker.llm.model.name,)

    def check_model(self, name: str | None) -> str:
        """The name to report. Raises ApiError for a model that is not served; none stands for the only one."""
        if name and name not in self.model_names:
            served = ", ".join(self.model_names)
            raise ApiError(
                404, f"there is no model {name!r} here: this server has {served}", "model", "model_not_found"
            )
        return name or self.model_names[0]

    async def chat(self, body: ChatCompletionRequest, record: Record) -> tuple[Generation, Answer]:
        """Submit a chat. Raises ApiError, or a SiftKVError that `api_error` knows."""
        model, policy = self._begin(body)
        tools = active_tools(body)
        if tools and not self.renderer.knows_tools:
            message = "this model's chat template does not know tools: leave them out, or serve a model that calls them"
            raise ApiError(400, message, "tools", "tools_not_supported")
        guide = await self._guide(body)
        params = self._params(body, guide)
        self.worker.check_room(params.n)
        text, ids = await self.renderer.run(render, body, self.renderer)
        self._log_prompt(record, text)
        head = self._head("chatcmpl", model)
        names = [tool.function.name for tool in tools] if tools else None
        most = 1 if body.parallel_tool_calls is False else None
        answer = ChatAnswer(head, self.renderer, params.n, names, most)
        return await self._submit([GenerationRequest(ids, params, policy, text)], answer, body, record), answer

    async def complete(self, body: CompletionRequest, record: Record) -> tuple[Generation, Answer]:
        """Submit one or several prompts. Raises ApiError, or a SiftKVError that `api_error` knows."""
        model, policy = self._begin(body)
        params = self._params(body, await self._guide(body))
        prompts = _prompts(body)
        self.worker.check_room(len(prompts) * params.n)
        special = body.add_special_tokens is not False
        requests = []
        for prompt in prompts:
            text = prompt if isinstance(prompt, str) else None
            ids = prompt if not isinstance(prompt, str) else await self._encode(prompt, special)
            requests.append(GenerationRequest(ids, params, policy, text))
            self._log_prompt(record, text if text is not None else ids)
        answer = TextAnswer(self._head("cmpl", model), self.renderer, params.n)
        return await self._submit(requests, answer, body, record), answer

    async def _encode(self, text: str, special: bool) -> list[int]:
        return await self.renderer.run(self.renderer.encode, text, special)

    def _begin(self, body: Body) -> tuple[str, Policy]:
        self.worker.check_open()
        model = self.check_model(body.model)
        llm = self.worker.llm
        return model, llm.kv if body.kv is None else self.allowed.parse(body.kv)

    async def _guide(self, body: Body) -> Guide | None:
        return await self.renderer.run(guide_for, body, self.renderer)

    def _params(self, body: Body, guide: Guide | None) -> SamplingParams:
        return sampling_params(body, self.worker.llm.model.generation, guide, self.settings.max_n)

    def _head(self, prefix: str, model: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def _submit(
        self, requests: list[GenerationRequest], answer: Answer, body: Body, record: Record
    ) -> Generation:
        for request in requests:
            check_context(len(request.prompt_ids), request.params, self.worker.llm.engine.max_model_len)
        record |= {
            "id": answer.head["id"],
            "kv": requests[0].policy.describe(),
            "prompt_tokens": sum(len(request.prompt_ids) for request in requests),
        }
        return await self.worker.submit(requests, answer.head["id"], whole=not body.stream)

    def _log_prompt(self, record: Record, prompt: str | list[int]) -> None:
        if self.settings.log_prompts:
            _log.info("prompt", extra={FIELDS: {"request_id": record["request_id"], "prompt": prompt}})


def _prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt must not be an empty list", "prompt", "invalid_value")
    return [prompt] if isinstance(prompt[0], int) else prompt
