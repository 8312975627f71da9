"""What libraries raise on a file that is not as its format says, told in this project's terms."""

from __future__ import annotations

import contextlib
import zipfile
import zlib
from collections.abc import Iterator

from lxml import etree

from storage.errors import FileError

_DAMAGE = (zipfile.BadZipFile, zlib.error, etree.LxmlError, NotImplementedError, EOFError, OSError, LookupError,
           ValueError, TypeError, AttributeError, RuntimeError, SyntaxError, ArithmeticError,
           AssertionError)  # fmt: skip


@contextlib.contextmanager
def reading(what: str) -> Iterator[None]:
    """Whatever a format's library says of a file that is not as it should be is that file's damage."""
    try:
        yield
    except _DAMAGE as error:
        raise FileError(f"The {what} is damaged and cannot be read.", code="invalid_file") from error
