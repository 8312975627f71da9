"""What was written is read back bit for bit; anything else is a miss and never an exception."""

from __future__ import annotations

import dataclasses
import json
import mmap
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import PROFILE, record, same, to_buffer

from storage.codecs import CODECS
from storage.format import DTYPES, Layers, decode, encode, open_layers
from storage.types import KVRecord, Miss

GOLDEN = Path(__file__).parent / "golden" / "kv-object-1.bin"
RECORD = record()
OBJECT = b"".join(encode(RECORD))
HEADER_LENGTH = struct.unpack_from("<I", OBJECT, 12)[0]
HEADER = json.loads(OBJECT[16 : 16 + HEADER_LENGTH])
DATA_START = (16 + HEADER_LENGTH + 16 + 63) // 64 * 64


def read(data: bytes, wanted: KVRecord = RECORD) -> KVRecord | Miss:
    return decode(to_buffer(data), wanted.key, wanted.profile)


def canonical(header: object) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode("ascii")


def forge(header: bytes, data: bytes = OBJECT[DATA_START:-32], version: int = 1) -> bytes:
    """An object whose checksums of header and end are right, whatever the header says."""
    head = b"\x89PREREAD" + struct.pack("<II", version, len(header)) + header
    digest = xxhash.xxh3_128_digest(head)
    body = head + digest + bytes(-(len(head) + 16) % 64) + data
    return body + b"COMMITTD" + struct.pack("<Q", len(body) + 32) + digest


# --- round trips ---


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["raw", "lossless"]),
    st.sampled_from(sorted(DTYPES)),
    st.tuples(*[st.integers(1, high) for high in (4, 3, 9, 7)]),
    st.data(),
)
def test_any_dtype_and_shape_comes_back_bit_for_bit(codec, dtype, sizes, data):
    layers, heads, tokens, width = sizes
    profile = dataclasses.replace(
        PROFILE, codec=codec, dtype=dtype, layers=layers, kv_heads=heads, head_dim=width
    )
    ids = tuple(data.draw(st.lists(st.integers(0, 2**32 - 1), min_size=tokens, max_size=tokens)))
    count = layers * 2 * heads * tokens * width * DTYPES[dtype].itemsize
    seed = data.draw(st.binary(min_size=1, max_size=16))
    kv = to_buffer((seed * count)[:count]).view(DTYPES[dtype]).reshape(layers, 2, heads, tokens, width)
    written = KVRecord(RECORD.key, profile, ids, kv)
    assert same(read(b"".join(encode(written)), written), written)


def test_equal_records_give_equal_bytes_however_their_tensors_lie_in_memory():
    transposed = RECORD.kv.transpose(3, 4).contiguous().transpose(3, 4)
    assert not transposed.is_contiguous()
    assert b"".join(encode(dataclasses.replace(RECORD, kv=transposed))) == OBJECT


def test_writing_and_reading_share_memory_with_the_tensor():
    parts = encode(RECORD)
    buffer = to_buffer(b"".join(parts))
    found = decode(buffer, RECORD.key, RECORD.profile)
    assert isinstance(found, KVRecord)
    assert found.kv.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    views = [part for part in parts if isinstance(part, memoryview)]
    assert [len(view) for view in views] == [RECORD.kv[0].nbytes] * PROFILE.layers
    views[0][:] = bytes(len(views[0]))
    try:
        assert not RECORD.kv[0].any()
    finally:
        RECORD.kv.copy_(record().kv)


def test_layers_and_token_ids_start_at_multiples_of_64():
    found = read(OBJECT)
    assert isinstance(found, KVRecord)
    base = found.kv.untyped_storage().data_ptr()
    assert [(found.kv[layer].data_ptr() - base) % 64 for layer in range(PROFILE.layers)] == [0, 0]
    assert DATA_START + HEADER["token_ids"][0] == DATA_START
    assert len(OBJECT) % 64 == 32


def test_a_buffer_at_an_odd_address_is_read_all_the_same():
    odd = to_buffer(b"x" + OBJECT)[1:]
    assert same(decode(odd, RECORD.key, RECORD.profile), RECORD)


def test_an_object_of_version_1_is_still_written_and_read_the_same():
    assert GOLDEN.read_bytes() == OBJECT
    assert same(read(GOLDEN.read_bytes()), RECORD)


@pytest.mark.parametrize(
    "change",
    [
        {"kv": RECORD.kv.float()},
        {"kv": RECORD.kv[:, :, :, :2]},
        {"kv": RECORD.kv[0]},
        {"token_ids": (1, 2, -3)},
        {"token_ids": (), "kv": RECORD.kv[:, :, :, :0]},
        {"profile": dataclasses.replace(PROFILE, codec="nope")},
        {"profile": dataclasses.replace(PROFILE, layout="other-1")},
        {"profile": dataclasses.replace(PROFILE, dtype="float64")},
        {"profile": dataclasses.replace(PROFILE, model="m" * (1 << 20))},
    ],
    ids=lambda change: "-".join(change),
)
def test_a_record_that_contradicts_itself_is_not_written(change):
    with pytest.raises(ValueError, match=r"tensor|token ids|codec|layout|header"):
        encode(dataclasses.replace(RECORD, **change))


# --- damage ---


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_a_flip_of_any_byte_is_a_miss(mask):
    assert same(read(OBJECT), RECORD)
    for position in range(len(OBJECT)):
        flipped = bytearray(OBJECT)
        flipped[position] ^= mask
        assert isinstance(read(bytes(flipped)), Miss), position


def test_a_cut_at_any_byte_is_a_miss():
    for length in range(len(OBJECT)):
        assert read(OBJECT[:length]) is Miss.DAMAGED, length


@pytest.mark.parametrize("more", [b"\0", bytes(64), OBJECT[-32:], OBJECT], ids=len)
def test_an_extended_object_is_a_miss(more):
    assert read(OBJECT + more) is Miss.DAMAGED


def test_a_file_that_is_no_object_is_a_miss():
    for data in (b"", b"\0" * 5000, b"\x80\x04pickle", b"{}" * 100, OBJECT[64:]):
        assert read(data) is Miss.DAMAGED


def test_two_objects_that_changed_places_are_both_misses():
    other = record(seed=1)
    assert read(b"".join(encode(other))) is Miss.WRONG_KEY
    assert read(OBJECT, other) is Miss.WRONG_KEY


def test_layers_that_changed_places_are_a_miss():
    first, second = (DATA_START + row[0] for row in HEADER["sections"])
    size = HEADER["sections"][0][1]
    swapped = bytearray(OBJECT)
    swapped[first : first + size], swapped[second : second + size] = (
        OBJECT[second : second + size],
        OBJECT[first : first + size],
    )
    assert read(bytes(swapped)) is Miss.DAMAGED


def test_the_head_of_one_object_on_the_body_of_another_is_a_miss():
    other = b"".join(encode(record(seed=1)))
    assert len(other) == len(OBJECT)
    for cut in range(64, len(OBJECT), 32):
        assert isinstance(read(OBJECT[:cut] + other[cut:]), Miss), cut


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(PROFILE)])
def test_a_profile_that_differs_in_any_field_is_a_wrong_layout(field):
    value = getattr(PROFILE, field)
    changed = dataclasses.replace(PROFILE, **{field: value + 1 if isinstance(value, int) else value + "x"})
    assert decode(to_buffer(OBJECT), RECORD.key, changed) is Miss.WRONG_LAYOUT


def test_an_unknown_version_layout_or_codec_is_a_wrong_layout():
    assert read(forge(canonical(HEADER), version=2)) is Miss.WRONG_LAYOUT
    for change in ({"layout": "lkhtd-2"}, {"codec": "later"}, {"layers": 0}):
        strange = dataclasses.replace(PROFILE, **change)
        forged = forge(canonical({**HEADER, "profile": dataclasses.asdict(strange)}))
        assert decode(to_buffer(forged), RECORD.key, strange) is Miss.WRONG_LAYOUT


# --- hostile headers, with checksums that hold ---


def test_the_forgery_itself_would_be_read_with_an_honest_header():
    assert forge(canonical(HEADER)) == OBJECT


ROW = HEADER["sections"][0]
HUGE = 1 << 62


@pytest.mark.parametrize(
    "change",
    [
        {"token_count": HUGE},
        {"token_count": 10**4000},
        {"token_count": -3},
        {"token_count": 0},
        {"token_count": 3.0},
        {"token_count": True},
        {"token_count": "3"},
        {"token_count": HUGE, "shape": [2, 2, 1, HUGE, 4]},
        {"token_count": 2, "shape": [2, 2, 1, 2, 4]},
        {"shape": [2, 2, 1, 3, 5]},
        {"shape": None},
        {"sections": []},
        {"sections": [ROW]},
        {"sections": [ROW] * 2},
        {"sections": [ROW] * 1000},
        {"sections": HEADER["sections"][::-1]},
        {"sections": {"0": ROW, "1": ROW}},
        {"sections": [[-64, *ROW[1:]], HEADER["sections"][1]]},
        {"sections": [[ROW[0], HUGE, ROW[2]], HEADER["sections"][1]]},
        {"sections": [[ROW[0], -ROW[1], ROW[2]], HEADER["sections"][1]]},
        {"sections": [[ROW[0], 0, ROW[2]], HEADER["sections"][1]]},
        {"sections": [[HUGE, ROW[1], ROW[2]], HEADER["sections"][1]]},
        {"sections": [[ROW[0], ROW[1], 7], HEADER["sections"][1]]},
        {"sections": [[ROW[0], ROW[1], "\ud800"], HEADER["sections"][1]]},
        {"sections": [[*ROW, 1], HEADER["sections"][1]]},
        {"sections": [[float(ROW[0]), *ROW[1:]], HEADER["sections"][1]]},
        {"sections": "ab"},
        {"token_ids": [0, 8, HEADER["token_ids"][2]]},
        {"token_ids": None},
        {"key": [RECORD.key]},
        {"profile": []},
        {"profile": {**HEADER["profile"], "layers": 2.0}},
        {"profile": {**HEADER["profile"], "extra": 1}},
        {"extra": 1},
    ],
    ids=str,
)
def test_a_header_that_lies_is_a_miss(change):
    assert isinstance(read(forge(canonical({**HEADER, **change}))), Miss)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{",
        b"[" * 100_000,
        b"[" * 100_000 + b"]" * 100_000,
        b'{"key":' * 50_000,
        canonical(HEADER).replace(b",", b", "),
        canonical(HEADER).replace(b'"key":', b'"key":"x","key":'),
        canonical(HEADER).replace(b'"token_count":3', b'"token_count":NaN'),
        canonical(HEADER) + b" ",
        b"\xef\xbb\xbf" + canonical(HEADER),
        json.dumps(HEADER, sort_keys=False, separators=(",", ":")).encode("utf-16"),
    ],
    ids=lambda raw: raw[:12].hex(),
)
def test_a_header_that_is_not_canonical_json_is_damage(raw):
    assert read(forge(raw)) is Miss.DAMAGED


def test_token_ids_that_do_not_fit_their_checksum_are_damage():
    data = bytearray(OBJECT[DATA_START:-32])
    data[0] ^= 1
    assert read(forge(canonical(HEADER), bytes(data))) is Miss.DAMAGED


@pytest.mark.parametrize(
    "lengths", [(12, 48, 96), (12, 96, 48), (12, 47, 48), (8, 48, 48), (13, 48, 48), (16, 48, 48)], ids=str
)
def test_consistent_sections_of_the_wrong_size_are_damage(lengths):
    """All checksums and offsets hold, but a section is not as long as what it stands for."""
    rows, data = [], b""
    for length in lengths:
        rows.append([len(data), length, xxhash.xxh3_128_hexdigest(bytes(length))])
        data += bytes(length + -length % 64)
    forged = forge(canonical({**HEADER, "token_ids": rows[0], "sections": rows[1:]}), data)
    assert read(forged) is Miss.DAMAGED


def test_room_between_the_last_section_and_the_commit_mark_is_damage():
    for more in (bytes(64), OBJECT[DATA_START : DATA_START + 64]):
        assert read(forge(canonical(HEADER), OBJECT[DATA_START:-32] + more)) is Miss.DAMAGED


def test_a_header_length_beyond_the_object_or_the_limit_is_damage():
    for length in (len(OBJECT), 1 << 20, (1 << 20) + 1, 0xFFFFFFFF):
        assert read(OBJECT[:12] + struct.pack("<I", length) + OBJECT[16:]) is Miss.DAMAGED


def test_a_header_that_claims_terabytes_allocates_nothing():
    forged = to_buffer(forge(canonical({**HEADER, "token_count": HUGE, "shape": [2, 2, 1, HUGE, 4]})))
    tracemalloc.start()
    try:
        assert decode(forged, RECORD.key, RECORD.profile) is Miss.DAMAGED
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400), st.integers(0, len(OBJECT)))
def test_random_bytes_anywhere_never_raise(noise, position):
    data = OBJECT[:position] + noise + OBJECT[position + len(noise) :]
    outcome = read(data)
    assert isinstance(outcome, Miss) or data == OBJECT


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted(HEADER)), inner),
        max_leaves=12,
    )
)
def test_random_json_under_a_right_checksum_never_raises(value):
    assert isinstance(read(forge(canonical(value))), Miss)
    if isinstance(value, dict):
        mixed = {**HEADER, **value}
        assert isinstance(read(forge(canonical(mixed))), Miss) or mixed == HEADER


# --- codecs ---


@pytest.mark.parametrize("name", sorted(CODECS))
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_codec_is_named_as_in_the_table_and_repeats_itself(name, dtype):
    codec = CODECS[name]
    layer = record(profile=dataclasses.replace(PROFILE, dtype=dtype)).kv[0].contiguous()
    data = bytes(codec.encode(layer))
    assert codec.name == name
    assert bytes(codec.encode(layer.clone())) == data
    decoded = codec.decode([to_buffer(data)], DTYPES[dtype], tuple(layer.shape))
    assert decoded.shape == (1, *layer.shape)
    assert decoded.dtype == layer.dtype
    if name in ("raw", "lossless"):
        assert torch.equal(decoded[0], layer)


@pytest.mark.parametrize("name", sorted(CODECS))
def test_every_codec_refuses_sections_that_are_no_layers(name):
    layer = record().kv[0].contiguous()
    data = bytes(CODECS[name].encode(layer))
    for wrong in (data[:-1], data + b"\0", b"\xff"):
        with pytest.raises(ValueError, match="section"):
            CODECS[name].decode([to_buffer(data), to_buffer(wrong)], layer.dtype, tuple(layer.shape))


def test_the_table_of_codecs_cannot_be_changed():
    with pytest.raises(TypeError):
        CODECS["mine"] = CODECS["raw"]  # type: ignore[index]


# --- memory-mapped, as another program may read it ---


@pytest.mark.parametrize("codec", sorted(CODECS))
@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_a_layer_is_read_over_a_memory_map_of_the_file(tmp_path: Path, codec: str, dtype: str) -> None:
    whole = record(tokens=5, profile=dataclasses.replace(PROFILE, codec=codec, dtype=dtype))
    (tmp_path / "object").write_bytes(b"".join(encode(whole)))
    with (tmp_path / "object").open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        view = memoryview(mapped)

        def read_into(buffer: memoryview, offset: int) -> int:
            piece = view[offset : offset + len(buffer)]
            buffer[: len(piece)] = piece
            return len(piece)

        opened = open_layers(read_into, len(mapped), whole.key, whole.profile)
        assert isinstance(opened, Layers)
        decoded = decode(to_buffer(bytes(mapped)), whole.key, whole.profile)
        assert isinstance(decoded, KVRecord)
        assert opened.token_ids() == whole.token_ids
        for number, expected in enumerate(decoded.kv):
            layer = opened.layer(number)
            assert isinstance(layer, torch.Tensor)
            assert torch.equal(layer, expected)
        starts = [opened.start + section.offset for section in opened.sections]
        assert all(start % 64 == 0 for start in starts), "a map begins at a page, so every section is aligned in memory"
        if codec == "raw":  # numbers in place: no byte is copied
            for number, start in enumerate(starts[1:]):
                length = whole.kv[number].numel()
                there = torch.frombuffer(view, dtype=DTYPES[dtype], count=length, offset=start)
                assert there.data_ptr() % 64 == 0
                assert torch.equal(there.view(whole.kv[number].shape), whole.kv[number])
                del there
        view.release()
