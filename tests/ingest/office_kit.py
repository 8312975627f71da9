"""Office files made with the libraries that write them, and what those cannot write put in as XML."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import docx
from docx.opc.packuri import PackURI
from docx.opc.part import Part
from docx.oxml import parse_xml

from storage.types import Block, ParsedDocument

_SPACES = {
    "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
    "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    "wps": "http://schemas.microsoft.com/office/word/2010/wordprocessingShape",
    "v": "urn:schemas-microsoft-com:vml",
    "m": "http://schemas.openxmlformats.org/officeDocument/2006/math",
    "r": "http://schemas.openxmlformats.org/officeDocument/2006/relationships",
}
_DECLARED = " ".join(f'xmlns:{prefix}="{uri}"' for prefix, uri in _SPACES.items())
_WORD = "application/vnd.openxmlformats-officedocument.wordprocessingml"
_RELATION = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"


def saved(document: Any) -> bytes:
    """What a document, presentation or workbook of any of the libraries is as a file."""
    out = io.BytesIO()
    document.save(out)
    return out.getvalue()


def element(xml: str) -> Any:
    """The element of a piece of XML whose prefixes are the usual ones."""
    name = xml[1:].replace("/", " ").replace(">", " ").split()[0]
    return parse_xml(xml.replace(f"<{name}", f"<{name} {_DECLARED}", 1))


def add_xml(document: Any, *pieces: str) -> None:
    """Put paragraphs or tables at the end of a Word document's body, before its last section's properties."""
    for xml in pieces:
        document.element.body.insert(len(document.element.body) - 1, element(xml))


def paragraph(text: str, properties: str = "") -> str:
    return f"<w:p><w:pPr>{properties}</w:pPr><w:r><w:t>{text}</w:t></w:r></w:p>"


def add_part(document: Any, kind: str, xml: str) -> None:
    """Give a Word document a part (footnotes, endnotes) that python-docx does not write."""
    blob = xml.replace(f"<w:{kind}", f"<w:{kind} {_DECLARED}", 1).encode()
    part = Part(PackURI(f"/word/{kind}.xml"), f"{_WORD}.{kind}+xml", blob, document.part.package)
    document.part.relate_to(part, f"{_RELATION}/{kind}")


def set_numbering(document: Any, *pieces: str) -> None:
    """Replace all lists of a Word document."""
    root = document.part.numbering_part.element
    root.clear()
    for xml in pieces:
        root.append(element(xml))


def word(*pieces: str, change: Callable[[Any], None] | None = None) -> bytes:
    """A Word document with these paragraphs and tables as XML."""
    document = docx.Document()
    if change is not None:
        change(document)
    add_xml(document, *pieces)
    return saved(document)


def repacked(data: bytes, members: Mapping[str, bytes | None]) -> bytes:
    """A zip with some members added or replaced, or taken out where there is None."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            if info.filename not in members:
                new.writestr(info, old.read(info))
        for name, content in members.items():
            if content is not None:
                new.writestr(name, content)
    return out.getvalue()


def member(data: bytes, name: str) -> bytes:
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        return package.read(name)


def texts(document: ParsedDocument, kind: str) -> list[str]:
    return [document.text[block.start : block.end] for block in document.blocks if block.kind == kind]


def block_with(document: ParsedDocument, words: str) -> Block:
    found = [b for b in document.blocks if words in document.text[b.start : b.end]]
    assert len(found) == 1, found
    return found[0]


def check_blocks(document: ParsedDocument) -> None:
    """Blocks are ordered and apart, their breaks lie inside, and no text lies outside."""
    reached = 0
    for block in document.blocks:
        assert reached <= block.start < block.end <= len(document.text)
        assert not document.text[reached : block.start].strip()
        assert all(block.start < at < block.end for at in block.breaks)
        reached = block.end
    assert not document.text[reached:].strip()
    starts = [anchor.start for anchor in document.anchors]
    assert starts == sorted(set(starts))
