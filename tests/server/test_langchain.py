"""LangChain's `ChatOpenAI` with another base URL."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server.live import MODEL, Live

langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


class Answer(BaseModel):
    """An answer."""

    model_config = ConfigDict(extra="forbid")  # else a random model adds properties for ever

    size: int = Field(ge=1, le=9)
    sure: bool


@pytest.fixture
def chat(live: Live) -> Any:
    return langchain_openai.ChatOpenAI(
        base_url=f"{live.url}/v1", api_key="none", model=MODEL, max_tokens=500, seed=1, max_retries=0
    )


def test_whole_and_streamed(chat: Any) -> None:
    limited = chat.bind(max_tokens=8)
    whole = limited.invoke("Hello")
    assert whole.usage_metadata["output_tokens"] <= 8
    assert "".join(chunk.text for chunk in limited.stream("Hello")) == whole.text


def test_structured_output(chat: Any) -> None:
    assert isinstance(chat.with_structured_output(Answer).invoke("Hello"), Answer)


def test_tools(chat: Any) -> None:
    [call] = chat.bind_tools([Answer], tool_choice="Answer").invoke("Hello").tool_calls
    assert call["name"] == "Answer"
    assert 1 <= call["args"]["size"] <= 9
