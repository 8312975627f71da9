"""The audit log: per tenant a chain in which each event's MAC covers the event and the MAC before it.

A changed, removed or inserted event breaks the chain for whoever has the key; the key is not in the database, so that who
can only write there cannot mend it. What a chain cannot show by itself is that its newest events are gone together with
the head: an export that was kept elsewhere shows that (`verify` takes one).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from storage.catalogue.insert import insert_into
from storage.catalogue.schema import AuditEvent, AuditHead
from storage.keys import length_prefixed

PRUNE = "audit.prune"
BATCH = 1000
_TAG = b"preread-audit-1"
_KEY_TAG = b"preread-audit-key-1"


@dataclass(frozen=True)
class Entry:
    """What is to be written down. `outcome`: ok or denied."""

    tenant_id: str
    action: str
    target: str
    at: float
    key_id: str | None = None
    user_id: str | None = None
    request_id: str | None = None
    outcome: str = "ok"


@dataclass(frozen=True)
class Found:
    """What a look at a chain has found. `broken`: the first event that does not fit, or None; `unchained`: events from
    before there was a chain."""

    tenant_id: str
    events: int
    unchained: int
    broken: int | None
    reason: str = ""


def audit_key(master: bytes) -> bytes:
    """The 32-byte key of the chains, derived from the installation's secret."""
    return hmac.new(master, _KEY_TAG, hashlib.sha256).digest()


def append(session: Session, entry: Entry) -> AuditEvent:
    """Add an event in the caller's transaction; those of a tenant wait for each other until it ends."""
    head = _head(session, entry.tenant_id)
    event = AuditEvent(**vars(entry), seq=head.seq + 1)
    event.mac = mac_of(session.info.get("audit_key", b""), event, head.mac)
    head.seq, head.mac = head.seq + 1, event.mac
    session.add(event)
    session.flush()
    return event


def mac_of(key: bytes, event: AuditEvent, before: str) -> str:
    """An event's MAC: HMAC-SHA256 over its fields, each behind its length, and the MAC of the one before it."""
    words = (
        event.tenant_id, str(event.seq), event.key_id, event.user_id, event.action, event.target, repr(float(event.at)),
        event.request_id, event.outcome, before,
    )  # fmt: skip
    # An absent word and an empty one differ.
    fields = [b"0" if word is None else b"1" + word.encode("utf-8", "surrogatepass") for word in words]
    return hmac.new(key, length_prefixed([_TAG, *fields]), hashlib.sha256).hexdigest()


def verify(session: Session, tenant_id: str, key: bytes) -> Found:
    """Read a tenant's chain from its beginning to its end."""
    head = session.get(AuditHead, tenant_id) or AuditHead(tenant_id=tenant_id, seq=0, mac="", pruned_seq=0, pruned_mac="")
    begins = f"{head.pruned_seq}:{head.pruned_mac}"
    expected, before, unchained, count = head.pruned_seq + 1, head.pruned_mac, 0, 0
    said = not head.pruned_seq  # a pruning must have been written down by who has the key
    for event in events(session, tenant_id):
        if event.seq is None:
            unchained += 1
            continue
        if event.seq <= head.pruned_seq:
            continue  # put out of date, and not deleted yet
        if event.seq != expected:
            return Found(tenant_id, count, unchained, expected, f"event {expected} is missing")
        if not hmac.compare_digest(event.mac or "", mac_of(key, event, before)):
            return Found(tenant_id, count, unchained, expected, f"event {expected} is not what was written")
        said = said or (event.action == PRUNE and event.target == begins)
        expected, before, count = expected + 1, event.mac or "", count + 1
    if (expected - 1, before) != (head.seq, head.mac):
        return Found(tenant_id, count, unchained, expected, f"the events from {expected} on are missing")
    if not said:
        return Found(tenant_id, count, unchained, head.pruned_seq, "nobody has written down that older events were removed")
    return Found(tenant_id, count, unchained, None)


def prune(session: Session, tenant_id: str, before: float, entry: Entry) -> int:
    """Delete a tenant's events from before a time, and write down that it was done. Returns how many went."""
    last = session.scalars(
        select(AuditEvent)
        .where(AuditEvent.tenant_id == tenant_id, AuditEvent.seq.is_not(None), AuditEvent.at < before)
        .order_by(AuditEvent.seq.desc())
        .limit(1)
    ).first()
    head = _head(session, tenant_id)
    if last is None or last.seq is None or last.seq <= head.pruned_seq:
        return 0
    head.pruned_seq, head.pruned_mac = last.seq, last.mac or ""
    session.flush()
    old = (AuditEvent.seq <= head.pruned_seq) | AuditEvent.seq.is_(None)
    gone = session.execute(delete(AuditEvent).where(AuditEvent.tenant_id == tenant_id, old))
    target = f"{head.pruned_seq}:{head.pruned_mac}"
    append(session, Entry(**{**vars(entry), "tenant_id": tenant_id, "action": PRUNE, "target": target}))
    return int(getattr(gone, "rowcount", 0))


def events(session: Session, tenant_id: str) -> Iterator[AuditEvent]:
    """A tenant's events, oldest first, read in batches."""
    last = 0
    while True:
        query = select(AuditEvent).where(AuditEvent.tenant_id == tenant_id, AuditEvent.id > last)
        batch = session.scalars(query.order_by(AuditEvent.id).limit(BATCH)).all()
        yield from batch
        if len(batch) < BATCH:
            return
        last = batch[-1].id
        session.expunge_all()


def _head(session: Session, tenant_id: str) -> AuditHead:
    """The end of the chain, held until the transaction ends."""
    fresh = {"tenant_id": tenant_id, "seq": 0, "mac": "", "pruned_seq": 0, "pruned_mac": ""}
    head = session.get(AuditHead, tenant_id, with_for_update=True)
    if head is None:
        session.execute(insert_into(session, AuditHead).values(**fresh).on_conflict_do_nothing())
        head = session.get_one(AuditHead, tenant_id, with_for_update=True)
    return head
