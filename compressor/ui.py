"""What a job says while it runs. Progress goes to stderr, so that stdout stays the result's."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

PLAIN_PERCENT = 10
"""Without a terminal, a progress line appears after this many more percent …"""
PLAIN_SECONDS = 30.0
"""… or after this many seconds, whichever comes first …"""
PLAIN_PAUSE = 1.0
"""… but none sooner than this many seconds after the last: short tasks do not fill a log."""


class Progress(Protocol):
    """Progress of one task."""

    def advance(self, n: int = 1) -> None:
        """`n` more units are done."""


class UI(Protocol):
    """Where the pipeline reports to."""

    def stage(self, name: str) -> None:
        """A new stage begins."""

    def progress(self, description: str, total: int) -> AbstractContextManager[Progress]:
        """A task of `total` units; advance it inside the context."""

    def note(self, text: str) -> None:
        """One line worth knowing: a decision, a download, a warning."""


class _Silent:
    def advance(self, n: int = 1) -> None:
        pass


class NullUI:
    """Says nothing: for library use and tests."""

    def stage(self, name: str) -> None:
        pass

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Progress]:
        yield _Silent()

    def note(self, text: str) -> None:
        pass


class RichUI:
    """Stage lines, notes and progress bars on stderr; where stderr is no terminal, plain lines instead of bars.

    Args:
        console: a rich console to write to; default stderr.
    """

    def __init__(self, console: "Console | None" = None):
        if console is None:
            from rich.console import Console

            console = Console(stderr=True)
        self.console = console
        self._start = time.monotonic()
        self._live: RichProgress | None = (
            None  # one rich display for all tasks that run at a time: rich allows no second
        )

    def stage(self, name: str) -> None:
        self._line(f"[{_clock(time.monotonic() - self._start)}] {name}", style="bold")

    def note(self, text: str) -> None:
        self._line(f"  {text}")

    @contextmanager
    def progress(self, description: str, total: int) -> Iterator[Progress]:
        if not self.console.is_terminal:
            yield _PlainProgress(self._line, description, total)
            return
        owner = self._live is None
        live = self._live or _bars(self.console)
        if owner:
            self._live = live
            live.start()
        task = live.add_task(description, total=total)
        try:
            yield _Bar(live, task)
        finally:
            if owner:
                live.stop()
                self._live = None
            else:
                live.remove_task(task)

    def _line(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _bars(console: "Console") -> "RichProgress":
    """Description, bar, count, elapsed and remaining time: within 80 columns for descriptions of up to 28."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    return RichProgress(
        TextColumn("  {task.description}", markup=False),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
    )


class _Bar:
    def __init__(self, live: "RichProgress", task: "TaskID"):
        self._live, self._task = live, task

    def advance(self, n: int = 1) -> None:
        self._live.advance(self._task, n)


class _PlainProgress:
    """Lines like ``  quantize blocks: 40% (12/30), 0:41`` at the pace set by the constants above."""

    def __init__(self, line: Callable[[str], None], description: str, total: int):
        self._line, self._description, self._total = line, description, total
        self._done, self._said_percent = 0, 0.0
        self._start = self._said_at = time.monotonic()

    def advance(self, n: int = 1) -> None:
        self._done += n
        now = time.monotonic()
        percent = 100 * self._done / self._total if self._total else 100.0
        finished = self._done >= self._total > self._done - n
        due = percent - self._said_percent >= PLAIN_PERCENT or now - self._said_at >= PLAIN_SECONDS
        if finished or (due and now - self._said_at >= PLAIN_PAUSE and self._done < self._total):
            self._said_percent, self._said_at = percent, now
            elapsed = _clock(now - self._start)
            self._line(f"  {self._description}: {int(percent)}% ({self._done}/{self._total}), {elapsed}")


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{second:02d}" if minutes >= 60 else f"{minutes}:{second:02d}"
