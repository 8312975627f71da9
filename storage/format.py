"""The KV object, version 1, as docs/object-format.md has it: encode a record, decode a buffer, or read layer by layer."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
import xxhash

from storage.codecs import CODECS, Codec
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


def encode(record: KVRecord, codec: Codec | None = None) -> list[Part]:
    """The object as buffers to be joined; layers are views of `record.kv` where the codec allows it.

    `codec`: the profile's, if it is not in the table. Equal records give equal bytes. Raises ValueError where the record
    contradicts its own profile, or the codec cannot hold its numbers.
    """
    codec = codec or CODECS.get(record.profile.codec)
    if codec is None or codec.name != record.profile.codec:
        raise ValueError(f"no codec {record.profile.codec!r}; there is {', '.join(CODECS)}")
    _check_record(record)
    kv = record.kv.detach().cpu()
    payloads: list[Part] = [token_bytes(record.token_ids)]
    payloads += [codec.encode(layer.contiguous(), number) for number, layer in enumerate(kv)]
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


def decode(buffer: torch.Tensor, key: str, profile: KVProfile, codec: Codec | None = None) -> KVRecord | Miss:
    """The record in `buffer` (uint8 [size], CPU), or why there is none. Never raises on what the bytes say.

    `kv` is [layers, 2, kv_heads, tokens, head_dim] in the profile's dtype; a view of the buffer if "raw". `codec`: the
    profile's, if it is not in the table. The header's checksum is verified first, then key and profile, then all
    sections; nothing is allocated by what a header claims.
    """
    if buffer.data_ptr() % 16 or buffer.storage_offset() % 16:
        buffer = buffer.clone()  # a slice of something else: views of wider elements need an aligned start
    view = buffer.numpy().data
    try:
        layers = _open(view, len(view), key, profile, codec)
        return _decode(buffer, layers)
    except _Refused as refusal:
        return refusal.miss


def profile_of(view: memoryview) -> KVProfile | Miss:
    """What a whole object says itself that its profile is, if header and commit mark hold. The sections are not looked at."""
    try:
        raw, _ = _read_header(view, len(view), view[-_MARK.size :])
        return KVProfile(**json.loads(raw)["profile"])
    except _Refused as refusal:
        return refusal.miss
    except (ValueError, KeyError, TypeError, RecursionError):
        return Miss.DAMAGED


def is_whole(view: memoryview, key: str) -> bool:
    """Whether these bytes are an object of this key, complete and undamaged, of whatever profile it says itself. No codec is
    asked: every byte is under a checksum."""
    profile = profile_of(view)
    if isinstance(profile, Miss):
        return False
    try:
        raw, start = _read_header(view, len(view), view[-_MARK.size :])
        _, sections = _parse_header(raw, key, profile)
        _check_places(len(view), start, sections)
        _check_padding(view, start, sections)
    except _Refused:
        return False
    data = view[start:]
    return all(xxhash.xxh3_128_hexdigest(data[s.offset : s.offset + s.length]) == s.digest for s in sections)


def open_layers(
    read_into: Callable[[memoryview, int], int], size: int, key: str, profile: KVProfile, codec: Codec | None = None
) -> Layers | Miss:
    """An object of `size` bytes to be read layer by layer, once its header and commit mark have held, or why there is none.

    `read_into(buffer, offset)` fills the buffer from that byte on and says how many bytes there were; its errors pass."""
    try:
        first = _read(read_into, 0, min(_PREFIX.size, size))
        head = _read(read_into, 0, min(_head_length(first, size), size))
        mark = _read(read_into, max(0, size - _MARK.size), min(_MARK.size, size))
        return _open(head.numpy().data, size, key, profile, codec, mark.numpy().data, read_into)
    except _Refused as refusal:
        return refusal.miss


@dataclass(frozen=True)
class Layers:
    """A verified header. Each layer is read by itself and stands on its own checksum."""

    key: str
    profile: KVProfile
    tokens: int
    codec: Codec
    start: int  # of the data area
    sections: Sequence[_Section]  # token ids, then layers
    read_into: Callable[[memoryview, int], int] | None = None

    def layer(self, number: int) -> torch.Tensor | Miss:
        """Layer `number` [2, kv_heads, tokens, head_dim], from its own bytes alone, or why there is none."""
        try:
            return self.decoded([self.fetched(1 + number)], number)[0]
        except _Refused as refusal:
            return refusal.miss

    def token_ids(self) -> tuple[int, ...] | Miss:
        """The chunk's token ids, or why there are none."""
        try:
            return self.ids_in(self.fetched(0))
        except _Refused as refusal:
            return refusal.miss

    def fetched(self, index: int) -> torch.Tensor:
        assert self.read_into is not None
        section = self.sections[index]
        return self.checked(index, _read(self.read_into, self.start + section.offset, section.length))

    def checked(self, index: int, data: torch.Tensor) -> torch.Tensor:
        """The section's bytes, uint8, whose checksum held."""
        if xxhash.xxh3_128_hexdigest(data.numpy().data) != self.sections[index].digest:
            raise _Refused(Miss.DAMAGED)
        return data

    def ids_in(self, data: torch.Tensor) -> tuple[int, ...]:
        if data.numel() != 4 * self.tokens:
            raise _Refused(Miss.DAMAGED)
        return struct.unpack(f"<{self.tokens}I", data.numpy().data)

    def decoded(self, sections: Sequence[torch.Tensor], first: int) -> torch.Tensor:
        """Layers from `first` on [layers, 2, kv_heads, tokens, head_dim]."""
        shape = _shape(self.profile, self.tokens)[1:]
        try:
            return self.codec.decode(sections, DTYPES[self.profile.dtype], shape, first)
        except ValueError:
            raise _Refused(Miss.DAMAGED) from None


def _open(
    head: memoryview, size: int, key: str, profile: KVProfile, codec: Codec | None, mark: memoryview | None = None,
    read_into: Callable[[memoryview, int], int] | None = None,
) -> Layers:  # fmt: skip
    """The verified header at the start of `head`; `mark`: the object's last bytes, if `head` is not the whole object."""
    codec = codec or CODECS.get(profile.codec)
    known = codec is not None and codec.name == profile.codec
    if profile.layout != LAYOUT or not known or profile.dtype not in DTYPES or 0 in _shape(profile, 1):
        raise _Refused(Miss.WRONG_LAYOUT)
    raw, start = _read_header(head, size, head[-_MARK.size :] if mark is None else mark)
    tokens, sections = _parse_header(raw, key, profile)
    _check_places(size, start, sections)
    return Layers(key, profile, tokens, codec, start, sections, read_into)  # type: ignore[arg-type]


def _decode(buffer: torch.Tensor, layers: Layers) -> KVRecord:
    _check_padding(buffer.numpy().data, layers.start, layers.sections)
    at = [layers.start + section.offset for section in layers.sections]
    parts = [buffer[a : a + section.length] for a, section in zip(at, layers.sections, strict=True)]
    ids, *sections = [layers.checked(index, part) for index, part in enumerate(parts)]
    token_ids = layers.ids_in(ids)
    return KVRecord(layers.key, layers.profile, token_ids, layers.decoded(sections, 0))


def _read(read_into: Callable[[memoryview, int], int], offset: int, length: int) -> torch.Tensor:
    buffer = torch.empty(length, dtype=torch.uint8)
    if read_into(buffer.numpy().data, offset) != length:
        raise _Refused(Miss.DAMAGED)
    return buffer


def _head_length(first: torch.Tensor, size: int) -> int:
    """How many bytes there are up to the data area, by the first of them: never more than MAX_HEADER and a little."""
    if size < _PREFIX.size:
        raise _Refused(Miss.DAMAGED)
    _, _, length = _PREFIX.unpack_from(first.numpy().data)
    return _aligned(_PREFIX.size + min(length, MAX_HEADER) + _DIGEST)


def _read_header(head: memoryview, size: int, mark: memoryview) -> tuple[bytes, int]:
    """The header's bytes, whose checksum and commit mark held, and where the data area starts."""
    if size < _PREFIX.size + _DIGEST + _MARK.size:
        raise _Refused(Miss.DAMAGED)
    magic, version, length = _PREFIX.unpack_from(head)
    if magic != MAGIC or length > MAX_HEADER:
        raise _Refused(Miss.DAMAGED)
    end = _PREFIX.size + length
    start = _aligned(end + _DIGEST)
    if start + _MARK.size > size:
        raise _Refused(Miss.DAMAGED)
    digest = xxhash.xxh3_128_digest(head[:end])
    if head[end : end + _DIGEST] != digest or any(head[end + _DIGEST : start]):
        raise _Refused(Miss.DAMAGED)
    if mark != _MARK.pack(_MARK_MAGIC, size, digest):
        raise _Refused(Miss.DAMAGED)
    if version != VERSION:  # only now: a flipped bit is damage, not another version
        raise _Refused(Miss.WRONG_LAYOUT)
    return bytes(head[_PREFIX.size : end]), start


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


def _check_places(size: int, start: int, sections: Sequence[_Section]) -> None:
    """Sections follow each other without gap or overlap; the mark comes right after."""
    at, last = start, size - _MARK.size
    for section in sections:
        end = at + _aligned(section.length)
        if start + section.offset != at or end > last:
            raise _Refused(Miss.DAMAGED)
        at = end
    if at != last:
        raise _Refused(Miss.DAMAGED)


def _check_padding(view: memoryview, start: int, sections: Sequence[_Section]) -> None:
    for section in sections:
        end = start + section.offset + section.length
        if any(view[end : _aligned(end)]):
            raise _Refused(Miss.DAMAGED)
