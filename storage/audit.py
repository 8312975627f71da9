"""Whether a stored KV object is what it says it is, judged by itself: no model is needed."""

from __future__ import annotations

import torch

from storage.codecs.shelf import CodecShelf
from storage.errors import ObjectMissing, StorageUnavailable
from storage.format import decode, profile_of
from storage.types import KVRecord, Miss, ObjectStore, miss_of


def check(objects: ObjectStore, name: str, codecs: CodecShelf) -> Miss | None:
    """Why the object `name`, which ends in its key, is not good; None if it is. Raises StorageUnavailable."""
    buffer = torch.empty(0, dtype=torch.uint8)

    def allocate(size: int) -> memoryview:
        nonlocal buffer
        buffer = torch.empty(size, dtype=torch.uint8)
        return buffer.numpy().data

    try:
        if objects.read_all(name, allocate) != buffer.numel():
            return Miss.DAMAGED
    except ObjectMissing as error:
        return miss_of(error)
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
