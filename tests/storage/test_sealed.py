"""Sealed objects open for who has the key and for nobody else, and only as they were written."""

from __future__ import annotations

import hashlib
import os
import struct

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import record, same

from storage.errors import ObjectDamaged, ObjectMissing
from storage.folder import FolderStore
from storage.kvstore import KVStore
from storage.sealed import FRAME, SealedStore
from storage.types import Miss

OLD, NEW, OTHER = b"old" * 12, b"new" * 12, b"other" * 8


@pytest.fixture
def folder(tmp_path) -> FolderStore:
    return FolderStore(tmp_path)


def sealed(folder: FolderStore, *keys: bytes, owner: str = "t1") -> SealedStore:
    return SealedStore(folder, keys or (OLD,), owner=lambda name: owner)


def read(store, name: str, length: int, offset: int = 0) -> bytes:
    buffer = bytearray(length)
    return bytes(buffer[: store.read_into(name, memoryview(buffer), offset)])


def whole(store, name: str) -> bytes:
    return read(store, name, store.size(name))


def test_the_store_below_never_sees_plain_text(folder):
    data = b"a secret that repeats " * 100_000
    sealed(folder).put("a", [data])
    sealed(folder).put("b", [data])
    below, other = whole(folder, "a"), whole(folder, "b")
    assert b"secret" not in below
    assert below[64:1000] != other[64:1000], "each write has a key of its own"
    assert len(below) == len(data) + 64 + 16 * 3
    assert whole(sealed(folder), "a") == data


def test_the_format_is_the_documented_one(folder):
    """Opened again by what docs/encryption.md says, without our code."""
    data = os.urandom(FRAME + 5)
    sealed(folder, owner="t1").put("kv/ab/cd", [data])
    below = whole(folder, "kv/ab/cd")
    magic, version, root, owner, salt = struct.unpack("<8sI4x16s16s16s", below[:64])
    assert (magic, version) == (b"\x89PRSEAL\n", 1)

    def derive(key: bytes, info: bytes, length: int, salt: bytes | None = None) -> bytes:
        return HKDF(SHA256(), length, salt, b"preread-seal-1 " + info).derive(key)

    assert root == derive(OLD, b"id", 16)
    assert owner == hashlib.sha256(b"t1").digest()[:16]
    key = derive(derive(OLD, b"owner " + owner, 32), b"object kv/ab/cd", 39, salt)
    frames = below[64 : 64 + FRAME + 16], below[64 + FRAME + 16 :]
    opened = [
        AESGCM(key[:32]).decrypt(key[32:] + struct.pack(">IB", n, n == 1), frame, below[:64] + b"kv/ab/cd")
        for n, frame in enumerate(frames)
    ]
    assert b"".join(opened) == data


@pytest.mark.parametrize("size", [0, 1, FRAME - 1, FRAME, FRAME + 1, 2 * FRAME, 3 * FRAME - 7])
def test_every_size_comes_back_and_is_known_beforehand(folder, size):
    data = os.urandom(size)
    store = sealed(folder)
    assert store.put("a", [data[: size // 3], memoryview(data)[size // 3 :]]) == size
    assert store.size("a") == size
    assert [info.size for info in store.entries("")] == [size]
    assert read(store, "a", size + 9) == data


@settings(max_examples=60, deadline=None)
@given(offset=st.integers(0, 3 * FRAME + 99), length=st.integers(0, 3 * FRAME))
def test_any_range_is_the_same_range_of_the_plain_text(tmp_path_factory, offset, length):
    folder = FolderStore(tmp_path_factory.getbasetemp() / "ranges")
    data = bytes(range(256)) * (3 * FRAME // 256) + b"tail"
    store = sealed(folder)
    if folder.size("a") is None:
        store.put("a", [data])
    assert read(store, "a", length, offset) == data[offset : offset + length]


# --- damage ------------------------------------------------------------------------------------------------


def test_every_flipped_byte_is_noticed(folder):
    store = sealed(folder)
    store.put("a", [b"some plain text"])
    below = whole(folder, "a")
    for at in range(len(below)):
        bad = bytearray(below)
        bad[at] ^= 1
        folder.put("a", [bad])
        with pytest.raises(ObjectDamaged):
            read(store, "a", 15)


def test_every_truncation_and_extension_is_noticed(folder):
    store = sealed(folder)
    data = os.urandom(2 * FRAME)
    store.put("a", [data])
    below = whole(folder, "a")
    step = FRAME + 16
    for end in (0, 1, 63, 64, 79, 80, 64 + step - 1, 64 + step, 64 + step + 1, 64 + step + 16, len(below) - 1):
        folder.put("a", [below[:end]])
        with pytest.raises(ObjectDamaged):
            read(store, "a", len(data))
    for tail in (b"x", bytes(16), below[-step:]):
        folder.put("a", [below, tail])
        with pytest.raises(ObjectDamaged):
            read(store, "a", len(data) + 99)


def test_frames_cannot_change_places_or_come_from_elsewhere(folder):
    store = sealed(folder)
    step = FRAME + 16
    for name in ("a", "b"):
        store.put(name, [os.urandom(3 * FRAME)])
    a, b = whole(folder, "a"), whole(folder, "b")
    head, first, second, third = a[:64], a[64 : 64 + step], a[64 + step : 64 + 2 * step], a[64 + 2 * step :]
    for mixed in (head + second + first + third, head + first + b[64 + step : 64 + 2 * step] + third, head + first + third):
        folder.put("a", [mixed])
        with pytest.raises(ObjectDamaged):
            read(store, "a", 3 * FRAME)


def test_an_object_does_not_open_under_another_name(folder):
    store = sealed(folder)
    store.put("a", [b"mine"])
    folder.put("b", [whole(folder, "a")])
    with pytest.raises(ObjectDamaged):
        read(store, "b", 4)


def test_what_is_not_sealed_is_not_believed(folder):
    folder.put("a", [b"slipped in by somebody " * 10])
    with pytest.raises(ObjectDamaged):
        whole(sealed(folder), "a")
    with pytest.raises(ObjectMissing):
        read(sealed(folder), "none", 5)


def test_damage_is_a_miss_that_is_repaired_in_place(folder):
    sample = record(tokens=20)
    reported = []
    kv = KVStore(sealed(folder), on_damage=lambda key, miss: reported.append((key, miss)))
    kv.put(sample)
    assert same(kv.get(sample.key, sample.profile), sample)
    name = f"kv/{sample.key[:2]}/{sample.key}"
    below = bytearray(whole(folder, name))
    below[100] ^= 1
    folder.put(name, [below])
    assert kv.get(sample.key, sample.profile) is Miss.DAMAGED
    assert reported == [(sample.key, Miss.DAMAGED)]
    kv.put(sample)
    assert same(kv.get(sample.key, sample.profile), sample)


# --- keys --------------------------------------------------------------------------------------------------


def test_another_key_opens_nothing(folder):
    sealed(folder, OLD).put("a", [b"mine"])
    with pytest.raises(ObjectDamaged, match="not configured"):
        read(sealed(folder, OTHER), "a", 4)


def test_owners_have_keys_of_their_own(folder):
    """The owner travels in the header: written over, it leads to another key."""
    sealed(folder, owner="t1").put("a", [b"mine"])
    sealed(folder, owner="t2").put("b", [b"theirs"])
    a, b = bytearray(whole(folder, "a")), whole(folder, "b")
    assert a[32:48] != b[32:48]
    a[32:48] = b[32:48]
    folder.put("a", [a])
    with pytest.raises(ObjectDamaged):
        read(sealed(folder), "a", 4)


def test_after_a_rotation_the_old_stays_readable_until_it_is_sealed_anew(folder):
    sealed(folder, OLD).put("old", [b"before"])
    folder.put("plain", [b"never sealed"])
    rotated = sealed(folder, NEW, OLD)
    rotated.put("new", [b"after"])
    assert read(rotated, "old", 9) == b"before"
    with pytest.raises(ObjectDamaged):
        read(sealed(folder, OLD), "new", 9)
    with pytest.raises(ObjectDamaged):
        read(sealed(folder, NEW), "old", 9)
    assert {name: rotated.rekey(name) for name in sorted(rotated.list(""))} == {"new": False, "old": True, "plain": True}
    only_new = sealed(folder, NEW)
    assert [whole(only_new, name) for name in ("old", "new", "plain")] == [b"before", b"after", b"never sealed"]


@pytest.mark.parametrize("keys", [[], [b"short"], [OLD, b"short"]])
def test_a_key_that_is_no_key_is_refused(folder, keys):
    with pytest.raises(ValueError, match="32 bytes"):
        SealedStore(folder, keys, owner=lambda name: "t")
