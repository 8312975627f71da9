"""Objects encrypted before they leave this machine: AES-256-GCM in frames, one key per object (docs/encryption.md).

The frames are the STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizár, CRYPTO 2015): a nonce counts the frames and
marks the last one, so that frames can be read by themselves but neither reordered nor cut off.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from storage.errors import ObjectDamaged
from storage.types import ObjectInfo, ObjectStore

MAGIC = b"\x89PRSEAL\n"
VERSION = 1
FRAME = 1 << 20  # bytes of plain text; part of version 1
TAG = 16
MIN_SECRET = 32  # bytes
KEPT, KEPT_BYTES = 4, 80 << 20  # scratch memory: as many readers as a request has, each with a large model's chunk
_HEADER = struct.Struct("<8sI4x16s16s16s")  # magic, version, id of the root key, owner, salt
_STEP = FRAME + TAG


class SealedStore:
    """An ObjectStore over another, which sees names, sizes and ages only.

    `secrets`: root secrets of 32 bytes or more, the newest first; it seals what is written from now on, the others open
    what was written before. `owner(name)`: whose object it is (a tenant or a sharing group); asked when writing, and
    bound into the key. Damage, truncation, a swap with another object and an unknown key raise ObjectDamaged.
    """

    def __init__(self, inner: ObjectStore, secrets: Sequence[bytes], owner: Callable[[str], str]) -> None:
        if not secrets or any(len(secret) < MIN_SECRET for secret in secrets):
            raise ValueError(f"encryption needs secrets of {MIN_SECRET} bytes or more")
        self._inner, self._owner = inner, owner
        self._roots: Mapping[bytes, bytes] = {_derive(secret, b"id", 16): secret for secret in secrets}
        self._newest = _derive(secrets[0], b"id", 16)
        self._scratch = _Scratches()

    def put(self, name: str, parts: Sequence[bytes | memoryview]) -> int:
        """See ObjectStore. The sealed bytes of the whole object are held in memory."""
        sealed = self._seal(name, parts)
        self._inner.put(name, sealed)
        return sum(map(len, parts))

    def put_new(self, name: str, parts: Sequence[bytes | memoryview]) -> bool:
        """See ObjectStore."""
        return self._inner.put_new(name, self._seal(name, parts))

    def _seal(self, name: str, parts: Sequence[bytes | memoryview]) -> list[bytes]:
        owner = hashlib.sha256(self._owner(name).encode()).digest()[:16]
        header = _HEADER.pack(MAGIC, VERSION, self._newest, owner, secrets.token_bytes(16))
        sealer = _Sealer(self._roots[self._newest], header, name)
        last = frames_of(sum(map(len, parts))) - 1
        sealed = [sealer.seal(number, frame, number == last) for number, frame in enumerate(_frames(parts))]
        return [header, *sealed]

    def size(self, name: str) -> int | None:
        """See ObjectStore: of the plain text."""
        stored = self._inner.size(name)
        return None if stored is None else plain_size(stored)

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """See ObjectStore. Reads the frames that hold the range; raises ObjectDamaged where one does not open."""
        first, last = offset // FRAME, (offset + max(1, len(buffer)) - 1) // FRAME
        begin = _HEADER.size + first * _STEP if first else 0
        # One byte more than the frames have: whether it is there tells whether they are the last.
        read = np.empty(_HEADER.size + (last + 1) * _STEP + 1 - begin, np.uint8).data
        got = self._inner.read_into(name, read, begin)
        at_end, read = got < len(read), read[: min(got, len(read) - 1)]
        if first:
            if not len(read):
                return 0  # the object ends before `offset`
            header = memoryview(bytearray(_HEADER.size))
            self._inner.read_into(name, header)
        else:
            header, read = read[: _HEADER.size], read[_HEADER.size :]
        sealer = self._sealer(bytes(header), name)
        return _open_frames(sealer, read, at_end, first, buffer, offset)

    def read_all(self, name: str, allocate: Callable[[int], memoryview]) -> int:
        """See ObjectStore. The sealed bytes are held in memory beside the plain ones."""
        with self._scratch.taken() as scratch:
            below = scratch.read_all(self._inner, name)
            sealer = self._sealer(bytes(below[: _HEADER.size]), name)
            return _open_frames(sealer, below[_HEADER.size :], True, 0, allocate(plain_size(len(below))), 0)

    def delete(self, name: str) -> bool:
        """See ObjectStore."""
        return self._inner.delete(name)

    def delete_many(self, names: Sequence[str]) -> dict[str, str]:
        """See ObjectStore."""
        return self._inner.delete_many(names)

    def list(self, prefix: str) -> Iterator[str]:
        """See ObjectStore."""
        return self._inner.list(prefix)

    def entries(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ObjectStore. Sizes are those of the plain text."""
        for info in self._inner.entries(prefix):
            yield ObjectInfo(info.name, plain_size(info.size), info.modified)

    def sweep(self, older_than_s: float) -> int:
        """See ObjectStore."""
        return self._inner.sweep(older_than_s)

    def counters(self) -> dict[str, int]:
        """See ObjectStore."""
        return self._inner.counters()

    def rekey(self, name: str) -> bool:
        """Seal an object under the newest key that is under an older one, or not sealed at all; whether it was.

        Raises ObjectMissing, ObjectDamaged, StorageUnavailable."""
        header = memoryview(bytearray(_HEADER.size))
        sealed = self._inner.read_into(name, header) == len(header) and bytes(header[: len(MAGIC)]) == MAGIC
        if sealed and _HEADER.unpack(header)[2] == self._newest:
            return False
        source: ObjectStore = self if sealed else self._inner
        self.put(name, [_Scratch().read_all(source, name)])
        return True

    def _sealer(self, header: bytes, name: str) -> _Sealer:
        if len(header) != _HEADER.size:
            raise ObjectDamaged(f"{name} is not sealed")
        magic, version, root, _, _ = _HEADER.unpack(header)
        if magic != MAGIC or version != VERSION:
            raise ObjectDamaged(f"{name} is not sealed")
        if root not in self._roots:
            raise ObjectDamaged(f"{name} is sealed under a key that is not configured")
        return _Sealer(self._roots[root], header, name)


def frames_of(size: int) -> int:
    """How many frames a plain text of that size has: an empty one has one too."""
    return max(1, -(-size // FRAME))


def plain_size(stored: int) -> int:
    """The size of what is sealed in an object of `stored` bytes."""
    body = stored - _HEADER.size
    return max(0, body - TAG * max(1, -(-body // _STEP)))


class _Scratch:
    """Memory for sealed bytes that is kept for the next object: memory fresh from the system costs as much as decrypting."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def read_all(self, store: ObjectStore, name: str) -> memoryview:
        """An object as it lies in the store; valid until the next one is read."""
        return self._view(store.read_all(name, self._view))

    def _view(self, size: int) -> memoryview:
        if size > self._memory.size:
            self._memory = np.empty(size, np.uint8)
        return self._memory.data[:size]

    @property
    def is_small(self) -> bool:
        return self._memory.size <= KEPT_BYTES


class _Scratches:
    """A few of them, shared between threads. Larger ones than KEPT_BYTES are not kept."""

    def __init__(self) -> None:
        self._free: list[_Scratch] = []

    @contextlib.contextmanager
    def taken(self) -> Iterator[_Scratch]:
        try:
            scratch = self._free.pop()
        except IndexError:
            scratch = _Scratch()
        try:
            yield scratch
        finally:
            if scratch.is_small and len(self._free) < KEPT:
                self._free.append(scratch)


def _derive(key: bytes, info: bytes, length: int, salt: bytes | None = None) -> bytes:
    return HKDF(SHA256(), length, salt, b"preread-seal-1 " + info).derive(key)


class _Sealer:
    """The key of one object, derived root -> owner -> object, so that no two objects share one."""

    def __init__(self, root: bytes, header: bytes, name: str) -> None:
        *_, owner, salt = _HEADER.unpack(header)
        tenant = _derive(root, b"owner " + owner, 32)
        key = _derive(tenant, b"object " + name.encode(), 39, salt)
        self._aead, self._prefix = AESGCM(key[:32]), key[32:]
        self._bound = header + name.encode()

    def seal(self, number: int, frame: bytes, last: bool) -> bytes:
        return self._aead.encrypt(self._nonce(number, last), frame, self._bound)

    def open_into(self, number: int, sealed: memoryview, last: bool, target: memoryview) -> None:
        """Raises InvalidTag."""
        self._aead.decrypt_into(self._nonce(number, last), sealed, self._bound, target)

    def _nonce(self, number: int, last: bool) -> bytes:
        return self._prefix + struct.pack(">IB", number, last)


def _open_frames(
    sealer: _Sealer, sealed: memoryview, at_end: bool, number: int, buffer: memoryview, offset: int
) -> int:
    """Open frames, the first of which is `number`, into `buffer`, which begins at `offset` of the plain text.

    A frame that lies in the range as a whole is opened in place."""
    filled = 0
    for at in range(0, max(1, len(sealed)), _STEP):
        frame = sealed[at : at + _STEP]
        last = at_end and at + _STEP >= len(sealed)
        size = len(frame) - TAG
        if size < 0 or (size < FRAME and not last) or (not size and number):
            raise ObjectDamaged("a sealed object was cut short")
        begin = number * FRAME - offset  # of the frame in the buffer
        whole = begin >= 0 and begin + size <= len(buffer)
        target = buffer[begin : begin + size] if whole else memoryview(bytearray(size))
        try:
            sealer.open_into(number, frame, last, target)
        except InvalidTag:
            raise ObjectDamaged("a sealed object does not open: it is damaged, or another's") from None
        if not whole:
            part = target[max(0, -begin) : len(buffer) - begin]
            buffer[max(0, begin) : max(0, begin) + len(part)] = part
            size = len(part)
        filled += size
        number += 1
    return filled


def _frames(parts: Sequence[bytes | memoryview]) -> Iterator[bytes]:
    """The parts joined and cut into frames; one empty frame for nothing."""
    frame, empty = bytearray(), True
    for part in parts:
        view = memoryview(part).cast("B")
        while len(view):
            taken, view = view[: FRAME - len(frame)], view[FRAME - len(frame) :]
            frame += taken
            if len(frame) == FRAME:
                yield bytes(frame)
                frame, empty = bytearray(), False
    if frame or empty:
        yield bytes(frame)
