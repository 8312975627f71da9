"""Which character parts the cells of a table that is text."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from itertools import islice, takewhile

_DELIMITERS = ",\t;|"
_SNIFFED = 50  # records a delimiter is judged by


def delimiter_of(lines: Sequence[str], *, strict: bool = False) -> str | None:
    """The character that parts these lines into equally many cells, two at least.

    `strict`: into three, or two by tabs, in every record of three or more, and no blank after it, so that prose
    is no table.
    """
    best: tuple[float, int, str] | None = None
    # Before the first quotation mark a line is a record: where one lacks the sign, it cannot be in every record.
    first = islice(filter(str.strip, lines[: 4 * _SNIFFED]), _SNIFFED)
    begin = list(takewhile(lambda line: '"' not in line, first)) if strict else []
    for delimiter in _DELIMITERS:
        if any(delimiter not in line for line in begin):
            continue
        reader = csv.reader((line + "\n" for line in lines[: 4 * _SNIFFED] if line.strip()), delimiter=delimiter)
        try:
            records = list(islice(reader, _SNIFFED))
        except csv.Error:
            continue
        if not records:
            return None
        width, count = Counter(map(len, records)).most_common(1)[0]
        share = count / len(records)
        certain = share == 1 and len(records) >= 3 and width >= (2 if delimiter == "\t" else 3)
        spaced = any(cell[:1] == " " for cells in records for cell in cells)
        if width >= 2 and ((certain and not spaced) or (share >= 0.5 and not strict)):
            best = max(best or (0.0, 0, ""), (share, width, delimiter))
    return best[2] if best else None
