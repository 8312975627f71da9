"""The text of Word paragraphs as a reader sees it: with what was inserted, without what was deleted or hidden."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lxml import etree

from ingest.parsers.docx_numbering import W, is_on, value

_COMPATIBLE = "{http://schemas.openxmlformats.org/markup-compatibility/2006}"
_MATH_TEXT = "{http://schemas.openxmlformats.org/officeDocument/2006/math}t"
_DROPPED = frozenset(
    W + name
    for name in "pPr rPr tblPr tblGrid trPr tcPr sectPr sdtPr sdtEndPr del moveFrom instrText delText delInstrText rt".split()
)
_BREAKS = {W + "tab": "\t", W + "br": "\n", W + "cr": "\n", W + "noBreakHyphen": "-", W + "ptab": "\t"}
_TICKS = {"F0FE": "☒", "F0FD": "☒", "F078": "☒", "F0FC": "✓", "F0A8": "☐", "F06F": "☐", "F071": "☐"}
_NOTES = {W + "footnoteReference": "footnotes", W + "endnoteReference": "endnotes"}
_LEAVES = frozenset({W + "t", W + "sym", _MATH_TEXT, *_BREAKS, *_NOTES})


@dataclass
class Run:
    """A paragraph's text as read, the notes it refers to (kind, id), and the text boxes anchored in it."""

    parts: list[str] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    boxes: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Lines trimmed, without those that are blank."""
        whole = "".join(self.parts).replace("\xad", "")
        lines = (re.sub(r"[ \t\xa0]*\t[ \t\xa0]*", "\t", line).strip() for line in whole.split("\n"))
        return "\n".join(line for line in lines if line)


@dataclass
class Reader:
    """Reads the paragraphs of one story (body, note, header) in order: a field may reach over several."""

    marks: dict[tuple[str, str], str] = field(default_factory=dict)  # notes met so far → their marks
    _fields: list[bool] = field(default_factory=list)  # open fields: whether their code is being read

    def paragraph(self, element: Any) -> Run:
        """What is visible of a `w:p`."""
        # A field's code ends in the paragraph it begins in: one that is never closed must not swallow the rest.
        self._fields = [False] * len(self._fields)
        run = Run()
        self._read(element, run)
        return run

    def _read(self, element: Any, run: Run) -> None:
        for child in element:
            tag = child.tag
            if tag in _DROPPED or not isinstance(tag, str):
                continue
            if tag == W + "fldChar":
                self._field(child, run)
            elif tag == _COMPATIBLE + "AlternateContent":
                self._read(chosen(child), run)
            elif tag == W + "txbxContent":
                run.boxes.append(child)
            elif tag in _LEAVES:
                if not any(self._fields):
                    self._leaf(child, run)
            elif tag != W + "r" or not is_on(child.find(f"{W}rPr/{W}vanish")):
                self._read(child, run)

    def _leaf(self, child: Any, run: Run) -> None:
        tag = child.tag
        if tag in _BREAKS:
            run.parts.append(_BREAKS[tag])
        elif tag == W + "sym":
            run.parts.append(_TICKS.get((value(child, "@char") or "").upper(), ""))
        elif tag in _NOTES:
            note = (_NOTES[tag], value(child, "@id") or "")
            run.parts.append(self._mark(note))
            run.notes.append(note)
        else:
            run.parts.append(child.text or "")

    def _field(self, child: Any, run: Run) -> None:
        """Fields show their result, which stands between "separate" and "end", and not their code."""
        kind = value(child, "@fldCharType")
        if kind == "begin":
            self._fields.append(True)
            box = child.find(f"{W}ffData/{W}checkBox")
            if box is not None:
                state = box.find(f"{W}checked")
                run.parts.append("☒" if is_on(box.find(f"{W}default") if state is None else state) else "☐")
        elif kind == "separate" and self._fields:
            self._fields[-1] = False
        elif kind == "end" and self._fields:
            self._fields.pop()

    def _mark(self, note: tuple[str, str]) -> str:
        """The mark of a note: numbered through, end notes with an e before."""
        same = sum(kind == note[0] for kind, _ in self.marks)
        return self.marks.setdefault(note, f"[^{'e' if note[0] == 'endnotes' else ''}{same + 1}]")


def chosen(alternatives: Any) -> Any:
    """One of the versions in which a thing is stored for newer and older programs: the newer."""
    found = alternatives.find(_COMPATIBLE + "Choice")
    if found is None:
        found = alternatives.find(_COMPATIBLE + "Fallback")
    return found if found is not None else etree.Element("none")


def blocks_in(parent: Any) -> Iterator[Any]:
    """The paragraphs and tables of a story in order, also those in content controls and custom XML."""
    stack = [iter(parent)]
    while stack:
        child = next(stack[-1], None)
        if child is None:
            stack.pop()
        elif child.tag in (W + "p", W + "tbl"):
            yield child
        elif child.tag == _COMPATIBLE + "AlternateContent":
            stack.append(iter(chosen(child)))
        elif child.tag not in _DROPPED and isinstance(child.tag, str):
            stack.append(iter(child))
