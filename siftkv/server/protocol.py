"""Request bodies: OpenAI's chat completions and completions, with vLLM's extensions and `kv`.

Every field that the `openai` client can send is either served, refused with a reason (`siftkv.server.sampling.refuse`),
or has no meaning here and is passed over (`user`, `store`, `metadata`, ...). Unknown fields are passed over too, wrong
types are not. A null means the same as a field that is not there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")
# A body may hold millions of wrong items, and pydantic makes a report of each unless the first one ends it.
Items = Annotated[list[T], Field(fail_fast=True)]
TokenIds = Items[int]


def _numbers(value: Any) -> Any:
    """The same for the values of an object, which pydantic would report one by one."""
    for key, number in value.items() if isinstance(value, dict) else ():
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"{str(key)[:20]!r} has a value that is no number")
    return value


Numbers = Annotated[dict[str, float], BeforeValidator(_numbers)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(_Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchema(_Body):
    name: str = "answer"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(_Body):
    """vLLM's `structured_outputs`: one of them."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Items[str] | None = None
    grammar: str | None = None


class Generate(_Body):
    """What chat completions and completions have in common."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Numbers | None = None
    seed: int | None = None
    stop: str | Items[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None

    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    structured_outputs: StructuredOutputs | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    add_special_tokens: bool | None = None

    # vLLM's that would change the output and are refused
    allowed_token_ids: Any = None
    bad_words: Any = None
    truncate_prompt_tokens: Any = None
    skip_special_tokens: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    # SiftKV's
    kv: str | None = None


class ContentPart(_Body):
    """A part of a message's content; parts other than text are refused when the chat is rendered."""

    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(_Body):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(_Body):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Body):
    role: str
    content: str | Items[ContentPart] | None = None
    name: str | None = None
    tool_calls: Items[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Function(_Body):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function


class NamedFunction(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatCompletionRequest(Generate):
    """Body of `POST /v1/chat/completions`."""

    messages: Items[Message]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Items[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Items[dict[str, Any]] | None = None
    modalities: Items[str] | None = None
    audio: Any = None
    web_search_options: Any = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(Generate):
    """Body of `POST /v1/completions`."""

    prompt: str | Items[str] | TokenIds | Items[TokenIds]
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class TokenizeRequest(_Body):
    """Body of `POST /tokenize`: a prompt, or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Items[Message] | None = None
    tools: Items[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(_Body):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
