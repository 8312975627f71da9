"""The canary: a sampled answer's prompt is read again in full, when the engine has nothing else to do, and the distance of
what was served from that is counted."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field

import torch

from precompute.passes import ContiguousPass
from precompute.reader import Reader

TOKENS = 16  # of an answer that are compared
WAITING = 2  # samples kept until the engine is idle; further ones are dropped


@dataclass
class Sample:
    """A prompt's ids, and for each of the answer's first tokens the log-probabilities [vocab] it was drawn from."""

    prompt: list[int]
    answer: list[int] = field(default_factory=list)
    served: list[torch.Tensor] = field(default_factory=list)

    def note(self, logits: torch.Tensor, token: int) -> None:
        if len(self.answer) < TOKENS:
            self.answer.append(token)
            self.served.append(torch.log_softmax(logits, -1))


class Canary:
    """`share` of the answers are compared. `kl`: KL from full prefill to what was served, mean over an answer's tokens."""

    def __init__(self, reader: Reader, share: float) -> None:
        self._reader, self._share = reader, share
        self._waiting: deque[Sample] = deque()
        self._random = random.Random()
        self._lock = threading.Lock()
        self.answers, self.kl_sum = 0, 0.0

    def sample(self, prompt: torch.Tensor) -> Sample | None:
        """A sample to be filled in, for some of the answers. `prompt`: token ids [tokens]."""
        return Sample(prompt.tolist()) if self._random.random() < self._share else None

    def finish(self, sample: Sample) -> None:
        """Have it compared, unless enough wait for that already."""
        if len(self._waiting) < WAITING:
            self._waiting.append(sample)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def compare(self) -> Generator[None, None, None]:
        """Read the oldest sample in full; yields between pieces, so that a request can go first."""
        sample = self._waiting.popleft()
        answer = sample.answer[:-1]  # nothing was drawn after the last one
        ids = [*sample.prompt, *answer]
        kv = self._reader.buffer(len(ids))
        device = self._reader.device
        before = torch.tensor(sample.prompt[:-1], dtype=torch.long, device=device)
        yield from self._reader.prefill_pieces(kv, before, logits=False)
        kl = 0.0
        for number, served in enumerate(sample.served):
            at = len(sample.prompt) - 1 + number
            step = torch.tensor([ids[at]], device=device), torch.tensor([at], device=device)
            logits = self._reader.forward(*step, ContiguousPass(kv, at))
            assert logits is not None
            truth = torch.log_softmax(logits, -1)
            kl += float((truth.exp() * (truth - served)).sum())
            yield
        with self._lock:
            self.answers, self.kl_sum = self.answers + 1, self.kl_sum + kl / len(sample.served)

    def totals(self) -> tuple[int, float]:
        """Answers compared, and the sum of their KL."""
        with self._lock:
            return self.answers, self.kl_sum
