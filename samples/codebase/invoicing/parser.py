"""Reads invoices from CSV.

The first row names the columns. Every further row is one line of the invoice
and repeats supplier, number and date; rows that disagree on any of these
belong to different invoices and make the file invalid. A file must not be
larger than 2 MiB and must be encoded as UTF-8; a byte-order mark is skipped.
"""

from __future__ import annotations

import csv
import io
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path

from invoicing.models import MAX_LINES, Invoice, InvoiceState, Line
from invoicing.money import Money

MAX_BYTES = 2 * 1024 * 1024
COLUMNS = ("supplier", "number", "issued", "text", "quantity", "unit_price", "tax_rate")


class ParseError(ValueError):
    """The file is no valid invoice. ``row`` counts from 1 and includes the header."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(f"row {row}: {reason}")
        self.row = row
        self.reason = reason


def parse_csv(data: bytes, currency: str = "EUR") -> Invoice:
    """Return the invoice in ``data``, in the state ``parsed``."""
    if len(data) > MAX_BYTES:
        raise ParseError(0, f"larger than {MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ParseError(0, "not UTF-8") from error
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
    if missing:
        raise ParseError(1, "missing columns: " + ", ".join(missing))

    head: tuple[str, str, str] | None = None
    lines: list[Line] = []
    for number, row in enumerate(reader, start=2):
        this = (row["supplier"], row["number"], row["issued"])
        if head is None:
            head = this
        elif head != this:
            raise ParseError(number, "belongs to another invoice")
        if len(lines) == MAX_LINES:
            raise ParseError(number, f"more than {MAX_LINES} lines")
        lines.append(_line(number, row, currency))
    if head is None:
        raise ParseError(2, "no lines")
    try:
        issued = date.fromisoformat(head[2])
    except ValueError as error:
        raise ParseError(2, f"not a date: {head[2]!r}") from error
    invoice = Invoice(head[0], head[1], issued, tuple(lines))
    invoice.move_to(InvoiceState.PARSED)
    return invoice


def _line(number: int, row: dict[str, str], currency: str) -> Line:
    try:
        return Line(
            text=row["text"].strip(),
            quantity=Decimal(row["quantity"]),
            unit_price=Money.parse(row["unit_price"], currency),
            tax_rate=Decimal(row["tax_rate"]),
        )
    except (ArithmeticError, ValueError, TypeError, AttributeError) as error:
        raise ParseError(number, str(error) or "not a number") from error


if __name__ == "__main__":
    parsed = parse_csv(Path(sys.argv[1]).read_bytes())
    sys.stdout.write(f"{parsed.key} {parsed.due.isoformat()} {len(parsed.lines)}\n")
