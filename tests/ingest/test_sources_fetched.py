"""Buckets and lists of URLs: what has not changed is not sent again, what cannot be had is named, nothing else is reached."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from fixtures_s3 import S3Server, s3_client
from fixtures_web import Asked, Reply, Web, web
from fixtures_work import Work

from ingest.egress import AllowedHosts, HostRefused
from ingest.fetch import FetchFailed
from ingest.planner import SourcePlanner
from ingest.sources import Asker, Entry, Reach, Seen, Source, open_source
from ingest.sources.http_list import path_of
from ingest.sync import queue_sync
from storage.catalogue.schema import Corpus, Document, SourceItem
from storage.errors import Cancelled, FileError, UserError

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


@pytest.fixture
def server() -> Iterator[Web]:
    with web() as made:
        yield made


@pytest.fixture
def reach(server: Web, tmp_path: Path) -> Reach:
    hosts = AllowedHosts.parse(f"127.0.0.1:{server.port}")
    return Reach(hosts=hosts, credentials=tmp_path / "credentials", scratch=tmp_path / "scratch")


def listing(server: Web, reach: Reach, seen: dict[str, Seen] | None = None, **spec: Any) -> Source:
    return open_source({"type": "http", "url": f"{server.url}/list", **spec}, reach, Asker("t1", seen or {}))


def versioned(text: str, headers: dict[str, str] | None = None) -> Any:
    """A page that heeds conditions."""
    tag = f'"{hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()}"'

    def answer(asked: Asked) -> Reply:
        if asked.headers.get("if-none-match") == tag:
            return Reply(status=304)
        return Reply(text.encode(), headers={"etag": tag, **(headers or {})})

    return answer


@pytest.mark.parametrize(
    "text",
    [
        "# a list\n/a.txt\n\n  /docs/  \n",
        '["/a.txt", {"url": "/docs/"}]',
        '<?xml version="1.0"?><urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9"><url><loc>/a.txt</loc>'
        "<lastmod>2026-01-01</lastmod></url><url><loc> /docs/ </loc></url></urlset>",
        "\ufeff/a.txt\r\n/docs/\r\n",
    ],
)
def test_lists_are_lines_json_or_a_sitemap(server: Web, reach: Reach, text: str) -> None:
    server.pages |= {"/list": Reply(text.encode()), "/a.txt": Reply(b"a"), "/docs/": Reply(b"<p>d")}
    source = listing(server, reach)
    at = f"127.0.0.1:{server.port}"
    digests = [hashlib.sha256(data).hexdigest() for data in (b"a", b"<p>d")]
    assert source.manifest() == [Entry(f"{at}/a.txt", digests[0], 1), Entry(f"{at}/docs/index.html", digests[1], 4)]
    assert source.read(f"{at}/docs/index.html") == b"<p>d"
    source.close()
    assert list(reach.scratch.iterdir()) == []


NESTED = b"".join(b'<!ENTITY %c "%s">' % (99 + i, b"&%c;" % (98 + i) * 10) for i in range(8))
BOMB = b'<!DOCTYPE x [<!ENTITY b "aaaaaaaaaaaaaaaaaaaa">' + NESTED + b"]><urlset><loc>&j;</loc></urlset>"


@pytest.mark.parametrize(
    "body",
    [b"<html>log in", b"[1]", b'{"a": 1', b"[" * 10_000, b'["/a", null]', b"<sitemapindex/>",
     b"down for maintenance", b"\xff\xfe/\0a\0",
     BOMB],
)  # fmt: skip
def test_what_is_no_list_is_refused(server: Web, reach: Reach, body: bytes) -> None:
    server.pages["/list"] = Reply(body)
    with closing(listing(server, reach)) as source, pytest.raises(FetchFailed, match="list"):
        source.manifest()


def test_a_page_is_named_by_its_whole_address() -> None:
    import httpx

    for url, path in {
        "https://example.org": "example.org/index.html", "https://example.org/a%20b/%C3%BC.md": "example.org/a b/ü.md",
        "https://example.org:8443/a?page=2": "example.org:8443/a?page=2", "https://example.org/a/": "example.org/a/index.html",
    }.items():  # fmt: skip
        assert path_of(httpx.URL(url)) == path


def test_what_cannot_be_had_is_named_and_keeps_its_document(server: Web, reach: Reach) -> None:
    items = ["/good", "/gone", "/down", "/huge", "/image", "/lfs", "http://127.0.0.1:1/x", "http://169.254.169.254/y", "file:///etc/passwd",
             "https://u:p@127.0.0.1/z", "/good", "/%2e%2e/up"]  # fmt: skip
    server.pages |= {
        "/list": Reply(json.dumps(items).encode()), "/good": Reply(b"good"), "/gone": Reply(status=404),
        "/down": Reply(status=403),
        "/image": Reply(b"\x89PNG\0"), "/lfs": Reply(LFS), "/huge": Reply(b"x" * 2000),
    }  # fmt: skip
    from ingest.sources.http_list import HttpListSource

    source = HttpListSource(f"{server.url}/list", reach, Asker("t1"), file_bytes=1000)
    at = f"127.0.0.1:{server.port}"
    assert [entry.path for entry in source.manifest()] == [f"{at}/good"]
    reasons = {left.path: (left.reason, left.unread) for left in source.skipped}
    source.close()
    assert reasons[f"{at}/gone"] == ("cannot be read: the server answered 404", True)
    assert reasons[f"{at}/down"] == ("cannot be read: the server answered 403", True)
    assert reasons[f"{at}/huge"] == ("larger than 1000 bytes", False)
    assert reasons[f"{at}/image"] == ("binary", False)
    assert reasons[f"{at}/lfs"][0].startswith("git LFS")
    assert reasons[f"{at}/good"] == ("is listed twice", False)
    for path in ("127.0.0.1:1/x", "169.254.169.254/y"):
        assert "may not connect" in reasons[path][0]
        assert reasons[path][1]


def test_a_page_that_has_not_changed_is_not_sent_again(server: Web, reach: Reach) -> None:
    server.pages |= {"/list": Reply(b"/a\n/b\n/c\n/image"), "/a": versioned("one"), "/b": versioned("two")}
    dated = formatdate(1_700_000_000, usegmt=True)

    def by_date(asked: Asked) -> Reply:
        same = asked.headers.get("if-modified-since") == dated
        return Reply(status=304) if same else Reply(b"three", headers={"last-modified": dated})

    server.pages |= {"/c": by_date, "/image": versioned("\0")}
    with closing(listing(server, reach)) as source:
        first = source.manifest()
        seen, skipped = dict(source.seen), [left.reason for left in source.skipped]
    server.pages["/b"] = versioned("TWO")
    sent: list[tuple[str, int]] = []
    for path in ("/a", "/b", "/c", "/image"):
        page = server.pages[path]
        server.pages[path] = lambda asked, page=page: sent.append((asked.path, (r := page(asked)).status)) or r  # type: ignore[misc]
    with closing(listing(server, reach, seen)) as source:
        second = source.manifest()
        assert source.read(second[1].path) == b"TWO"
        assert [left.reason for left in source.skipped] == skipped == ["binary"]
        assert dict(source.seen).keys() == seen.keys()
    assert sent == [("/a", 304), ("/b", 200), ("/c", 304), ("/image", 304)]
    assert (second[0], second[2]) == (first[0], first[2])
    assert second[1] != first[1]


def test_a_path_that_comes_to_stand_for_another_page_is_fetched(server: Web, reach: Reach) -> None:
    pages = {"/v1": "old", "/v2": "new"}
    for path, text in pages.items():
        server.pages[path] = lambda asked, text=text: Reply(  # type: ignore[misc]
            b"" if "if-modified-since" in asked.headers else text.encode(),
            304 if "if-modified-since" in asked.headers else 200,
            headers={"last-modified": formatdate(0, usegmt=True)},
        )
    seen: dict[str, Seen] = {}
    for path, text in [*pages.items(), ("/v2", "new")]:
        server.pages["/list"] = Reply(json.dumps([{"url": f"{server.url}{path}", "path": "doc.md"}]).encode())
        with closing(listing(server, reach, seen)) as source:
            [entry] = source.manifest()
            assert entry.sha256 == hashlib.sha256(text.encode()).hexdigest()
            seen = dict(source.seen)


def test_what_is_beyond_what_one_listing_may_fetch_stays_as_it_is(
    server: Web, reach: Reach, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ingest.sources.shelf.TOGETHER", 10)
    for name in "abc":
        server.pages[f"/{name}"] = Reply(b"123456789")
    server.pages["/list"] = Reply("\n".join(f"{server.url}/{name}" for name in "abc").encode())
    with closing(listing(server, reach)) as source:
        assert len(source.manifest()) == 2
        assert [left.unread for left in source.skipped] == [True]
        assert "10 bytes" in source.skipped[0].reason


def test_a_known_page_is_fetched_when_it_is_read_and_must_be_what_was_listed(server: Web, reach: Reach) -> None:
    """Chunk settings have changed: the document is to be made anew, though its page is as it was."""
    server.pages |= {"/list": Reply(b"/a"), "/a": versioned("one")}
    with closing(listing(server, reach)) as source:
        (entry,) = source.manifest()
        seen = dict(source.seen)
    with closing(listing(server, reach, seen)) as source:
        source.manifest()
        assert source.read(entry.path) == b"one"
        server.pages["/a"] = versioned("other")
        with pytest.raises(FileError, match="changed"):
            source.read(entry.path)
        with pytest.raises(FileError):
            source.read("nowhere")


def test_a_server_in_trouble_is_asked_again(server: Web, reach: Reach) -> None:
    answers = [Reply(status=503), Reply(b"/a")]
    server.pages |= {"/list": lambda asked: answers.pop(0), "/a": Reply(b"a")}
    with closing(listing(server, reach)) as source:
        assert len(source.manifest()) == 1


def test_a_credential_goes_to_the_pages_it_covers_and_to_no_others(server: Web, reach: Reach) -> None:
    with web() as other:
        hosts = AllowedHosts.parse(f"127.0.0.1:{server.port},127.0.0.1:{other.port}")
        reach.credentials.mkdir()
        found = {"tenant": "t1", "url": f"{server.url}/docs", "username": "u", "password": "p"}
        (reach.credentials / "docs").write_text(json.dumps(found))
        server.pages |= {
            "/docs/list": Reply(f"/docs/a\n/public\n{other.url}/b".encode()),
            "/docs/a": Reply(b"a"),
            "/public": Reply(b"p"),
        }
        other.pages["/b"] = Reply(b"b")
        wider = Reach(hosts=hosts, credentials=reach.credentials, scratch=reach.scratch)
        with closing(listing(server, wider, url=f"{server.url}/docs/list", credential="docs")) as source:
            assert len(source.manifest()) == 3
        shown = {asked.path: "authorization" in asked.headers for asked in (*server.asked, *other.asked)}
        assert shown == {"/docs/list": True, "/docs/a": True, "/public": False, "/b": False}


def test_a_cancelled_listing_stops_and_leaves_nothing(server: Web, reach: Reach) -> None:
    server.pages |= {"/list": Reply(b"/a\n/b\n/c"), "/a": Reply(b"a"), "/b": Reply(b"b"), "/c": Reply(b"c")}

    def check() -> None:
        if any(asked.path == "/a" for asked in server.asked):
            raise Cancelled("the job was cancelled")

    source = open_source({"type": "http", "url": f"{server.url}/list"}, reach, Asker("t1", check=check))
    with closing(source), pytest.raises(Cancelled):
        source.manifest()
    assert [asked.path for asked in server.asked] == ["/list", "/a"]
    assert list(reach.scratch.iterdir()) == []


def run(work: Work, reach: Reach, corpus: Corpus) -> dict[str, Any]:
    with work.catalogue.write() as session:
        job = queue_sync(session, session.get_one(Corpus, corpus.id)).id
    work.worker(planner=SourcePlanner(work.catalogue, work.objects, reach, work.pipeline.done_hash)).drain()
    work.compute_kv()
    return work.view(job)


def test_an_outage_of_some_pages_deletes_nothing_and_the_memory_lasts(work: Work, server: Web, reach: Reach) -> None:
    corpus = work.corpus(source={"type": "http", "url": f"{server.url}/list"})
    server.pages |= {"/list": Reply(b"/a\n/b"), "/a": versioned("one"), "/b": versioned("two")}
    assert run(work, reach, corpus)["status"] == "completed"
    page = server.pages.pop("/b")
    assert run(work, reach, corpus)["status"] == "completed"
    assert work.count(Document) == 2
    server.pages["/b"] = page
    before = len(server.asked)
    assert run(work, reach, corpus)["progress"]["files_total"] == 0
    assert [asked.headers.get("if-none-match") is not None for asked in server.asked[before:]] == [False, True, True]
    server.pages["/list"] = Reply(b"/a")
    run(work, reach, corpus)
    assert (work.count(Document), work.count(SourceItem)) == (1, 1)
    work.deleter.corpus("t1", corpus.id)
    assert work.count(SourceItem) == 0


# --- S3 ---


@pytest.fixture
def s3(s3_server: S3Server) -> Iterator[Any]:
    with closing(s3_client(s3_server)) as client:
        yield client


def s3_reach(s3_server: S3Server, folder: Path, bucket: str) -> Reach:
    credentials = folder / "credentials"
    credentials.mkdir()
    found = {"tenant": "t1", "url": f"{s3_server.endpoint}/{bucket}"}
    found |= {"username": s3_server.access_key, "password": s3_server.secret_key}
    (credentials / "s3").write_text(json.dumps(found))
    hosts = AllowedHosts.parse(s3_server.endpoint.removeprefix("http://"))
    return Reach(hosts=hosts, credentials=credentials, scratch=folder / "scratch")


def s3_source(s3_server: S3Server, reach: Reach, url: str, seen: dict[str, Seen] | None = None, **spec: Any) -> Source:
    spec = {"endpoint": s3_server.endpoint, "credential": "s3", **spec}
    return open_source({"type": "s3", "url": url, **spec}, reach, Asker("t1", seen or {}))


@pytest.mark.slow
def test_a_prefix_of_more_than_a_thousand_objects_is_listed_whole(s3: Any, s3_server: S3Server, tmp_path: Path) -> None:
    s3.create_bucket(Bucket="many-docs")
    for number in range(1005):
        s3.put_object(Bucket="many-docs", Key=f"all/{number:04}.txt", Body=b"same")
    tag = f'"{hashlib.md5(b"same", usedforsecurity=False).hexdigest()}" 4'
    seen = {f"{number:04}.txt": Seen(tag, "known", 4) for number in range(1000)}
    with closing(s3_source(s3_server, s3_reach(s3_server, tmp_path, "many-docs"), "s3://many-docs/all", seen)) as source:
        entries = source.manifest()
    assert [entry.path for entry in entries] == [f"{number:04}.txt" for number in range(1005)]
    assert {entry.sha256 for entry in entries[:1000]} == {"known"}, "what is as it was is not fetched"


def test_keys_come_back_as_they_are_and_an_unchanged_object_is_not_fetched(
    s3: Any, s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.create_bucket(Bucket="odd-keys")
    names = ["a b+c.txt", "日本/ü&<>.md", "100%.txt", "image.png", "deep/er/x.txt"]
    for name in names:
        s3.put_object(Bucket="odd-keys", Key=f"p/{name}", Body=b"\0" if name == "image.png" else name.encode())
    s3.put_object(Bucket="odd-keys", Key="p2/other.txt", Body=b"not below p/")
    s3.put_object(Bucket="odd-keys", Key="p/folder/", Body=b"")
    reach = s3_reach(s3_server, tmp_path, "odd-keys")
    with closing(s3_source(s3_server, reach, "s3://odd-keys/p/")) as source:
        first = source.manifest()
        assert [entry.path for entry in first] == sorted(name for name in names if name != "image.png")
        assert all(source.read(entry.path) == entry.path.encode() for entry in first)
        seen = dict(source.seen)
    s3.put_object(Bucket="odd-keys", Key="p/100%.txt", Body=b"changed")
    from ingest.sources import s3 as module

    fetched: list[str] = []
    signed = module.S3Source._object
    monkeypatch.setattr(module.S3Source, "_object", lambda self, path: fetched.append(path) or signed(self, path))
    with closing(s3_source(s3_server, reach, "s3://odd-keys/p", seen)) as source:
        second = source.manifest()
        assert fetched == ["100%.txt"]
        assert [entry.path for entry in second if entry not in first] == ["100%.txt"]
        assert source.read("100%.txt") == b"changed"
        assert source.read("deep/er/x.txt") == b"deep/er/x.txt"
        assert ("image.png", "binary") in {(left.path, left.reason) for left in source.skipped}


def test_a_bucket_that_is_not_there_or_not_ours_is_a_failure(s3: Any, s3_server: S3Server, tmp_path: Path) -> None:
    s3.create_bucket(Bucket="ours")
    reach = s3_reach(s3_server, tmp_path, "ours")
    with pytest.raises(UserError, match="there is no credential"):
        s3_source(s3_server, reach, "s3://theirs/x")
    for url, spec in (("s3://ours/x", {"credential": None}), ("s3://missing-bucket", {"credential": None})):
        with closing(s3_source(s3_server, reach, url, **spec)) as source, pytest.raises(FetchFailed, match="answered 40"):
            source.manifest()


@pytest.mark.parametrize("url", ["s3://", "s3://UPPER/x", "https://bucket/x", "s3://a/x", "s3://bu_cket/x", "s3://bucket@evil/x"])
def test_what_names_no_bucket_is_refused(url: str, reach: Reach) -> None:
    with pytest.raises(UserError):
        open_source({"type": "s3", "url": url}, reach, Asker("t1"))


def test_an_endpoint_the_operator_does_not_list_is_refused(reach: Reach) -> None:
    for endpoint in (None, "http://169.254.169.254", "http://127.0.0.1:1", "https://u:p@127.0.0.1"):
        with pytest.raises(UserError) as refused:
            open_source({"type": "s3", "url": "s3://bucket/x", "endpoint": endpoint}, reach, Asker("t1"))
        assert endpoint is None or isinstance(refused.value, HostRefused | UserError)


def test_no_signature_nor_secret_is_in_what_a_failure_says(server: Web, tmp_path: Path, reach: Reach) -> None:
    reach.credentials.mkdir()
    found = {"tenant": "t1", "url": f"{server.url}/bucket", "username": "AKIDEXAMPLE", "password": "sesame"}
    (reach.credentials / "s3").write_text(json.dumps(found))
    for reply in (
        Reply(status=403),
        Reply(b"<x/>"),
        Reply(b"no xml"),
        Reply(status=302, headers={"location": "http://127.0.0.1:1/"}),
    ):
        server.rest = lambda asked, reply=reply: reply  # type: ignore[misc]
        source = open_source({"type": "s3", "url": "s3://bucket", "endpoint": server.url, "credential": "s3"}, reach, Asker("t1"))
        with closing(source), pytest.raises(UserError) as failed:
            source.manifest()
        assert not any(word in str(failed.value) for word in ("Signature", "AKID", "sesame"))
    assert "X-Amz-Signature" in server.asked[0].path
