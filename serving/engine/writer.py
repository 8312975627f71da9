"""From tokens to what is sent: their text, and how likely they were; and from logits to tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch

from precompute.reader import Reader
from precompute.spec import ReaderSpec
from serving.engine.guide import Guide
from serving.engine.sampling import Sampler
from serving.engine.text import TextStream
from serving.engine.types import Delta, GenerateRequest, TokenLogprob


class TokenWriter:
    """One answer being written, token by token. `finish_reason` is None until it has ended."""

    def __init__(self, reader: ReaderSpec, guide: Guide, request: GenerateRequest) -> None:
        self._request, self._guide = request, guide
        self._ends = frozenset() if request.ignore_eos else reader.stop_ids
        self._stream = TextStream(reader.tokenizer.decode, request.stop)
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # where each begins in the text, and what is to be told of it
        self.count = 0
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All that was sent."""
        return self._stream.text

    def describe(self, token: int, logprob: float, top: Iterable[tuple[int, float]]) -> None:
        """How likely the token is that is written next, and which ones were the likeliest in its place."""
        if token not in self._ends:
            alternatives = tuple(TokenLogprob(self._guide.bytes_of(i), v) for i, v in top)
            told = TokenLogprob(self._guide.bytes_of(token), logprob, alternatives)
            self._waiting.append((self._stream.decoded, told))

    def write(self, token: int) -> Delta | None:
        """What `token` makes final, if anything."""
        self.count += 1
        if token in self._ends:
            self.finish_reason = "stop"
            return self._delta(self._stream.finish())
        piece = self._stream.feed(token)
        if self._stream.stopped or self._is_last(token):
            self.finish_reason = "stop"
        elif self.count >= self._request.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            piece += self._stream.finish()
        return self._delta(piece)

    def _is_last(self, token: int) -> bool:
        """Whether nothing more can follow this token of the answer."""
        return False

    def _delta(self, piece: str) -> Delta | None:
        if not piece:
            return None
        told = []
        while self._waiting and self._waiting[0][0] < self._stream.sent:
            told.append(self._waiting.popleft()[1])
        return Delta(piece, tuple(told))


class Writer(TokenWriter):
    """Chooses the tokens too."""

    def __init__(self, reader: Reader, guide: Guide, request: GenerateRequest) -> None:
        super().__init__(reader, guide, request)
        self._constraint = guide.constraint(request.shape) if request.shape else None
        self._sampler = Sampler(request)

    def choose(self, logits: torch.Tensor) -> int:
        """The next token; logits [vocab] fp32."""
        allowed = logits if self._constraint is None else self._constraint.mask(logits)
        token = self._sampler.choose(allowed)
        if self._request.logprobs is not None:
            # What the model itself holds likely, before anything the caller asks for changes that.
            likely = torch.log_softmax(logits, -1)
            values, ids = likely.topk(self._request.logprobs)
            self.describe(token, float(likely[token]), zip(ids.tolist(), values.tolist(), strict=True))
        return token

    def _is_last(self, token: int) -> bool:
        if self._constraint is None:
            return False
        self._constraint.took(token)
        return self._constraint.complete
