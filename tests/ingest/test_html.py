"""HTML as a reader sees it."""

from __future__ import annotations

import time

from ingest.parsers import parse
from storage.types import ParsedDocument

PAGE = """<!doctype html><html><head><title> The  Page </title><style>p{}</style></head><body>
<nav><a href=x>Home</a> <a href=y>Shop</a></nav>
<h1>Main <em>title</em></h1><script>alert("<p>no</p>")</script>
<p>First   paragraph,<br>second line &amp; more.</p>loose text<div>in a <b>div</b></div>
<p hidden>secret</p><p style="DISPLAY: none">secret too</p><!-- comment -->
<h2>List</h2><ul><li>one<li>two <ol><li>inner</ol></ul>
<table><caption>Prices</caption><thead><tr><th>Item</th><th>Cost</th></tr></thead>
<tr><td>Tea</td><td>2 <i>EUR</i></td></tr><tr><td>Milk</td><td>1</td></tr></table>
<pre>
def f():
    return 1
</pre><textarea>typed</textarea></body></html>"""


def shown(document: ParsedDocument) -> list[tuple[str, str]]:
    return [(block.kind, document.text[block.start : block.end]) for block in document.blocks]


def test_a_page_becomes_its_visible_blocks() -> None:
    document = parse(PAGE.encode(), "a.html")
    assert document.title == "The Page"
    assert shown(document) == [
        ("paragraph", "Home Shop"),
        ("heading", "Main title"),
        ("paragraph", "First paragraph,\nsecond line & more."),
        ("paragraph", "loose text"),
        ("paragraph", "in a div"),
        ("heading", "List"),
        ("list", "- one\n- two\n  1. inner"),
        ("paragraph", "Prices"),
        ("table", "Item | Cost\nTea | 2 EUR\nMilk | 1"),
        ("code", "def f():\n    return 1"),
        ("paragraph", "typed"),
    ]


def test_a_table_keeps_its_header_and_breaks_between_rows() -> None:
    document = parse(PAGE.encode(), "a.html")
    table = next(block for block in document.blocks if block.kind == "table")
    assert table.header == "Item | Cost"
    assert [document.text[at : at + 4] for at in table.breaks] == ["Milk"]
    assert table.headings == ("Main title", "List")


def test_a_table_for_layout_is_read_as_plain_blocks() -> None:
    page = "<table><tr><td><p>left</p><td><table><tr><td>in<td>ner</table></table>"
    assert shown(parse(page.encode(), "a.html")) == [("paragraph", "left"), ("table", "in | ner")]


def test_the_declared_charset_is_used() -> None:
    page = '<html><head><meta http-equiv=x content="text/html; charset=windows-1251"></head><p>Привет'
    assert parse(page.encode("cp1251"), "a.html").text == "Привет"


def test_five_thousand_nested_elements_are_read_in_a_moment() -> None:
    begun = time.process_time()
    assert parse(b"<div>" * 5000 + b"deep", "a.html").text == "deep"
    assert time.process_time() - begun < 2
