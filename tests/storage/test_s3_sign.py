"""Our signed URLs are botocore's, for any name, time and credentials, and follow both as they change."""

from __future__ import annotations

import datetime
import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import boto3
import pytest
from botocore.config import Config
from botocore.credentials import Credentials
from botocore.exceptions import NoCredentialsError
from hypothesis import given
from hypothesis import strategies as st

from storage.s3 import S3Store
from storage.s3_sign import Signer

NOON = datetime.datetime(2030, 5, 17, 12, 0, 1)
CONFIG = Config(signature_version="s3v4", s3={"addressing_style": "path"})


class Clock:
    def __init__(self) -> None:
        self.now = NOON


@pytest.fixture(scope="module")
def clock() -> Iterator[Clock]:
    made = Clock()
    with pytest.MonkeyPatch.context() as patch:
        for clock in ("botocore.auth.get_current_datetime", "storage.s3_sign._now"):
            patch.setattr(clock, lambda *_: made.now)
        yield made


def client(session: boto3.session.Session, **options: Any) -> Any:
    return session.client("s3", config=CONFIG, **options)


@pytest.fixture(scope="module", params=["", "a token/with+signs=="])
def pair(request: pytest.FixtureRequest, clock: Clock) -> tuple[Signer, Any]:
    """Ours and botocore's of the same credentials."""
    session = boto3.session.Session("AKIA/TEST", "secret+/=", request.param or None, region_name="eu-west-3")
    theirs = client(session, endpoint_url="http://store.test:8333")
    return Signer(theirs, session.get_credentials(), "bucket", "eu-west-3", 3600), theirs


def taken_apart(url: str) -> tuple[Any, ...]:
    parts = urlsplit(url)
    return parts.scheme, parts.netloc, parts.path, dict(parse_qsl(parts.query, strict_parsing=True))


def test_any_name_at_any_time_is_signed_as_botocore_signs_it(pair: tuple[Signer, Any], clock: Clock) -> None:
    ours, theirs = pair
    names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=40).filter(
        lambda name: not name.startswith("/")
    )

    @given(names, st.datetimes(datetime.datetime(2020, 1, 1), datetime.datetime(2060, 1, 1)), st.booleans())
    def same(name: str, now: datetime.datetime, head: bool) -> None:
        clock.now = now
        method, operation = ("HEAD", "head_object") if head else ("GET", "get_object")
        expected = theirs.generate_presigned_url(operation, Params={"Bucket": "bucket", "Key": name}, ExpiresIn=3600)
        assert taken_apart(ours.url(method, name)) == taken_apart(expected)

    same()


@pytest.mark.parametrize("region", ["us-east-1", "eu-west-3"])
def test_without_an_endpoint_it_is_the_one_that_botocore_knows(clock: Clock, region: str) -> None:
    session = boto3.session.Session("AKIATEST", "secret", region_name=region)
    theirs = client(session)
    expected = theirs.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "a/b"}, ExpiresIn=60)
    found = Signer(theirs, session.get_credentials(), "bucket", region, 60).url("GET", "a/b")
    assert taken_apart(found) == taken_apart(expected)
    assert "amazonaws.com" in found


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("https://store.test:443", "store.test"),
        ("http://store.test:80", "store.test"),
        ("https://store.test:80", "store.test:80"),
        ("http://store.test:443", "store.test:443"),
        ("https://store.test", "store.test"),
        ("http://[::1]:80", "[::1]"),
        ("http://[::1]:8333", "[::1]:8333"),
    ],
)
def test_what_is_signed_is_the_host_that_a_request_names(clock: Clock, endpoint: str, host: str) -> None:
    """A scheme's own port is not in it, though the endpoint says it."""
    session = boto3.session.Session("AKIATEST", "secret", region_name="us-east-1")
    theirs = client(session, endpoint_url=endpoint)
    expected = theirs.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "a/b"}, ExpiresIn=60)
    signer = Signer(theirs, session.get_credentials(), "bucket", "us-east-1", 60)
    assert taken_apart(signer.url("GET", "a/b")) == taken_apart(expected)
    assert sent_host(endpoint) == host


def sent_host(endpoint: str) -> str:
    """The Host of a request that http.client makes."""
    parts, sent = urlsplit(endpoint), bytearray()

    class Socket:
        def sendall(self, data: bytes) -> None:
            sent.extend(data)

    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc)
    connection.sock = Socket()
    connection.request("GET", "/bucket/a/b")
    (found,) = [line.removeprefix("Host: ") for line in sent.decode().split("\r\n") if line.startswith("Host: ")]
    return found


def test_credentials_that_change_are_taken_up_at_once(pair: tuple[Signer, Any], clock: Clock) -> None:
    _, theirs = pair
    clock.now = NOON
    held = Credentials("AKIAONE", "one")
    signer = Signer(theirs, held, "bucket", "eu-west-3", 3600)
    first = signer.url("GET", "a")
    held.secret_key = "two"  # the same id and day
    second = signer.url("GET", "a")
    fresh = Signer(theirs, Credentials("AKIAONE", "two"), "bucket", "eu-west-3", 3600).url("GET", "a")
    assert first != second == fresh


def test_the_next_day_has_a_key_of_its_own(pair: tuple[Signer, Any], clock: Clock) -> None:
    ours, theirs = pair
    for now in (NOON, NOON + datetime.timedelta(days=1), NOON - datetime.timedelta(days=400)):
        clock.now = now
        expected = theirs.generate_presigned_url("get_object", Params={"Bucket": "bucket", "Key": "a"}, ExpiresIn=3600)
        assert taken_apart(ours.url("GET", "a")) == taken_apart(expected)


def test_without_credentials_it_says_so(pair: tuple[Signer, Any]) -> None:
    with pytest.raises(NoCredentialsError):
        Signer(pair[1], None, "bucket", "eu-west-3", 3600).url("GET", "a")


def test_the_store_takes_the_credentials_of_the_environment_where_it_is_given_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAENV")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    store = S3Store("bucket", "pre", endpoint="http://127.0.0.1:9")
    query = taken_apart(store._signer.url("GET", "pre/a"))[3]
    assert query["X-Amz-Credential"].startswith("AKIAENV/")
    assert query["X-Amz-Security-Token"] == "token"
    store.close()
