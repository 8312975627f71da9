"""The child's side of isolated parsing: `python -m ingest.parser_child <memory bytes> <seconds per file>`.

Messages are those of `pipes.py`. A request is `{"name", "bytes"}` and that many raw bytes; an answer is a document, or
`{"code", "message"}`, or before the first request, once the child has started, `{"network_cut"}`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any, BinaryIO

from ingest.no_network import cut_network
from ingest.pipes import PREFIX, frame_head
from storage.errors import FileError
from storage.types import Anchor, Block, ParsedDocument

_GRACE_S = 5.0  # the parent's clock should end a file first; this one is for a parent that is gone


def document_to(document: ParsedDocument) -> dict[str, Any]:
    """A document as plain JSON; heading paths are listed once."""
    paths: dict[tuple[str, ...], int] = {}
    blocks = [
        [b.kind, b.start, b.end, paths.setdefault(b.headings, len(paths)), b.header, b.breaks, b.name]
        for b in document.blocks
    ]
    anchors = [[a.start, a.page, paths.setdefault(a.headings, len(paths))] for a in document.anchors]
    return {
        "text": document.text,
        "blocks": blocks,
        "anchors": anchors,
        "paths": list(paths),
        "title": document.title,
        "warnings": document.warnings,
    }


def document_of(value: dict[str, Any]) -> ParsedDocument:
    """The inverse of `document_to`."""
    paths = [tuple(path) for path in value["paths"]]
    return ParsedDocument(
        value["text"],
        tuple(
            Block(kind, start, end, paths[path], header, tuple(breaks), name)
            for kind, start, end, path, header, breaks, name in value["blocks"]
        ),
        tuple(Anchor(start, page, paths[path]) for start, page, path in value["anchors"]),
        value["title"],
        tuple(value["warnings"]),
    )


def serve(requests: BinaryIO, answers: BinaryIO, wall_s: float) -> None:
    """Answer requests until the pipe closes."""
    while prefix := requests.read(PREFIX.size):
        (length,) = PREFIX.unpack(prefix)
        request = json.loads(requests.read(length))
        data = requests.read(request["bytes"])
        signal.setitimer(signal.ITIMER_REAL, wall_s + _GRACE_S)
        answers.write(frame_head(_answer(data, request["name"])))
        answers.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)


def _answer(data: bytes, name: str) -> dict[str, Any]:
    from ingest.parsers import parse  # here, so that the parent does not import every format's library

    try:
        return document_to(parse(data, name))
    except FileError as error:
        return {"code": error.code, "message": str(error)}
    except MemoryError:
        return {"code": "parser_crash", "message": "Reading this file takes more memory than is allowed."}
    except Exception as error:  # noqa: BLE001 - whatever a format's library raises is this file's failure
        return {
            "code": "parser_crash",
            "message": f"The parser failed on this file ({type(error).__name__}).",
        }


def main() -> None:
    """Limit this process, keep the answer pipe from stray prints, take away the network, and serve."""
    memory, wall_s = int(sys.argv[1]), float(sys.argv[2])
    answers = confined(memory)
    import ingest.parsers  # noqa: F401 - before the first request, so that its clock does not pay for it

    answers.write(frame_head({"network_cut": cut_network()}))
    answers.flush()
    serve(sys.stdin.buffer, answers, wall_s)


def confined(memory: int) -> BinaryIO:
    """Limit this process to so many bytes of memory. The pipe for its answers: what is printed goes elsewhere."""
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
