"""The connector's half in a worker: it carries out a step's orders, and says what has come and what is done.

Nothing here raises into vLLM: a prompt whose blend fails is given back as failed, and computed in full.
"""

from __future__ import annotations

import logging
from collections.abc import Generator

from serving.connector.blending import Leads, Model, blend
from serving.connector.director import Heard, Job, Orders, Staged
from serving.connector.fetching import Fetched, Fetches
from serving.connector.plan import Told
from serving.connector.saving import Saver
from serving.connector.transfer import Pages

log = logging.getLogger(__name__)
IDLE_WAIT_S = 0.01  # for chunks, in a step in which nothing else is computed: it bounds how late a new request is seen


class _Blend:
    """One prompt on this rank."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.fetched = Fetched()
        self.work: Generator[None, None, Told] | None = None


class Rank:
    """See above. One thread calls it."""

    def __init__(self, model: Model, pages: Pages, fetches: Fetches, saver: Saver) -> None:
        self._model, self._pages, self._fetches, self._saver = model, pages, fetches, saver
        self._leads = Leads()
        self._blends: dict[str, _Blend] = {}
        self._heard = Heard()

    def carry_out(self, orders: Orders) -> None:
        """Before or behind the step's own forward pass: the pages of a prompt that is blended are in nobody's batch."""
        self._model.beside, self._model.step_s = orders.beside, orders.step_s
        for job in orders.start:
            self._begin(job, wanted=job.request_id not in orders.cancel)
        for request_id in orders.cancel:
            if self._blends.pop(request_id, None) is not None:  # else it has ended meanwhile
                self._fetches.give_up(request_id)
                self._heard.ended[request_id] = Told(refused="The request was given up.")
        for request_id, unusable in orders.advance.items():
            if request_id in self._blends:
                self._advance(request_id, unusable)
        self._take_landed(IDLE_WAIT_S if not orders.beside and not orders.advance and not self._heard.ended else 0.0)

    def _begin(self, job: Job, *, wanted: bool) -> None:
        self._blends[job.request_id] = _Blend(job)
        try:
            if wanted:
                self._fetches.begin(job)
        except RuntimeError as error:  # no more threads
            log.exception("a fetch could not be begun; the prompt is computed in full")
            self._end(job.request_id, Told(refused=f"The fetch failed ({error})."))

    def save(self, orders: Orders) -> None:
        """Behind the step's forward pass."""
        for save in orders.save:
            self._saver.save(self._pages, save)

    def say(self) -> Heard:
        """What has come and what is done since this was last asked."""
        heard, self._heard = self._heard, Heard()
        heard.saved = self._saver.saved()
        return heard

    def _take_landed(self, wait_s: float) -> None:
        for request_id, fetched in self._fetches.landed(wait_s).items():
            if (each := self._blends.get(request_id)) is not None:
                each.fetched = fetched
                self._heard.staged[request_id] = Staged(fetched.missed, fetched.tiers, fetched.ms)

    def _advance(self, request_id: str, unusable: frozenset[str]) -> None:
        """One piece; what some rank has not is used by none."""
        each = self._blends[request_id]
        try:
            if each.work is None:
                records = {key: record for key, record in each.fetched.records.items() if key not in unusable}
                each.work = blend(self._model, self._pages, self._leads, each.job, records)
            next(each.work)
        except StopIteration as end:
            self._end(request_id, end.value)
        except Exception as error:
            log.exception("a blend failed; the prompt is computed in full")
            self._end(request_id, Told(refused=f"The blend failed ({type(error).__name__})."))

    def _end(self, request_id: str, told: Told) -> None:
        del self._blends[request_id]
        self._heard.ended[request_id] = told

    @property
    def counts(self) -> dict[str, int]:
        """What is kept, for tests of leaks."""
        return {"blends": len(self._blends)}

    def close(self) -> None:
        self._fetches.close()
        self._saver.close()


class BrokenRank:
    """A rank that blends nothing: prompts are given back at once, to be computed in full."""

    def __init__(self, reason: str) -> None:
        self._heard = Heard(broken=reason)

    def carry_out(self, orders: Orders) -> None:
        for job in orders.start:
            self._heard.ended[job.request_id] = Told(refused=self._heard.broken)

    def save(self, orders: Orders) -> None:
        """Nothing is stored."""

    def say(self) -> Heard:
        heard, self._heard = self._heard, Heard(broken=self._heard.broken)
        return heard

    counts: dict[str, int] = {}  # noqa: RUF012 - nothing is kept

    def close(self) -> None:
        """Nothing to close."""
