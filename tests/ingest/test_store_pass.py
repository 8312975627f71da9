"""What a rule keeps out of the store: at ingest, and when the rule comes or goes later."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from fixtures_work import Work, paragraphs
from sqlalchemy import select, update

from ingest.placement import PASS_SECONDS, StorePass
from storage.catalogue.schema import ChunkRow, Corpus, Document, DocumentUse, KVObject, Site, SiteWanted
from storage.catalogue.sites import wanted
from storage.policy.file import PolicyFile

SECRET = 'rules:\n- {name: secret, match: {path: "secret/*"}, store: false}\n'


class Operator:
    """Edits the file, and lets the beat look at it."""

    def __init__(self, work: Work, path: Path) -> None:
        self.work, self.path, self.ticks = work, path, 0.0
        self.now = time.time()
        path.write_text("")
        self.policy = PolicyFile(path, self._later)
        self.storing = StorePass(work.catalogue, self.policy, work.rung.append, lambda: self.now)

    def _later(self) -> float:
        self.ticks += 1.0
        return self.ticks

    def says(self, text: str) -> None:
        self.path.write_text(text)
        self.work.policy = self.policy.current()

    def run(self) -> int:
        """Ticks until a pass over all documents is through."""
        changed = self.storing.tick()
        while self.storing._after is not None:
            changed += self.storing.tick()
        return changed


@pytest.fixture
def operator(work: Work, tmp_path: Path) -> Operator:
    return Operator(work, tmp_path / "policy.yaml")


def keys(work: Work, path: str) -> list[str | None]:
    with work.catalogue.read() as session:
        query = select(ChunkRow.kv_key).join(Document, Document.id == ChunkRow.document_id)
        return list(session.scalars(query.where(Document.path == path).order_by(ChunkRow.ordinal)))


def test_what_must_not_be_stored_is_searchable_and_owes_no_kv(work: Work, operator: Operator) -> None:
    operator.says(SECRET)
    corpus = work.corpus()
    job = work.ingest(corpus, {"secret/a.txt": "alpha one two", "open/b.txt": "beta one two"})
    assert work.view(job)["status"] == "in_progress", "the open one's KV is owed"
    assert keys(work, "secret/a.txt") == [None]
    assert work.document(corpus, "secret/a.txt").not_stored == "secret"
    assert work.document(corpus, "open/b.txt").not_stored is None
    assert work.count(KVObject) == 1
    assert work.search(corpus, "alpha")[1] == ["alpha one two"]
    work.compute_kv()
    assert work.view(job)["status"] == "completed"


def test_a_text_that_two_documents_share_is_kept_for_the_one_that_may(work: Work, operator: Operator) -> None:
    operator.says(SECRET)
    work.ingest(work.corpus(), {"secret/a.txt": "the same words", "open/b.txt": "the same words"})
    assert keys(work, "secret/a.txt") == [None]
    assert keys(work, "open/b.txt") != [None]


def test_a_new_rule_reaches_documents_that_are_there(work: Work, operator: Operator) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"secret/a.txt": paragraphs(3), "open/b.txt": "beta one two"})
    work.compute_kv()
    gone, kept = keys(work, "secret/a.txt"), keys(work, "open/b.txt")
    operator.says(SECRET)
    assert operator.run() == 1
    assert keys(work, "secret/a.txt") == [None] * 3
    assert keys(work, "open/b.txt") == kept
    assert work.count(KVObject, KVObject.key.in_(gone), KVObject.status == "purge") == 3
    assert len(work.chunks(corpus, "secret/a.txt")) == 3, "it is searchable all the while"
    operator.now += PASS_SECONDS
    assert operator.run() == 0


def test_a_rule_that_goes_has_the_documents_stored_again(work: Work, operator: Operator) -> None:
    operator.says(SECRET)
    corpus = work.corpus()
    work.ingest(corpus, {"secret/a.txt": "alpha one two"})
    operator.says("")
    assert operator.run() == 1
    assert work.rung[-1] == "ingest"
    work.worker().drain()
    assert keys(work, "secret/a.txt") != [None]
    assert work.document(corpus, "secret/a.txt").not_stored is None
    operator.now += PASS_SECONDS
    assert operator.run() == 0


def test_no_second_job_is_queued_while_the_first_is_at_work(work: Work, operator: Operator) -> None:
    operator.says(SECRET)
    work.ingest(work.corpus(), {"secret/a.txt": "alpha one two"})
    operator.says("")
    assert operator.run() == 1
    operator.now += PASS_SECONDS
    assert operator.run() == 0


def test_another_rule_of_the_same_kind_is_named_without_any_work(work: Work, operator: Operator) -> None:
    operator.says(SECRET)
    corpus = work.corpus()
    work.ingest(corpus, {"secret/a.txt": "alpha one two"})
    operator.says(SECRET.replace("name: secret", "name: private"))
    operator.run()
    assert work.document(corpus, "secret/a.txt").not_stored == "private"


def test_disuse_takes_kv_away_and_use_brings_it_back(work: Work, operator: Operator) -> None:
    operator.says('rules:\n- {name: idle, match: {use: {last: "> 30d"}}, store: false}\n')
    corpus = work.corpus()
    work.ingest(corpus, {"a.txt": "alpha one two"})
    work.compute_kv()
    operator.run()
    assert keys(work, "a.txt") != [None]
    with work.catalogue.write() as session:
        session.execute(update(Document).values(created_at=operator.now - 31 * 86400))
    operator.now += PASS_SECONDS
    operator.run()
    assert keys(work, "a.txt") == [None]
    with work.catalogue.write() as session:
        document = session.scalars(select(Document)).one()
        session.add(DocumentUse(document_id=document.id, day=int(operator.now // 86400), hits=1, last_at=operator.now))
    operator.now += PASS_SECONDS
    assert operator.run() == 1


def test_a_pass_sees_every_document_of_many_pages(work: Work, operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("storage.catalogue.facts.page_of.__defaults__", (2,))
    corpora = [work.corpus(name) for name in ("one", "two")]
    for corpus in corpora:
        work.ingest(corpus, {f"secret/{n}.txt": f"{corpus.name} text {n}" for n in range(4)})
    operator.says(SECRET)
    assert operator.run() == 8


def test_nothing_is_read_while_nothing_is_said(work: Work, operator: Operator) -> None:
    work.ingest(work.corpus(), {"a.txt": "alpha"})
    operator.says("rules:\n- {pin: memory}\n")
    with work.catalogue.read() as session:
        assert operator.storing._corpora(session) == []
        assert session.scalars(select(Corpus.id)).all() != []


def test_two_beats_that_tick_together_do_the_work_once(work: Work, operator: Operator, tmp_path: Path) -> None:
    work.ingest(work.corpus(), {"secret/a.txt": "alpha one two"})
    operator.says(SECRET)
    other = StorePass(work.catalogue, PolicyFile(operator.path), work.rung.append)
    assert operator.storing.tick() + other.tick() == 1




def test_a_rule_names_the_sites_that_are_to_hold_a_documents_kv(work: Work, operator: Operator) -> None:
    corpus = work.corpus()
    work.ingest(corpus, {"lyon/a.txt": "alpha one two", "b.txt": "beta one two"})
    with work.catalogue.write() as session:
        tenant = session.scalars(select(Document.tenant_id)).first()
        for name in ("lyon", "oslo"):
            session.add(Site(id=f"site-{name}", tenant_id=tenant, name=name, corpora=None, groups=[], pushed=[], erased=0,
                             seen_at=None, created_at=1.0, removed_at=None))  # fmt: skip
        session.flush()
        session.get_one(Site, "site-oslo").removed_at = 2.0
        session.execute(update(KVObject).values(status="done"))
    operator.says('rules:\n- {match: {path: "lyon/*"}, replicate: [lyon, oslo, nowhere]}\n')
    for _ in range(2):  # saying it again is no error
        operator.run()
        operator.now += PASS_SECONDS
    with work.catalogue.read() as session:
        assert [(row.site_id, row.key) for row in session.scalars(select(SiteWanted))] == [
            ("site-lyon", key) for key in keys(work, "lyon/a.txt")
        ]
        assert wanted(session, session.get_one(Site, "site-lyon"), "") == keys(work, "lyon/a.txt")
