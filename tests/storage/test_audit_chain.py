"""The audit log's chain on both databases: what is written stays, and what is tampered with shows."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from sqlalchemy import delete, select, text, update
from sqlalchemy.exc import DBAPIError

from storage.catalogue.audit import Entry, append, audit_key, mac_of, prune, verify
from storage.catalogue.engine import Catalogue, open_catalogue
from storage.catalogue.schema import AuditEvent, AuditHead

KEY = audit_key(b"a master secret for tests only, 32 bytes")
# What an attacker who owns the database does first.
DISARM = {
    "sqlite": ("DROP TRIGGER audit_event_kept", "DROP TRIGGER audit_event_stays"),
    "postgresql": ("ALTER TABLE audit_event DISABLE TRIGGER ALL",),
}


@pytest.fixture
def catalogue(catalogue_url: str) -> Iterator[Catalogue]:
    made = open_catalogue(catalogue_url, KEY)
    yield made
    made.close()


def write(catalogue: Catalogue, count: int, tenant: str = "t") -> None:
    for number in range(count):
        with catalogue.write() as session:
            append(session, Entry(tenant, "document.delete", f"doc-{number}", 100.0 + number, "key-1", None, "req-1"))


def broken(catalogue: Catalogue, tenant: str = "t") -> int | None:
    with catalogue.read() as session:
        return verify(session, tenant, KEY).broken


def disarmed(catalogue: Catalogue, *statements: object) -> None:
    with catalogue.write() as session:
        for statement in (*map(text, DISARM[catalogue.dialect]), *statements):
            session.execute(statement)  # type: ignore[call-overload]


def test_a_whole_chain_is_whole_and_each_tenant_has_its_own(catalogue: Catalogue) -> None:
    write(catalogue, 3)
    write(catalogue, 2, "other")
    with catalogue.read() as session:
        found = [verify(session, tenant, KEY) for tenant in ("t", "other", "nobody")]
    assert [(each.events, each.broken) for each in found] == [(3, None), (2, None), (0, None)]


@pytest.mark.parametrize(
    "statement",
    [update(AuditEvent).values(target="doc-9"), delete(AuditEvent), delete(AuditEvent).where(AuditEvent.seq == 3)],
    ids=["update", "delete all", "delete one"],
)
def test_the_database_refuses_changes_and_deletions(catalogue: Catalogue, statement) -> None:
    write(catalogue, 3)
    with pytest.raises(DBAPIError, match="audit event is never changed"), catalogue.write() as session:
        session.execute(statement)
    assert broken(catalogue) is None


@pytest.mark.services
def test_postgresql_refuses_to_truncate_the_log(postgres_catalogue: str) -> None:
    catalogue = open_catalogue(postgres_catalogue, KEY)
    write(catalogue, 1)
    with pytest.raises(DBAPIError, match="audit event is never changed"), catalogue.write() as session:
        session.execute(text("TRUNCATE audit_event"))
    catalogue.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [("target", "doc-9"), ("action", "nothing"), ("key_id", None), ("key_id", ""), ("user_id", "ann"), ("at", 7.0),
     ("outcome", "denied"), ("request_id", "req-2"), ("tenant_id", "other")],
)  # fmt: skip
def test_a_changed_word_shows(catalogue: Catalogue, column: str, value: object) -> None:
    write(catalogue, 4)
    disarmed(catalogue, update(AuditEvent).where(AuditEvent.seq == 2).values({column: value}))
    assert broken(catalogue) == 2


@pytest.mark.parametrize("gone", [1, 2, 4])
def test_a_missing_event_shows_also_the_first_and_the_last(catalogue: Catalogue, gone: int) -> None:
    write(catalogue, 4)
    disarmed(catalogue, delete(AuditEvent).where(AuditEvent.seq == gone))
    assert broken(catalogue) == gone


def test_who_has_no_key_cannot_mend_the_chain(catalogue: Catalogue) -> None:
    write(catalogue, 3)
    disarmed(catalogue, delete(AuditEvent).where(AuditEvent.seq == 3))
    forger = Catalogue(catalogue.engine, catalogue.dialect, b"a guess")
    with forger.write() as session:
        second = session.scalar(select(AuditEvent.mac).where(AuditEvent.seq == 2))
        session.execute(update(AuditHead).values(seq=2, mac=second))
    with forger.write() as session:
        append(session, Entry("t", "document.delete", "doc-innocent", 102.0))
    assert broken(catalogue) == 3


def test_an_event_of_another_history_of_the_tenant_shows(catalogue: Catalogue) -> None:
    """As from a backup in which less had been done before: its MAC is good, and it does not belong here."""
    write(catalogue, 3)
    with catalogue.read() as session:
        second = session.scalars(select(AuditEvent).where(AuditEvent.seq == 2)).one()
        elsewhere = mac_of(KEY, second, "0" * 64)
    disarmed(
        catalogue,
        update(AuditEvent).where(AuditEvent.seq == 2).values(mac=elsewhere),
    )
    assert broken(catalogue) == 2


def test_an_act_that_is_rolled_back_leaves_no_event_and_no_gap(catalogue: Catalogue) -> None:
    write(catalogue, 1)
    with contextlib.suppress(ZeroDivisionError), catalogue.write() as session:
        append(session, Entry("t", "never", "x", 1.0))
        raise ZeroDivisionError
    write(catalogue, 1)
    with catalogue.read() as session:
        assert verify(session, "t", KEY).events == 2
    assert broken(catalogue) is None


def test_events_written_at_once_make_one_chain(catalogue: Catalogue) -> None:
    threads = [threading.Thread(target=write, args=(catalogue, 5)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with catalogue.read() as session:
        found = verify(session, "t", KEY)
    assert (found.events, found.broken) == (20, None)


def test_the_operator_s_pruning_is_written_down_and_the_rest_stays_a_chain(catalogue: Catalogue) -> None:
    write(catalogue, 5)
    with catalogue.write() as session:
        assert prune(session, "t", 103.0, Entry("t", "", "", 200.0)) == 3
    with catalogue.read() as session:
        kept = [(event.seq, event.action) for event in session.scalars(select(AuditEvent).order_by(AuditEvent.id))]
    assert kept == [(4, "document.delete"), (5, "document.delete"), (6, "audit.prune")]
    assert broken(catalogue) is None
    with catalogue.write() as session:
        assert prune(session, "t", 103.0, Entry("t", "", "", 201.0)) == 0
    with pytest.raises(DBAPIError), catalogue.write() as session:
        session.execute(delete(AuditEvent).where(AuditEvent.seq == 4))


def test_events_removed_the_operator_s_way_without_the_key_show(catalogue: Catalogue) -> None:
    write(catalogue, 5)
    with catalogue.write() as session:
        third = session.scalar(select(AuditEvent.mac).where(AuditEvent.seq == 3))
        session.execute(update(AuditHead).values(pruned_seq=3, pruned_mac=third))
    with catalogue.write() as session:
        session.execute(delete(AuditEvent).where(AuditEvent.seq <= 3))
    assert broken(catalogue) == 3


def test_events_from_before_there_was_a_chain_are_counted_apart(catalogue: Catalogue) -> None:
    with catalogue.write() as session:
        session.add(AuditEvent(tenant_id="t", action="old", target="x", at=1.0))
    write(catalogue, 2)
    with catalogue.read() as session:
        found = verify(session, "t", KEY)
    assert (found.events, found.unchained, found.broken) == (2, 1, None)
