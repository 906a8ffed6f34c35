"""A client's request as requests of the decoder, or the reason why not."""

import asyncio
import json
import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from jinja2 import TemplateError

from compressor.decode.batch import Request
from compressor.decode.decoder import Decoder
from compressor.decode.law import Grammar, Law
from compressor.errors import UsageError
from compressor.serve.compiling import Compiler
from compressor.serve.protocol import ApiError, Body, ChatBody, CompletionBody

DEFAULT_MAX_TOKENS = 256
LARGEST_GRAMMAR = 256 * 1024
"""Bytes of a schema or an expression."""


@dataclass(frozen=True)
class Wanted:
    """The grammar that a body asks for, in its key `key`. `schema` counts where `pattern` is None."""

    key: str
    schema: dict[str, Any] | bool
    pattern: str | None


class Frontend:
    """Turns bodies into requests for `decoder`. Its methods raise ApiError naming the key at fault."""

    def __init__(self, tokenizer: Any, decoder: Decoder) -> None:
        self.tokenizer, self.decoder = tokenizer, decoder
        self._tokenizing, self.compiler = asyncio.Lock(), Compiler()

    async def requests(self, body: Body) -> list[Request]:
        """One request for every prompt, all of them with the body's seed; each with one of its own if it has none."""
        wanted = _wanted(body)
        async with self._tokenizing:  # tokenizers are not made for several threads, and long prompts would hold up all
            requests = await asyncio.to_thread(self._without_grammar, body)
            compile_it = None if wanted is None else await asyncio.to_thread(self._compilation, wanted)
        if wanted is None or compile_it is None:
            return requests
        compiled = await self.compiler.compile(wanted.key, compile_it)
        return [replace(request, law=replace(request.law, grammar=compiled)) for request in requests]

    def _without_grammar(self, body: Body) -> list[Request]:
        if isinstance(body, ChatBody):
            prompts, key = [self._chat(body)], "messages"
        else:
            assert isinstance(body, CompletionBody)
            prompts, key = self._prompts(body), "prompt"
        rooms = [self._room(body, prompt, key) for prompt in prompts]
        try:
            law = Law(
                temperature=body.temperature,
                top_k=body.top_k if body.top_k > 0 else None,  # 0 and -1 are vLLM's ways to switch it off
                top_p=body.top_p,
                min_p=body.min_p,
                repetition_penalty=body.repetition_penalty,
            )
        except UsageError as error:
            raise ApiError.of(error) from None
        seeds = [secrets.randbits(63) if body.seed is None else body.seed for _ in prompts]
        return [Request(prompt, room, law, seed) for prompt, room, seed in zip(prompts, rooms, seeds, strict=True)]

    def _compilation(self, wanted: Wanted) -> Callable[[], Grammar]:
        """What is left to do once the tokenizer has been read."""
        from compressor.decode import grammar  # llguidance is needed by those alone who ask for a grammar

        try:
            grammar.prepare(self.tokenizer)
        except UsageError as error:
            raise ApiError(400, f"{wanted.key}: {error}", wanted.key) from None
        rest = (self.tokenizer, self.decoder.vocab_size, self.decoder.stops)
        if wanted.pattern is not None:
            return partial(grammar.regex, wanted.pattern, *rest)
        return partial(grammar.json_schema, wanted.schema, *rest)

    def _chat(self, body: ChatBody) -> list[int]:
        if not self.tokenizer.chat_template:
            raise ApiError(400, "messages: the model has no chat template; use /v1/completions", "messages")
        messages = [message.plain() for message in body.messages]
        try:
            return self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except (TemplateError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise ApiError(400, f"messages: the model's chat template refuses them ({reason})", "messages") from None

    def _prompts(self, body: CompletionBody) -> list[list[int]]:
        prompt = body.prompt
        if isinstance(prompt, str) or not prompt or isinstance(prompt[0], int):
            given: list[Any] = [prompt]
        else:
            given = list(prompt)
        return [self.tokenizer(one).input_ids if isinstance(one, str) else one for one in given]

    def _room(self, body: Body, prompt: list[int], key: str) -> int:
        """How many tokens may be generated."""
        if not prompt:
            raise ApiError(400, f"{key}: it is empty; generation needs at least one token", key)
        outside = next((token for token in prompt if not 0 <= token < self.decoder.vocab_size), None)
        if outside is not None:
            raise ApiError(400, f"{key}: token {outside} is outside the vocabulary of {self.decoder.vocab_size}", key)
        positions = self.decoder.max_length
        if positions is None:
            return body.limit or DEFAULT_MAX_TOKENS
        if len(prompt) + (body.limit or 1) > positions:
            raise ApiError(
                400,
                f"{key}: {len(prompt)} tokens and {body.limit or 1} new ones exceed the model's maximum context length "
                f"of {positions} tokens; shorten the prompt or lower max_tokens",
                key,
                "context_length_exceeded",
            )
        return body.limit or min(DEFAULT_MAX_TOKENS, positions - len(prompt))


def _wanted(body: Body) -> Wanted | None:
    form, pattern = body.response_format, body.guided_regex
    schema: dict[str, Any] | bool | None = None
    if form is not None and form.type == "json_object":
        schema = {"type": "object"}
    elif form is not None and form.type == "json_schema":
        if form.json_schema is None:
            raise ApiError(400, "response_format: json_schema is missing", "response_format")
        schema = form.json_schema.schema_
    if schema is None and pattern is None:
        return None
    if schema is not None and pattern is not None:
        raise ApiError(400, "guided_regex: response_format is set too; choose one of them", "guided_regex")
    key = "guided_regex" if schema is None else "response_format"
    size = len((json.dumps(schema) if pattern is None else pattern).encode())
    if size > LARGEST_GRAMMAR:
        raise ApiError(
            400, f"{key}: a grammar of {size} bytes is too large; at most {LARGEST_GRAMMAR} are compiled", key
        )
    return Wanted(key, True if schema is None else schema, pattern)
