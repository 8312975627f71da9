"""Reading from a parent that stalls, breaks off, lies and comes back; and keeping what was read."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import kv_samples
import pytest
from rude_server import RudeServer

from storage.errors import ObjectMissing, StorageTimeout, StorageUnavailable, UserError
from storage.folder import FolderStore
from storage.format import encode, is_whole
from storage.peer import PAUSE_SECONDS, PeerStore
from storage.readthrough import ReadThrough
from storage.site_key import SiteKey, site_secret

KEY = SiteKey("site-1", "default", site_secret(b"master", "site-1"), {})
RECORD = kv_samples.record(tokens=40)
DATA = b"".join(encode(RECORD))
NAME = f"kv/{RECORD.key[:2]}/{RECORD.key}"


@pytest.fixture
def parent() -> Iterator[RudeServer]:
    with RudeServer(DATA) as server:
        yield server


@pytest.fixture
def peer(parent: RudeServer) -> Iterator[PeerStore]:
    store = PeerStore(parent.endpoint, KEY, read_s=1.0, deadline_s=5.0)
    yield store
    store.close()


@pytest.fixture
def local(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def read(store: PeerStore | ReadThrough, size: int = len(DATA), offset: int = 0) -> bytes:
    buffer = bytearray(size)
    return bytes(buffer[: store.read_into(NAME, memoryview(buffer), offset)])


# --- the wire ------------------------------------------------------------------------------------------------


def test_an_object_and_any_part_of_it_arrives_in_the_callers_memory(peer: PeerStore) -> None:
    assert peer.size(NAME) == len(DATA)
    assert read(peer) == DATA
    assert read(peer, 10, 7) == DATA[7:17]
    assert read(peer, 10, len(DATA) - 4) == DATA[-4:]
    assert read(peer, 0) == b""


@pytest.mark.parametrize("behaviour", ["reset-body", "short-body"])
def test_a_body_that_breaks_off_is_resumed_where_it_ended(parent: RudeServer, peer: PeerStore, behaviour: str) -> None:
    parent.plan = [behaviour, behaviour]
    assert read(peer) == DATA
    assert len(parent.requests) == 3


def test_an_absent_object_and_a_forbidden_one_are_missing(parent: RudeServer, peer: PeerStore) -> None:
    parent.always = 404
    assert peer.size(NAME) is None
    with pytest.raises(ObjectMissing):
        read(peer)


@pytest.mark.parametrize("behaviour", [403, 500, 503, "reset"])
def test_refusals_are_unavailable(parent: RudeServer, peer: PeerStore, behaviour: int | str) -> None:
    parent.always = behaviour
    with pytest.raises(StorageUnavailable) as caught:
        read(peer)
    assert not isinstance(caught.value, StorageTimeout)
    assert "signature" not in str(caught.value)


@pytest.mark.parametrize("behaviour", ["stall", "stall-body"])
def test_a_stall_ends_as_a_timeout(parent: RudeServer, peer: PeerStore, behaviour: str) -> None:
    parent.always = behaviour
    with pytest.raises(StorageTimeout):
        read(peer)


def test_a_server_that_ignores_the_range_is_not_believed(parent: RudeServer, peer: PeerStore) -> None:
    parent.always = "no-range"
    with pytest.raises(StorageUnavailable):
        read(peer, 10, 7)


def test_a_parent_that_fails_is_left_alone_and_tried_again(
    parent: RudeServer, peer: PeerStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent.always = 500
    with pytest.raises(StorageUnavailable):
        peer.size(NAME)
    asked = len(parent.requests)
    for _ in range(5):
        with pytest.raises(StorageUnavailable):
            peer.size(NAME)
    assert len(parent.requests) == asked, "nobody waits for a parent that is down"
    parent.always = None
    later = time.monotonic() + PAUSE_SECONDS + 0.1
    monkeypatch.setattr(peer._breaker, "_clock", lambda: later)
    assert peer.size(NAME) == len(DATA)
    assert peer.size(NAME) == len(DATA)


def test_each_url_is_signed_for_its_own_method_and_object(parent: RudeServer, peer: PeerStore) -> None:
    peer.size(NAME)
    read(peer)
    head, get = parent.requests
    assert head.startswith(f"HEAD /site/site-1/objects/{NAME}?expires=")
    assert get.startswith(f"GET /site/site-1/objects/{NAME}?expires=")
    assert head.split("signature=")[1] != get.split("signature=")[1]


@pytest.mark.parametrize("url", ["", "ftp://a", "https://", "parent:8321", "https://u:p@host", "https://host?x=1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(UserError, match="https://host:port"):
        PeerStore(url, KEY)


def test_another_machine_is_reached_encrypted_only() -> None:
    with pytest.raises(UserError, match="https"):
        PeerStore("http://parent.example:8321", KEY)
    PeerStore("https://parent.example:8321/v1", KEY).close()
    PeerStore("http://[::1]:8321", KEY).close()


# --- reading through -----------------------------------------------------------------------------------------


def test_what_is_fetched_is_kept_and_served_from_here(parent: RudeServer, peer: PeerStore, local: FolderStore) -> None:
    store = ReadThrough(local, peer, lambda key: True)
    assert store.size(NAME) == len(DATA)
    assert read(store) == DATA
    asked = len(parent.requests)
    assert (store.size(NAME), read(store), read(store, 9, 3)) == (len(DATA), DATA, DATA[3:12])
    assert len(parent.requests) == asked
    assert list(local.list("")) == [NAME]
    assert store.counters()["objects"] == 1
    assert store.counters()["bytes"] == len(DATA)


def test_a_part_is_served_of_an_object_that_was_verified_whole(peer: PeerStore, local: FolderStore) -> None:
    store = ReadThrough(local, peer, lambda key: True)
    assert read(store, 16, 0) == DATA[:16]
    assert read(store, 16, 40) == DATA[40:56]
    assert local.size(NAME) == len(DATA)


class Flipping:
    """A parent whose first `bad` answers have one byte changed."""

    def __init__(self, data: bytes, at: int, bad: int) -> None:
        self.data, self.at, self.bad = data, at, bad
        self.reads = 0

    def size(self, name: str) -> int | None:
        return len(self.data)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        piece = bytearray(self.data)
        if self.reads < self.bad:
            piece[self.at] ^= 1
        self.reads += 1
        part = piece[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)


@pytest.mark.parametrize("at", range(0, len(DATA), 13))
def test_a_byte_flipped_on_the_way_is_refused_and_fetched_again(at: int, local: FolderStore) -> None:
    parent = Flipping(DATA, at, bad=1)
    store = ReadThrough(local, parent, lambda key: True)
    assert read(store) == DATA
    assert parent.reads == 2
    assert store.counters()["damaged"] == 1


def test_no_byte_can_change_unnoticed() -> None:
    assert is_whole(memoryview(DATA), RECORD.key)
    for at in range(len(DATA)):
        assert not is_whole(memoryview(DATA[:at] + bytes([DATA[at] ^ 1]) + DATA[at + 1 :]), RECORD.key), at
    for end in (0, 1, 50, len(DATA) // 2, len(DATA) - 1):
        assert not is_whole(memoryview(DATA[:end]), RECORD.key)
    assert not is_whole(memoryview(DATA + b"\0"), RECORD.key)


def test_a_codecs_basis_is_read_through_if_its_name_is_its_digest(local: FolderStore) -> None:
    basis = b"a basis, whatever is in it"
    digest = hashlib.sha256(basis).hexdigest()

    def read_all(store: ReadThrough, name: str) -> bytes:
        buffer = bytearray(store.size(name) or 0)
        return bytes(buffer[: store.read_into(name, memoryview(buffer))])

    store = ReadThrough(local, Flipping(basis, 3, bad=1), lambda key: False)
    assert read_all(store, f"basis/{digest}") == basis
    assert local.size(f"basis/{digest}") == len(basis), "no catalogue row speaks of it, and it is kept"
    with pytest.raises(StorageUnavailable):
        read_all(ReadThrough(local, Flipping(b"another", 0, bad=0), lambda key: True), f"basis/{'0' * 64}")
    noted = ReadThrough(local, Flipping(digest.encode(), 0, bad=0), lambda key: True)
    assert read_all(noted, f"basis-of/{'a' * 64}") == digest.encode()
    with pytest.raises(StorageUnavailable):
        read_all(ReadThrough(local, Flipping(b"<html>", 0, bad=0), lambda key: True), f"basis-of/{'b' * 64}")


def test_what_stays_damaged_is_neither_kept_nor_handed_on(local: FolderStore) -> None:
    store = ReadThrough(local, Flipping(DATA, 100, bad=99), lambda key: True)
    with pytest.raises(StorageUnavailable):
        read(store)
    assert list(local.list("")) == []
    assert store.counters()["objects"] == 0


def test_another_keys_object_is_not_taken(local: FolderStore) -> None:
    other = b"".join(encode(kv_samples.record(tokens=40, seed=1)))
    assert not is_whole(memoryview(bytearray(other)), RECORD.key)
    with pytest.raises(StorageUnavailable):
        read(ReadThrough(local, Flipping(other, 0, bad=0), lambda key: True))


def test_what_was_deleted_while_it_was_on_its_way_does_not_stay(peer: PeerStore, local: FolderStore) -> None:
    store = ReadThrough(local, peer, lambda key: False)
    assert read(store) == DATA
    assert list(local.list("")) == []


class Full(FolderStore):
    def put(self, name: str, parts: object) -> int:
        raise StorageUnavailable("no space left")


def test_a_full_disk_costs_the_copy_and_not_the_answer(peer: PeerStore, tmp_path: Path) -> None:
    store = ReadThrough(Full(tmp_path), peer, lambda key: True)
    assert read(store) == DATA
    assert store.counters()["unkept"] == 1


def test_only_stored_kv_is_asked_of_the_parent(parent: RudeServer, peer: PeerStore, local: FolderStore) -> None:
    store = ReadThrough(local, peer, lambda key: True)
    assert store.size("raw/default/abc") is None
    with pytest.raises(ObjectMissing):
        store.read_into("raw/default/abc", memoryview(bytearray(4)))
    assert parent.requests == []


def test_pulling_fetches_once_and_a_dropped_copy_again(parent: RudeServer, peer: PeerStore, local: FolderStore) -> None:
    store = ReadThrough(local, peer, lambda key: True)
    assert store.pull(RECORD.key) == len(DATA)
    assert store.pull(RECORD.key) == 0
    store.drop(RECORD.key)
    assert local.size(NAME) is None
    assert read(store) == DATA
    parent.always = 404
    store.drop(RECORD.key)
    with pytest.raises(ObjectMissing):
        store.pull(RECORD.key)


@pytest.mark.parametrize(
    ("behaviour", "counted"), [(404, "missing"), (500, "unavailable"), ("stall", "timeout"), ("reset", "unavailable")]
)
def test_failures_are_counted_by_their_kind(
    parent: RudeServer, peer: PeerStore, local: FolderStore, behaviour: int | str, counted: str
) -> None:
    store = ReadThrough(local, peer, lambda key: True)
    parent.always = behaviour
    with pytest.raises((ObjectMissing, StorageUnavailable)):
        read(store)
    assert store.counters()[counted] == 1


def test_a_body_that_drips_ends_at_the_deadline() -> None:
    """Each byte comes in time, the object never."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=_drip, args=(server,), daemon=True)
        thread.start()
        peer = PeerStore(f"http://127.0.0.1:{server.getsockname()[1]}", KEY, read_s=0.5, deadline_s=0.6)
        started = time.monotonic()
        with pytest.raises(StorageTimeout):
            read(peer)
        assert time.monotonic() - started < 20
        peer.close()
        thread.join(5)


def _drip(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection, contextlib.suppress(OSError):
        connection.recv(4096)
        head = f"HTTP/1.1 206 Partial\r\ncontent-length: {len(DATA)}\r\ncontent-range: bytes 0-{len(DATA) - 1}/*\r\n\r\n"
        connection.sendall(head.encode())
        for byte in DATA:
            connection.sendall(bytes([byte]))
            time.sleep(0.1)
