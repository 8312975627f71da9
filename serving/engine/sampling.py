"""Choosing the next token."""

from __future__ import annotations

from collections import Counter

import torch

from serving.engine.types import GenerateRequest


class Sampler:
    """Greedy at temperature 0, else nucleus sampling (Holtzman et al. 2020). Equal seeds give equal tokens. Biases and
    penalties are added to the logits as OpenAI defines them; penalties count what the answer has said so far."""

    def __init__(self, request: GenerateRequest) -> None:
        self._temperature, self._top_p = request.temperature, request.top_p
        self._bias = request.logit_bias
        self._presence, self._frequency = request.presence_penalty, request.frequency_penalty
        self._said: Counter[int] = Counter()
        self._random = torch.Generator()
        if request.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(request.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """logits [vocab] fp32, which stay as they are."""
        token = self._draw(self._weighed(logits))
        self._said[token] += 1
        return token

    def _weighed(self, logits: torch.Tensor) -> torch.Tensor:
        changes = dict(self._bias)
        if self._presence or self._frequency:
            for token, count in self._said.items():
                changes[token] = changes.get(token, 0.0) - self._presence - self._frequency * count
        if not changes:
            return logits
        tokens = torch.tensor(list(changes), device=logits.device)
        return logits.index_add(0, tokens, torch.tensor(list(changes.values()), dtype=logits.dtype, device=logits.device))

    def _draw(self, logits: torch.Tensor) -> int:
        if self._temperature == 0:
            return int(logits.argmax())
        probabilities = torch.softmax(logits.cpu() / self._temperature, -1)
        ordered, tokens = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered
        ordered = ordered.masked_fill(before >= self._top_p, 0.0)
        ordered[0] = ordered[0].clamp_min(torch.finfo(torch.float32).tiny)  # top_p 0 still leaves the best one
        return int(tokens[torch.multinomial(ordered, 1, generator=self._random)])
