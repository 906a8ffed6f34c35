"""One thread that owns a batch and steps it for as long as anybody waits for tokens."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass

from compressor.decode.batch import Request, Text
from compressor.decode.runner import Runner
from compressor.errors import CompressError, UsageError

LOG = logging.getLogger(__name__)


class Closed(CompressError):
    """The server is ending."""


@dataclass(frozen=True)
class Event:
    """News of a request: the tokens of one step; in the last event also how it ended, `Output.stop` or `error`."""

    tokens: list[int]
    stop: str | None = None
    error: Exception | None = None


@dataclass(eq=False)
class Handle:
    """A submitted request."""

    request: Request
    deliver: Callable[[Event], None]
    cancelled: bool = False


@dataclass
class Counters:
    """Since the start. A draft is a cycle of one text in which something was proposed."""

    requests: int = 0
    cycles: int = 0
    tokens: int = 0
    drafts: int = 0
    proposed: int = 0
    accepted: int = 0


class Worker:
    """Runs requests side by side, at most `max_batch` at a time; the others wait in their order.

    Args:
        runner: target, proposer and settings. Requests have their own law and seed.
        max_batch: texts in one pass of the target.
    """

    def __init__(self, runner: Runner, max_batch: int = 16) -> None:
        if max_batch < 1:
            raise UsageError(f"max_batch: {max_batch} is not a positive number")
        self.decoder = runner.decoder
        self.lossy = runner.rule != "exact"
        self.max_batch = max_batch
        self._batch = runner.batch()
        self._counters = Counters()
        self._running: dict[Text, Handle] = {}  # the thread's alone
        self._changed = threading.Condition()  # guards what follows
        self._waiting: deque[Handle] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="compress-worker", daemon=True)
        self._thread.start()

    def submit(self, request: Request, deliver: Callable[[Event], None]) -> Handle:
        """Queue a request. `deliver` is called for each of its events, in order, on the worker's thread: it must be
        quick. For asyncio let it be ``loop.call_soon_threadsafe`` of what takes the event."""
        handle = Handle(request, deliver)
        with self._changed:
            if not self._closing:
                self._waiting.append(handle)
                self._changed.notify()
                return handle
        _tell(handle, Event([], error=closed()))
        return handle

    def cancel(self, handle: Handle) -> None:
        """Nobody wants the request any more: it ends before the next step, without another event, and its cache is
        freed. A request that has ended is left as it is."""
        with self._changed:
            handle.cancelled = True
            if handle in self._waiting:
                self._waiting.remove(handle)

    def close(self) -> None:
        """End the thread after its current step; requests that are not done get the error `Closed`."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def statistics(self) -> dict[str, int]:
        """Requests `running` and `waiting`, `cache_bytes`, and the `Counters`."""
        now = {"running": len(self._running), "waiting": len(self._waiting), "cache_bytes": self._batch.cache_bytes}
        return now | asdict(self._counters)

    def _run(self) -> None:
        while self._wait():
            self._drop_cancelled()
            self._admit()
            if self._running:
                self._step()
        self._fail_running(closed())
        with self._changed:
            waiting, self._waiting = self._waiting, deque()
        for handle in waiting:
            _tell(handle, Event([], error=closed()))

    def _wait(self) -> bool:
        """Sleep until there is work; False when it is time to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting or self._running)
            return not self._closing

    def _drop_cancelled(self) -> None:
        for text in [text for text, handle in self._running.items() if handle.cancelled]:
            self._batch.leave(text)
            del self._running[text]

    def _admit(self) -> None:
        while len(self._running) < self.max_batch:
            with self._changed:
                if not self._waiting:
                    return
                handle = self._waiting.popleft()
            try:
                self._running[self._batch.join(handle.request)] = handle
            except Exception as error:  # logged and told: a thread that died of it would leave everybody waiting
                _log(error)
                _tell(handle, Event([], error=error))

    def _step(self) -> None:
        try:
            texts = self._batch.step()
        except Exception as error:  # the pass itself: logged, and told to all of its texts; those that wait are served
            _log(error)
            self._fail_running(error)
            return
        told = []
        for text in texts:
            ended = text.done or text.error is not None
            handle = self._running.pop(text) if ended else self._running[text]
            if text.fresh or ended:
                told.append((handle, Event(text.fresh, text.output.stop if text.done else None, text.error)))
            self._count(text)
            if text.error is not None:
                _log(text.error)
        for handle, event in told:
            _tell(handle, event)

    def _count(self, text: Text) -> None:
        counters = self._counters
        counters.requests += text.done
        if text.error is None and not text.reading:
            proposed = len(text.output.proposals[-1])
            counters.cycles += 1
            counters.tokens += len(text.fresh)
            counters.drafts += proposed > 0
            counters.proposed += proposed
            counters.accepted += sum(text.output.accepted_per_position[-1])

    def _fail_running(self, error: Exception) -> None:
        failed = dict(self._running)
        self._running.clear()
        for text in failed:
            self._batch.leave(text)
        for handle in failed.values():
            _tell(handle, Event([], error=error))


def closed() -> Closed:
    return Closed("the server is ending; send the request to another one")


def _log(error: Exception) -> None:
    """Errors that a user can act on go to the user alone."""
    if not isinstance(error, CompressError):
        LOG.error("a request failed", exc_info=error)


def _tell(handle: Handle, event: Event) -> None:
    if handle.cancelled:
        return
    try:
        handle.deliver(event)
    except RuntimeError:  # its event loop is closed: nobody listens any more
        handle.cancelled = True
