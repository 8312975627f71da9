"""Codecs by name: those of the table, and transform codecs, whose basis is an object in the store."""

from __future__ import annotations

import re
import threading

import torch

from storage.codecs import CODECS, Codec
from storage.codecs.basis import MAX_BYTES, Basis
from storage.codecs.transform import PREFIX, Transform
from storage.errors import ObjectMissing, StorageUnavailable
from storage.types import Miss, ObjectStore, miss_of

BASES, NOTES = "basis/", "basis-of/"  # what objects' names begin with
_DIGEST = re.compile(r"[0-9a-f]{64}")


class CodecShelf:
    """Finds codecs, and keeps the bases it has read. Safe to share between threads."""

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects
        self._read: dict[str, Transform] = {}
        self._reading = threading.Lock()

    def find(self, name: str) -> Codec | Miss:
        """The codec, or why it cannot be had: WRONG_LAYOUT for a name that is none, else what became of its basis."""
        if name in CODECS:
            return CODECS[name]
        digest = name.removeprefix(PREFIX)
        if not name.startswith(PREFIX) or not _DIGEST.fullmatch(digest):
            return Miss.WRONG_LAYOUT
        with self._reading:
            if name not in self._read:
                basis = self._load(digest)
                if isinstance(basis, Miss):
                    return basis
                self._read[name] = Transform(basis)
            return self._read[name]

    def required(self, name: str) -> Codec:
        """The codec. Raises ValueError for a name that is none, StorageUnavailable where its basis cannot be had."""
        codec = self.find(name)
        if codec is Miss.WRONG_LAYOUT:
            raise ValueError(f"no codec {name!r}; there is {', '.join(CODECS)} and {PREFIX}<digest>")
        if isinstance(codec, Miss):
            raise StorageUnavailable(f"the basis of codec {name[: len(PREFIX) + 12]}… is {codec}")
        return codec

    def add(self, basis: Basis) -> Transform:
        """The codec of this basis, which is in the store from now on. Raises StorageUnavailable."""
        codec = Transform(basis)
        self._objects.put(basis_name(basis.digest), [basis.to_bytes()])
        with self._reading:
            return self._read.setdefault(codec.name, codec)

    def noted(self, purpose: str) -> Codec | Miss:
        """The transform codec that was last noted for a purpose (64 hex digits). Raises StorageUnavailable."""
        note = bytearray(65)
        try:
            length = self._objects.read_into(_note(purpose), memoryview(note))
        except ObjectMissing:
            return Miss.ABSENT
        found = self.find(PREFIX + note[:length].decode("ascii", "replace"))
        if found in (Miss.TIMEOUT, Miss.UNAVAILABLE):  # not to be taken for one that is gone
            raise StorageUnavailable(f"the basis of the model's codec is {found}")
        return found

    def note(self, purpose: str, codec: Transform) -> None:
        """Notes the codec, if none is noted: of several processes at once, the first one's. A note that leads nowhere is
        replaced. Raises StorageUnavailable."""
        note = [codec.basis.digest.encode()]
        if not self._objects.put_new(_note(purpose), note) and not isinstance(self.noted(purpose), Transform):
            self._objects.put(_note(purpose), note)

    def _load(self, digest: str) -> Basis | Miss:
        try:
            size = self._objects.size(basis_name(digest))
            if size is None:
                return Miss.ABSENT
            if size > MAX_BYTES:
                return Miss.DAMAGED
            buffer = torch.empty(size, dtype=torch.uint8).numpy().data
            self._objects.read_into(basis_name(digest), buffer)
            return Basis.from_bytes(buffer, digest)
        except (ObjectMissing, StorageUnavailable) as error:
            return miss_of(error)
        except ValueError:
            return Miss.DAMAGED


def basis_name(digest: str) -> str:
    """Where a basis lies."""
    return BASES + digest


def _note(purpose: str) -> str:
    return NOTES + purpose
