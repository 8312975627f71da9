"""Token ids to text while they come: whole characters only, and nothing that may yet become a stop sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

WINDOW = 64  # tokens that are decoded at most for each new one, unless a stop sequence holds more of them back
CUT = 3  # bytes of a character that is not whole yet, at most; a decoder may show each as a sign of its own
KEPT = 8  # of them that stay when the window moves on: more than a character or a decoder's rule spans


class TextStream:
    """Feed it token ids; it answers with the text that is safe to send. `stopped` is set when a stop sequence is met.

    Only the last tokens are decoded: what a token adds to a text may depend on those before it, but on few."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, [s for s in stop if s]
        self._window: list[int] = []
        self._out = 0  # characters of the window's text that were sent
        self._pieces: list[str] = []
        self.sent = 0  # characters
        self.decoded = 0  # of which the end may be held back, or not yet be whole
        self.stopped = False

    @property
    def text(self) -> str:
        """All that was sent."""
        return "".join(self._pieces)

    def feed(self, token: int) -> str:
        """The text that `token` makes final; may be empty."""
        self._window.append(token)
        text = self._decode(self._window)
        open_ = text[self._out :]
        self.decoded = self.sent + len(open_)
        cut = min((at for s in self._stop if (at := open_.find(s)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            return self._release(open_, cut)
        whole = _whole(open_)
        piece = self._release(open_, len(whole) - self._held(whole))
        if len(self._window) >= WINDOW:
            self._move_on(text)
        return piece

    def finish(self) -> str:
        """What is left when generation has ended without a stop sequence."""
        if self.stopped:
            return ""
        text = self._decode(self._window)[self._out :]
        return self._release(text, len(text))

    def _move_on(self, text: str) -> None:
        """Keep the last tokens only, if they say by themselves what they say here, and more than what waits."""
        last = self._window[-KEPT:]
        said, waits = self._decode(last), len(text) - self._out
        if text.endswith(said) and len(said) >= waits:
            self._window, self._out = last, len(said) - waits

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
        piece = text[: max(end, 0)]
        self._out += len(piece)
        self.sent += len(piece)
        self._pieces.append(piece)
        return piece


def _whole(text: str) -> str:
    """Without what may become a character, shown as such signs at the end; more of them were never one."""
    signs = len(text) - len(text.rstrip("\ufffd"))
    return text[: len(text) - min(signs, CUT)]
