"""Sizes as people write them."""

from __future__ import annotations

import re

from storage.errors import UserError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", re.IGNORECASE)


def size(text: str) -> int:
    """Bytes of `500GB`, `1.5TB` or a plain number, in powers of 1000. Raises UserError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UserError(f"{text!r} is no size: write 500GB, 1.5TB, or a number of bytes")
    return int(float(found[1]) * 1000 ** " KMGT".index(found[2].upper() or " "))
