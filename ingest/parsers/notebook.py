"""Jupyter notebooks: cells in order, code and Markdown as written, and what a cell printed; no pictures, no HTML."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ingest.encoding import decode
from ingest.parsers.markdown import markdown_blocks
from ingest.parsers.outline import Outline, anchors_of
from storage.errors import FileError
from storage.types import Block, ParsedDocument

MOST_OUTPUT = 4000  # characters of a cell's output that are kept
_COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LINE_START = re.compile(r"\n(?=[^\n])")


@dataclass(frozen=True)
class NotebookParser:
    """A cell is a block; headings come from the Markdown cells."""

    name: str = "notebook"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        try:
            cells = json.loads(decode(data))["cells"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FileError("The notebook is damaged and cannot be opened.", code="invalid_file") from error
        page = _Page()
        for cell in cells:
            page.add(cell)
        text = "".join(page.parts)
        title = next((block.headings[-1] for block in page.blocks if block.kind == "heading"), "")
        return ParsedDocument(text, tuple(page.blocks), anchors_of(page.blocks), title)


@dataclass
class _Page:
    parts: list[str] = field(default_factory=list)
    length: int = 0
    blocks: list[Block] = field(default_factory=list)
    outline: Outline = field(default_factory=Outline)

    def add(self, cell: Any) -> None:
        if not isinstance(cell, dict):
            return
        source = _joined(cell.get("source"))
        outputs = "\n".join(_outputs(cell)) if cell.get("cell_type") == "code" else ""
        text = "\n\n".join(part for part in (source.strip("\n"), outputs) if part.strip())
        if not text:
            return
        if self.parts:
            self._write("\n\n")
        start = self.length
        if cell.get("cell_type") == "markdown":
            self.blocks += [_moved(block, start) for block in markdown_blocks(text, self.outline)]
        else:
            breaks = tuple(start + match.end() for match in _LINE_START.finditer(text))
            self.blocks.append(Block("code", start, start + len(text), self.outline.path, "", breaks))
        self._write(text)

    def _write(self, text: str) -> None:
        self.parts.append(text)
        self.length += len(text)


def _moved(block: Block, by: int) -> Block:
    breaks = tuple(at + by for at in block.breaks)
    return block._replace(start=block.start + by, end=block.end + by, breaks=breaks)


def _outputs(cell: dict[str, Any]) -> Iterator[str]:
    """What the cell printed, as text, up to a limit that leaves a mark."""
    left = MOST_OUTPUT
    for output in cell.get("outputs") or ():
        text = _COLOURS.sub("", _text_of(output) if isinstance(output, dict) else "").strip("\n")
        if not text.strip():
            continue
        if len(text) > left:
            yield f"{text[:left]}\n[… {len(text) - left} more characters of output]"
            return
        left -= len(text)
        yield text


def _text_of(output: dict[str, Any]) -> str:
    if "ename" in output:
        return f"{output['ename']}: {output.get('evalue', '')}"
    shown = output.get("data")
    return _joined(output.get("text") or (shown.get("text/plain") if isinstance(shown, dict) else ""))


def _joined(text: Any) -> str:
    """Notebooks store a text whole, or as a list of its lines."""
    if isinstance(text, list):
        text = "".join(line for line in text if isinstance(line, str))
    return text.replace("\r\n", "\n") if isinstance(text, str) else ""
