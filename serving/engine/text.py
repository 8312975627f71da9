"""Token ids to text while they come: whole characters only, and nothing that may yet become a stop sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TextStream:
    """Feed it token ids; it answers with the text that is safe to send. `stopped` is set when a stop sequence is met."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, [s for s in stop if s]
        self._ids: list[int] = []
        self.sent = 0  # characters
        self.decoded = 0  # of which the end may be held back, or not yet be whole
        self.text = ""
        self.stopped = False

    def feed(self, token: int) -> str:
        """The text that `token` makes final; may be empty."""
        self._ids.append(token)
        text = self._decode(self._ids)
        self.decoded = len(text)
        cut = min((at for s in self._stop if (at := text.find(s, max(0, self.sent - len(s)))) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            return self._release(text, cut)
        whole = text.rstrip("\ufffd")
        return self._release(text, len(whole) - self._held(whole))

    def finish(self) -> str:
        """What is left when generation has ended without a stop sequence."""
        if self.stopped:
            return ""
        text = self._decode(self._ids)
        return self._release(text, len(text))

    def _held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop sequence."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _release(self, text: str, end: int) -> str:
        end = max(end, self.sent)
        piece = text[self.sent : end]
        self.sent = end
        self.text += piece
        return piece
