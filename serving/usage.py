"""What answers reused, counted in memory and added to the catalogue in batches: never a write per answer.

A process that is killed loses what it counted since its last flush, FLUSH_SECONDS at most; one that ends properly loses
nothing."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from sqlalchemy.orm import Session

from serving.engine.types import Outcome
from storage.catalogue.engine import Catalogue
from storage.catalogue.usage import Place, add_usage, add_uses, forget_uses
from storage.policy.parse import MOST_DAYS
from storage.policy.types import DAY

FLUSH_SECONDS = 10.0


class Meter:
    """Counts of one process. `used` is told which keys an answer took, with the documents that they belong to."""

    def __init__(
        self,
        catalogue: Catalogue,
        used: Callable[[Mapping[str, str]], None] = lambda uses: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._catalogue, self._used, self._clock = catalogue, used, clock
        self.spent: Callable[[int], None] = lambda tokens: None  # told of every answer's tokens, in the asker's context
        self._amounts: dict[Place, Counter[str]] = {}
        self._uses: dict[tuple[str, int], tuple[int, float]] = {}
        self._lock = threading.Lock()
        self._flushed = clock()
        self._forgot = 0

    def note(self, tenant_id: str, corpora: Sequence[str], outcome: Outcome) -> None:
        """Count one answer over these corpora, finished or cut off. May wait for the broker: not for the event loop."""
        now = self._clock()
        day = int(now // DAY)
        parts = split(_amounts(outcome), weights(outcome, corpora))
        documents = {chunk.document_id for chunk in outcome.used_chunks}
        with self._lock:
            for corpus_id, amounts in parts.items():
                self._amounts.setdefault((day, tenant_id, corpus_id), Counter()).update(amounts)
            for document_id in documents:
                hits, _ = self._uses.get((document_id, day), (0, 0.0))
                self._uses[document_id, day] = (hits + 1, now)
        self.spent(outcome.prompt_tokens + outcome.completion_tokens)
        self._used({chunk.kv_key: chunk.document_id for chunk in outcome.used_chunks if chunk.kv_key})

    def tick(self) -> None:
        """Flush if it is time."""
        if self._clock() - self._flushed >= FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write down what was counted. What the catalogue does not take is kept for the next time."""
        with self._lock:
            amounts, uses = self._amounts, self._uses
            self._amounts, self._uses, self._flushed = {}, {}, self._clock()
        if not amounts and not uses:
            return
        try:
            with self._catalogue.write() as session:
                add_usage(session, amounts)
                add_uses(session, uses)
                self._forget(session)
        except BaseException:
            self._put_back(amounts, uses)
            raise

    def _forget(self, session: Session) -> None:
        today = int(self._clock() // DAY)
        if today != self._forgot:
            forget_uses(session, today - MOST_DAYS)
            self._forgot = today

    def _put_back(self, amounts: dict[Place, Counter[str]], uses: dict[tuple[str, int], tuple[int, float]]) -> None:
        with self._lock:
            for place, counts in amounts.items():
                self._amounts.setdefault(place, Counter()).update(counts)
            for use, (hits, at) in uses.items():
                more, later = self._uses.get(use, (0, at))
                self._uses[use] = (hits + more, max(at, later))


def _amounts(outcome: Outcome) -> dict[str, int]:
    report = outcome.report
    return {
        "tokens_prompt": outcome.prompt_tokens,
        "tokens_completion": outcome.completion_tokens,
        "tokens_reused": report.tokens_reused,
        "tokens_recomputed": report.tokens_recomputed,
        "bytes_fetched": report.bytes_fetched,
    }


def weights(outcome: Outcome, corpora: Sequence[str]) -> dict[str, int]:
    """How many of the prompt's chunk tokens come from each corpus; without any, the first corpus asked counts for all."""
    found: Counter[str] = Counter()
    for chunk in outcome.used_chunks:
        found[chunk.corpus_id] += len(chunk.token_ids)
    return dict(found) or {corpora[0] if corpora else "": 1}


def split(amounts: Mapping[str, int], shares: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Amounts by corpus, in proportion to the shares; each adds up to what it was, and each corpus had one answer."""
    total, taken = sum(shares.values()) or 1, Counter[str]()
    parts: dict[str, dict[str, int]] = {}
    so_far = 0
    for corpus_id, share in sorted(shares.items()):
        so_far += share
        upto = {name: amount * so_far // total for name, amount in amounts.items()}
        parts[corpus_id] = {"answers": 1, **{name: upto[name] - taken[name] for name in upto}}
        taken.update(parts[corpus_id] | {"answers": 0})
    return parts
