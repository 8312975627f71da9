"""Files as somebody makes them who wants ingest to fall: names, contents and archives, the same for the same seed."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
import zipfile
from collections.abc import Callable
from types import MappingProxyType

LETTERS = "aZ9 ._-'\"\\<>&%$#@!()[]{}\t\n\r\u202e\u200b\u0301é日本\u05d0😀\u2028\ufeff"
SUFFIXES = "txt md html json jsonl yaml toml ini xml csv tsv py js c rs java ipynb eml docx xlsx pptx pdf zip tar tar.gz".split()
WORDS = ("clause", "§ 3", "Vertrag", "第十条", "שלום", "😀", "<|im_end|>", "\x0b", "\u2028")
MAGIC = (b"", b"%PDF-1.7\n", b"PK\x03\x04", b"\x1f\x8b\x08", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", b"{", b"<?xml", b"From: a\n")


TAR_KINDS = (
    tarfile.REGTYPE, tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE,
)  # fmt: skip


def name(dice: random.Random) -> str:
    """A name that a file system takes: of any letters, up to its 255 bytes."""
    stem = "".join(dice.choice(LETTERS) for _ in range(dice.choice((1, 3, 12, 90))))
    suffix = dice.choice(["", *SUFFIXES])
    stem = (stem.encode()[: 254 - len(suffix)].decode(errors="ignore")).strip("./") or "x"
    return f"{stem}.{suffix}" if suffix else stem


def _text(dice: random.Random) -> bytes:
    text = dice.choice((" ", "\n", "\r\n", "\r", "\n\n")).join(dice.choices(WORDS, k=200))
    return text.encode(dice.choice(("utf-8", "utf-16", "utf-32", "utf-8-sig")))


def _mixed(dice: random.Random) -> bytes:
    codecs = ("utf-8", "latin-1", "utf-16-le", "shift_jis", "gb18030", "cp1252")
    parts = [("Größe 大小 " * 20).encode(dice.choice(codecs), "ignore") for _ in range(6)]
    return dice.choice((b"", b"\n", b"\0")).join(parts)


def _noise(dice: random.Random) -> bytes:
    return dice.choice(MAGIC) + dice.randbytes(dice.choice((0, 1, 20, 3000)))


def _line(dice: random.Random) -> bytes:
    return dice.choice((b"a", b"ab ", "漢".encode(), b"{[(", b",", b"\t", b'"', b"\\", b"* ", b"> ", b"#")) * 15_000


def _deep(dice: random.Random) -> bytes:
    depth = dice.choice((50, 3_000, 20_000))
    opens, core, closes = dice.choice(
        (
            (b"[", b"1", b"]"), (b'{"a":', b"1", b"}"), (b"<a>", b"x", b"</a>"), (b"<div>", b"x", b"</div>"), (b"(", b"1", b")"),
            (b"<div>", b"x", b""), (b"- ", b"x", b""), (b"> ", b"x", b""), (b"a: {", b"b", b"}"), (b"if x: ", b"y", b""),
            (b"<table><tr><td>", b"x", b""), (b"<!--", b"x", b""), (b"![[", b"x", b""), (b"a.", b"b = 1", b""),
            (b"{ ", b"", b"} "),
        )
    )
    return opens * depth + core + closes * depth


def _escapes(dice: random.Random) -> bytes:
    """Characters that no text has, written so that a parser makes them."""
    odd = r"\ud800 \udfff \u0000 \u202e \uffff x"
    cells = [{"cell_type": "markdown", "source": [json.loads(f'"{odd}"')]}, {"cell_type": "code", "source": None, "outputs": [3]}]
    return dice.choice(
        (
            f'{{"k": "{odd}", "{odd}": [1, null]}}'.encode(),
            json.dumps({"nbformat": 4, "cells": cells, "metadata": {}}).encode(),
            b"<html><body>&#xD800;&#0;&#x110000;&#xFFFF; words &unknown; <p>more</body></html>",
            b'<?xml version="1.0"?><a>&#x202e;<b n="&#x10FFFF;">words</b></a>',
            b'a: "\\ud800 \\0 words"\nb: !!python/object:os.system x\n',
            b'a = "\\u0000 \\uD800"\nb = 1\n',
            b"From: =?utf-8?q?=ED=A0=80?= <a@b>\nSubject: =?nope?b?////?=\nDate: x\nTo: c\n\nwords \xed\xa0\x80 here\n",
            b"\xed\xa0\x80\xed\xb0\x80 words in CESU",
        )
    )


def _swollen(dice: random.Random) -> bytes:
    """What is small and becomes large: entities, anchors, references."""
    laughs = "".join(f'<!ENTITY l{n} "{f"&l{n - 1};" * 10}">' for n in range(1, 10))
    anchors = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10))
    rows = b"".join(b'"%s",%d\n' % (b"x" * dice.choice((1, 500)), n) for n in range(300))
    return dice.choice(
        (
            f'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY l0 "ha">{laughs}]><a>&l9;</a>'.encode(),
            anchors.encode(), rows, rows.replace(b'"', b"", 1), b"a\tb\n" * 3_000, b"key = 1\n" * 3_000,
            b"Content-Type: multipart/mixed; boundary=b\nFrom: a\n\n" + b"--b\n\n" * 300,
        )
    )


def _zip(dice: random.Random, depth: int = 0) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))) as packed:
        for number in range(dice.choice((0, 1, 5))):
            info = zipfile.ZipInfo(dice.choice(_member_names(dice, number)))
            if info.filename in packed.namelist():
                continue
            info.external_attr = dice.choice((0, 0o120777, 0o100644, 0o060644)) << 16
            packed.writestr(info, inside(dice, depth))
        if dice.random() < 0.2:
            packed.writestr("zeros", b"\0" * (20 << 20), zipfile.ZIP_DEFLATED)
    return _damaged(dice, out.getvalue())


def _tar(dice: random.Random, depth: int = 0) -> bytes:
    out = io.BytesIO()
    form, encoding = dice.choice(((tarfile.PAX_FORMAT, "utf-8"), (tarfile.GNU_FORMAT, "utf-8"), (tarfile.GNU_FORMAT, "latin-1")))
    with tarfile.open(fileobj=out, mode="w", format=form, encoding=encoding, errors="ignore") as packed:
        for number in range(dice.choice((0, 1, 5))):
            info = tarfile.TarInfo(dice.choice(_member_names(dice, number)).replace("\0", "_"))
            info.type, info.linkname = dice.choice(TAR_KINDS), dice.choice(("/etc/passwd", "../../x", info.name, ""))
            data = inside(dice, depth) if info.isreg() else b""
            info.size = len(data)
            packed.addfile(info, io.BytesIO(data))
    data = _damaged(dice, out.getvalue())
    return dice.choice((bytes, gzip.compress, bz2.compress, lzma.compress))(data)


def _member_names(dice: random.Random, number: int) -> tuple[str, ...]:
    return (
        name(dice), f"{number}.txt", "same.txt", "../out.txt", "/abs.txt", "c:\\x.txt", "a/../../b", "a\\b.txt", "", "nul\0.txt",
        "d/" * 400 + "x.txt", "x" * 5000, "caf\xe9.txt", f"{number}.zip!/y.txt", ".", "a//b.txt",
    )  # fmt: skip


def _damaged(dice: random.Random, data: bytes) -> bytes:
    if dice.random() < 0.6 or not data:
        return data
    at = dice.randrange(len(data))
    return data[:at] if dice.random() < 0.5 else data[:at] + dice.randbytes(8) + data[at + 8 :]


CONTENTS: MappingProxyType[str, Callable[[random.Random], bytes]] = MappingProxyType(
    {
        "nothing": lambda dice: dice.choice((b"", b" ", b"\n\n", b"\xff\xfe", b"\xef\xbb\xbf")),
        "text": _text, "mixed": _mixed, "noise": _noise, "line": _line, "deep": _deep, "escapes": _escapes, "swollen": _swollen,
        "zip": _zip, "tar": _tar,
    }
)


def inside(dice: random.Random, depth: int) -> bytes:
    """A file in an archive: small, or another archive."""
    if depth < 2 and dice.random() < 0.3:
        return dice.choice((_zip, _tar))(dice, depth + 1)
    return dice.choice((_text, _noise, _escapes, CONTENTS["nothing"]))(dice)


def files(seed: int, count: int) -> dict[str, bytes]:
    """So many files by their paths."""
    dice = random.Random(seed)
    made: dict[str, bytes] = {}
    kinds = list(CONTENTS)
    while len(made) < count:
        kind = kinds[len(made) % len(kinds)]
        folder = dice.choice(("", "a/", "a/b c/", "\u202ea/"))
        made[folder + name(dice)] = CONTENTS[kind](dice)
    return made
