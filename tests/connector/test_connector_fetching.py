"""Load or compute inside vLLM: a source that stalls is not waited for, and what it sends later is there for the next prompt."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

import pytest
import torch
from vllm_kit import Installation, ids_of

from serving.connector.blending import Leads, Model, blend
from serving.connector.director import Job, Orders
from serving.connector.fetching import THREADS, Fetched, Fetches
from serving.connector.parts import ConnectorParts
from serving.connector.rank import Rank
from serving.engine import loading
from serving.engine.loading import SLOW
from serving.engine.rates import FLOOR_S, Rates
from storage.folder import FolderStore
from storage.kvstore import KVStore
from storage.types import Miss

SLOWLY = 30.0  # tokens of prefill a second: some hundred tokens are 20 s, a busy machine's hiccup is a fraction of it


class HeldStore(FolderStore):
    """A folder whose objects with a name in `held` are read once `go` is set."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held: Callable[[str], bool] = lambda name: False
        self.go = threading.Event()

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        if self.held(name):
            self.go.wait(30)
        return super().read_into(name, buffer, offset)


class Site:
    """A connector's fetches over the installation's objects. `rates`, `speed`: what it knows."""

    def __init__(self, installation: Installation, speed: float | None = SLOWLY, fixed_s: float | None = None) -> None:
        self.installation = installation
        self.objects = HeldStore(installation.data / "objects")
        self.store = KVStore(self.objects, memory_bytes=1 << 26)
        self.rates, self.explained = Rates(fixed_s), list[tuple[str, Miss]]()
        self.fetches = Fetches(self.store, self._explain, self.rates, lambda: speed)
        self._number = 0

    def _explain(self, key: str, miss: Miss) -> str:
        self.explained.append((key, miss))
        return f"{miss} but owed"

    def job(self, question: str = "How much?") -> Job:
        self._number += 1
        prompt = self.installation.prompt(question)
        return Job(f"r{self._number}", tuple(ids_of(prompt)), (0,), 0, self.installation.plan(prompt, "reuse"))

    def fetched(self, job: Job) -> Fetched:
        self.fetches.begin(job)
        return self.here(job)

    def here(self, job: Job) -> Fetched:
        end = time.monotonic() + 30
        while job.request_id not in (found := self.fetches.landed(1.0)):
            assert time.monotonic() < end
        return found[job.request_id]


@pytest.fixture
def site(installation: Installation) -> Iterator[Site]:
    made = Site(installation)
    yield made
    made.objects.go.set()
    made.fetches.close()


def keys_of(job: Job) -> set[str]:
    return {span.key for span in job.plan.spans}


def prefill_s(job: Job) -> float:
    return len(job.token_ids) / SLOWLY


def until(look: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not look():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_comes_in_time_is_used(site: Site) -> None:
    job = site.job()
    found = site.fetched(job)
    assert (set(found.records), found.missed) == (keys_of(job), {})
    assert set(found.tiers.values()) == {"store"}


def test_a_stall_costs_less_than_a_fifth_of_a_full_prefill_and_the_next_prompt_nothing(site: Site) -> None:
    site.objects.held = lambda name: name.startswith("kv/")
    job = site.job()
    found = site.fetched(job)
    assert found.missed == dict.fromkeys(keys_of(job), SLOW)
    assert found.ms / 1000 <= 0.2 * prefill_s(job)
    again = site.job("And for children?")
    site.fetches.begin(again)
    found = site.fetches.landed(0.0)[again.request_id]  # it has been handed over before `begin` returned
    assert found.missed == dict.fromkeys(keys_of(again), SLOW)
    assert not site.objects.go.is_set()


def test_what_comes_too_late_is_in_memory_for_the_next_prompt(site: Site) -> None:
    site.objects.held = lambda name: name.startswith("kv/")
    job = site.job()
    assert site.fetched(job).records == {}
    site.objects.go.set()
    until(lambda: keys_of(job) <= set(site.store.keys_in_memory()))
    found = site.fetched(site.job("And now?"))
    assert (set(found.records), found.missed) == (keys_of(job), {})
    assert set(found.tiers.values()) == {"memory"}


def test_what_has_come_by_then_is_used_and_what_is_absent_says_so(site: Site) -> None:
    """One chunk stalls, one is not stored: all others are used, and each of the two has its own reason."""
    job = site.job()
    stalled, gone = (str(site.installation.chunks[n].kv_key) for n in (1, 2))
    site.objects.held = lambda name: name.endswith(stalled)
    absent, plan = "f" * 64, job.plan
    spans = tuple(replace(span, key=absent) if span.key == gone else span for span in plan.spans)
    job = replace(job, plan=replace(plan, spans=spans))
    site.rates.note_load("store", 1_000, 1.0)  # its usual is half a second, so that a busy machine has its time
    found = site.fetched(job)
    assert set(found.records) == keys_of(job) - {stalled, absent}
    assert found.missed == {stalled: SLOW, absent: "absent"}, "what the catalogue knows of it comes with the end of the fetch"
    assert found.ms / 1000 <= 0.2 * prefill_s(job), "what came earns no wait for what does not"
    site.objects.go.set()
    until(lambda: (absent, Miss.ABSENT) in site.explained)


def test_memory_answers_while_every_thread_waits_for_the_store(site: Site) -> None:
    first = str(site.installation.chunks[0].kv_key)
    site.store.get(first, site.installation.reader.profile)
    site.objects.held = lambda name: name.startswith("kv/")
    for _ in range(THREADS + 3):
        found = site.fetched(site.job())
        assert (set(found.records), found.tiers) == ({first}, {first: "memory"})


def test_a_source_that_keeps_up_with_computing_is_waited_for(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Object after object, the last one long after the patience with the first."""
    site = Site(installation, speed=20.0)
    site.rates.note_load("store", 1_000, 1.0)
    read, lock = site.objects.read_into, threading.Lock()

    def slowly(name: str, buffer: memoryview, offset: int = 0) -> int:
        with lock:
            time.sleep(0.4)
        return read(name, buffer, offset)

    monkeypatch.setattr(site.objects, "read_into", slowly)  # of this site alone: others' held reads may still be ending
    job = site.job()
    [patience] = site.rates.waits_s({"store": sum(s.length for s in job.plan.spans)}, 20.0, meanwhile=False).values()
    found = site.fetched(job)
    assert found.missed == {}
    assert found.ms / 1000 > patience
    site.fetches.close()


def test_a_prompt_that_is_given_up_is_not_handed_over(site: Site) -> None:
    site.objects.held = lambda name: True
    job = site.job()
    site.fetches.begin(job)
    site.fetches.give_up(job.request_id)
    site.objects.go.set()
    assert site.fetches.landed(2 * FLOOR_S) == {}


def test_a_record_of_other_tokens_is_missed(site: Site) -> None:
    job = site.job()
    first = site.installation.chunks[0]
    ids = tuple(0 if i == job.plan.spans[0].start else t for i, t in enumerate(job.token_ids))
    found = site.fetched(replace(job, token_ids=ids))
    assert found.missed == {job.plan.spans[0].key: "wrong_key"} == {str(first.kv_key): "wrong_key"}


def test_a_store_that_raises_costs_the_chunks_only(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(site.store, "get_many", broken)
    job = site.job()
    assert site.fetched(job).missed == dict.fromkeys(keys_of(job), "RuntimeError")


def test_the_deadline_of_a_fetch_is_a_time_out_with_its_reason(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "DEADLINE_S", 0.1)
    site = Site(installation, fixed_s=20.0)
    site.objects.held = lambda name: name.startswith("kv/")
    job = site.job()
    assert site.fetched(job).missed == dict.fromkeys(keys_of(job), "timeout but owed")
    site.objects.go.set()
    site.fetches.close()


def test_a_rank_says_that_a_stalled_prompt_is_ready_without_its_chunks(site: Site) -> None:
    site.objects.held = lambda name: name.startswith("kv/")
    rank = Rank(cast("Model", _Model()), cast("Any", None), site.fetches, cast("Any", _Nothing()))
    job = site.job()
    rank.carry_out(Orders(start=[job], beside=0))
    staged = rank.say().staged
    while not staged:
        rank.carry_out(Orders(beside=0))
        staged = rank.say().staged
    assert staged[job.request_id].missed == dict.fromkeys(keys_of(job), SLOW)
    assert staged[job.request_id].fetch_ms / 1000 <= 0.2 * prefill_s(job)


class _Nothing:
    """A `Saver` with nothing to save."""

    def saved(self) -> dict[str, list[str]]:
        return {}


class _Model:
    """Computes a row a millisecond, and nothing else."""

    layers, piece, beside, step_s = 2, 512, 0, None

    def run(self, ids: torch.Tensor, *_: Any) -> Iterator[None]:
        time.sleep(len(ids) / 1000)
        yield from ()

    def sum_ranks(self, values: torch.Tensor) -> torch.Tensor:
        return values


def test_rows_are_computed_in_pieces_of_the_step_that_they_are_computed_in(site: Site) -> None:
    class Busy(_Model):
        """Others are beside it in its first two passes, of which each takes two steps."""

        ran: ClassVar[list[int]] = []

        @property
        def piece(self) -> int:  # type: ignore[override]
            return (3, 2)[len(self.ran)] if len(self.ran) < 2 else 512

        def run(self, ids: torch.Tensor, *_: Any) -> Iterator[None]:
            self.ran.append(len(ids))
            if len(self.ran) <= 2:
                yield

    class Pages:
        device = torch.device("cpu")

        def place(self, *_: Any) -> None: ...

        def take(self, *_: Any) -> None: ...

    job = site.job()
    lead = job.plan.spans[0].start
    fresh = len(job.token_ids) - lead - sum(span.length for span in job.plan.spans)
    steps = list(blend(cast(Any, Busy()), cast(Any, Pages()), Leads(), job, site.fetched(job).records))
    assert Busy.ran == [3, 2, lead - 5, fresh]
    assert len(steps) == len(job.plan.spans) + 4 + 2


@pytest.mark.parametrize(("beside", "piece", "together"), [(1, 512, False), (0, 512, True), (0, 1, False)])
def test_chunks_are_placed_one_a_step_beside_others_and_alone_as_many_as_may_be_computed(
    site: Site, beside: int, piece: int, together: bool
) -> None:
    class Places:
        device = torch.device("cpu")

        def __init__(self) -> None:
            self.at: list[list[int]] = []

        def place(self, some: Sequence[tuple[torch.Tensor, int]], table: torch.Tensor) -> None:
            self.at.append([at for _, at in some])

    model, job, pages = _Model(), site.job(), Places()
    model.beside, model.piece = beside, piece
    steps = blend(cast(Any, model), cast(Any, pages), Leads(), job, site.fetched(job).records)
    starts = [span.start for span in job.plan.spans]
    for placed in range(1, 2 if together else len(starts) + 1):
        next(steps)
        assert pages.at == ([starts] if together else [[start] for start in starts[:placed]])


@pytest.mark.parametrize(("extra", "waits"), [({}, FLOOR_S), ({"patience_s": 7}, 7.0)])
def test_patience_is_measured_unless_the_operator_has_said_it(
    extra: dict[str, Any], waits: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path))
    parts = ConnectorParts(extra)
    assert parts.rates.waits_s({"store": 1000}, None, meanwhile=False) == {"store": waits}
    parts.close()
