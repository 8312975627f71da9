"""Rows and cells of Word tables: merged cells once, deleted rows not at all."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ingest.parsers.docx_numbering import W, is_on, number, value

_MOST_SPANNED = 64
_INSIDE = (W + "sdt", W + "sdtContent", W + "customXml", W + "ins", W + "moveTo")


def rows_of(table: Any) -> Iterator[tuple[bool, list[Any | None]]]:
    """Each row: whether it is marked as a header, and its cells by column; None where a merged one goes on."""
    for row in _inside(table, W + "tr"):
        properties = row.find(f"{W}trPr")
        if properties is not None and properties.find(f"{W}del") is not None:
            continue
        cells: list[Any | None] = []
        for cell in _inside(row, W + "tc"):
            of_cell = cell.find(f"{W}tcPr")
            span = number(of_cell, "gridSpan", 1) if of_cell is not None else 1
            merge = of_cell.find(f"{W}vMerge") if of_cell is not None else None
            goes_on = merge is not None and value(merge, "@val") != "restart"
            cells += [None if goes_on else cell, *[None] * min(max(span, 1) - 1, _MOST_SPANNED)]
        yield properties is not None and is_on(properties.find(f"{W}tblHeader")), cells


def is_layout(table: Any) -> bool:
    """Whether a table only places things on the page: it has one column, or tables in it."""
    if next(table.iterdescendants(W + "tbl"), None) is not None:
        return True
    return all(len(cells) <= 1 for _, cells in rows_of(table))


def _inside(parent: Any, tag: str) -> Iterator[Any]:
    for child in parent:
        if child.tag == tag:
            yield child
        elif child.tag in _INSIDE:
            yield from _inside(child, tag)
