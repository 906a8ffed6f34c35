"""Stop strings: a text ends before the first of them, wherever the tokens' borders lie."""

from collections.abc import Iterable


class StopStrings:
    """Cuts a growing text at whichever of `stops` is complete first (of two, the one that began first).

    `found` says that there was one. The result does not depend on the pieces in which the text comes. Text that may be
    the beginning of a stop string is held back until the next piece decides.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def add(self, piece: str) -> str:
        """The text that `piece` lets out."""
        if self.found:
            return ""
        text = self._held + piece
        complete = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if complete:
            self.found, self._held = True, ""
            return text[: min(complete)[1]]
        certain = len(text) - max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """The text is complete: what was held back."""
        held, self._held = self._held, ""
        return held


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` are the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
