"""A file that comes in parts, as the unmodified client sends it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import openai
import pytest
from api_kit import Site
from sqlalchemy import func, select

from ingest import uploads
from ingest.ticker import Ticker
from storage.catalogue.schema import File, Tenant

WHOLE = b"".join(b"Line %d of a large report.\n" % n for n in range(4000))


def begin(client: openai.OpenAI, size: int = len(WHOLE), name: str = "report.txt") -> Any:
    return client.uploads.create(bytes=size, filename=name, mime_type="text/plain", purpose="assistants")


def rows(site: Site) -> int:
    with site.parts.catalogue.read() as session:
        return int(session.scalar(select(func.count()).select_from(File)) or 0)


def test_the_client_uploads_a_file_in_parts_and_reads_it_back(site: Site, tmp_path: Path) -> None:
    client, path = site.client(), tmp_path / "größe 報告.txt"
    path.write_bytes(WHOLE)
    md5 = hashlib.md5(WHOLE).hexdigest()
    done = client.uploads.upload_file_chunked(
        file=path, mime_type="text/plain", purpose="assistants", part_size=10_000, md5=md5
    )
    assert (done.status, done.file.filename, done.file.bytes) == ("completed", path.name, len(WHOLE))
    assert client.files.content(done.file.id).content == WHOLE
    assert [file.id for file in client.files.list()] == [done.file.id], "parts are no files of anybody"
    assert rows(site) == 1


def test_parts_are_joined_in_the_order_that_is_named_and_may_have_the_same_bytes(site: Site) -> None:
    client = site.client()
    upload = begin(client, 9)
    first, again, second = (client.uploads.parts.create(upload.id, data=data).id for data in (b"abc", b"abc", b"xyz"))
    done = client.uploads.complete(upload.id, part_ids=[first, second, again])
    assert client.files.content(done.file.id).content == b"abcxyzabc"
    assert client.uploads.complete(upload.id, part_ids=[second]).file.id == done.file.id, "a repeated request is answered again"
    assert rows(site) == 1


def test_a_small_part_is_not_multiplied(site: Site) -> None:
    client = site.client()
    upload = begin(client, 6)
    part = client.uploads.parts.create(upload.id, data=b"abc").id
    for twice in ([part, part], [part, part.removeprefix("part_")]):
        with pytest.raises(openai.BadRequestError) as refused:
            client.uploads.complete(upload.id, part_ids=twice)
        assert refused.value.code == "invalid_part"


def test_parts_that_do_not_fit_together_are_not_joined(site: Site, monkeypatch) -> None:
    client = site.client(max_retries=0)
    upload = begin(client, 2000)
    parts = [client.uploads.parts.create(upload.id, data=bytes([n]) * 1000).id for n in (1, 2)]
    with site.parts.catalogue.write() as session:
        session.get_one(Tenant, "default").quota_bytes = 3999
    monkeypatch.setattr("serving.doors.uploads.open_file", lambda *_: pytest.fail("it was read"))
    with pytest.raises(openai.RateLimitError) as refused:
        client.uploads.complete(upload.id, part_ids=parts)
    assert refused.value.code == "insufficient_quota"


@pytest.mark.parametrize("wrong", ["size", "md5", "part"])
def test_what_is_not_as_announced_is_refused_and_can_be_put_right(site: Site, wrong: str) -> None:
    client = site.client()
    upload = begin(client, 7 if wrong == "size" else 6)
    parts = [client.uploads.parts.create(upload.id, data=data).id for data in (b"abc", b"xyz")]
    other = begin(client)
    strange = client.uploads.parts.create(other.id, data=b"xyz").id
    extra: dict[str, Any] = {"md5": "0" * 32} if wrong == "md5" else {}
    with pytest.raises(openai.BadRequestError) as refused:
        client.uploads.complete(upload.id, part_ids=[parts[0], strange if wrong == "part" else parts[1]], **extra)
    assert refused.value.code == {"size": "invalid_upload_size", "md5": "invalid_checksum", "part": "invalid_part"}[wrong]
    more = [client.uploads.parts.create(upload.id, data=b"!").id] if wrong == "size" else []
    assert client.uploads.complete(upload.id, part_ids=[*parts, *more]).status == "completed"


def test_a_cancelled_upload_leaves_nothing_and_takes_no_parts(site: Site) -> None:
    client = site.client()
    upload = begin(client)
    client.uploads.parts.create(upload.id, data=WHOLE[:100])
    assert client.uploads.cancel(upload.id).status == "cancelled"
    assert client.uploads.cancel(upload.id).status == "cancelled"
    for call in (
        lambda: client.uploads.parts.create(upload.id, data=b"late"),
        lambda: client.uploads.complete(upload.id, part_ids=[]),
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            call()
        assert refused.value.code == "upload_not_pending"
    assert rows(site) == 0
    assert list(site.parts.objects.entries("raw/")) == []


def test_an_upload_expires_with_its_parts(site: Site) -> None:
    client = site.client()
    kept, late = begin(client), begin(client)
    for upload in (kept, late):
        client.uploads.parts.create(upload.id, data=upload.id.encode())
    with site.parts.catalogue.write() as session:
        assert uploads.expire(session, late.created_at + 1.0) == 0
        assert uploads.expire(session, late.expires_at + 1.0) == 2
    with pytest.raises(openai.BadRequestError, match="expired"):
        client.uploads.complete(late.id, part_ids=[])
    assert rows(site) == 0


def test_the_tick_gives_up_on_what_nobody_completed(site: Site) -> None:
    client = site.client()
    upload = begin(client)
    client.uploads.parts.create(upload.id, data=b"abc")
    idle: dict[str, Any] = {"reap_kv": lambda _: 0, "kv_has_work": lambda _: False, "collect": lambda: None}
    Ticker(site.parts.catalogue, lambda _: None, lambda _: None, **idle).tick(upload.expires_at + 1.0)
    assert rows(site) == 0
    assert client.uploads.cancel(upload.id).status == "expired"


def test_another_key_finds_no_upload(site: Site) -> None:
    upload = begin(site.client())
    stranger = site.client(site.key("write"))
    with pytest.raises(openai.NotFoundError):
        stranger.uploads.parts.create(upload.id, data=b"x")
    with pytest.raises(openai.NotFoundError):
        stranger.uploads.complete(upload.id, part_ids=[])
