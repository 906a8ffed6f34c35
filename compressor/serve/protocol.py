"""OpenAI's requests: what is understood, what changes nothing, and what is refused by name."""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from compressor.errors import CompressError, UsageError, brief
from compressor.serve.worker import Closed

HARMLESS = frozenset(
    {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
    | {"prediction", "parallel_tool_calls"}
)
"""Keys that are accepted although nothing reads them: they do not change what an answer says."""
NEUTRAL: dict[str, list[Any]] = {"n": [1], "presence_penalty": [0], "frequency_penalty": [0], "logit_bias": [{}]}
"""Keys that are not implemented, and their values that ask for nothing. null does so for every key."""


class ApiError(Exception):
    """An answer with an HTTP status and OpenAI's error object."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @classmethod
    def of(cls, error: Exception) -> "ApiError":
        """What a client may know of an error of the decoder."""
        if isinstance(error, UsageError):
            key = str(error).split(":")[0]
            return cls(400, str(error), key if key.isidentifier() else None)
        if isinstance(error, Closed):
            return cls(503, str(error))
        if isinstance(error, CompressError):
            return cls(500, str(error))
        return cls(500, f"the server failed ({type(error).__name__}); its log says where")

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


class _Lenient(BaseModel):
    """Types are exact, and null is the same as leaving a key out. Keys that nothing reads are refused unless they are
    `HARMLESS` or have a neutral value."""

    model_config = ConfigDict(strict=True)
    neutral: ClassVar[Mapping[str, list[Any]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_read(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {key: value for key, value in data.items() if value is not None}
        read = {field.alias or name for name, field in cls.model_fields.items()}
        for key, value in given.items():
            neutral = cls.neutral.get(key, [])
            if key not in read and key not in HARMLESS and not any(_same(value, known) for known in neutral):
                remedy = f"it can only be {neutral[0]!r}" if neutral else "leave it out"
                raise ApiError(400, f"{key}: {brief(value)} is not supported here; {remedy}", key, "unsupported_value")
        return given


def _same(value: Any, known: Any) -> bool:
    """Equal as JSON has it: to Python, True is 1 and False is 0."""
    return value == known and isinstance(value, bool) == isinstance(known, bool)


class StreamOptions(_Lenient):
    neutral = {"include_obfuscation": [False, True]}
    include_usage: bool = False


class JsonSchema(_Lenient):
    neutral = {"strict": [False, True]}
    name: str = ""
    description: str = ""
    schema_: Annotated[dict[str, Any] | bool, Field(alias="schema")]


class ResponseFormat(_Lenient):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Body(_Lenient):
    """What both endpoints take. `top_k`, `min_p`, `repetition_penalty` and `guided_regex` are vLLM's names."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: Annotated[int, Field(ge=-1)] = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: str | list[str] = []
    response_format: ResponseFormat | None = None
    guided_regex: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, data: Any) -> Any:
        """JSON can escape half a surrogate pair, which neither tokenizers nor answers can hold. Bytes are what is not
        called JSON, by curl --data for instance."""
        if isinstance(data, bytes):
            raise ApiError(415, "Content-Type: the body is not said to be JSON; send Content-Type: application/json")
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ApiError(400, "the body holds half a surrogate pair (\\ud800 to \\udfff), which is no text") from None
        return data

    @property
    def limit(self) -> int | None:
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        """The stop strings. Raises ApiError for more than four or an empty one."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        if len(stops) > 4 or "" in stops:
            raise ApiError(400, f"stop: {brief(self.stop)} is not one to four strings, none of them empty", "stop")
        return stops


class CompletionBody(Body):
    neutral = {**NEUTRAL, "best_of": [1], "echo": [False]}
    prompt: str | list[int] | list[str] | list[list[int]]


class TextPart(_Lenient):
    type: Literal["text"]
    text: str


class Message(_Lenient):
    neutral = {"tool_calls": [[]], "annotations": [[]]}
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """As chat templates take it. They know nothing of `developer`, OpenAI's newer word for `system`."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        named = {} if self.name is None else {"name": self.name}
        return {"role": "system" if self.role == "developer" else self.role, "content": content, **named}


class ChatBody(Body):
    neutral = {
        **NEUTRAL,
        "logprobs": [False],
        "top_logprobs": [0],
        "tools": [[]],
        "tool_choice": ["none", "auto"],
        "functions": [[]],
        "function_call": ["none", "auto"],
        "modalities": [["text"]],
    }
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def invalid(errors: Iterable[Mapping[str, Any]]) -> ApiError:
    """pydantic's errors as one: those of the first place, for a union says what each of its members missed."""
    found: dict[str, list[str]] = {}
    for error in errors:
        if error["type"] == "json_invalid":
            return ApiError(400, f"the body is not JSON: {error['ctx']['error']}")
        parts = [str(part) for part in error["loc"][1:]]
        reasons = found.setdefault(".".join(part for part in parts if part != "str" and "[" not in part), [])
        reason = error["msg"][:1].lower() + error["msg"][1:]
        if reason not in reasons:
            reasons.append(reason)
    place, reasons = next(iter(found.items()))
    return ApiError(400, f"{place or 'the body'}: {' or '.join(reasons)}", place.split(".")[0] or None)
