"""Hostile bytes in the place of a section or a frame: a miss, or a tensor; never an exception, never more memory."""

from __future__ import annotations

import struct
import tracemalloc

import pytest
import xxhash
import zstandard
from codec_samples import NAMES, codec_for
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import PROFILE, record, to_buffer

from storage.codecs.zstd import Unpacker
from storage.format import decode, encode
from storage.types import KVRecord, Miss


def object_of(name: str) -> tuple[KVRecord, bytes, object]:
    codec, profile = codec_for(name, PROFILE)
    written = record(profile=profile)
    return written, b"".join(encode(written, codec)), codec


OBJECTS = {name: object_of(name) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_flip_of_any_byte_is_a_miss_for_every_codec(name):
    written, data, codec = OBJECTS[name]
    for position in range(len(data)):
        for mask in (0x01, 0x80):
            flipped = bytearray(data)
            flipped[position] ^= mask
            assert isinstance(decode(to_buffer(bytes(flipped)), written.key, written.profile, codec), Miss), position


def reseal(name: str, layer: int, section: bytes) -> bytes:
    """The object with other bytes in a layer's place and every checksum right: what only a forger would write."""
    written, _, codec = OBJECTS[name]

    class Forger:
        name = codec.name

        def encode(self, tensor, number=0):
            return memoryview(section) if number == layer else codec.encode(tensor, number)

    return b"".join(encode(written, Forger()))


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(NAMES), st.data())
def test_hostile_sections_under_right_checksums_give_a_miss_or_a_tensor_and_never_an_exception(name, data):
    written, _, codec = OBJECTS[name]
    good = bytearray(codec.encode(written.kv[1].contiguous(), 1))
    match data.draw(st.sampled_from(["flip", "cut", "extend", "noise"])):
        case "flip":
            for _ in range(data.draw(st.integers(1, 4))):
                good[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
        case "cut":
            good = good[: data.draw(st.integers(1, len(good) - 1))] if len(good) > 1 else good
        case "extend":
            good += data.draw(st.binary(min_size=1, max_size=40))
        case "noise":
            good = bytearray(data.draw(st.binary(min_size=1, max_size=200)))
    found = decode(to_buffer(reseal(name, 1, bytes(good))), written.key, written.profile, codec)
    assert isinstance(found, KVRecord) or found is Miss.DAMAGED
    if isinstance(found, KVRecord):
        assert found.kv.shape == written.kv.shape


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(NAMES), st.sampled_from(NAMES), st.data())
def test_objects_cut_spliced_and_extended_are_misses(name, other, data):
    written, one, codec = OBJECTS[name]
    two = OBJECTS[other][1]
    at = data.draw(st.integers(0, len(one)))
    cut = data.draw(st.integers(0, len(two)))
    spliced = one[:at] + two[cut:]
    if spliced != one:
        assert isinstance(decode(to_buffer(spliced), written.key, written.profile, codec), Miss)


def bomb(size: int, announced: bool) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=announced).compress(bytes(size))


@pytest.mark.parametrize("announced", [True, False])
def test_a_small_frame_of_a_large_content_is_refused_before_it_is_unpacked(announced):
    frame = bomb(1 << 28, announced)
    assert len(frame) < 1 << 16
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="frame"):
            Unpacker().unpack(memoryview(frame), 1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_frame_that_lies_about_its_length_is_refused():
    frame = bytearray(zstandard.ZstdCompressor(write_content_size=True).compress(bytes(200)))
    assert frame[5] == 200  # the field of one byte
    for told in (199, 201):
        frame[5] = told
        with pytest.raises(ValueError, match="frame"):
            Unpacker().unpack(memoryview(bytes(frame)), told)


def test_two_frames_in_the_place_of_one_are_refused():
    frame = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(10))
    with pytest.raises(ValueError, match="frame"):
        Unpacker().unpack(memoryview(frame + frame), 10)


@pytest.mark.parametrize("version", [0, 2, 2**32 - 1])
def test_another_version_is_a_wrong_layout_even_if_all_else_is_right(version):
    written, data, _ = OBJECTS["int4"]
    length = struct.unpack_from("<I", data, 12)[0]
    head = data[:8] + struct.pack("<I", version) + data[12 : 16 + length]
    digest = xxhash.xxh3_128_digest(head)
    forged = head + digest + data[16 + length + 16 : -16] + digest
    assert len(forged) == len(data)
    assert decode(to_buffer(forged), written.key, written.profile) is Miss.WRONG_LAYOUT
