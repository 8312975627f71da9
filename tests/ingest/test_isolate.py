"""Files that crash, hang or swell their parser."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from fixtures_work import Work

from ingest import pipes
from ingest.isolate import ParserPool
from ingest.parser_child import document_of, document_to
from ingest.parsers import parse
from storage.errors import Cancelled, FileError

SELF_REFERRING = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[2 0 R 2 0 R]/Count 2>>endobj
trailer<</Root 1 0 R>>
"""
SLOW = b"<div>" * 120_000  # unclosed elements: the time grows with the square of their number


def laughing_pdf(depth: int = 30) -> bytes:
    """A page that shows a form twice, which shows another one twice, and so on: 2 to the power of `depth` of them."""

    def stream(head: bytes, body: bytes) -> bytes:
        return b"<<%s/Length %d>>stream\n%s\nendstream" % (head, len(body), body)

    shown = b"/Resources<</XObject<</A %d 0 R>>>>"
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 99 99]%s/Contents 4 0 R>>" % (shown % 5)
    objects = [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[3 0 R]/Count 1>>", page, stream(b"", b"/A Do /A Do")]
    form = b"/Type/XObject/Subtype/Form/BBox[0 0 99 99]"
    objects += [stream(form + shown % (6 + level), b"/A Do /A Do") for level in range(depth)]
    objects.append(stream(form, b"q Q"))
    out, places = b"%PDF-1.4\n", []
    for number, body in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj%sendobj\n" % (number, body)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size, begins = len(objects) + 1, len(out)
    out += b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    return out + b"trailer<</Root 1 0 R/Size %d>>\nstartxref\n%d\n%%%%EOF" % (size, begins)


LOOPS = {"loop.html": SLOW, "loop.pdf": laughing_pdf()}


@pytest.fixture(scope="module")
def pool() -> Iterator[ParserPool]:
    with ParserPool() as made:
        yield made


def child_of(pool: ParserPool) -> subprocess.Popen[bytes]:
    process = pool._all[0]._process
    assert process is not None
    return process


def test_a_document_comes_back_as_the_parser_made_it(pool: ParserPool) -> None:
    data = "# Ünïcode 😀\n\ntext\n\n| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\x1f".encode()
    assert pool.parse(data, "a.md") == parse(data, "a.md")
    assert document_of(document_to(parse(data, "a.md"))) == parse(data, "a.md")


def test_a_name_of_any_bytes_reaches_the_parser(pool: ParserPool) -> None:
    assert pool.parse(b"x = 1", os.fsdecode(b"caf\xe9\xff/\xe4.py")).text == "x = 1"


def test_a_refusal_in_the_child_keeps_its_code_and_message(pool: ParserPool) -> None:
    with pytest.raises(FileError) as here:
        parse(b"\x7fELF", "a")
    with pytest.raises(FileError) as there:
        pool.parse(b"\x7fELF", "a")
    assert (there.value.code, str(there.value)) == (here.value.code, str(here.value))


@pytest.mark.parametrize("name", LOOPS)
def test_a_file_that_takes_too_long_is_stopped_and_the_next_one_is_read(name: str) -> None:
    with ParserPool(wall_s=1.5) as pool:
        pool.parse(b"warm", "a.txt")
        begun = time.monotonic()
        with pytest.raises(FileError) as caught:
            pool.parse(LOOPS[name], name)
        assert caught.value.code == "parser_timeout"
        assert time.monotonic() - begun > 1.4
        assert pool.parse(b"next", "a.txt").text == "next"


def test_a_page_tree_that_refers_to_itself_ends_and_the_next_file_is_read(pool: ParserPool) -> None:
    with pytest.raises(FileError) as caught:
        pool.parse(SELF_REFERRING, "a.pdf")
    assert caught.value.code == "invalid_file"  # seen at once; what loops for ever is the next test's
    assert pool.parse(b"next", "a.txt").text == "next"


@pytest.mark.parametrize("name", LOOPS)
def test_a_file_that_loops_ends_its_part_of_the_job_and_no_other(work: Work, name: str) -> None:
    corpus = work.corpus()
    with ParserPool(wall_s=1.5) as pool:
        work.parser = pool  # type: ignore[assignment]
        job = work.ingest(corpus, {name: LOOPS[name], "good.txt": b"The lamp is lit."})
    work.compute_kv()
    shown = work.view(job)
    assert shown["status"] == "completed_with_errors"
    assert [(error["filename"], error["code"]) for error in shown["errors"]] == [(name, "parser_timeout")]
    assert work.chunks(corpus, "good.txt") == ["The lamp is lit."]


def test_a_parse_that_nobody_wants_any_more_is_stopped_at_once_and_its_child_with_it() -> None:
    with ParserPool(wall_s=600) as pool:
        pool.parse(b"warm", "a.txt")
        child = child_of(pool)
        looks = []

        def check() -> None:
            looks.append(time.monotonic())
            if len(looks) > 5 and looks[-1] - looks[0] > 0.3:
                raise Cancelled("enough")

        with pytest.raises(Cancelled):
            pool.parse(SLOW * 4, "a.html", check)
        assert child.poll() == -signal.SIGKILL
        assert pool.parse(b"next", "a.txt").text == "next"


def test_a_child_that_dies_in_a_file_costs_that_file_only() -> None:
    with ParserPool() as pool:
        pool.parse(b"warm", "a.txt")
        killer = threading.Timer(0.3, child_of(pool).kill)
        killer.start()
        with pytest.raises(FileError) as caught:
            pool.parse(SLOW, "a.html")
        killer.join()
        assert caught.value.code == "parser_crash"
        assert pool.parse(b"next", "a.txt").text == "next"


def test_a_child_that_died_between_files_costs_none() -> None:
    with ParserPool() as pool:
        pool.parse(b"warm", "a.txt")
        child_of(pool).send_signal(signal.SIGSEGV)
        child_of(pool).wait()
        assert pool.parse(b"next", "a.txt").text == "next"


def test_a_file_that_needs_too_much_memory_fails_alone() -> None:
    with ParserPool(memory_bytes=400 << 20) as pool:
        with pytest.raises(FileError) as caught:
            pool.parse(b"a\n\n" * 8_000_000, "a.txt")
        assert caught.value.code == "parser_crash"
        assert pool.parse(b"next", "a.txt").text == "next"


def test_a_child_serves_many_files_and_is_then_replaced() -> None:
    with ParserPool(files_per_child=3) as pool:
        seen = []
        for number in range(7):
            pool.parse(b"%d" % number, "a.txt")
            seen.append(child_of(pool).pid)
        assert len(set(seen[:3])) == len(set(seen[3:6])) == 1
        assert len(set(seen)) == 3


def test_children_work_at_the_same_time_and_none_outlives_the_pool() -> None:
    with ParserPool(workers=2) as pool:
        found: list[str] = []
        threads = [
            threading.Thread(target=lambda n=n: found.append(pool.parse(b"file %d" % n, "a.txt").text))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        children = [child._process for child in pool._all if child._process is not None]
    assert sorted(found) == [f"file {n}" for n in range(8)]
    assert children
    assert all(child.returncode is not None for child in children)


def test_a_file_larger_than_a_pipe_goes_both_ways(pool: ParserPool) -> None:
    text = "word " * 1_000_000
    assert pool.parse(text.encode(), "a.txt").text == text


def test_a_child_sees_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREREAD_SECRET", "x")
    assert not any("PREREAD" in key for key in pipes.environment())


def test_a_child_does_not_import_torch() -> None:
    code = "import sys, ingest.parser_child, ingest.parsers, ingest.isolate; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], env=pipes.environment(), check=False).returncode == 0
    )


def test_the_start_of_a_child_is_not_charged_to_its_first_file() -> None:
    with ParserPool(wall_s=0.4) as pool:
        for _ in range(3):
            assert pool.parse(b"text", "a.txt").text == "text"
            child_of(pool).kill()
            child_of(pool).wait()
