"""Whether a file is an e-mail, or a mailbox of them: told by its first lines, which are header fields."""

from __future__ import annotations

import re

MAILBOX = re.compile(rb"^From \S[^\r\n]* \d{4}(?: [+-]\d{4})?\r?$", re.M)  # the line before each message
_FIELD = re.compile(rb"([!-9;-~]{1,76}):(?:[ \t\r]|$)")
_BLANK = re.compile(rb"\r?\n\r?\n")
_SIGNS = frozenset({b"message-id", b"mime-version", b"received", b"return-path"})


def is_mail(head: bytes, *, sure: bool = False) -> bool:
    """Whether `head` begins with a message's header: fields and nothing else, among them a sender.

    `sure`: only with a field that programs write and people do not.
    """
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip(b"\r\n")
    if mailbox := MAILBOX.match(head):
        head = head[mailbox.end() :].lstrip(b"\r\n")
    fields, *body = _BLANK.split(head, maxsplit=1)
    lines = fields.split(b"\n") if body else fields.split(b"\n")[:-1]  # the last line may be cut off
    names: set[bytes] = set()
    for line in lines:
        field = _FIELD.match(line)
        if field is not None:
            names.add(field[1].lower())
        elif not (names and line[:1] in (b" ", b"\t")):
            return False
    return b"from" in names and bool(names & _SIGNS or (not sure and {b"subject", b"to"} <= names))
