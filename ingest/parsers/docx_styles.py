"""Paragraph styles of Word: what a paragraph gets from its style, and that from the one it is based on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ingest.parsers.docx_numbering import Numbering, W, number_in, value

_HEADING = re.compile(r"heading ([1-9])$", re.I)  # built-in names are English in every language of Word
_BODY_TEXT = 9  # the outline level of what is no heading


@dataclass(frozen=True)
class Styles:
    """Paragraph styles by id, and the id of the default one."""

    elements: Mapping[str, Any]
    default: str = ""

    @classmethod
    def of(cls, root: Any | None) -> Styles:
        """From the root of styles.xml, None where a document has no such part."""
        found = root.findall(f"{W}style") if root is not None else ()
        paragraph = {value(s, "@styleId") or "": s for s in found if value(s, "@type") in (None, "paragraph")}
        default = next((i for i, s in paragraph.items() if value(s, "@default") in {"1", "true", "on"}), "")
        return cls(paragraph, default)

    def of_paragraph(self, properties: Any | None) -> str:
        """The id of a paragraph's style."""
        named = value(properties, "pStyle") if properties is not None else None
        return named if named is not None and named in self.elements else self.default

    def outline_level(self, properties: Any | None, style: str) -> int | None:
        """A heading's level from 1, 0 for a title; None for what is no heading."""
        own = number_in(properties, "outlineLvl") if properties is not None else None
        if own is not None:
            return own + 1 if own < _BODY_TEXT else None
        for _, element in self._chain(style):
            of_style = element.find(f"{W}pPr")
            level = number_in(of_style, "outlineLvl") if of_style is not None else None
            if level is not None:
                return level + 1 if level < _BODY_TEXT else None
            name = value(element, "name") or ""
            if heading := _HEADING.match(name):
                return int(heading[1])
            if name.lower() == "title":
                return 0
        return None

    def list_of(self, properties: Any | None, style: str, numbering: Numbering) -> tuple[str | None, int]:
        """The list that a paragraph counts in, by itself or by its style, and the level; None for none."""
        own = properties.find(f"{W}numPr") if properties is not None else None
        own_level = number_in(own, "ilvl") if own is not None else None
        if own is not None and (num := value(own, "numId")) is not None:
            return (num if num != "0" else None), own_level or 0
        level = own_level
        for _, element in self._chain(style):
            found = element.find(f"{W}pPr/{W}numPr")
            if found is None:
                continue
            level = number_in(found, "ilvl") if level is None else level
            if (num := value(found, "numId")) is not None:
                linked = self._level_linked(num, style, numbering)
                return (num if num != "0" else None), linked if linked is not None else level or 0
        return None, 0

    def _level_linked(self, num: str, style: str, numbering: Numbering) -> int | None:
        levels = (numbering.level_of_style(num, identity) for identity, _ in self._chain(style))
        return next((level for level in levels if level is not None), None)

    def _chain(self, style: str) -> Iterator[tuple[str, Any]]:
        """The style and those it is based on."""
        seen: set[str] = set()
        while style in self.elements and style not in seen:
            seen.add(style)
            yield style, self.elements[style]
            style = value(self.elements[style], "basedOn") or ""
