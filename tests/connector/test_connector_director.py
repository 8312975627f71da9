"""The scheduler's half: all ranks in step, no more at once than allowed, and nothing left behind, whatever comes when."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.connector.director import AT_ONCE, BLENDS_PER_STEP, Asked, Director, Heard, Orders, Staged
from serving.connector.plan import Plan, Span, Told, cache_salt, plan_secret, sign, token_hash
from storage.types import KVProfile

SECRET = plan_secret(b"a master secret of an installation")
PROFILE = KVProfile("m", "w", "t", "f", "filler:4:x", "raw", "float32", layers=3, kv_heads=2, head_dim=16)
OWN = {"weights": "w", "layers": 3}
NOW = 1_800_000_000.0
PROMPT = list(range(100))
BLOCK = 16


def span(start: int, end: int) -> Span:
    return Span(start, end - start, f"{start:064x}", token_hash(PROMPT[start:end]))


PLAN = Plan(PROFILE, (span(10, 40), span(42, 90)), "reuse", 92, "acme", "acme/g", int(NOW) + 60)
SAVING = replace(PLAN, spans=(), saves=(span(10, 40), span(42, 90)))


def director(ranks: int = 1, **options: Any) -> Director:
    return Director(SECRET, OWN, block=BLOCK, ranks=ranks, clock=lambda: NOW, **options)


def asked(name: str, plan: Plan = PLAN, local: int = 0, **changes: Any) -> Asked:
    return replace(Asked(name, PROMPT, sign(plan, SECRET), cache_salt(plan), local), **changes)


def begun(made: Director, name: str, plan: Plan = PLAN) -> None:
    """A request that the scheduler has given pages to."""
    made.allocated(name, [7, 8, 9], made.claim(asked(name, plan)))


def orders(made: Director, computed: dict[str, int] | None = None) -> Orders:
    return made.orders(computed or {}, lambda _name: [1, 2], beside=1)


def test_a_prompt_is_blended_when_all_ranks_have_its_chunks_and_with_what_all_have() -> None:
    made = director(ranks=2)
    begun(made, "a")
    assert [job.request_id for job in orders(made).start] == ["a"]
    made.hear(Heard(staged={"a": Staged({"k1": "absent"}, {"k2": "disk"}, 1.0)}), [])
    assert orders(made).advance == {}
    first, second = Heard(staged={"a": Staged({"k3": "damaged"}, {}, 2.0)}), Heard()
    made.hear(first.joined(second), [])
    assert orders(made).advance == {"a": {"k1", "k3"}}
    told = Told.read(made.finished("a"))
    assert told.missed == {"k1": "absent", "k3": "damaged"}
    assert told.fetch_ms == 2.0


def test_what_two_ranks_say_of_a_step_is_joined() -> None:
    a = Heard(staged={"x": Staged({"k": "absent"}, {"l": "disk"}, 1.0)}, ended={"y": Told(reused=5)}, saved={"z": ["k"]})
    b = Heard(staged={"x": Staged({}, {"l": "memory"}, 3.0)}, ended={"y": Told(refused="failed")}, broken="no plugin")
    for joined in (a.joined(b), b.joined(a)):
        assert joined.staged["x"].missed == {"k": "absent"}
        assert (joined.staged["x"].ranks, joined.staged["x"].fetch_ms) == (2, 3.0)
        assert joined.ended["y"].refused == "failed"
        assert joined.saved == {"z": ["k"]}
        assert joined.broken == "no plugin"


def test_no_more_than_a_few_are_fetched_at_once_and_one_is_blended_in_a_step() -> None:
    made = director()
    names = [f"r{n}" for n in range(AT_ONCE + 3)]
    for name in names:
        begun(made, name)
    assert [job.request_id for job in orders(made).start] == names[:AT_ONCE]
    assert orders(made).start == []
    made.hear(Heard(staged={name: Staged({}, {}, 1.0) for name in names[:AT_ONCE]}), [])
    assert list(orders(made).advance) == list(orders(made).advance) == names[:BLENDS_PER_STEP]
    made.hear(Heard(ended={names[0]: Told(reused=1)}), names[:1])
    last = orders(made)
    assert [job.request_id for job in last.start] == names[AT_ONCE : AT_ONCE + 1]
    assert list(last.advance) == names[1:2]


def test_ranks_are_told_how_long_others_steps_take_without_a_blend() -> None:
    now = NOW
    made = director()
    made._clock = lambda: now

    def step(seconds: float, beside: int = 1) -> float | None:
        nonlocal now
        told = made.orders({}, lambda _name: [], beside=beside).step_s
        now += seconds
        return told and round(told, 3)

    assert [step(0.03), step(0.05), step(0.04), step(6.0, beside=0), step(0.04)] == [None, 0.03, 0.04, 0.04, 0.04]
    begun(made, "a")
    assert step(5.0) == 0.04, "a prompt is begun in this step"
    made.hear(Heard(staged={"a": Staged({}, {}, 1.0)}), [])
    assert [step(5.0), step(5.0)] == [0.04, 0.04], "and blended in these"


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_what_is_given_up_is_told_to_the_ranks_once(steps: int) -> None:
    made = director()
    begun(made, "a")
    if steps > 0:
        assert orders(made).start
    if steps > 1:
        made.hear(Heard(staged={"a": Staged({}, {}, 1.0)}), [])
    if steps > 2:
        assert orders(made).advance
    made.finished("a")
    found = orders(made)
    assert found.cancel == ["a"]
    assert [job.request_id for job in found.start] == (["a"] if steps == 0 else [])
    assert replace(orders(made), step_s=None) == Orders(beside=1)
    made.hear(Heard(ended={"a": Told(refused="given up")}), ["a"])
    assert set(made.counts.values()) == {0}


def test_pages_that_vllm_has_already_are_not_filled_again_and_a_short_rest_is_left_to_it() -> None:
    made = director()
    assert made.claim(asked("a", local=32)) == 68
    made.allocated("a", [1], 68)
    assert orders(made).start[0].start == 32
    assert made.claim(asked("b", local=80)) == 0  # ten tokens of the last chunk
    assert Told.read(made.finished("b")).reused == 80


def test_a_failed_blend_is_not_tried_again_and_a_broken_rank_ends_all_blending() -> None:
    made = director()
    begun(made, "a")
    made.hear(Heard(ended={"a": Told(refused="The blend failed.")}), ["a"])
    assert made.claim(asked("a")) == 0
    assert Told.read(made.finished("a")) == Told(refused="The blend failed.", computed=len(PROMPT))
    made.hear(Heard(broken="The layout is not known."), [])
    assert made.claim(asked("b")) == 0
    assert Told.read(made.finished("b")).refused == "The layout is not known."


def test_a_request_without_a_plan_is_none_of_ours() -> None:
    made = director()
    assert made.claim(asked("a", params=None)) == made.claim(asked("b", params={"do_remote_decode": True})) == 0
    assert made.finished("a") is None
    assert set(made.counts.values()) == {0}


@pytest.mark.parametrize("obstacle", ["The request has an adapter: stored KV is of the model alone."])
def test_an_obstacle_is_told_and_nothing_loaded(obstacle: str) -> None:
    made = director()
    assert made.claim(asked("a", obstacle=obstacle)) == 0
    assert Told.read(made.finished("a")).refused == obstacle


def test_what_was_computed_in_full_is_stored_once_and_what_was_loaded_never() -> None:
    made = director()
    assert made.claim(asked("a", SAVING, salt=None)) == 0
    assert orders(made, {"a": 89}).save == []
    [save] = orders(made, {"a": 90}).save
    assert (save.blocks, save.plan, list(save.token_ids)) == ((1, 2), SAVING, PROMPT)
    assert orders(made, {"a": 91}).save == []
    made.hear(Heard(saved={"a": ["k"]}), [])
    assert Told.read(made.finished("a")).saved == ["k"]
    both = replace(PLAN, saves=SAVING.saves)
    begun(made, "b", both)
    assert orders(made, {"b": 100}).save == []


# --- whatever comes when --------------------------------------------------------------------------------------------------


@dataclass
class _Rank:
    """Fetches and blends take as many steps as luck has it; it may fail."""

    luck: random.Random
    fetching: dict[str, int] = field(default_factory=dict)
    blending: dict[str, int] = field(default_factory=dict)

    def step(self, found: Orders, pieces: dict[str, int]) -> Heard:
        heard = Heard()
        for job in found.start:
            assert job.request_id not in self.fetching
            self.fetching[job.request_id] = self.luck.randrange(4)
        for name in found.cancel:
            if self.fetching.pop(name, None) is not None or self.blending.pop(name, None) is not None:
                heard.ended[name] = Told(refused="given up")
        for name in found.advance.keys() & self.blending.keys():  # others have ended in the step that is not heard yet
            self.blending[name] -= 1
            if self.blending[name] == 0:
                del self.blending[name]
                heard.ended[name] = Told(refused="failed") if pieces[name] == 4 else Told(reused=1)
        for name, left in list(self.fetching.items()):
            self.fetching[name] = left - 1
            if left == 0:
                del self.fetching[name]
                self.blending[name] = pieces[name]
                heard.staged[name] = Staged({}, {}, 1.0)
        return heard


@given(st.integers(0, 2**32), st.integers(1, 3), st.booleans())
def test_every_prompt_ends_on_every_rank_and_nothing_is_left(seed: int, count: int, overlap: bool) -> None:
    """`overlap`: as with asynchronous scheduling, a step's orders are made before what the step before it said is heard."""
    luck = random.Random(seed)
    made, ranks = director(count), [_Rank(random.Random(seed + n)) for n in range(count)]
    pieces: dict[str, int] = {}
    open_requests: set[str] = set()  # that the scheduler has pages for
    left: dict[str, int] = {}  # ranks that have not ended it
    unheard: list[tuple[Heard, list[str]]] = []
    for step in range(120):
        if step < 40 and luck.random() < 0.6:
            name = f"r{step}"
            pieces[name] = luck.randrange(1, 5)
            begun(made, name)
            open_requests.add(name)
            left[name] = count
        for name in [name for name in open_requests if luck.random() < 0.05]:
            made.finished(name)
            open_requests.discard(name)
        found = orders(made)
        assert len(found.advance) <= BLENDS_PER_STEP
        said = [rank.step(found, pieces) for rank in ranks]
        ended = []
        for heard in said:
            for name in heard.ended:
                left[name] -= 1
                if left[name] == 0:
                    ended.append(name)
        whole = said[0]
        for heard in said[1:]:
            whole = whole.joined(heard)
        unheard.append((whole, ended))
        while len(unheard) > overlap:
            heard, names = unheard.pop(0)
            made.hear(heard, names)
            for name in names:
                if name in open_requests:
                    made.finished(name)
                    open_requests.discard(name)
    assert not any(left.values())
    assert set(made.counts.values()) == {0}
    assert not any(rank.fetching or rank.blending for rank in ranks)
