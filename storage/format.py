"""The KV object, version 1, as docs/object-format.md has it: encode a record, decode a buffer."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
import xxhash

from storage.codecs import CODECS
from storage.keys import token_bytes
from storage.types import LAYOUT, KVProfile, KVRecord, Miss

MAGIC = b"\x89PREREAD"
VERSION = 1
ALIGN = 64
MAX_HEADER = 1 << 20
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)

_PREFIX = struct.Struct("<8sII")  # magic, version, header length
_MARK = struct.Struct("<8sQ16s")  # magic, total length, header checksum
_MARK_MAGIC = b"COMMITTD"
_DIGEST = 16
_HEADER_FIELDS = frozenset({"key", "profile", "sections", "shape", "token_count", "token_ids"})

Part = bytes | memoryview


@dataclass(frozen=True)
class _Section:
    """A run of bytes in the data area; `offset` counts from the area's start and is a multiple of 64."""

    offset: int
    length: int
    digest: str


class _Refused(Exception):
    def __init__(self, miss: Miss) -> None:
        self.miss = miss


# --- writing -----------------------------------------------------------------------------------------------


def encode(record: KVRecord) -> list[Part]:
    """The object as buffers to be joined; layers are views of `record.kv` where the codec allows it.

    Equal records give equal bytes. Raises ValueError where the record contradicts its own profile.
    """
    _check_record(record)
    codec = CODECS[record.profile.codec]
    kv = record.kv.detach().cpu()
    payloads: list[Part] = [token_bytes(record.token_ids)]
    payloads += [codec.encode(layer.contiguous()) for layer in kv]
    sections = _place(payloads)
    header = _header_bytes(record.key, record.profile, len(record.token_ids), sections)
    if len(header) > MAX_HEADER:
        raise ValueError(f"the header of a KV object would be {len(header)} bytes, more than {MAX_HEADER}")

    head = _PREFIX.pack(MAGIC, VERSION, len(header)) + header
    digest = xxhash.xxh3_128_digest(head)
    parts: list[Part] = [_padded(head + digest)]
    for payload in payloads:
        parts += [payload, bytes(-len(payload) % ALIGN)]
    total = sum(map(len, parts)) + _MARK.size
    return [part for part in parts if len(part)] + [_MARK.pack(_MARK_MAGIC, total, digest)]


def _check_record(record: KVRecord) -> None:
    profile, shape = record.profile, tuple(record.kv.shape)
    if profile.layout != LAYOUT:
        raise ValueError(f"layout {profile.layout!r} cannot be written, only {LAYOUT!r}")
    if profile.codec not in CODECS:
        raise ValueError(f"no codec {profile.codec!r}; there is {', '.join(CODECS)}")
    if record.kv.dtype != DTYPES.get(profile.dtype):
        raise ValueError(f"the tensor is {record.kv.dtype}, the profile says {profile.dtype!r}")
    expected = _shape(profile, len(record.token_ids))
    if 0 in shape or shape != expected:
        raise ValueError(f"the tensor is {shape}, profile and tokens say {expected}")


def _shape(profile: KVProfile, tokens: int) -> tuple[int, int, int, int, int]:
    return profile.layers, 2, profile.kv_heads, tokens, profile.head_dim


def _place(payloads: Sequence[Part]) -> list[_Section]:
    sections, offset = [], 0
    for payload in payloads:
        sections.append(_Section(offset, len(payload), xxhash.xxh3_128_hexdigest(payload)))
        offset += _aligned(len(payload))
    return sections


def _header_bytes(key: str, profile: KVProfile, tokens: int, sections: Sequence[_Section]) -> bytes:
    """Canonical JSON: sorted keys, no spaces, ASCII. `sections[0]` is the token ids, then the layers."""
    table = [[section.offset, section.length, section.digest] for section in sections]
    header = {
        "key": key,
        "profile": asdict(profile),
        "sections": table[1:],
        "shape": _shape(profile, tokens),
        "token_count": tokens,
        "token_ids": table[0],
    }
    return json.dumps(header, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def _aligned(length: int) -> int:
    return length + -length % ALIGN


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGN)


# --- reading -----------------------------------------------------------------------------------------------


def decode(buffer: torch.Tensor, key: str, profile: KVProfile) -> KVRecord | Miss:
    """The record in `buffer` (uint8 [size], CPU), or why there is none. Never raises on what the bytes say.

    `kv` is [layers, 2, kv_heads, tokens, head_dim] in the profile's dtype; a view of the buffer if "raw".
    The header's checksum is verified first, then key and profile, then all sections; nothing is allocated by
    what a header claims.
    """
    if profile.layout != LAYOUT or profile.codec not in CODECS or profile.dtype not in DTYPES:
        return Miss.WRONG_LAYOUT
    if 0 in _shape(profile, 1):
        return Miss.WRONG_LAYOUT
    if buffer.data_ptr() % 16 or buffer.storage_offset() % 16:
        buffer = buffer.clone()  # a slice of something else: views of wider elements need an aligned start
    try:
        return _decode(buffer, key, profile)
    except _Refused as refusal:
        return refusal.miss


def is_whole(view: memoryview, key: str) -> bool:
    """Whether these bytes are an object of this key, complete and undamaged, of whatever profile it says itself. No codec is
    asked: every byte is under a checksum."""
    try:
        raw, start = _read_header(view)
        _, sections = _parse_header(raw, key, KVProfile(**json.loads(raw)["profile"]))
        _check_layout(view, start, sections)
    except (_Refused, ValueError, KeyError, TypeError, RecursionError):
        return False
    data = view[start:]
    return all(xxhash.xxh3_128_hexdigest(data[s.offset : s.offset + s.length]) == s.digest for s in sections)


def _decode(buffer: torch.Tensor, key: str, profile: KVProfile) -> KVRecord:
    view = buffer.numpy().data
    raw, start = _read_header(view)
    tokens, sections = _parse_header(raw, key, profile)
    _check_layout(view, start, sections)
    for section in sections:
        at = start + section.offset
        if xxhash.xxh3_128_hexdigest(view[at : at + section.length]) != section.digest:
            raise _Refused(Miss.DAMAGED)

    ids, *layers = [buffer[start + s.offset : start + s.offset + s.length] for s in sections]
    if ids.numel() != 4 * tokens:
        raise _Refused(Miss.DAMAGED)
    try:
        kv = CODECS[profile.codec].decode(layers, DTYPES[profile.dtype], _shape(profile, tokens)[1:])
    except ValueError:
        raise _Refused(Miss.DAMAGED) from None
    return KVRecord(key, profile, struct.unpack(f"<{tokens}I", ids.numpy().data), kv)


def _read_header(view: memoryview) -> tuple[bytes, int]:
    """The header's bytes, whose checksum and commit mark held, and where the data area starts."""
    if len(view) < _PREFIX.size + _DIGEST + _MARK.size:
        raise _Refused(Miss.DAMAGED)
    magic, version, length = _PREFIX.unpack_from(view)
    if magic != MAGIC or length > MAX_HEADER:
        raise _Refused(Miss.DAMAGED)
    if version != VERSION:
        raise _Refused(Miss.WRONG_LAYOUT)
    end = _PREFIX.size + length
    start = _aligned(end + _DIGEST)
    if start + _MARK.size > len(view):
        raise _Refused(Miss.DAMAGED)
    digest = xxhash.xxh3_128_digest(view[:end])
    mark = _MARK.pack(_MARK_MAGIC, len(view), digest)
    if view[end : end + _DIGEST] != digest or any(view[end + _DIGEST : start]) or view[-_MARK.size :] != mark:
        raise _Refused(Miss.DAMAGED)
    return bytes(view[_PREFIX.size : end]), start


def _parse_header(raw: bytes, key: str, profile: KVProfile) -> tuple[int, list[_Section]]:
    """Token count and sections, token ids first. Only a header that encode() would have written is taken."""
    try:
        header = json.loads(raw)
    except (ValueError, RecursionError):
        raise _Refused(Miss.DAMAGED) from None
    if not isinstance(header, dict) or header.keys() != _HEADER_FIELDS:
        raise _Refused(Miss.DAMAGED)
    if header["key"] != key:
        raise _Refused(Miss.WRONG_KEY)
    if header["profile"] != asdict(profile):
        raise _Refused(Miss.WRONG_LAYOUT)
    tokens, table = header["token_count"], header["sections"]
    if not _is_count(tokens) or not isinstance(table, list) or len(table) != profile.layers:
        raise _Refused(Miss.DAMAGED)
    sections = [_parse_section(row) for row in (header["token_ids"], *table)]
    # Catches all that parsing forgives: spaces, doubled names, 1.0 for 1, a shape that is not the profile's.
    if _header_bytes(key, profile, tokens, sections) != raw:
        raise _Refused(Miss.DAMAGED)
    return tokens, sections


def _parse_section(row: Any) -> _Section:
    match row:
        case [offset, length, str(digest)] if type(offset) is int and offset >= 0 and _is_count(length):
            return _Section(offset, length, digest)
    raise _Refused(Miss.DAMAGED)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 63


def _check_layout(view: memoryview, start: int, sections: Sequence[_Section]) -> None:
    """Sections follow each other without gap or overlap, padded with zeros; the mark comes right after."""
    at, last = start, len(view) - _MARK.size
    for section in sections:
        end = at + _aligned(section.length)
        if start + section.offset != at or end > last or any(view[at + section.length : end]):
            raise _Refused(Miss.DAMAGED)
        at = end
    if at != last:
        raise _Refused(Miss.DAMAGED)
