"""INI files, and others of keys and values under section lines. The file's own text is the document."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ingest.encoding import decode
from ingest.parsers.outline import anchors_of
from ingest.parsers.text import line_blocks
from ingest.parsers.toml import sections
from storage.types import ParsedDocument

_SECTION = re.compile(r"^[ \t]*\[([^\[\]\n]{1,200})\][ \t]*(?:[#;][^\n]*)?$", re.M)


@dataclass(frozen=True)
class IniParser:
    """A section is an entry; a file without any, such as Java properties, is lines."""

    name: str = "ini"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        text = decode(data)
        found = [(match.start(), match[1].strip()) for match in _SECTION.finditer(text)]
        blocks = sections(text, found, ("#", ";")) if found else line_blocks(text)
        return ParsedDocument(text, tuple(blocks), anchors_of(blocks))
