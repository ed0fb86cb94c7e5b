"""What surrounds a request: errors in OpenAI's shape, keys, sizes, origins, ids, logs, and the state of the server."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from siftkv.errors import ModelError
from siftkv.server.logs import JsonFormatter
from siftkv.server.settings import ServerSettings
from tests.server.live import MODEL, Live, byte_llm, wait_for

KEY = "s3cret"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    settings = ServerSettings(
        model_names=("first", "second"),
        api_keys=("other", KEY),
        max_body_bytes=2000,
        cors_origins=("https://a.example",),
        allow_kv=("full", "diffkv:window=8,sinks=2"),
    )
    server = Live(byte_llm(), settings).ready()
    yield server
    server.close()


def error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    found: dict[str, Any] = answer.json()["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert found["message"]
    return found


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": True}, "temperature"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stop": 5}, "stop"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": "a", "kv": 5}, "kv"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "response_format.type"),
    ],
    ids=str,
)
def test_wrong_types_name_the_field(live: Live, body: dict[str, Any], param: str) -> None:
    found = error(live.post("/v1/completions", body), 422)
    assert found["param"] is not None
    assert found["param"].split("[")[0] == param
    assert param in found["message"]


def test_wrong_messages_name_the_place(live: Live) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": 5}]}
    found = error(live.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}, message]}), 422)
    assert found["param"].startswith("messages[1].content")
    assert error(live.post("/v1/chat/completions", {"messages": []}), 400)["param"] == "messages"
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
    found = error(live.post("/v1/chat/completions", {"messages": [call]}), 400)
    assert found["param"] == "messages[0].tool_calls[0].function.arguments"
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"chat_template": "x"}}
    assert error(live.post("/v1/chat/completions", body), 400)["param"] == "chat_template_kwargs"


@pytest.mark.parametrize("content", ["", "{", "[1]", "null", '"text"', "\x00", '{"prompt": "a"} x'])
def test_bodies_that_are_no_json_object(live: Live, content: str) -> None:
    answer = httpx.post(f"{live.url}/v1/completions", content=content, headers={"Content-Type": "application/json"})
    error(answer, 400)


@pytest.mark.parametrize(
    "body",
    [
        '{"prompt": "a\\ud800"}',
        '{"prompt": ["a", "\\udc00b"]}',
        '{"prompt": "a", "model": "\\ud800"}',
        '{"prompt": "a", "kv": "\\ud800"}',
        '{"prompt": "a", "structured_outputs": {"regex": "\\ud800"}}',
        '{"prompt": "a", "structured_outputs": {"json": "{"}}',
        '{"prompt": "a", "temperature": NaN}',
        '{"prompt": "a", "top_p": -Infinity}',
        '{"prompt": "a", "seed": 1' + "0" * 5000 + "}",
        '{"prompt": [1' + "0" * 30 + "]}",
        '{"prompt": ' + "[" * 5000 + "]" * 5000 + "}",
    ],
    ids=lambda body: body[:50],
)
def test_odd_values(live: Live, body: str) -> None:
    answer = httpx.post(f"{live.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error(answer, answer.status_code)
    assert answer.status_code in (400, 404, 422)


def test_a_chat_with_half_a_character(live: Live) -> None:
    content = '{"messages": [{"role": "user", "content": "\\ud800"}], "stop": "\\ud800"}'
    answer = httpx.post(
        f"{live.url}/v1/chat/completions", content=content, headers={"Content-Type": "application/json"}
    )
    error(answer, 400)


def test_unknown_paths_and_methods(live: Live) -> None:
    error(live.get("/v1/nothing"), 404)
    error(live.get("/v1/completions"), 405)


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics", "/v1/models", "/", "/docs"])
def test_head_is_get_without_a_body(live: Live, path: str) -> None:
    asked, whole = httpx.head(live.url + path), live.get(path)
    assert (asked.status_code, asked.content) == (200, b"")
    assert asked.headers["content-type"] == whole.headers["content-type"]
    assert int(asked.headers["content-length"]) > 0


def test_head_where_nothing_can_be_got(live: Live) -> None:
    paths = ("/v1/nothing", "/v1/completions", "/api/stream")
    assert [httpx.head(live.url + path).status_code for path in paths] == [404, 405, 405]


def test_unknown_fields_are_passed_over(live: Live) -> None:
    assert live.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "colour": "red"}).status_code == 200


def test_request_ids(live: Live) -> None:
    assert live.get("/version", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    made = {live.get("/version", headers={"x-request-id": "with blank"}).headers["x-request-id"] for _ in range(2)}
    assert len(made) == 2
    assert live.get("/v1/nothing").headers["x-request-id"]


def test_logs_have_figures_and_no_prompt(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "siftkv.server")
    live.post("/v1/completions", {"prompt": "confidential", "max_tokens": 3}, headers={"x-request-id": "abc"})
    wait_for(lambda: bool(caplog.records))
    [record] = caplog.records
    line = json.loads(JsonFormatter().format(record))
    assert (line["message"], line["request_id"], line["status"]) == ("request", "abc", 200)
    assert line["usage"]["completion_tokens"] <= 3
    assert line["usage"]["kv"]["physical_bytes"] > 0
    assert "confidential" not in caplog.text


def test_prompts_are_logged_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "siftkv.server")
    server = Live(byte_llm(), ServerSettings(log_prompts=True)).ready()
    server.post("/v1/completions", {"prompt": "confidential", "max_tokens": 1})
    server.close()
    assert any("confidential" in JsonFormatter().format(record) for record in caplog.records)


class TestGuards:
    auth: dict[str, str] = {"Authorization": f"Bearer {KEY}"}  # noqa: RUF012

    @pytest.mark.parametrize("given", [None, "Bearer wrong", f"Basic {KEY}", KEY, "Bearer x", "Bearer \u00e9"])
    def test_a_key_is_asked_for(self, guarded: Live, given: str | None) -> None:
        headers = {} if given is None else {"Authorization": given.encode("latin-1")}
        for path in ("/v1/models", "/metrics", "/api/snapshot", "/version"):
            answer = guarded.get(path, headers=headers)
            assert error(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        error(guarded.post("/v1/completions", {"prompt": "a"}, headers=headers), 401)

    def test_health_and_the_page_are_open(self, guarded: Live) -> None:
        for path in ("/health", "/ready", "/"):
            assert guarded.get(path).status_code == 200

    def test_the_openai_client_with_and_without_key(self, guarded: Live) -> None:
        good = OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0)
        assert [model.id for model in good.models.list()] == ["first", "second"]
        assert good.completions.create(model="second", prompt="a", max_tokens=1).model == "second"
        with pytest.raises(AuthenticationError):
            OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0).models.list()

    def test_large_bodies(self, guarded: Live) -> None:
        found = error(guarded.post("/v1/completions", {"prompt": "a" * 3000}, headers=self.auth), 413)
        assert found["code"] == "body_too_large"

        def pieces() -> Iterator[bytes]:
            for _ in range(30):
                yield b" " * 100

        url = f"{guarded.url}/v1/completions"
        streamed = httpx.post(url, content=pieces(), headers=self.auth | {"Content-Type": "application/json"})
        assert error(streamed, 413)["code"] == "body_too_large"

    def test_origins(self, guarded: Live, live: Live) -> None:
        ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        allowed = httpx.options(f"{guarded.url}/v1/completions", headers=ask)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(f"{guarded.url}/v1/completions", headers=ask | {"Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers
        off = httpx.get(f"{live.url}/v1/models", headers={"Origin": "https://a.example"})
        assert "access-control-allow-origin" not in off.headers

    @pytest.mark.parametrize(
        ("kv", "status"),
        [("full", 200), ("full:window=8", 200), ("diffkv:window=8,sinks=2", 200), ("diffkv:window=9", 400)],
    )
    def test_policies_are_the_operators_choice(self, guarded: Live, kv: str, status: int) -> None:
        answer = guarded.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "kv": kv}, headers=self.auth)
        assert answer.status_code == status
        if status != 200:
            assert error(answer, status)["param"] == "kv"


class TestState:
    def test_while_the_model_is_loaded_and_after_it_could_not_be(self) -> None:
        import threading

        go_on = threading.Event()

        def load() -> Any:
            go_on.wait(20)
            raise ModelError("there is no such model")

        server = Live(load)
        wait_for(lambda: server.server.started)
        assert server.get("/health").status_code == 503
        assert server.get("/ready").json() == {"status": "starting"}
        answer = server.post("/v1/completions", {"prompt": "a"})
        assert "still being loaded" in error(answer, 503)["message"]
        assert int(answer.headers["Retry-After"]) > 0
        error(server.get("/v1/models"), 503)
        go_on.set()
        wait_for(lambda: server.worker.state == "failed")
        assert server.get("/health").status_code == 500
        assert "there is no such model" in error(server.post("/v1/completions", {"prompt": "a"}), 500)["message"]
        server.close()

    def test_a_full_queue(self) -> None:
        server = Live(byte_llm(max_num_seqs=2), max_queue=1).ready()
        long = {"prompt": "a", "n": 3, "max_tokens": 1900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=long) as stream:
            lines = stream.iter_lines()
            next(lines)
            answer = server.post("/v1/completions", {"prompt": "a"})
            assert error(answer, 429)["type"] == "rate_limit_error"
            assert int(answer.headers["Retry-After"]) >= 1
        wait_for(lambda: not server.worker.in_system)
        assert server.post("/v1/completions", {"prompt": "a", "n": 3, "max_tokens": 2}).status_code == 200
        server.check_settled()
        server.close()

    def test_an_engine_that_fails_says_so_to_everybody(self, caplog: pytest.LogCaptureFixture) -> None:
        llm = byte_llm()
        server = Live(llm).ready()
        step, calls = llm.engine.step, []

        def failing() -> Any:
            calls.append(1)
            if len(calls) == 4:
                raise RuntimeError("out of luck")
            return step()

        llm.engine.step = failing  # type: ignore[method-assign]
        body = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}
        streamed = server.post("/v1/completions", body | {"stream": True})
        [*_, last, done] = [x.removeprefix("data: ") for x in streamed.text.split("\n\n") if x]
        assert done == "[DONE]"
        assert "out of luck" in json.loads(last)["error"]["message"]
        assert "out of luck" in error(server.post("/v1/completions", body), 500)["message"]
        assert server.get("/health").status_code == 500
        assert MODEL in server.get("/v1/models").text
        server.close()

    def test_one_request_that_fails_leaves_the_others_alone(self) -> None:
        server = Live(byte_llm(kv_cache_memory_bytes=600_000, max_model_len=1000, max_num_seqs=2, kv="full")).ready()
        answer = server.post("/v1/completions", {"prompt": "x" * 900, "max_tokens": 99, "ignore_eos": True})
        found = error(answer, 500)
        assert "kv_cache_memory_bytes" in found["message"]
        assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 2}).status_code == 200
        server.check_settled()
        server.close()
