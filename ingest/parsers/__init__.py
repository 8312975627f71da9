"""One file per format. A parser is a frozen object behind a small protocol, and one line in the table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from ingest.detect import detect
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
    # PostgreSQL stores no NUL in text; one character for one, so that spans stay what they are.
    return replace(document, text=document.text.replace("\x00", "\ufffd"))


_ALL: tuple[Parser, ...] = (
    TextParser(), MarkdownParser(), HtmlParser(), CodeParser(), PdfParser(), CsvParser(), JsonParser(), YamlParser(),
    TomlParser(), IniParser(), XmlParser(), NotebookParser(), DocxParser(), PptxParser(), XlsxParser(), EmailParser(parse),
)  # fmt: skip
PARSERS: Mapping[str, Parser] = MappingProxyType({parser.name: parser for parser in _ALL})
