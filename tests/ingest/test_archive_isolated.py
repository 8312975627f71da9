"""Archives that loop, swell or crash whoever reads them, and the process that reads them for us."""

from __future__ import annotations

import bz2
import io
import platform
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path
from typing import BinaryIO

import pytest
from fixtures_work import Work
from test_archive import FILES, MAKERS, SMALL, zipped

from ingest import archive_isolated, pipes
from ingest.archive import Budget, Caps, Extracted, Skipped, expand
from ingest.archive_isolated import expand_isolated
from storage.errors import Cancelled, FileError


def slow_archive() -> bytes:
    """A few kilobytes that take long to unpack: a file of zeros that is over the cap, and so passed over, all of it."""
    zeros = 8 << 20
    header = tarfile.TarInfo("zeros")
    header.size = 120 * zeros
    return bz2.compress(header.tobuf()) + bz2.compress(bytes(zeros)) * 120


def crowded_zip(entries: int) -> bytes:
    """A zip that is nothing but a list of files: each takes 47 bytes there, and ten times as many in memory."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("x", b"")
    whole = out.getvalue()
    entry = whole[whole.index(b"PK\x01\x02") : whole.index(b"PK\x05\x06")]
    start = whole.index(b"PK\x01\x02")
    size = entries * len(entry)
    zip64 = b"PK\x06\x06" + (44).to_bytes(8, "little") + bytes([45, 0, 45, 0]) + bytes(8)
    zip64 += b"".join(number.to_bytes(8, "little") for number in (entries, entries, size, start))
    locator = b"PK\x06\x07" + bytes(4) + (start + size).to_bytes(8, "little") + (1).to_bytes(4, "little")
    end = b"PK\x05\x06" + bytes(4) + b"\xff" * 12 + bytes(2)
    return whole[:start] + entry * entries + zip64 + locator + end


def code_of(archive: bytes) -> str:
    with pytest.raises(FileError) as caught:
        list(expand_isolated(io.BytesIO(archive), "hostile.zip"))
    assert str(caught.value).startswith("hostile.zip: ")
    return caught.value.code


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[pipes.Child]:
    """Every child that is started, in order."""
    started: list[pipes.Child] = []
    begin = pipes.start

    def remembered(module: str, arguments: list[str], stdin: BinaryIO, check) -> pipes.Child:  # type: ignore[no-untyped-def]
        started.append(begin(module, arguments, stdin, check))
        return started[-1]

    monkeypatch.setattr(pipes, "start", remembered)
    return started


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())
def test_what_comes_out_is_what_the_reader_gives_in_this_process(make) -> None:  # type: ignore[no-untyped-def]
    data = make({**FILES, "../up": b"x", "é": b"y", "empty": b""})
    assert list(expand_isolated(io.BytesIO(data), "a", caps=SMALL)) == list(expand(data, SMALL))


@pytest.mark.parametrize("rolled", [False, True])
def test_an_upload_is_read_from_its_file_wherever_it_stands(rolled: bool) -> None:
    with tempfile.SpooledTemporaryFile(1 if rolled else 1 << 20) as upload:
        upload.write(zipped(FILES))
        found = list(expand_isolated(upload, "a"))  # type: ignore[arg-type]
    assert {part.path: part.data for part in found if isinstance(part, Extracted)} == FILES


@pytest.mark.parametrize(("data", "code"), [
    (b"just text", "unsupported_file"), (zipped(FILES)[:60], "invalid_file"),
    (zipped({f"{n}": b"" for n in range(10_001)}), "archive_limit"),
], ids=["no archive", "cut off", "too many"])  # fmt: skip
def test_a_refusal_keeps_its_code_and_names_the_archive(data: bytes, code: str) -> None:
    assert code_of(data) == code


def test_an_archive_that_takes_too_long_is_stopped_and_its_child_with_it(
    monkeypatch: pytest.MonkeyPatch, children: list[pipes.Child]
) -> None:
    monkeypatch.setattr(archive_isolated, "WALL_S", 0.3)
    assert code_of(slow_archive()) == "parser_timeout"
    assert children[0].returncode == -signal.SIGKILL


def test_the_time_that_its_files_take_to_be_stored_is_not_charged_to_an_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_isolated, "WALL_S", 4.0)
    files = {f"{n}": bytes(90_000) for n in range(3)}  # more than a pipe holds
    found = []
    for part in expand_isolated(io.BytesIO(zipped(files)), "a"):
        time.sleep(1.5)
        found.append(part)
    assert len(found) == 3


def test_an_archive_that_takes_too_much_memory_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_isolated, "MEMORY_BYTES", 160 << 20)
    assert code_of(crowded_zip(200_000)) == "archive_limit"
    assert [part.path for part in expand_isolated(io.BytesIO(zipped({"a": b"x"})), "next")] == ["a"]


def test_a_child_that_dies_costs_its_archive_only(children: list[pipes.Child]) -> None:
    def check() -> None:
        if children:
            children[0].kill()

    with pytest.raises(FileError) as caught:
        list(expand_isolated(io.BytesIO(slow_archive()), "a", check))
    assert caught.value.code == "parser_crash"
    assert [part.path for part in expand_isolated(io.BytesIO(zipped({"a": b"x"})), "next")] == ["a"]


def test_an_archive_that_nobody_wants_any_more_is_stopped(children: list[pipes.Child]) -> None:
    def check() -> None:
        if children and time.monotonic() > begun + 0.5:
            raise Cancelled("enough")

    begun = time.monotonic()
    with pytest.raises(Cancelled):
        list(expand_isolated(io.BytesIO(slow_archive()), "a", check))
    assert children[0].returncode == -signal.SIGKILL


def test_a_child_ends_with_the_reading_of_its_archive(children: list[pipes.Child]) -> None:
    files = expand_isolated(io.BytesIO(zipped({f"{n}": bytes(90_000) for n in range(9)})), "a")
    assert isinstance(next(files), Extracted)
    files.close()
    assert children[0].returncode is not None


@pytest.mark.parametrize(("said", "code"), [
    ({"path": "a", "bytes": 1 << 40}, "archive_limit"), ({"path": "a", "bytes": 0}, "archive_limit"),
    ({"path": "a"}, "parser_crash"), ([1], "parser_crash"), ({"path": "a" * 40_000, "reason": "r"}, "parser_crash"),
    ({"path": "a", "reason": "r"}, "archive_limit"),
])  # fmt: skip
def test_a_child_that_has_been_taken_over_is_not_believed(said: object, code: str) -> None:
    times = Caps().entries + 1  # of empty files more than an archive may have
    program = f"from ingest.pipes import frame_head; import sys; sys.stdout.buffer.write(frame_head({said!r}) * {times})"
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=pipes.environment(), bufsize=0)
    try:
        with pytest.raises(FileError) as caught:
            list(archive_isolated._members(child, "a", pipes.Until(30, lambda: None), Budget(Caps())))
    finally:
        pipes.stop(child)
    assert caught.value.code == code


@pytest.mark.skipif(sys.platform != "linux" or platform.machine() not in {"x86_64", "aarch64"}, reason="no filter known here")
def test_the_child_has_no_network_and_limits(children: list[pipes.Child]) -> None:
    files = expand_isolated(io.BytesIO(zipped({f"{n}": bytes(90_000) for n in range(9)})), "a")
    next(files)
    of_child = Path(f"/proc/{children[0].pid}")
    assert "Seccomp:\t2" in (of_child / "status").read_text()
    limits = (of_child / "limits").read_text()
    assert str(archive_isolated.MEMORY_BYTES) in limits
    assert next(line for line in limits.split("\n") if line.startswith("Max cpu time")).split()[3] == "301"
    assert "PREREAD" not in (of_child / "environ").read_text()
    files.close()


def test_a_hostile_archive_fails_by_itself_and_the_worker_goes_on(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_isolated, "WALL_S", 0.3)
    corpus = work.corpus()
    job = work.ingest(corpus, {"loop.tar.bz2": slow_archive(), "good.txt": b"The lamp is lit."})
    work.compute_kv()
    shown = work.view(job)
    assert shown["status"] == "completed_with_errors"
    assert [(error["filename"], error["code"]) for error in shown["errors"]] == [("loop.tar.bz2", "parser_timeout")]
    assert work.chunks(corpus, "good.txt") == ["The lamp is lit."]


def test_a_reader_that_the_system_does_not_keep_from_the_network_is_told_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pipes, "_told", set())
    said: list[str] = []
    monkeypatch.setattr(pipes.log, "warning", lambda event, **_: said.append(event), raising=False)
    for started in ({"network_cut": True}, {"network_cut": False}, {"network_cut": False}, {}):
        pipes._tell(started)
    assert said == ["parser_network_not_enforced"]


def test_the_longest_name_there_may_be_comes_through() -> None:
    name = "\U0001f4a1" * 1024  # of four bytes each, which JSON writes in twelve
    assert list(expand_isolated(io.BytesIO(zipped({name: b"t"})), "a")) == [Extracted(name, b"t")]


def test_a_message_that_never_ends_is_not_waited_for() -> None:
    program = "import sys; sys.stdout.buffer.write((1 << 40).to_bytes(8, 'little') + bytes(10)); sys.stdout.flush(); input()"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=pipes.environment(), bufsize=0
    )
    try:
        with pytest.raises(ValueError, match="too long"):
            pipes.answer(child, pipes.Until(30, lambda: None))
    finally:
        pipes.stop(child)


def test_a_warning_names_some_of_what_was_left_out_and_counts_all(work: Work) -> None:
    corpus = work.corpus()
    binaries = {f"{n:04}{'x' * 3000}": b"\0\1\2" * 99 for n in range(50)}
    work.ingest(corpus, {"a.zip": zipped({**binaries, "z" * 5000: b"text", "good.txt": b"The lamp is lit."})})
    document = work.document(corpus, "a.zip")
    assert document is not None
    assert document.error_message is not None
    assert document.error_message.startswith("51 files in the archive were left out: 0000xxx")
    assert document.error_message.count(": binary") == 20
    assert len(document.error_message) < 20 * 230
    assert work.chunks(corpus) == ["The lamp is lit."]


def test_skipped_members_are_told_with_their_reason() -> None:
    found = list(expand_isolated(io.BytesIO(zipped({"../up.txt": b"x", "t": b"t"})), "a"))
    assert found == [Skipped("../up.txt", "unsafe path"), Extracted("t", b"t")]


def test_archives_within_an_archive_fail_with_their_code_and_the_rest_is_read(work: Work) -> None:
    deep = zipped({"bottom.txt": b"x"})
    for _ in range(5):
        deep = zipped({"deeper.zip": deep})
    corpus = work.corpus()
    job = work.ingest(corpus, {"a.zip": zipped({"in.zip": deep, "a.docx": zipped(FILES), "t.txt": b"The lamp is lit."})})
    work.compute_kv()
    shown = work.view(job)
    assert shown["status"] == "completed_with_errors"
    assert {each["filename"]: each["code"] for each in shown["errors"]} == dict.fromkeys(
        ["a.zip!/in.zip", "a.zip!/a.docx"], "archive_limit"
    )
    assert work.chunks(corpus) == ["The lamp is lit."]


def test_pointers_minified_scripts_and_foreign_archives_in_an_archive_are_left_out_with_their_reasons(work: Work) -> None:
    files = {
        "big.psd": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "app.min.js": b"var a=1;" * 4000,
        "old.7z": b"7z\xbc\xaf\x27\x1c" + bytes(600), "t.txt": b"The lamp is lit.",
    }  # fmt: skip
    corpus = work.corpus()
    work.ingest(corpus, {"a.zip": zipped(files)})
    document = work.document(corpus, "a.zip")
    assert document is not None
    assert document.error_message == (
        "3 files in the archive were left out: big.psd: git LFS pointer; the file itself is not here, app.min.js: minified, "
        "old.7z: an archive that is neither zip nor tar"
    )
    assert work.chunks(corpus) == ["The lamp is lit."]
