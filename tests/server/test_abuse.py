"""Bodies that are made to hurt: huge, deep, or naming what is not the client's to say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from siftkv.engine.grammar import GrammarCompiler
from siftkv.errors import PolicyError
from siftkv.server.protocol import ChatCompletionRequest, CompletionRequest
from siftkv.server.settings import AllowedKv
from tests.server.live import MODEL, Live, byte_tokenizer
from tests.server.test_http import error


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [1.5] * 300_000},
        {"prompt": "a", "stop": [1] * 300_000},
        {"prompt": "a", "logit_bias": {str(i): "x" for i in range(100_000)}},
        {"prompt": "a", "structured_outputs": {"choice": [{}] * 300_000}},
        {"messages": [{}] * 300_000},
        {"messages": [{"role": "user", "content": [{}] * 300_000}]},
        {"messages": [], "tools": [1] * 300_000},
    ],
    ids=lambda body: str(body)[:40],
)
def test_of_a_million_wrong_items_the_first_is_reported(body: dict[str, Any]) -> None:
    kind = ChatCompletionRequest if "messages" in body else CompletionRequest
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= 4


@pytest.mark.parametrize("key", ["--5", "\u00b2", "9" * 5000, "x", "\ud800", ""], ids=ascii)
def test_keys_of_logit_bias_that_are_no_token(live: Live, key: str) -> None:
    body = json.dumps({"prompt": "a", "logit_bias": {key: 1}})
    answer = httpx.post(f"{live.url}/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert error(answer, 400)["param"] == "logit_bias"


@pytest.mark.parametrize("name", ["messages", "self", "conversation", "tools"])
def test_settings_that_are_not_the_templates(live: Live, name: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {name: []}}
    for path in ("/v1/chat/completions", "/tokenize"):
        assert error(live.post(path, body), 400)["param"] == "chat_template_kwargs"


def test_deep_json_inside_strings(live: Live) -> None:
    deep = "[" * 100_000
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}
    assert error(live.post("/v1/chat/completions", {"messages": [call]}), 400)["param"].startswith("messages[0]")
    body = {"prompt": "a", "structured_outputs": {"json": deep}}
    assert error(live.post("/v1/completions", body), 400)["param"] == "structured_outputs"


def test_more_than_the_queue_ever_holds_is_no_reason_to_try_again(live: Live) -> None:
    for body in ({"prompt": ["a"] * 2000}, {"prompt": ["a"] * 20, "n": 100}):
        assert "retry-after" not in live.post("/v1/completions", body).headers
        assert "at a time" in error(live.post("/v1/completions", body), 400)["message"]


def test_lists_that_every_token_is_held_against_are_short(live: Live) -> None:
    biases = {str(token): 1.0 for token in range(3000)}
    for name, value in (
        ("stop", [f"q{i}" for i in range(200)]),
        ("stop_token_ids", list(range(3000))),
        ("logit_bias", biases),
    ):
        assert error(live.post("/v1/completions", {"prompt": "a", name: value}), 400)["param"] == name


def test_text_that_no_context_holds_is_not_tokenized(live: Live) -> None:
    text = "a" * (live.worker.llm.engine.max_model_len * 20)
    for path, body in (("/v1/completions", {"prompt": text}), ("/tokenize", {"prompt": text})):
        found = error(live.post(path, body), 400)
        assert found["param"] == "prompt"
        assert "characters" in found["message"]


def test_errors_do_not_send_megabytes_back(live: Live) -> None:
    for field in ("kv", "model"):
        answer = live.post("/v1/completions", {"prompt": "a", field: "x" * 1_000_000})
        assert len(answer.content) < 5000
        error(answer, answer.status_code)


@pytest.mark.parametrize("kv", ["profile:/dev/zero", " profile : x", "duo:heads=/dev/zero", "duo:window=8, heads = x"])
def test_no_request_makes_the_server_read_a_file(live: Live, kv: str) -> None:
    found = error(live.post("/v1/completions", {"prompt": "a", "kv": kv}), 400)
    assert found["code"] == "invalid_kv"
    assert "file" in found["message"]


def test_an_operator_may_allow_one_file(tmp_path: Path) -> None:
    file = tmp_path / "heads.json"
    file.write_text("[[1.0, 0.0], [0.0, 1.0]]")
    allowed = AllowedKv(["duo", f"duo:heads={file}"])
    assert allowed.parse(f"duo:heads={file}").name == "duo"
    assert allowed.parse("duo:window=32").name == "duo"
    other = tmp_path / "other.json"
    other.write_text(file.read_text())
    with pytest.raises(PolicyError, match="cannot name a file"):
        allowed.parse(f"duo:heads={other}")


def test_an_empty_model_is_the_one_that_is_served(live: Live) -> None:
    assert live.post("/v1/completions", {"prompt": "a", "model": "", "max_tokens": 1}).json()["model"] == MODEL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bad_words", ["a"]),
        ("allowed_token_ids", [5]),
        ("truncate_prompt_tokens", 3),
        ("skip_special_tokens", False),
        ("guided_json", {"type": "object"}),
        ("guided_choice", ["a", "b"]),
    ],
)
def test_what_would_change_the_output_is_not_passed_over(live: Live, name: str, value: Any) -> None:
    assert error(live.post("/v1/completions", {"prompt": "a", name: value}), 400)["param"] == name
    harmless = {"skip_special_tokens": True}.get(name)
    assert live.post("/v1/completions", {"prompt": "a", "max_tokens": 1, name: harmless}).status_code == 200


class TestGrammars:
    """What a request can make of a grammar must neither stop the engine nor keep it busy."""

    @pytest.mark.parametrize(
        "outputs",
        [
            {"regex": "|".join(f"w{i}" for i in range(20_000))},
            {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}},
            {"json": {"$ref": "#"}},
            {"json": "[1]"},
            {"grammar": "start: start"},
            {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
        ],
        ids=lambda outputs: str(outputs)[:40],
    )
    def test_refused(self, live: Live, outputs: dict[str, Any]) -> None:
        found = error(live.post("/v1/completions", {"prompt": "a", "structured_outputs": outputs}), 400)
        assert found["param"] == "structured_outputs"

    def test_a_step_is_bounded(self, live: Live) -> None:
        """This pattern takes gigabytes and seconds a token without a limit; its request alone fails."""
        body = {"prompt": "a", "max_tokens": 5, "structured_outputs": {"regex": "((a{1000}){1000}){1000}"}}
        found = error(live.post("/v1/completions", body), 400)
        assert "NaN" not in found["message"]
        assert live.get("/health").status_code == 200

    def test_a_limit_that_is_met_on_the_way_is_told_in_the_stream(self, live: Live) -> None:
        grammar = 'start: "a" /((a{1000}){1000}){1000}/'
        body = {"prompt": "a", "max_tokens": 9, "stream": True, "structured_outputs": {"grammar": grammar}}
        first, *_, last, done = live.post("/v1/completions", body).text.strip().split("\n\n")
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "a"
        assert "the grammar cannot go on" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert done == "data: [DONE]"

    @pytest.mark.parametrize(
        "options", [[f"c{i}" for i in range(3000)], ["", 'a"b\\c'], [""], ["\u2028", "é😀"]], ids=len
    )
    def test_choices(self, live: Live, options: list[str]) -> None:
        body = {"prompt": "a", "max_tokens": 20, "structured_outputs": {"choice": options}}
        answer = live.post("/v1/completions", body)
        assert answer.json()["choices"][0]["text"] in options

    def test_compiled_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compiling takes up to a second: the engine's thread only copies."""
        tokenizer = byte_tokenizer()
        grammar = GrammarCompiler(tokenizer, 260, (0, 3)).choice(["a", "b"])
        monkeypatch.delattr("llguidance.LLMatcher")
        a, b = tokenizer.convert_tokens_to_ids(["a", "b"])
        first, second = grammar.start(), grammar.start()
        assert first.allowed([], 260).nonzero().flatten().tolist() == [a, b]
        assert a not in first.allowed([a], 260).nonzero().flatten().tolist()
        assert second.allowed([], 260).nonzero().flatten().tolist() == [a, b]
