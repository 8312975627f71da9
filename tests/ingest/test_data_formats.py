"""Tables, JSON, YAML, TOML, INI and XML: the text is the file, and their structure is where it says it is."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ingest_tokens import PlainTokenizer, check_cover

from ingest.chunker import cut
from ingest.parsers import PARSERS, parse
from storage.errors import FileError
from storage.types import Block, ParsedDocument

LONG = "word " * 400  # more than an entry that stays whole
PLAIN = PlainTokenizer()


def at(document: ParsedDocument, words: str) -> Block:
    found = [b for b in document.blocks if words in document.text[b.start : b.end]]
    assert len(found) == 1, found
    return found[0]


def cuts(document: ParsedDocument, block: Block) -> list[str]:
    """The beginnings of what a block may be cut into."""
    return [document.text[offset:].lstrip()[:6] for offset in block.breaks]


# --- tables ---


def test_a_table_keeps_its_header_with_the_first_row() -> None:
    document = parse(b"name,age\nann,1\nbob,2\n", "a.csv")
    (block,) = document.blocks
    assert (block.kind, block.header) == ("table", "name,age")
    assert cuts(document, block) == ["bob,2\n"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_a_quoted_cell_may_hold_line_ends_and_delimiters(delimiter: str) -> None:
    rows = [["name", "note"], ["ann", '"two\nlines"'], ["bob", f'"x{delimiter}y\n\nz"'], ["eve", "1"]]
    text = "\n".join(delimiter.join(row) for row in rows) + "\n"
    document = parse(text.encode(), "a.csv")
    (block,) = document.blocks
    assert document.text == text
    assert [document.text[offset : offset + 3] for offset in block.breaks] == ["bob", "eve"]


def test_rows_of_other_widths_are_rows_and_a_stray_quote_takes_no_others_with_it() -> None:
    document = parse(b'a,b\n1,2\n3\n4,5,6\n5" pipe,7\n"stray,8\nq,9\n', "a.csv")
    assert cuts(document, document.blocks[0]) == ["3\n4,5,", "4,5,6\n", '5" pip', '"stray', "q,9\n"]


def test_a_header_of_several_lines_is_whole() -> None:
    document = parse(b'"first\nname",age\nann,1\nbob,2\n', "a.csv")
    assert document.blocks[0].header == '"first\nname",age'


def test_sixty_rows_over_chunks_are_never_cut_inside_one_and_every_chunk_knows_the_header() -> None:
    rows = [f"{n},\"item {n}\nwith a note, and another\",{n * 7}" for n in range(60)]
    document = parse(("id,item,price\n" + "\n".join(rows) + "\n").encode(), "a.csv")
    chunks = cut(document, PLAIN, max_tokens=200)
    check_cover(document, chunks)
    assert len(chunks) >= 3
    assert "\n".join(chunk.text for chunk in chunks) == document.text.rstrip()
    assert all(chunk.text.split("\n")[0] in document.text and chunk.text[0].isdigit() for chunk in chunks[1:])
    assert chunks[0].headings == ()
    assert all(chunk.headings == ("id,item,price",) for chunk in chunks[1:])


# --- entries ---

TREE = {"info": {"a": 1}, "paths": {"/x": {"get": 1}, "/y": {"get": {"note": LONG}}, "/z": {"get": 2}}, "end": [1, 2]}


@pytest.mark.parametrize(
    ("text", "name"),
    [(json.dumps(TREE), "a.json"), (json.dumps(TREE, indent=2), "a.json"), (yaml.safe_dump(TREE, sort_keys=False), "a.yaml"),
     (json.dumps(TREE, indent=1), "a.yaml")],
)  # fmt: skip
def test_a_big_entry_is_opened_and_its_key_heads_its_parts(text: str, name: str) -> None:
    document = parse(text.encode(), name)
    assert document.text == text
    assert at(document, "info").headings == ()
    assert at(document, "/x").headings == ("paths",)
    assert at(document, "word word").headings == ("paths", "/y", "get")
    assert at(document, "/z").headings == ("paths",)
    assert at(document, "end").headings == ()


def test_small_entries_stay_whole_and_may_be_parted_between() -> None:
    document = parse(b'{"one": {"x": 1},\n "two": [1, 2],\n "three": "3"}\n', "a.json")
    (block,) = document.blocks
    assert cuts(document, block) == ['"one":', '"two":', '"three']


def test_an_element_of_an_array_is_known_by_its_number() -> None:
    document = parse(json.dumps([{"n": 1}, {"n": LONG}, {"n": 3}]).encode(), "a.json")
    assert at(document, "word word").headings == ("[1]",)


def test_json_lines_are_parted_at_lines() -> None:
    text = "\n".join(json.dumps({"n": n, "t": "x" * (5 if n != 2 else 2000)}) for n in range(5))
    document = parse(text.encode(), "a.jsonl")
    assert cuts(document, document.blocks[0]) == ['{"n": ']
    assert at(document, '"n": 2').headings == ("[2]",)


def test_a_comment_belongs_to_the_entry_below_it() -> None:
    text = "a: 1\n# about b\n# and more\nb: 2\n"
    for name in ("a.yaml", "a.toml", "a.ini"):
        written = text if name == "a.yaml" else "[one]\na = 1\n# about b\n# and more\n[two]\nb = 2\n"
        document = parse(written.encode(), name)
        assert "# abou" in cuts(document, document.blocks[0])


def test_documents_of_a_yaml_stream_are_parted() -> None:
    document = parse(b"---\nkind: A\n---\nkind: B\n", "a.yaml")
    assert [document.text[offset:] for offset in document.blocks[0].breaks] == ["---\nkind: B\n"]


def test_tables_of_toml_are_told_from_arrays_that_look_like_them() -> None:
    rows = "".join(f"key{n} = '{'v' * 60}'\n" for n in range(30))
    values = "array = [\n  [1],\n  ['two'],\n]\nlong = '''\n[three]\n'''\n"
    text = f"title = 'x'\n\n[tool.one]\n{values}{rows}\n[two]\nb = 1\n[[two.c]]\n"
    document = parse(text.encode(), "a.toml")
    assert at(document, "[three]").headings == ("tool.one",)
    assert at(document, "title").headings == ()
    assert at(document, "[two]").headings == ()
    assert {block.headings for block in document.blocks} == {(), ("tool.one",)}


def test_sections_of_ini_files_are_entries() -> None:
    rows = "".join(f"key{n} = {'v' * 60}\n" for n in range(30))
    document = parse(f"a = 1\n[one]\nb = 2\n[two words] ; note\n{rows}".encode(), "a.ini")
    assert at(document, "[one]").headings == ()
    assert at(document, "key29").headings == ("two words",)


def test_elements_of_xml_are_entries_with_the_name_that_tells_them_apart() -> None:
    items = "".join(f'  <item id="{n}"><v>é {LONG if n == 2 else n}</v></item>\n' for n in range(4))
    document = parse(f'<?xml version="1.0"?>\n<root>\n{items}</root>\n'.encode(), "a.xml")
    assert at(document, "word word").headings == ("item 2",)
    assert at(document, "é 1<").headings == ()
    assert "<item id=" in document.text[document.blocks[0].breaks[1] :][:9]


@pytest.mark.parametrize("encoding", ["iso-8859-1", "utf-16", "utf-8"])
def test_xml_is_read_in_the_encoding_it_declares(encoding: str) -> None:
    text = f'<?xml version="1.0" encoding="{encoding}"?>\n<a>é ü</a>'
    assert parse(text.encode(encoding), "a.xml").text == text


# --- what is not sound, or wicked ---

BOMB = (
    '<?xml version="1.0"?>\n<!DOCTYPE a [<!ENTITY l "lol">'
    + "".join(f'<!ENTITY l{n} "{f"&l{n - 1 or str()};" * 10}">' for n in range(1, 30))
    + "]>\n<a>&l29;</a>\n"
)
FOREIGN = '<?xml version="1.0"?>\n<!DOCTYPE a [<!ENTITY x SYSTEM "file:///etc/passwd">]>\n<a>&x;</a>\n'
ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40))
UNSOUND = {
    "bomb.xml": BOMB, "foreign.xml": FOREIGN, "aliases.yaml": ALIASES, "half.json": '{"a": [1, 2,\n"b"',
    "comments.json": '// tsconfig\n{\n  "a": 1, // one\n}\n', "digits.json": "[" + "9" * 9000 + "]",
    "nested.json": "[" * 5000 + "]" * 5000, "nested.yaml": "[" * 5000 + "]" * 5000, "nested.toml": "a = " + "[" * 5000,
    "nested.xml": "<a>" * 5000 + "</a>" * 5000, "helm.yaml": "{{- if .x }}\na: {{ .y }}\n\tb: 1\n{{- end }}\n",
    "broken.xml": "<a><b></a>\n", "broken.toml": "a = \n[b\n", "quote.csv": 'a,b\n"' + "x,\n" * 60_000,
    "blob.csv": "a,b\n1," + "x" * 200_000 + "\n",
}  # fmt: skip


@pytest.mark.parametrize("name", UNSOUND)
def test_what_is_not_sound_is_read_as_it_is_within_bounds(name: str) -> None:
    text = UNSOUND[name]
    begun = time.process_time()
    document = parse(text.encode(), name)
    assert document.text == text
    check_cover(document, cut(document, PLAIN, max_tokens=300))
    assert time.process_time() - begun < 60  # not speed: what is not bounded takes hours


def test_the_text_of_a_file_named_by_an_entity_is_not_read() -> None:
    assert "root:" not in parse(FOREIGN.encode(), "a.xml").text


def test_a_file_that_declares_an_entity_is_read_by_lines_and_not_taken_further() -> None:
    text = f'<!DOCTYPE a [<!ENTITY x "y">]>\n<a><b><c>{LONG}</c></b></a>\n'
    sound = parse(text.replace('<!ENTITY x "y">', "").encode(), "a.xml")
    assert ("b",) in {block.headings[:1] for block in sound.blocks}
    assert {block.headings for block in parse(text.encode(), "a.xml").blocks} == {()}


# --- properties, for every parser of the table ---

ANY = st.text(min_size=1, max_size=600) | st.text("ab \n\t,;|\"'{}[]<>:=#-*&!/é中🙂1", min_size=1, max_size=600)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=60) | st.just("long " * 350),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=12), inner, max_size=6),
    max_leaves=25,
)
WRITERS: dict[str, Callable[[object], str]] = {
    "json": lambda tree: json.dumps(tree, indent=1, ensure_ascii=False),
    "yaml": lambda tree: yaml.safe_dump(tree, allow_unicode=True),
    "xml": lambda tree: "<r>" + "\n".join(
        f"<e n='{n}'>é{n}{'w ' * (n % 7 * 300)}</e>" for n in range(len(str(tree)) % 20)) + "</r>",
    "notebook": lambda tree: json.dumps({"nbformat": 4, "cells": [
        {"cell_type": kind, "source": str(tree), "outputs": [{"text": [str(tree), "\n"]}, {"data": tree}]}
        for kind in ("code", "markdown", "raw")]}),
}  # fmt: skip


# What is written must be a file of these kinds before it is read: test_parser_properties.py writes such.
CONTAINERS = {"pdf", "docx", "pptx", "xlsx", "email"}


@pytest.mark.parametrize("parser", [name for name in PARSERS if name not in CONTAINERS])
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_a_file_holds_its_chunks_cover_it_once_within_both_limits(parser: str, data: st.DataObject) -> None:
    sound = VALUES.map(WRITERS[parser]) if parser in WRITERS else ANY
    written = data.draw(sound if parser == "notebook" else ANY | sound)
    written = written.encode("utf-8", "replace").decode().replace("\0", "")
    try:
        document = PARSERS[parser].parse(written.encode(), data.draw(st.sampled_from(["a.py", "a.rb", "a.ml", "a"])))
    except FileError as error:
        assert error.code == "encoding_unknown"  # noqa: PT017
        return
    reached = 0
    for block in document.blocks:
        assert reached <= block.start < block.end <= len(document.text)
        assert not document.text[reached : block.start].strip()
        assert all(block.start < offset < block.end for offset in block.breaks)
        assert list(block.breaks) == sorted(set(block.breaks))
        reached = block.end
    assert not document.text[reached:].strip()
    limit, second = data.draw(st.integers(16, 90)), data.draw(st.integers(16, 60))

    def words(texts: Sequence[str]) -> list[int]:
        return [len(text.split()) + 2 for text in texts]

    chunks = cut(document, PLAIN, max_tokens=limit, embedder_tokens=words, embedder_limit=second)
    check_cover(document, chunks)
    for chunk in chunks:
        assert list(chunk.token_ids) == PLAIN.encode(chunk.text)
        assert len(chunk.token_ids) <= limit
        assert len(chunk.text.split()) + 2 <= second
