"""How the transform codec's integers are packed, now and before: docs/object-format.md."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc

import numpy as np
import pytest
import torch
from codec_samples import codec_for
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import PROFILE, record, to_buffer

from storage.codecs import transform_1, transform_2, transform_3
from storage.codecs.packing import pack
from storage.codecs.transform import Transform
from storage.codecs.zstd import Packer, Unpacker

PLAIN = dataclasses.replace(PROFILE, layers=1, head_dim=8, kv_heads=1)
limits = st.sampled_from([0, 1, 2, 7, 8, 127, 128, 256])


def integers_of(k_limits: list[int], v_limit: int, columns: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """K [components, columns] and V, whose largest integers are the limits, with either sign."""
    draw = np.random.default_rng(seed)
    k = np.stack([draw.integers(-limit, limit + 1, columns) for limit in k_limits]).astype(np.int16)
    k[:, 0] = np.array(k_limits) * draw.choice([-1, 1], len(k_limits))
    v = draw.integers(-v_limit, v_limit + 1, columns * len(k_limits)).astype(np.int16)
    v[0] = v_limit
    return k, v


def first_section(k: np.ndarray, v: np.ndarray) -> bytes:
    """What the first version wrote behind the kind, by docs/object-format.md."""
    classes, packer = ((16, 256), (8, 128), (4, 8), (2, 2)), Packer()

    def frame(values: np.ndarray, bits: int, added: int) -> bytes:
        unsigned = (values.reshape(-1) + added).astype(np.uint16)
        planes = [unsigned.astype(np.uint8), (unsigned >> 8).astype(np.uint8)] if bits == 16 else [pack(unsigned, bits)]
        return packer.pack(np.concatenate(planes).data) if len(unsigned) else b""

    filled = np.zeros((len(k), -(-k.shape[1] // 4) * 4), np.int16)
    filled[:, : k.shape[1]] = k
    ends = [int(np.flatnonzero(np.abs(k).max(1) > limit).max(initial=-1)) + 1 for limit in (127, 7, 1, 0)]
    rows = [filled[a:b] for a, b in zip((0, *ends), ends, strict=False)]
    frames = [frame(part, *each) for part, each in zip(rows, classes, strict=True)]
    bits, added = next(each for each in reversed(classes) if np.abs(v).max() < each[1] or each[0] == 16)
    head = struct.pack("<4H4I", *map(len, rows), *map(len, frames))
    return head + b"".join(frames) + bytes([bits]) + frame(v, bits, added)


def second_section(k: np.ndarray, v: np.ndarray) -> bytes:
    """What the second version wrote behind the kind, by docs/object-format.md."""

    def high(integers: np.ndarray) -> np.ndarray:
        return ((integers + 128) >> 8).astype(np.uint8)

    largest = np.abs(k).max(axis=1)
    double, whole, end = (int(np.flatnonzero(largest > limit).max(initial=-1)) + 1 for limit in (127, 7, 0))
    if (end - whole) % 2:
        whole, end = (whole, end + 1) if end < len(k) else (whole + 1, end)
    first, second = np.split((k[whole:end] + 8).astype(np.uint8), 2)
    each = 2 if np.abs(v).max() > 127 else 1
    parts = [
        k[:whole].astype(np.uint8),
        first | second << 4,
        v.astype(np.uint8),
        high(k[:double]),
        high(v[: v.size * (each - 1)]),
    ]
    frame = Packer().pack(*(part.reshape(-1).data for part in parts if part.size))
    return struct.pack("<3HB", double, whole, end - whole, each) + frame


PACKINGS = {1: (first_section, transform_1), 2: (second_section, transform_2), 3: (transform_3.pack_layer, transform_3)}


def unpacked(kind: int, data: bytes, components: int, columns: int) -> np.ndarray:
    """K and V as one row."""
    row = np.full((2 * components, columns), 99, np.uint8)  # what was there before is no part of it
    patches = PACKINGS[kind][1].unpack_layer(Unpacker(), memoryview(data), row)
    found = row.reshape(-1).view(np.int8).astype(np.int16)
    if patches is not None:
        assert (np.diff(patches[0]) > 0).all()
        found[patches[0]] = patches[1]
    return found


@settings(deadline=None, max_examples=150)
@given(st.lists(limits, min_size=1, max_size=9), limits, st.integers(1, 13), st.integers(0, 9), st.sampled_from(sorted(PACKINGS)))
def test_integers_come_back_from_every_packing(k_limits, v_limit, columns, seed, kind):
    k, v = integers_of(k_limits, v_limit, columns, seed)
    found = unpacked(kind, PACKINGS[kind][0](k, v), len(k), columns)
    assert found.tolist() == [*k.reshape(-1).tolist(), *v.tolist()]


@pytest.mark.parametrize(("rare", "smaller"), [(1, True), (60, False)])
def test_a_few_large_integers_of_v_leave_half_a_byte_to_the_others_and_many_do_not(rare, smaller):
    k, v = integers_of([7] * 8, 7, 400, 0)
    few = v.copy()
    few[np.arange(rare) * 50] = [200, -9, 127][:rare] if rare < 4 else 9
    one = transform_3.pack_layer(k, few)
    assert unpacked(3, one, 8, 400).tolist() == [*k.reshape(-1).tolist(), *few.tolist()]
    begin, end = struct.unpack_from("<2I", one)
    assert (begin, end) == (0, 6400 if smaller else 3200)


@pytest.mark.parametrize("kind", [1, 2])
def test_a_layer_of_an_earlier_packing_gives_the_bits_that_one_of_todays_gives(kind):
    codec, profile = codec_for("transform", dataclasses.replace(PROFILE, layers=3, kv_heads=2))
    kv = record(tokens=21, profile=profile).kv
    shape = tuple(kv.shape[1:])
    today = [to_buffer(bytes(codec.encode(layer, number))) for number, layer in enumerate(kv)]
    assert [int(section[0]) for section in today] == [3, 3, 3]
    earlier = []
    for section in today:
        k, v = np.split(unpacked(3, bytes(section[1:].numpy()), 4, 42), 2)
        earlier.append(to_buffer(bytes([kind]) + PACKINGS[kind][0](k.reshape(4, 42), v)))
    expected = codec.decode(today, kv.dtype, shape)
    assert torch.equal(codec.decode(earlier, kv.dtype, shape), expected)
    assert torch.equal(codec.decode([earlier[0], today[1], earlier[2]], kv.dtype, shape), expected)


def test_integers_beyond_a_byte_find_their_layer_their_half_and_their_place():
    codec, _ = codec_for("transform", dataclasses.replace(PROFILE, layers=3, kv_heads=2, head_dim=8))
    assert isinstance(codec, Transform)
    draw = np.random.default_rng(1)
    k, v = draw.integers(-3, 4, (3, 8, 10)).astype(np.int16), draw.integers(-3, 4, (3, 80)).astype(np.int16)
    k[1, 7, 9], k[2, 0, 0], v[0, 79], v[2, 0] = 256, -200, 130, -256  # layer 0 has none of K, layer 1 none of V
    sections = [to_buffer(b"\x03" + transform_3.pack_layer(*layer)) for layer in zip(k, v, strict=True)]
    found = codec.decode(sections, torch.float32, (2, 2, 5, 8))
    q = torch.from_numpy(k).view(3, 8, 2, 5).permute(0, 2, 3, 1).double()
    true_k = codec.basis.means[:, 0].double().unsqueeze(-2) + q @ codec.basis.matrices.double()
    steps = codec.basis.steps.double().view(-1, 1, 1, 1)
    true_v = codec.basis.means[:, 1].double().unsqueeze(-2) + torch.from_numpy(v).view(3, 2, 5, 8).double() * steps
    assert torch.allclose(found.double(), torch.stack([true_k, true_v], 1), rtol=1e-5, atol=1e-4)


# --- claims ---

SIZE = 2 * 8 * 30  # integers of a layer
CLAIMS = {
    "components that there are not": (1, struct.pack("<4H4I", *[0xFFFF] * 4, 0, 0, 0, 0)),
    "components that there are not, again": (2, struct.pack("<3HB", 0xFFFF, 0xFFFF, 0xFFFE, 1)),
    "components with two bytes that have not one": (2, struct.pack("<3HB", 2, 1, 0, 1)),
    "an odd number of halves": (2, struct.pack("<3HB", 0, 0, 3, 1)),
    "V of no byte": (2, struct.pack("<3HB", 0, 8, 0, 0)),
    "V of many bytes": (2, struct.pack("<3HB", 0, 8, 0, 255)),
    "halves beyond the end": (3, struct.pack("<4I", 0, SIZE + 2, 0, 0)),
    "halves that end before they begin": (3, struct.pack("<4I", 4, 2, 0, 0)),
    "half a byte alone": (3, struct.pack("<4I", 0, 3, 0, 0)),
    "a list longer than the section": (3, struct.pack("<4I", 0, 0, 0xFFFFFFFF, 0)),
    "another list longer than the section": (3, struct.pack("<4I", 0, 0, 0, 0xFFFFFFFF)),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_section_that_claims_what_cannot_be_is_refused_before_anything_is_allocated(claim):
    codec, _ = codec_for("transform", PLAIN)
    kind, head = CLAIMS[claim]
    section = to_buffer(bytes([kind]) + head + bytes(100))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="section"):
            codec.decode([section], torch.bfloat16, (2, 1, 30, 8))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("places", [[SIZE], [2**32 - 1], [5, 5], [9, 4]])
@pytest.mark.parametrize("wide", [False, True])
def test_lists_that_name_no_place_or_that_are_in_no_order_are_refused(places, wide):
    codec, _ = codec_for("transform", PLAIN)
    row = np.zeros(SIZE, np.uint8)
    head = struct.pack("<4I", 0, 0, 0 if wide else len(places), len(places) if wide else 0)
    lists = struct.pack(f"<{len(places)}I{len(places)}{'h' if wide else 'b'}", *places, *[100] * len(places))
    section = to_buffer(b"\x03" + head + lists + Packer().pack(row.data))
    if not wide and max(places) < SIZE:  # harmless: the last one counts
        codec.decode([section], torch.bfloat16, (2, 1, 30, 8))
        return
    with pytest.raises(ValueError, match="integers"):
        codec.decode([section], torch.bfloat16, (2, 1, 30, 8))
