"""From the worker's events to OpenAI's objects, whole or as a stream of chunks."""

import asyncio
import json
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from compressor.decode.batch import Request
from compressor.detokenize import Detokenizer
from compressor.serve.protocol import ApiError
from compressor.serve.stop_strings import StopStrings
from compressor.serve.worker import Event, Worker


class ChoiceText:
    """One text of an answer: what its tokens spell (see `Detokenizer`), up to a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str], after: Sequence[int] = ()) -> None:
        self.tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer, self._stops = Detokenizer(tokenizer, after), StopStrings(stops)

    def take(self, event: Event) -> str:
        """The text that `event` adds. With the last one `finish_reason` is set."""
        text = ""
        for i, token in enumerate(event.tokens):  # one by one: tokens behind a stop string do not count
            self.tokens += 1
            stop = event.stop if i + 1 == len(event.tokens) else None
            text += self._stops.add(self._detokenizer.add([token], stop))
            if self._stops.found:
                self.finish_reason = "stop"
                return text
        if event.stop is not None:
            text += self._stops.add(self._detokenizer.finish())
            text += self._stops.finish()
            self.finish_reason = "length" if event.stop == "length" and not self._stops.found else "stop"
        return text


class Answer:
    """The answer to `requests`, generated side by side.

    `collect` or `stream` runs it, once.
    """

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def __init__(
        self, worker: Worker, tokenizer: Any, requests: Sequence[Request], stops: Sequence[str], model: str
    ) -> None:
        self._worker, self._requests, self._model = worker, requests, model
        self._choices = [ChoiceText(tokenizer, stops, self.continued(request)) for request in requests]
        self._id = f"{self.prefix}-{secrets.token_hex(12)}"
        self._created = int(time.time())

    def continued(self, request: Request) -> Sequence[int]:
        """The tokens that the text continues."""
        return request.token_ids

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a stream's first chunk, if it has one without text."""
        return None

    def whole(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A choice of the whole answer."""
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def delta(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        """A choice of a stream's chunk."""
        return self.whole(index, text, reason)

    async def collect(self) -> dict[str, Any]:
        """The whole answer. Raises ApiError."""
        texts = [""] * len(self._choices)
        async with aclosing(self._pieces()) as pieces:
            async for index, text in pieces:
                texts[index] += text
        choices = [
            self.whole(index, text, choice.finish_reason)
            for index, (text, choice) in enumerate(zip(texts, self._choices, strict=True))
        ]
        return {**self._object(self.kind, choices), "usage": self._usage()}

    async def stream(self, include_usage: bool) -> AsyncGenerator[str, None]:
        """Server-sent events; an error is one of them."""
        usage = {"usage": None} if include_usage else {}

        def chunk(choice: dict[str, Any]) -> str:
            return _event({**self._object(self.chunk_kind, [choice]), **usage})

        for index in range(len(self._choices)):
            opening = self.opening(index)
            if opening is not None:
                yield chunk(opening)
        try:
            async with aclosing(self._pieces()) as pieces:
                async for index, text in pieces:
                    reason = self._choices[index].finish_reason
                    if text or reason:
                        yield chunk(self.delta(index, text, reason))
            if include_usage:
                yield _event({**self._object(self.chunk_kind, []), "usage": self._usage()})
        except ApiError as error:
            yield _event(error.body())
        yield "data: [DONE]\n\n"

    async def _pieces(self) -> AsyncGenerator[tuple[int, str], None]:
        """Index and new text of a choice, as they come. What has not ended when this is closed is cancelled."""
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Event]]()
        handles = []
        try:
            for index, request in enumerate(self._requests):

                def deliver(event: Event, index: int = index) -> None:
                    loop.call_soon_threadsafe(queue.put_nowait, (index, event))

                handles.append(self._worker.submit(request, deliver))
            while any(choice.finish_reason is None for choice in self._choices):
                index, event = await queue.get()
                choice = self._choices[index]
                if choice.finish_reason is not None:
                    continue  # a stop string has ended it, and the worker did not know yet
                if event.error is not None:
                    raise ApiError.of(event.error)
                text = choice.take(event)
                if choice.finish_reason is not None:
                    self._worker.cancel(handles[index])
                yield index, text
        finally:
            for handle in handles:
                self._worker.cancel(handle)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model, "choices": choices}

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(request.token_ids) for request in self._requests)
        completion = sum(choice.tokens for choice in self._choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class ChatAnswer(Answer):
    """The same as a message of the assistant."""

    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def continued(self, request: Request) -> Sequence[int]:
        return ()  # a message is a text of its own

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._delta(index, {"role": "assistant", "content": ""}, None)

    def whole(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}

    def delta(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        return self._delta(index, {"content": text} if text else {}, reason)

    def _delta(self, index: int, delta: dict[str, str], reason: str | None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
