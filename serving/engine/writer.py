"""From logits to what is sent: which token comes next, its text, and how likely it was."""

from __future__ import annotations

from collections import deque

import torch

from precompute.reader import Reader
from serving.engine.guide import Guide
from serving.engine.sampling import Sampler
from serving.engine.text import TextStream
from serving.engine.types import Delta, GenerateRequest, TokenLogprob


class Writer:
    """One answer being written. `finish_reason` is None until it has ended."""

    def __init__(self, reader: Reader, guide: Guide, request: GenerateRequest) -> None:
        self._request, self._guide = request, guide
        self._ends = frozenset() if request.ignore_eos else reader.stop_ids
        self._constraint = guide.constraint(request.shape) if request.shape else None
        self._sampler = Sampler(request)
        self._stream = TextStream(reader.tokenizer.decode, request.stop)
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # where each begins in the text, and what is to be told of it
        self.count = 0
        self.finish_reason: str | None = None

    @property
    def text(self) -> str:
        """All that was sent."""
        return self._stream.text

    def choose(self, logits: torch.Tensor) -> int:
        """The next token; logits [vocab] fp32."""
        allowed = logits if self._constraint is None else self._constraint.mask(logits)
        token = self._sampler.choose(allowed)
        if self._request.logprobs is not None and token not in self._ends:
            self._waiting.append((self._stream.decoded, self._described(logits, token)))
        return token

    def write(self, token: int) -> Delta | None:
        """What `token` makes final, if anything."""
        self.count += 1
        if token in self._ends:
            self.finish_reason = "stop"
            return self._delta(self._stream.finish())
        if self._constraint is not None:
            self._constraint.took(token)
        piece = self._stream.feed(token)
        if self._stream.stopped or (self._constraint is not None and self._constraint.complete):
            self.finish_reason = "stop"
        elif self.count >= self._request.max_tokens:
            self.finish_reason = "length"
        if self.finish_reason is not None:
            piece += self._stream.finish()
        return self._delta(piece)

    def _delta(self, piece: str) -> Delta | None:
        if not piece:
            return None
        told = []
        while self._waiting and self._waiting[0][0] < self._stream.sent:
            told.append(self._waiting.popleft()[1])
        return Delta(piece, tuple(told))

    def _described(self, logits: torch.Tensor, token: int) -> TokenLogprob:
        """Of what the model itself holds likely, before anything the caller asks for changes that."""
        likely = torch.log_softmax(logits, -1)
        top = [(int(i), float(v)) for v, i in zip(*likely.topk(self._request.logprobs or 0), strict=True)]
        alternatives = tuple(TokenLogprob(self._guide.bytes_of(i), v) for i, v in top)
        return TokenLogprob(self._guide.bytes_of(token), float(likely[token]), alternatives)
