"""Vectors and words live and die with their chunk, on both databases."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from fixtures_work import empty_catalogue
from small_library import HashedWords, Library
from sqlalchemy import delete, select, text

from retrieval import impacts
from retrieval.index import ChunkIndex, open_index
from retrieval.search import Retriever
from storage.catalogue.engine import open_catalogue
from storage.catalogue.schema import ChunkRow
from storage.errors import UserError

HOSTILE = [
    '" OR *',
    "NEAR(a b, 2)",
    '"',
    "'",
    "''); DROP TABLE chunk; --",
    "corpus : x",
    "words:*",
    "a AND",
    "NOT",
    "-a",
    "^a",
    "a*",
    "(((",
    "{a b} : c",
    "\\",
    "a:* & !b | <->",
    "%_",
    "\x00",
    "\ud800",
    "💥",
    "x" * 100_000,
    "AND OR NOT NEAR",
    ":k :query",
    "?",
    "$1",
    "%(a)s",
]


def hits(library: Library, query: str, corpus_id: str = "vs_1") -> tuple[list[int], list[int]]:
    vector = library.embedder.embed([query])[0]
    with library.catalogue.read() as session:
        dense = library.index.dense(session, [corpus_id], vector, 10)
        lexical = library.index.lexical(session, [corpus_id], query, 10)
    return [id_ for id_, _ in dense], [id_ for id_, _ in lexical]


def test_a_rollback_leaves_neither_vector_nor_word(library: Library) -> None:
    with contextlib.suppress(ZeroDivisionError), library.catalogue.write() as session:
        library.index.add(session, "vs_1", [(1, library.embedder.embed(["kiwi"])[0], "kiwi")])
        raise ZeroDivisionError
    assert hits(library, "kiwi") == ([], [])


def test_a_rolled_back_delete_keeps_both(library: Library) -> None:
    (chunk,) = library.put("vs_1", "doc", "kiwi")
    with contextlib.suppress(ZeroDivisionError), library.catalogue.write() as session:
        library.index.remove(session, [chunk])
        raise ZeroDivisionError
    assert hits(library, "kiwi") == ([chunk], [chunk])


def test_a_delete_is_immediate_also_for_a_second_warm_process(library: Library) -> None:
    gone, kept = library.put("vs_1", "a", "kiwi fruit", "kiwi bird")
    catalogue, _, retriever = library.warm()
    search = {"tenant_id": "t1", "corpus_ids": ["vs_1"], "query": "kiwi fruit", "top_k": 5}
    assert {chunk.chunk_id for chunk in retriever.search(**search)} == {gone, kept}
    with library.catalogue.write() as session:
        library.index.remove(session, [gone, 12345])
    assert hits(library, "kiwi fruit") == ([kept], [kept])
    assert {chunk.chunk_id for chunk in retriever.search(**search)} == {kept}
    catalogue.close()


@pytest.mark.parametrize("query", HOSTILE)
def test_a_query_is_plain_text_whatever_it_holds(library: Library, query: str) -> None:
    library.corpus("vs_2")
    library.put("vs_2", "theirs", "a b c x and or not near corpus words k query drop table")
    assert library.find(query, mode="lexical") == []
    library.put("vs_1", "mine", "quiet text")
    assert library.find(query, mode="lexical") == []
    assert library.find(query + " quiet", mode="lexical") == ["mine"]


def test_hostile_text_is_indexed_and_found(library: Library) -> None:
    for number, content in enumerate(HOSTILE):
        with library.catalogue.write() as session:
            row = (number + 1, library.embedder.embed([content])[0], content + " marker")
            library.index.add(session, "vs_1", [row])
    assert len(hits(library, "marker")[1]) == 10


@pytest.mark.parametrize(
    ("content", "queries"),
    [
        ("東京都の契約は三年です", ["契約", "東京", "都", "す", "三年です"]),
        ("계약기간은 삼년이다", ["계약", "기간"]),
        ("สัญญามีอายุสามปี", ["สัญญา", "ปี"]),
        ("ﾃﾞｰﾀﾍﾞｰｽ ＡＢＣ", ["データベース", "abc"]),
        ("Die Straße ist Maß", ["STRASSE", "mass"]),
        ("नियम की अवधि", ["अवधि"]),
        ("call parse_invoice or getUserName", ["invoice", "parse_invoice", "USER name", "getusername"]),
        ("cafe\u0301", ["café", "cafe", "CAFÉ"]),
        ("Ελευθερία", ["ελευθερια"]),
        ("Die Prüfung naïver Garçons", ["prufung", "NAIVER", "garcon garcons"]),
        ("甲方应当在30天内支付API费用", ["支付", "API费用", "费", "api", "应当支付"]),
        ("『契約期間』は、３年とする。", ["契約期間", "契約の期間", "3年"]),
        ("한국어 계약서 v2.1 조항", ["계약서", "v2.1", "조"]),
        ("see § 12.3 and § 4", ["§ 12.3", "12.3"]),
        ("import java.util.ArrayList; os.path.join(a)", ["java.util.ArrayList", "arraylist", "array", "os.path.join"]),
        ("HTTPServerError_v2 raised by parseXMLFile", ["http server", "parse_xml XML", "httpservererror_v2"]),
    ],
)
def test_words_of_many_scripts_are_found(library: Library, content: str, queries: list[str]) -> None:
    library.put("vs_1", "doc", content)
    library.put("vs_1", "noise", "something else, 別物")
    for query in queries:
        assert library.find(query, mode="lexical") == ["doc"], query


def test_a_section_number_is_found_before_its_digits(library: Library) -> None:
    library.put("vs_1", "other", "clause 12 and clause 3, of 12 pages and 3 annexes")
    library.put("vs_1", "wanted", "as said in 12.3 above, and again in the annexes of the whole of this long document")
    library.put("vs_1", "near", "12.4 and 11.3")
    assert library.find("§ 12.3", mode="lexical")[0] == "wanted"


def test_more_of_a_word_in_less_text_ranks_higher(library: Library) -> None:
    filler = " ".join(f"w{number}" for number in range(150))
    library.put("vs_1", "once", f"indemnity {filler}")
    library.put("vs_1", "often", f"indemnity indemnity indemnity indemnity {filler}")
    library.put("vs_1", "short", "indemnity indemnity indemnity")
    assert library.find("indemnity", mode="lexical") == ["short", "often", "once"]


def test_a_word_of_half_the_corpus_is_not_read_to_its_end_and_the_rare_one_decides(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impacts, "MOST_POSTINGS", 20)
    for number in range(60):
        library.put("vs_1", f"n{number}", f"the policy of the house number {number}")
    library.put("vs_1", "rare", "the indemnity of the house, and a policy")
    assert library.find("the policy of indemnity", mode="lexical")[0] == "rare"
    # All words are frequent: what holds all of them is found.
    library.put("vs_1", "about", "garden policy of the house")
    library.put("vs_1", "garden", *[f"a garden {number}" for number in range(30)])
    assert library.find("garden policy", mode="lexical")[0] == "about"


def test_a_word_that_other_corpora_are_full_of_is_found_in_ours_and_weighs_what_it_weighs_in_ours(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impacts, "MOST_POSTINGS", 20)
    library.corpus("vs_alone")
    library.corpus("vs_other", "t2")
    library.put("vs_other", "theirs", *(f"indemnity of the house {number}" for number in range(60)))
    for name in ("vs_alone", "vs_1"):
        for number in range(15):
            library.put(name, f"n{number}", f"policy of the garden number {number}")
        library.put(name, "rare", "the indemnity")
        if name == "vs_alone":
            with library.catalogue.read() as session:
                theirs = list(session.scalars(select(ChunkRow.id).where(ChunkRow.corpus_id == "vs_other")))
            alone = scores(library, "indemnity of the garden", [name], without=theirs)
    assert scores(library, "indemnity of the garden", ["vs_1"]) == alone
    assert library.find("indemnity", mode="lexical") == ["rare"]
    assert library.find("indemnity", "vs_1", "vs_other", mode="lexical") == ["rare"]


def scores(library: Library, query: str, corpora: list[str], without: Sequence[int] = ()) -> list[float]:
    with contextlib.suppress(ZeroDivisionError), library.catalogue.write() as session:
        library.index.remove(session, without)
        found = [score for _, score in library.index.lexical(session, corpora, query, 50)]
        raise ZeroDivisionError
    return found


def test_a_rare_word_weighs_more_than_frequent_ones(library: Library) -> None:
    for number in range(30):
        library.put("vs_1", f"n{number}", "what is the of a what is the")
    library.put("vs_1", "rare", "a word on indemnity")
    assert library.find("what is the indemnity", mode="lexical")[0] == "rare"


def test_corpora_whose_names_differ_by_case_or_sign_are_different(library: Library) -> None:
    for corpus_id in ("vs_A", "vs_a", "vs a", 'vs"a'):
        library.corpus(corpus_id)
    library.put("vs_A", "doc", "kiwi")
    for corpus_id in ("vs_a", "vs a", 'vs"a'):
        assert hits(library, "kiwi", corpus_id) == ([], [])


def test_dense_search_is_exact(library: Library) -> None:
    vectors = np.random.default_rng(0).standard_normal((600, 64))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with library.catalogue.write() as session:
        for name, ids in (("vs_1", range(0, 600, 2)), ("vs_2", range(1, 600, 2))):
            library.index.add(session, name, [(i + 1, vectors[i].tolist(), "w") for i in ids])
    with library.catalogue.read() as session:
        for corpora, rows in ((["vs_1"], np.arange(0, 600, 2)), (["vs_1", "vs_2"], np.arange(600))):
            found = library.index.dense(session, corpora, vectors[7].tolist(), 20)
            scores = vectors[rows] @ vectors[7]
            best = rows[np.argsort(-scores)][:20] + 1
            assert [id_ for id_, _ in found] == best.tolist()
            assert [score for _, score in found] == pytest.approx(np.sort(scores)[::-1][:20], abs=1e-5)


def other_index(library: Library) -> tuple[HashedWords, ChunkIndex]:
    other = HashedWords("hashed@2")
    other.dimensions = 32
    index = open_index(library.catalogue, other)
    index.ensure()
    return other, index


def test_another_embedder_is_refused_until_a_reindex(library: Library) -> None:
    library.put("vs_1", "doc", "kiwi")
    other, index = other_index(library)
    with library.catalogue.write() as session, pytest.raises(UserError, match="preread reindex vs_1"):
        index.add(session, "vs_1", [(99, other.embed(["kiwi"])[0], "kiwi")])
    with pytest.raises(UserError, match="hashed@1") as refused:
        Retriever(library.catalogue, index, other).search(tenant_id="t1", corpus_ids=["vs_1"], query="kiwi", top_k=1)
    assert refused.value.code == "reindex_required"
    assert library.find("kiwi") == ["doc"]


def test_a_generation_that_is_being_filled_is_seen_by_nobody_and_is_flipped_whole(library: Library) -> None:
    first, second = library.put("vs_1", "doc", "kiwi", "fig")
    library.corpus("vs_2")
    library.put("vs_2", "other", "kiwi of another corpus")
    other, index = other_index(library)
    rows = [(first, other.embed(["kiwi"])[0], "kiwi"), (second, other.embed(["fig"])[0], "fig")]
    retriever = Retriever(library.catalogue, index, other)
    search = {"tenant_id": "t1", "corpus_ids": ["vs_1"], "query": "kiwi", "top_k": 5}
    with library.catalogue.write() as session:
        index.stage(session, "vs_1", rows[:1])
        assert index.lacking(session, "vs_1") == [second]
        assert not index.generations.flip(session, "vs_1", index)
    assert [chunk.text for chunk in library.retriever.search(**search)] == ["kiwi", "fig"]
    with pytest.raises(UserError, match="reindex"):
        retriever.search(**search)
    with library.catalogue.write() as session:
        index.stage(session, "vs_1", rows[1:])
        assert index.generations.flip(session, "vs_1", index)
        assert library.find("kiwi") == ["doc", "doc"]  # readers are not held up meanwhile
    assert [chunk.text for chunk in retriever.search(**search)] == ["kiwi", "fig"]
    with pytest.raises(UserError, match="reindex"):
        library.find("kiwi")
    with library.catalogue.write() as session:
        assert [index.generations.clear(session, "vs_1", index, most) for most in (1, 5, 5)] == [1, 1, 0]
        vector = library.embedder.embed(["kiwi"])[0]
        assert library.index.dense(session, ["vs_1"], vector, 5) == []  # nothing of it is left behind
    assert library.find("kiwi", "vs_2") == ["other"]


def test_an_index_of_an_earlier_version_asks_for_a_reindex(library: Library) -> None:
    library.put("vs_1", "doc", "kiwi")
    with library.catalogue.write() as session:
        session.execute(text("UPDATE corpus SET index_generation = 'before'"))  # as the migration leaves it
    with pytest.raises(UserError, match=r"by an earlier version.*preread reindex vs_1"):
        library.find("kiwi")


def test_a_deleted_chunk_leaves_a_generation_that_is_being_filled_too(library: Library) -> None:
    first, second = library.put("vs_1", "doc", "kiwi", "fig")
    other, index = other_index(library)
    with library.catalogue.write() as session:
        index.stage(session, "vs_1", [(i, other.embed([t])[0], t) for i, t in ((first, "kiwi"), (second, "fig"))])
    with library.catalogue.write() as session:
        library.index.remove(session, [first])
        session.execute(delete(ChunkRow).where(ChunkRow.id == first))
        assert index.generations.flip(session, "vs_1", index)
    with library.catalogue.read() as session:
        assert [id_ for id_, _ in index.dense(session, ["vs_1"], other.embed(["kiwi"])[0], 5)] == [second]
        assert index.lexical(session, ["vs_1"], "kiwi", 5) == []


def test_ensuring_again_keeps_what_is_there(library: Library) -> None:
    library.put("vs_1", "doc", "kiwi")
    library.index.ensure()
    assert library.find("kiwi") == ["doc"]


def test_deleted_words_and_vectors_leave_the_file(tmp_path: Path) -> None:
    library = Library(empty_catalogue(tmp_path / "catalogue.db"))
    library.index.ensure()
    library.corpus("vs_1")
    library.put("vs_1", "kept", "kiwi fruit")
    library.put("vs_1", "doc", "xylophonesecret")
    vector = np.asarray(library.embedder.embed(["xylophonesecret"])[0], dtype="<f4").tobytes()
    pieces = [vector[start : start + 32] for start in range(0, len(vector), 32)]  # pages may cut it anywhere
    pieces = [piece for piece in pieces if piece != piece[:4] * 8]
    for traces in (True, False):
        with library.catalogue.engine.connect() as connection:
            connection.connection.driver_connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        content = (tmp_path / "catalogue.db").read_bytes()
        assert (any(piece in content for piece in pieces), b"xylophonesecret" in content) == (traces, traces)
        if traces:
            library.drop("vs_1", "doc")
    library.catalogue.close()


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
from small_library import Library
library = Library(sys.argv[1])
for number in range(100_000):
    library.put("vs_1", f"{number:06}", f"alpha w{number}")
    print(number, flush=True)
"""


def test_kill_during_writes_loses_no_acknowledged_chunk_nor_half_of_one(library: Library) -> None:
    here = Path(__file__).parent
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED, library.url, str(here)],
        cwd=here.parents[1],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    stop = random.Random(1).randrange(20, 40)
    acknowledged = -1
    with child, child.stdout as lines:
        for line in lines:
            acknowledged = int(line)
            library.find("alpha")  # a reader at work
            if acknowledged == stop:
                os.kill(child.pid, signal.SIGKILL)
    assert acknowledged >= stop
    vector = library.embedder.embed(["alpha"])[0]
    with library.catalogue.read() as session:
        chunks = sorted(session.scalars(select(ChunkRow.id)))
        assert len(chunks) in (acknowledged + 1, acknowledged + 2)
        assert sorted(id_ for id_, _ in library.index.dense(session, ["vs_1"], vector, 4000)) == chunks
        assert sorted(id_ for id_, _ in library.index.lexical(session, ["vs_1"], "alpha", 4000)) == chunks
    if library.catalogue.dialect == "sqlite":
        # A connection of its own: FTS5 checks by what a connection knew of the words when it last searched them.
        other = open_catalogue(library.url)
        with other.read() as session:
            assert session.scalar(text("PRAGMA integrity_check")) == "ok"
        other.close()
