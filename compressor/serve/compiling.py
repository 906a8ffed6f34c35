"""Clients' grammars are compiled beside the server: a few lines of a schema can keep llguidance busy for hours."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from compressor.decode.law import Grammar
from compressor.errors import UsageError
from compressor.serve.protocol import ApiError
from compressor.serve.worker import Closed, closed

DEADLINE = 10.0
"""Seconds that a grammar may take."""
AT_ONCE = 2
"""Grammars compiled side by side; the others wait."""
MOST_GIVEN_UP = 2
"""Compilations that nobody waits for any more and that still run, since nothing can end them: with so many, no further
grammar is begun."""


class Compiler:
    """Compiles grammars for one event loop."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(AT_ONCE)
        self._given_up = 0
        self._awaited: set[asyncio.Future[Grammar]] = set()
        self._closed = False

    def close(self) -> None:
        """The server is ending: whoever waits for a grammar, now or later, is told so at once."""
        self._closed = True
        for result in self._awaited:
            if not result.done():
                result.set_exception(closed())

    async def compile(self, key: str, work: Callable[[], Grammar]) -> Grammar:
        """What `work` returns for the grammar in the body's `key`. Raises ApiError for one that cannot be compiled,
        or not in time, and where too many were given up."""
        async with self._places:
            if self._closed:
                raise ApiError.of(closed())
            if self._given_up >= MOST_GIVEN_UP:
                raise ApiError(
                    503,
                    f"{key}: the server still compiles {self._given_up} grammars that took too long; "
                    "try again later, or ask without a grammar",
                    key,
                )
            result = _on_a_thread(work)
            self._awaited.add(result)
            done, _ = await asyncio.wait([result], timeout=DEADLINE)
            self._awaited.discard(result)
            if not done:
                self._given_up += 1
                result.add_done_callback(self._ended)
                raise ApiError(400, f"{key}: the grammar takes more than {DEADLINE:g} s to compile; simplify it", key)
        try:
            return result.result()
        except UsageError as error:
            raise ApiError(400, f"{key}: {error}", key) from None
        except Closed as error:
            raise ApiError.of(error) from None

    def _ended(self, result: asyncio.Future[Grammar]) -> None:
        self._given_up -= 1
        result.exception()  # nobody else asks for it, and asyncio would say so


def _on_a_thread(work: Callable[[], Grammar]) -> asyncio.Future[Grammar]:
    """The result of `work` on a thread of its own, for which the process does not wait at its end, as it would for one
    of the executor's."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[Grammar] = loop.create_future()

    def settle(grammar: Grammar | None, error: Exception | None) -> None:
        if result.done():  # by `Compiler.close`
            return
        if error is not None:
            result.set_exception(error)
        elif grammar is not None:
            result.set_result(grammar)

    def run() -> None:
        grammar, failure = None, None
        try:
            grammar = work()
        except Exception as error:
            failure = error
        except BaseException as panic:  # Rust's panics are none of Python's exceptions
            failure = RuntimeError(repr(panic))
        with suppress(RuntimeError):  # the loop is closed: the server has ended
            loop.call_soon_threadsafe(settle, grammar, failure)

    threading.Thread(target=run, name="compress-grammar", daemon=True).start()
    return result
