"""No body larger than what a prompt can use: reading one takes the tokenizer seconds, and everybody else waits."""

from fastapi import HTTPException
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SMALLEST_LIMIT = 256 * 1024
BYTES_PER_TOKEN = 32


def body_limit(max_length: int | None) -> int:
    """Bytes of a body that a model of `max_length` positions (None: any number) may be sent."""
    return max(SMALLEST_LIMIT, BYTES_PER_TOKEN * (max_length or 0))


class BodyLimit:
    """Answers 413 instead of reading more than `limit` bytes of a body, whether its length was declared or not."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        declared = Headers(scope=scope).get("content-length", "")
        size = int(declared) if declared.isdecimal() else 0
        received = 0

        async def limited() -> Message:
            nonlocal received
            message = await receive() if size <= self.limit else {}
            received += len(message.get("body", b""))
            if max(size, received) > self.limit:
                raise HTTPException(413, f"the body is larger than {self.limit} bytes; send a shorter one")
            return message

        await self.app(scope, limited, send)
