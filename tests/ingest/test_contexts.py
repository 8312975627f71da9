"""What is told of a chunk beside its text: where it stands, and the header of what it begins inside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fixtures_work import WordEmbedder, Work
from ingest_tokens import PlainTokenizer, check_cover
from sqlalchemy import select

from ingest.chunker import cut
from ingest.parsers import parse
from storage.catalogue.schema import ChunkRow, Corpus, VersionChunk
from storage.types import Chunk, ParsedDocument, embedded_text

PLAIN = PlainTokenizer()
BODY = [f"value_{n} = call(argument_{n})" for n in range(60)]


class RealParser:
    """The product's, in this process."""

    def parse(self, data: bytes, name: str, check: Callable[[], None] = lambda: None) -> ParsedDocument:
        return parse(data, name)


def chunks_of(text: str, name: str, limit: int = 90) -> list[Chunk]:
    document = parse(text.encode(), name)
    chunks = cut(document, PLAIN, max_tokens=limit)
    check_cover(document, chunks)
    return chunks


# --- code ---

LONG = {
    "a.py": ("def settle(account, amount):\n", "    {}", "\n", "settle", "def settle(account, amount):"),
    "a.js": ("export const settle = (account) => {\n", "  {};", "\n}\n", "settle", "export const settle = (account) =>"),
    "a.go": ("package p\n\nfunc Settle(a int) int {\n", "\t{}", "\n\treturn 1\n}\n", "Settle", "func Settle(a int) int"),
    "a.rs": ("pub fn settle(a: u8) -> u8 {\n", "    let {};", "\n    a\n}\n", "settle", "pub fn settle(a: u8) -> u8"),
    "a.c": ("static int settle(int a)\n{\n", "    {};", "\n    return a;\n}\n", "settle", "static int settle(int a)"),
}


@pytest.mark.parametrize("name", LONG)
def test_later_chunks_of_a_long_function_carry_its_name_and_its_first_line(name: str) -> None:
    begin, line, end, symbol, header = LONG[name]
    first, second, *rest = chunks_of(begin + "\n".join(line.format(each) for each in BODY) + end, name)
    assert (first.header, first.headings) == ("", ())
    assert rest
    for chunk in (second, *rest):
        assert chunk.headings == (symbol,)
        assert chunk.header == header
        assert symbol not in chunk.text


def test_the_middle_of_a_method_is_told_below_its_class() -> None:
    method = "\n".join(["    def settle(self, amount):", *(f"        {each}" for each in BODY)])
    text = f"class Ledger(Base):\n    kept = 1\n\n    def close(self):\n        return 2\n\n{method}\n"
    *_, late = chunks_of(text, "a.py")
    assert late.headings == ("Ledger", "settle")
    assert late.header == "class Ledger(Base):\ndef settle(self, amount):"


def test_the_middle_of_a_long_class_without_methods_is_told_its_class_once() -> None:
    fields = "\n".join(f"    field_{n}: int = {n}" for n in range(80))
    *_, late = chunks_of(f"class Row:\n{fields}\n", "a.py")
    assert late.headings == ("Row",)
    assert late.header == "class Row:"


def test_short_functions_still_share_a_chunk_and_a_section() -> None:
    functions = [f"def f{n}(a, b):\n    return a + {n}" for n in range(12)]
    (chunk,) = chunks_of("\n\n\n".join(functions), "a.py", 400)
    assert (chunk.headings, chunk.header) == ((), "")


def test_a_first_line_without_an_end_is_told_in_part() -> None:
    text = "def f(" + ", ".join(f"argument_{n}=None" for n in range(300)) + "):\n" + "\n".join(f"    {each}" for each in BODY)
    *_, late = chunks_of(text, "a.py", 200)
    assert late.headings == ("f",)
    assert 100 < len(late.header) <= 1001


# --- stored ---


def test_the_header_is_stored_with_a_chunk_and_kept_with_its_generation(work: Work) -> None:
    work.parser = RealParser()  # type: ignore[assignment]
    corpus = work.corpus()
    with work.catalogue.write() as session:
        session.get_one(Corpus, corpus.id).settings = {"keep_versions": 3}
    rows = [f"item{n},{n}" for n in range(60)]
    work.ingest(corpus, {"a.csv": "\n".join(["thing,price", *rows])})
    work.ingest(corpus, {"a.csv": "\n".join(["thing,weight", *rows])})
    with work.catalogue.read() as session:
        for table, header in ((ChunkRow, "thing,weight"), (VersionChunk, "thing,price")):
            first, *late = session.execute(select(table.text, table.header).order_by(table.ordinal)).all()
            assert header in first.text
            assert first.header == ""
            assert late
            assert {row.header for row in late} == {header}


# --- what is embedded ---


def test_of_a_path_that_does_not_fit_the_embedder_the_inner_headings_are_kept() -> None:
    embedder = WordEmbedder()
    embedder.max_tokens = 12
    path = ("Outer part", "Middle", "Inner")
    text = "one two three four five"
    shown = embedded_text(embedder, text, path, "folder/name.md")
    assert shown == f"name > Middle > Inner\n{text}"  # ten words; the outer ones would make thirteen
    embedder.max_tokens = 8
    assert embedded_text(embedder, text, path, "folder/name.md") == f"name > Inner\n{text}"
    embedder.max_tokens = 6
    assert embedded_text(embedder, text, path, "folder/name.md") == f"name\n{text}"
    embedder.max_tokens = 5
    assert embedded_text(embedder, text, path, "folder/name.md") == text
