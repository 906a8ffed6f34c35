"""The HTTP endpoints: OpenAI's completions and chat completions, the served model, health and metrics."""

import asyncio
import time
from collections.abc import Coroutine
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from compressor.serve.answers import Answer, ChatAnswer
from compressor.serve.body_limit import BodyLimit, body_limit
from compressor.serve.protocol import ApiError, Body, ChatBody, CompletionBody, invalid
from compressor.serve.requests import Frontend
from compressor.serve.worker import Worker

METRICS = {
    "running": ("num_requests_running", "gauge", "Requests in the batch."),
    "waiting": ("num_requests_waiting", "gauge", "Requests that wait for a place in the batch."),
    "cache_bytes": ("kv_cache_bytes", "gauge", "Bytes set aside for keys and values."),
    "requests": ("request_success_total", "counter", "Requests generated to their end."),
    "cycles": ("cycles_total", "counter", "Cycles, counted for every text of a pass."),
    "tokens": ("generation_tokens_total", "counter", "Tokens generated."),
    "drafts": ("spec_decode_num_drafts_total", "counter", "Cycles in which something was proposed."),
    "proposed": ("spec_decode_num_draft_tokens_total", "counter", "Tokens proposed."),
    "accepted": ("spec_decode_num_accepted_tokens_total", "counter", "Proposed tokens accepted."),
}
"""What `Worker.statistics` counts: vLLM's name for it, its type and its meaning."""
CLIENT_CLOSED_REQUEST = 499  # nginx's; nobody reads it


class EventStream(StreamingResponse):
    """Server-sent events from an async generator, which is closed also where the client goes away between two."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]  # it is a generator
            await super().__call__(scope, receive, send)


def make_app(worker: Worker, tokenizer: Any, model_name: str) -> FastAPI:
    """The server's application. `worker` stays the caller's, who closes it, as does the `state.compiler` of what is
    returned.

    Args:
        tokenizer: the transformers tokenizer of the worker's target.
        model_name: the `model` that requests have to name.
    """
    app = FastAPI(title="compressor", exception_handlers=HANDLERS)
    app.add_middleware(BodyLimit, limit=body_limit(worker.decoder.max_length))
    frontend, created = Frontend(tokenizer, worker.decoder), int(time.time())
    app.state.compiler = frontend.compiler

    async def answer(kind: type[Answer], body: Body, http: Request) -> Response:
        if body.model != model_name:
            raise ApiError(
                404, f"model: '{body.model}' does not exist; '{model_name}' is served", "model", "model_not_found"
            )
        stops = body.stops
        made = kind(worker, tokenizer, await frontend.requests(body), stops, model_name)
        if body.stream:
            return EventStream(made.stream(body.stream_options.include_usage))
        whole = await _unless_gone(http, made.collect())
        return Response(status_code=CLIENT_CLOSED_REQUEST) if whole is None else JSONResponse(whole)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, http: Request) -> Response:
        return await answer(Answer, body, http)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, http: Request) -> Response:
        return await answer(ChatAnswer, body, http)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        model = {"id": model_name, "object": "model", "created": created, "owned_by": "compressor"}
        ours = {"max_model_len": worker.decoder.max_length, "lossy": worker.lossy}
        return {"object": "list", "data": [model | ours]}

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(_metrics(worker), media_type="text/plain; version=0.0.4")

    return app


def _metrics(worker: Worker) -> str:
    lines = []
    for key, value in worker.statistics().items():
        name, kind, meaning = METRICS[key]
        name = f"compressor:{name}"
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}", f"{name} {value}"]
    return "\n".join(lines) + "\n"


async def _unless_gone(http: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any] | None:
    """The result of `work`; None, and `work` cancelled, where the client hangs up before."""

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    tasks: list[asyncio.Task[Any]] = [asyncio.create_task(work), asyncio.create_task(gone())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].result() if tasks[0].done() else None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _api_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(), error.status)


async def _invalid(http: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _api_error(http, invalid(error.errors()))


async def _refused(http: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return await _api_error(http, ApiError(error.status_code, f"{http.method} {http.url.path}: {error.detail}"))


async def _failed(http: Request, error: Exception) -> JSONResponse:
    return await _api_error(http, ApiError.of(error))


HANDLERS: dict[Any, Any] = {
    ApiError: _api_error,
    RequestValidationError: _invalid,
    HTTPException: _refused,
    Exception: _failed,  # its traceback is logged all the same
}
