"""YAML. The file's own text is the document; libyaml's events give the structure, and nothing is constructed."""

from __future__ import annotations

from dataclasses import dataclass, field

import yaml

from ingest.parsers.entries import DEPTH, Entry, entry_blocks, read_entries, with_comments
from ingest.parsers.text import line_blocks
from storage.types import Block, ParsedDocument

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class YamlParser:
    """Headings are the keys of what is too big to stay whole. Aliases are left as they are written, so that
    a file cannot grow by them. What is not YAML, such as a template, is lines."""

    name: str = "yaml"
    version: int = 1

    def parse(self, data: bytes, name: str) -> ParsedDocument:
        return read_entries(data, _structure)


@dataclass(slots=True)
class _Open:
    """A document, mapping or sequence whose end has not come yet."""

    start: int
    kind: type[yaml.Event]
    entries: list[Entry] = field(default_factory=list)
    key: str | None = None  # of a mapping, while its value is awaited
    key_start: int = 0


def _structure(text: str) -> list[Block]:
    try:
        documents = _documents(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return line_blocks(text)
    return entry_blocks(text, documents[0].children if len(documents) == 1 else documents)


def _documents(text: str) -> list[Entry]:
    stack = [_Open(0, yaml.StreamStartEvent)]
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, (yaml.StreamStartEvent, yaml.StreamEndEvent)) or not event.start_mark or not event.end_mark:
            continue
        start, end = event.start_mark.index, event.end_mark.index
        if isinstance(event, (yaml.DocumentStartEvent, yaml.CollectionStartEvent)):
            stack.append(_Open(start, type(event)))
        elif isinstance(event, (yaml.DocumentEndEvent, yaml.CollectionEndEvent)):
            closed = stack.pop()
            _value(text, stack, closed.start, end, "", closed)
        else:
            _value(text, stack, start, end, getattr(event, "value", ""), None)
    return stack[0].entries


def _value(text: str, stack: list[_Open], start: int, end: int, scalar: str, closed: _Open | None) -> None:
    """A node has ended: it is the key of the mapping around it, or an entry."""
    around = stack[-1]
    if around.kind is yaml.DocumentStartEvent:
        around.entries = closed.entries if closed is not None else []
        return
    if around.kind is yaml.MappingStartEvent and around.key is None:
        around.key, around.key_start = scalar, start
        return
    if len(stack) <= DEPTH + 2:
        children = closed.entries if closed is not None else []
        if around.kind is yaml.MappingStartEvent:
            start = around.key_start
        after = around.entries[-1].end if around.entries else around.start
        begin = _begin(text, start, after)
        around.entries.append(Entry(around.key or f"[{len(around.entries)}]", begin, max(begin, end), children))
    around.key = None


def _begin(text: str, start: int, after: int) -> int:
    """An entry begins at its line, with its dash, and at the comments above it; inside a line, where it is."""
    after = min(after, start)
    line = max(after, text.rfind("\n", after, start) + 1)
    return start if text[line:start].strip(" -") else with_comments(text, start, after, ("#",))
