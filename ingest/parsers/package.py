"""The zip package that an Office file is (ECMA-376 part 2): parts, relationships, and what it may cost to open it."""

from __future__ import annotations

import io
import posixpath
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from lxml import etree

from ingest.archive import Budget, Caps
from storage.errors import FileError

TREES = Caps(entries=10_000, total_bytes=512 << 20, file_bytes=64 << 20)  # where XML parts become trees in memory
STREAMS = Caps(entries=10_000, total_bytes=1 << 30, file_bytes=512 << 20)  # where they are read as a stream
_GRACE = 32 << 20  # bytes that a part may have whatever its ratio
_RATIO = 200  # bytes out of one packed byte: XML packs 10 to 50 to one, zeros a thousand
_PIECE = 1 << 16
_DOCTYPES = tuple("<!DOCTYPE".encode(coding) for coding in ("ascii", "utf-16-le", "utf-16-be"))
_STRICT = re.compile(rb"http://purl\.oclc\.org/ooxml/(\w+)/(\w+)")
_TRANSITIONAL = rb"http://schemas.openxmlformats.org/\1/2006/\2"


def inspect(data: bytes, caps: Caps) -> None:
    """Unpack every part once, keeping nothing: sizes are counted as they are read, whatever the headers say.

    Raises FileError: `archive_limit` over a cap, `invalid_file` for a damaged package, a part's name that leads outside,
    or XML that declares entities, which the format forbids.
    """
    budget = Budget(caps)
    if data.count(b"PK\x01\x02") > caps.entries:  # before the directory is read, which costs memory
        raise FileError(f"The file has more than {caps.entries} parts.", code="archive_limit")
    with zipfile.ZipFile(io.BytesIO(data)) as package:
        for info in package.infolist():
            budget.entry()
            if budget.refusal(info.filename, 0) == "unsafe path":
                raise FileError("A part of the file has an unsafe name.", code="invalid_file")
            if info.flag_bits & 0x1:
                raise FileError("A part of the file is protected by a password.", code="password_required")
            _inspect_part(package, info, budget)


def _inspect_part(package: zipfile.ZipFile, info: zipfile.ZipInfo, budget: Budget) -> None:
    is_xml = info.filename.lower().endswith((".xml", ".rels", ".vml"))
    size, tail = 0, b""
    with package.open(info) as part:
        while piece := part.read(_PIECE):
            size += len(piece)
            budget.read(len(piece))
            if size > _GRACE and size > _RATIO * info.compress_size:
                raise FileError("The file unpacks to far more than it holds.", code="archive_limit")
            if is_xml and size > budget.caps.file_bytes:
                raise FileError("A part of the file is too large.", code="archive_limit")
            if is_xml and any(sign in tail + piece for sign in _DOCTYPES):
                raise FileError("The file declares XML entities, which is not allowed in it.", code="invalid_file")
            tail = piece[-32:]


@dataclass(frozen=True)
class Relation:
    """Where a part points: `kind` is the last word of its type; `target` a part's name, or an address."""

    kind: str
    target: str
    external: bool


class Package:
    """An inspected package whose parts are read one by one."""

    def __init__(self, data: bytes) -> None:
        inspect(data, TREES)
        self._zip = zipfile.ZipFile(io.BytesIO(data))
        self._names = {name.lower(): name for name in self._zip.namelist()}

    def xml(self, name: str) -> Any | None:
        """A part's root element, None where there is no such part. Strict files come in transitional namespaces."""
        stored = self._names.get(name.lower())
        if stored is None:
            return None
        return parse_xml(_STRICT.sub(_TRANSITIONAL, self._zip.read(stored)))

    def relations(self, name: str = "") -> Mapping[str, Relation]:
        """A part's relationships by id; the package's own for ""."""
        folder, base = posixpath.split(name)
        root = self.xml(posixpath.join(folder, "_rels", f"{base}.rels"))
        found: dict[str, Relation] = {}
        for element in root if root is not None else ():
            if isinstance(element.tag, str):
                target, external = element.get("Target", ""), element.get("TargetMode") == "External"
                path = target if external else posixpath.normpath(posixpath.join("/", folder, unquote(target)))[1:]
                kind = element.get("Type", "").rsplit("/", 1)[-1]
                found[element.get("Id", "")] = Relation(kind, path, external)
        return found

    def main(self) -> str:
        """The name of the main part. Raises LookupError."""
        found = [r.target for r in self.relations().values() if r.kind == "officeDocument"]
        return found[0]


def parse_xml(data: bytes) -> Any:
    """An element tree without entities, network or unbounded depth. Raises etree.XMLSyntaxError."""
    return etree.fromstring(data, _reader())


def _reader() -> etree.XMLParser:
    return etree.XMLParser(
        resolve_entities=False, no_network=True, load_dtd=False, huge_tree=False, remove_comments=True, remove_pis=True
    )
