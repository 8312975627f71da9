"""Whether a stored KV object is what it says it is, judged by itself: no model is needed."""

from __future__ import annotations

import json
import struct
from typing import Any

import torch

from storage.codecs.shelf import CodecShelf
from storage.errors import ObjectMissing, StorageUnavailable
from storage.format import MAX_HEADER, decode
from storage.types import KVProfile, KVRecord, Miss, ObjectStore, miss_of

_PREFIX = struct.Struct("<8sII")  # as in docs/object-format.md: magic, version, header length


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
    profile = _profile(buffer.numpy().data)
    if profile is None:
        return Miss.DAMAGED
    codec = codecs.find(profile.codec)
    if codec in (Miss.TIMEOUT, Miss.UNAVAILABLE):
        raise StorageUnavailable(f"object store: read the codec's basis: {codec}")
    if isinstance(codec, Miss):
        return codec
    outcome = decode(buffer, name.rpartition("/")[2], profile, codec)
    return None if isinstance(outcome, KVRecord) else outcome


def _profile(view: memoryview) -> KVProfile | None:
    """The profile that the header claims; whether the header is sound is for `decode` to say."""
    if len(view) < _PREFIX.size:
        return None
    length = min(_PREFIX.unpack_from(view)[2], MAX_HEADER)
    try:
        claimed: Any = json.loads(bytes(view[_PREFIX.size : _PREFIX.size + length]))
        return KVProfile(**claimed["profile"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
