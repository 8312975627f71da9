"""What commands print: lines for people, one JSON value for machines (`--json`); all else goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON value and nothing else on standard output.")
]


def note(text: str) -> None:
    """A line for the person at the terminal, out of the way of the output."""
    print(text, file=sys.stderr, flush=True)


def show(value: Any, as_json: bool, shape: Callable[[Any], str]) -> None:
    """Print a result: as JSON, or as `shape` makes it readable."""
    print(json.dumps(value, ensure_ascii=False) if as_json else shape(value), flush=True)


def table(rows: Sequence[Sequence[object]], empty: str) -> str:
    """Columns of equal width; the first row is the head."""
    if len(rows) < 2:
        return empty
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
