"""Archives: what comes out, what is left out and why, and the bombs."""

from __future__ import annotations

import io
import random
import struct
import tarfile
import tracemalloc
import zipfile

import pytest

from ingest.archive import Caps, Extracted, Skipped, expand, is_archive
from storage.errors import FileError

SMALL = Caps(entries=20, total_bytes=200_000, file_bytes=100_000)
FILES = {"a/report.txt": b"first", "b/report.txt": b"second", "日本/ü.md": b"# x"}


def zipped(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return out.getvalue()


def tarred(files: dict[str, bytes], mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


MAKERS = {
    "zip": zipped,
    **{m: (lambda files, m=m: tarred(files, m)) for m in ("w", "w:gz", "w:bz2", "w:xz")},
}


def results(data: bytes, caps: Caps = SMALL) -> tuple[dict[str, bytes], dict[str, str]]:
    found = list(expand(data, caps))
    return (
        {item.path: item.data for item in found if isinstance(item, Extracted)},
        {item.path: item.reason for item in found if isinstance(item, Skipped)},
    )


def code_of(data: bytes, caps: Caps = SMALL) -> str:
    with pytest.raises(FileError) as caught:
        results(data, caps)
    return caught.value.code


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_every_format_gives_its_files_byte_for_byte(make) -> None:  # type: ignore[no-untyped-def]
    data = make(FILES)
    assert is_archive(data)
    assert results(data) == (FILES, {})


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_names_that_lead_outside_are_skipped(make) -> None:  # type: ignore[no-untyped-def]
    bad = ["../up.txt", "a/../../up.txt", "/etc/passwd", "C:\\x.txt", "..\\up.txt"]
    files, skipped = results(make({**dict.fromkeys(bad, b"x"), "good.txt": b"y"}))
    assert files == {"good.txt": b"y"}
    assert set(skipped.values()) == {"unsafe path"}
    assert len(skipped) == len(bad)


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_an_archive_within_is_a_file_like_any_other_and_not_opened(make) -> None:  # type: ignore[no-untyped-def]
    within = {"in.zip": zipped(FILES), "in.tar": tarred(FILES), "in.bin": tarred(FILES, "w:gz"), "t": b"t"}
    assert results(make(within)) == (within, {})


def test_an_office_file_within_is_a_document() -> None:
    document = zipped({"[Content_Types].xml": b"<x/>", "word/document.xml": b"<x/>"})
    assert not is_archive(document)
    assert results(zipped({"a": document}))[0] == {"a": document}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_too_many_entries_are_refused(make) -> None:  # type: ignore[no-untyped-def]
    assert code_of(make({f"{n}.txt": b"" for n in range(21)})) == "archive_limit"
    assert len(results(make({f"{n}.txt": b"" for n in range(20)}))[0]) == 20


def test_twenty_thousand_entries_are_refused_by_default() -> None:
    assert code_of(zipped({f"{n}": b"" for n in range(20_000)}), Caps()) == "archive_limit"


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_the_total_is_capped_by_what_is_read(make) -> None:  # type: ignore[no-untyped-def]
    assert code_of(make({f"{n}.txt": bytes(90_000) for n in range(3)})) == "archive_limit"


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_one_large_file_is_skipped_and_the_rest_is_read(make) -> None:  # type: ignore[no-untyped-def]
    files, skipped = results(make({"big": bytes(100_001), "small": b"s"}))
    assert files == {"small": b"s"}
    assert skipped == {"big": "larger than 100000 bytes"}


@pytest.mark.parametrize("make", [MAKERS["zip"], MAKERS["w:gz"], MAKERS["w:xz"]], ids=["zip", "gz", "xz"])
def test_a_bomb_is_stopped_with_little_memory(make) -> None:  # type: ignore[no-untyped-def]
    bomb = make({f"{n}": bytes(9_000_000) for n in range(6)})
    caps = Caps(total_bytes=20_000_000, file_bytes=10_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(FileError) as caught:
            for _ in expand(bomb, caps):
                pass
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.code == "archive_limit"
    assert peak < 40_000_000


def test_a_zip_that_understates_a_size_gives_no_more_than_it_states() -> None:
    data = bytearray(zipped({"liar": bytes(90_000)}))
    central = data.rindex(b"PK\x01\x02")
    data[central + 24 : central + 28] = struct.pack("<I", 10)
    assert results(bytes(data)) == ({}, {"liar": "damaged"})


def test_a_huge_extended_header_in_a_tar_is_refused() -> None:
    header = tarfile.TarInfo("x")
    header.type, header.size = tarfile.XHDTYPE, 5_000_000
    data = header.tobuf() + bytes(5_000_000) + tarred(FILES)
    assert code_of(data, Caps()) == "archive_limit"


def test_links_and_devices_are_skipped() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind in (
            ("s", tarfile.SYMTYPE),
            ("h", tarfile.LNKTYPE),
            ("d", tarfile.CHRTYPE),
            ("p", tarfile.FIFOTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            archive.addfile(info)
    _, skipped = results(out.getvalue())
    assert skipped == {"s": "symlink", "h": "symlink", "d": "not a regular file", "p": "not a regular file"}
    info = zipfile.ZipInfo("link")
    info.external_attr = 0o120777 << 16
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(info, "/etc/passwd")
    assert results(packed.getvalue()) == ({}, {"link": "symlink"})


@pytest.mark.parametrize("letter", ["x", "é", "灯"])
def test_a_name_over_4_kib_is_skipped_and_cut(letter: str) -> None:
    longest = letter * (4096 // len(letter.encode()))
    files = {longest: b"taken", longest + letter: b"too long"}
    for make in MAKERS.values():
        taken, skipped = results(make(files))
        assert taken == {longest: b"taken"}
        assert skipped == {letter * 200 + "…": "name too long"}


def test_a_link_with_a_name_too_long_is_cut() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info = tarfile.TarInfo("x" * 500_000)
        info.type, info.linkname = tarfile.SYMTYPE, "a"
        archive.addfile(info)
    assert results(out.getvalue(), Caps()) == ({}, {"x" * 200 + "…": "name too long"})


def test_a_second_file_of_one_name_is_skipped() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for data in (b"one", b"two"):
            info = tarfile.TarInfo("same")
            info.size = 3
            archive.addfile(info, io.BytesIO(data))
    assert results(out.getvalue()) == ({"same": b"one"}, {"same": "second file of this name"})


def test_a_protected_member_is_skipped() -> None:
    data = bytearray(zipped({"secret": b"x", "open": b"y"}))
    for at in (data.index(b"PK\x03\x04") + 6, data.index(b"PK\x01\x02") + 8):
        data[at] |= 1
    assert results(bytes(data)) == ({"open": b"y"}, {"secret": "protected by a password"})


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_a_truncated_archive_is_an_error_of_the_file(make) -> None:  # type: ignore[no-untyped-def]
    data = make({"a": random.Random(1).randbytes(50_000), "b": b"x"})
    assert code_of(data[: len(data) // 2]) == "invalid_file"


@pytest.mark.parametrize("seed", range(40))
def test_a_damaged_archive_never_ends_in_another_error(seed: int) -> None:
    rng = random.Random(seed)
    data = bytearray(list(MAKERS.values())[seed % 5](FILES))
    for _ in range(rng.randint(1, 12)):
        data[rng.randrange(len(data))] = rng.randrange(256)
    try:
        results(bytes(data))
    except FileError as error:
        assert error.code in {"invalid_file", "archive_limit", "unsupported_file"}  # noqa: PT017


def test_what_is_no_archive_is_unsupported() -> None:
    assert code_of(b"just text") == "unsupported_file"
