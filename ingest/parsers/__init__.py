"""One file per format. A parser is a frozen object behind a small protocol, and one line in the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from ingest.detect import detect
from ingest.encoding import is_storable, storable
from ingest.parsers.code import CodeParser
from ingest.parsers.csv import CsvParser
from ingest.parsers.docx import DocxParser
from ingest.parsers.email import EmailParser
from ingest.parsers.html import HtmlParser
from ingest.parsers.ini import IniParser
from ingest.parsers.json import JsonParser
from ingest.parsers.markdown import MarkdownParser
from ingest.parsers.notebook import NotebookParser
from ingest.parsers.pdf import PdfParser
from ingest.parsers.pptx import PptxParser
from ingest.parsers.text import TextParser
from ingest.parsers.toml import TomlParser
from ingest.parsers.xlsx import XlsxParser
from ingest.parsers.xml import XmlParser
from ingest.parsers.yaml import YamlParser
from storage.errors import FileError
from storage.types import ParsedDocument


class Parser(Protocol):
    """Turns a file's bytes into text and structure. A change of what it returns is a new version."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        """The document in `data`, of a file called `name`. Raises FileError."""
        ...


def parse(data: bytes, name: str) -> ParsedDocument:
    """Read a file with the parser its content asks for, in this process. Raises FileError."""
    document = PARSERS[detect(data, name)].parse(data, name)
    if not document.text or document.text.isspace():
        raise FileError("There is no text in this file.", code="no_text_extracted")
    return _storable(document)


def _storable(document: ParsedDocument) -> ParsedDocument:
    """Without what no database takes, such as the halves of surrogate pairs that escapes in JSON can make."""
    said = {document.title, *document.warnings, *(text for block in document.blocks for text in (block.header, block.name))}
    for headings in {block.headings for block in document.blocks} | {anchor.headings for anchor in document.anchors}:
        said.update(headings)
    if is_storable(document.text) and is_storable("".join(said)):
        return document

    def path(headings: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(storable, headings))

    return ParsedDocument(
        storable(document.text),
        tuple(
            block._replace(headings=path(block.headings), header=storable(block.header), name=storable(block.name))
            for block in document.blocks
        ),
        tuple(replace(anchor, headings=path(anchor.headings)) for anchor in document.anchors),
        storable(document.title),
        tuple(map(storable, document.warnings)),
    )


_ALL: tuple[Parser, ...] = (
    TextParser(), MarkdownParser(), HtmlParser(), CodeParser(), PdfParser(), CsvParser(), JsonParser(), YamlParser(),
    TomlParser(), IniParser(), XmlParser(), NotebookParser(), DocxParser(), PptxParser(), XlsxParser(), EmailParser(parse),
)  # fmt: skip
PARSERS: Mapping[str, Parser] = MappingProxyType({parser.name: parser for parser in _ALL})
