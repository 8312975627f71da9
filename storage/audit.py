"""What a stored KV object is, judged by itself: no model is needed."""

from __future__ import annotations

import torch

from storage.codecs.shelf import CodecShelf
from storage.errors import ObjectMissing, StorageUnavailable
from storage.format import decode, profile_of
from storage.types import KVProfile, KVRecord, Miss, ObjectStore, miss_of


def check(objects: ObjectStore, name: str, codecs: CodecShelf) -> Miss | None:
    """Why the object `name`, which ends in its key, is not good; None if it is. Raises StorageUnavailable."""
    buffer = _read(objects, name)
    if isinstance(buffer, Miss):
        return buffer
    profile = profile_of(buffer.numpy().data)
    if isinstance(profile, Miss):
        return profile
    codec = codecs.find(profile.codec)
    if codec in (Miss.TIMEOUT, Miss.UNAVAILABLE):
        raise StorageUnavailable(f"object store: read the codec's basis: {codec}")
    if isinstance(codec, Miss):
        return codec
    outcome = decode(buffer, name.rpartition("/")[2], profile, codec)
    return None if isinstance(outcome, KVRecord) else outcome


def stored_profile(objects: ObjectStore, name: str) -> KVProfile | Miss:
    """The profile that a stored object says it has. Raises StorageUnavailable."""
    buffer = _read(objects, name)
    return buffer if isinstance(buffer, Miss) else profile_of(buffer.numpy().data)


def _read(objects: ObjectStore, name: str) -> torch.Tensor | Miss:
    """All bytes of an object, uint8."""
    buffer = torch.empty(0, dtype=torch.uint8)

    def allocate(size: int) -> memoryview:
        nonlocal buffer
        buffer = torch.empty(size, dtype=torch.uint8)
        return buffer.numpy().data

    try:
        return buffer if objects.read_all(name, allocate) == buffer.numel() else Miss.DAMAGED
    except ObjectMissing as error:
        return miss_of(error)
