"""The transform codec: how integers are packed, now and before, and the basis as an object of the store."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_samples import allowed, basis, codec_for
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_samples import PROFILE, record, to_buffer

from storage.codecs import basis as basis_module
from storage.codecs import transform_1, transform_2
from storage.codecs.basis import MAX_BYTES, Basis
from storage.codecs.packing import pack
from storage.codecs.shelf import CodecShelf
from storage.codecs.transform import Transform
from storage.codecs.zstd import Packer, Unpacker
from storage.errors import StorageUnavailable
from storage.folder import FolderStore
from storage.format import DTYPES, encode
from storage.kvstore import KVStore
from storage.types import KVProfile, KVRecord, Miss

GOLDEN = Path(__file__).parent / "golden"



def plain_transform(step: float, dtype: str = "bfloat16") -> tuple[Transform, KVProfile]:
    """A basis without rotation or mean: an element is an integer times `step`."""
    base = dataclasses.replace(PROFILE, dtype=dtype, layers=1, head_dim=8)
    eye = torch.eye(8, dtype=torch.bfloat16) * step
    return Transform(Basis(torch.zeros(1, 2, 1, 8), torch.full((1,), step), eye.view(1, 1, 8, 8))), base


@pytest.mark.parametrize("largest", [1, 2, 7, 8, 127, 128, 255, 256])
@pytest.mark.parametrize("sign", [1, -1])
def test_integers_at_the_edge_of_a_class_are_coded_exactly(largest, sign):
    codec, _ = plain_transform(0.25)
    layer = torch.zeros(2, 1, 5, 8, dtype=torch.bfloat16)
    layer[:, 0, 2, :3] = torch.tensor([largest, 1, largest]) * 0.25 * sign
    section = bytes(codec.encode(layer))
    assert section[0] == 2
    assert torch.equal(codec.decode([to_buffer(section)], layer.dtype, tuple(layer.shape))[0], layer)


@pytest.mark.parametrize(("number", "dtype", "step"), [(257.0, "bfloat16", 0.5), (65504.0, "float16", 257.0)])
def test_numbers_for_which_the_basis_was_not_made_are_stored_without_loss(number, dtype, step):
    """More steps than an integer holds, and a number whose nearest integer lies beyond the dtype's range."""
    codec, _ = plain_transform(step, dtype)
    layer = torch.zeros(2, 1, 5, 8, dtype=DTYPES[dtype])
    layer[1, 0, 1, 1] = layer[0, 0, 3, 3] = number
    section = bytes(codec.encode(layer))
    assert section[0] == 0
    assert torch.equal(codec.decode([to_buffer(section)], layer.dtype, tuple(layer.shape))[0], layer)


CLAIMS = {
    1: struct.pack("<4H4I", *[0xFFFF] * 4, 0, 0, 0, 0),
    2: struct.pack("<3HB", 0xFFFF, 0xFFFF, 0xFFFE, 1),
    "components with two bytes that have not one": struct.pack("<3HB", 2, 1, 0, 1),
    "an odd number of halves": struct.pack("<3HB", 0, 0, 3, 1),
    "V of no byte": struct.pack("<3HB", 0, 8, 0, 0),
    "V of many bytes": struct.pack("<3HB", 0, 8, 0, 255),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_section_that_claims_what_cannot_be_is_refused_before_anything_is_allocated(claim):
    codec, _ = plain_transform(0.25)
    section = to_buffer(bytes([claim if isinstance(claim, int) else 2]) + CLAIMS[claim] + bytes(100))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="section"):
            codec.decode([section], torch.bfloat16, (2, 1, 30, 8))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# --- packings ---

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


@settings(deadline=None, max_examples=150)
@given(st.lists(limits, min_size=1, max_size=9), limits, st.integers(1, 13), st.integers(0, 9), st.booleans())
def test_integers_come_back_from_both_packings(k_limits, v_limit, columns, seed, first):
    k, v = integers_of(k_limits, v_limit, columns, seed)
    data = first_section(k, v) if first else transform_2.pack_layer(k, v)
    packing = transform_1 if first else transform_2
    low = np.full(k.shape, 99, np.uint8), np.full(v.shape, 99, np.uint8)  # what was there before is no part of it
    high = packing.unpack_layer(Unpacker(), memoryview(data), *low)
    for true, lower, upper in zip((k, v), low, high, strict=True):
        found = lower.view(np.int8).astype(np.int16)
        found[: len(upper)] += 256 * upper.view(np.int8).astype(np.int16)
        assert found.tolist() == true.tolist()


def test_components_behind_the_last_that_is_not_zero_take_no_bytes():
    k, v = integers_of([100] * 4 + [3] * 8 + [0] * 52, 20, 400, 0)
    assert transform_2.pack_layer(k, v) == transform_2.pack_layer(k[:12], v)


def test_a_layer_of_the_first_packing_gives_the_bits_that_one_of_the_second_gives():
    codec, profile = codec_for("transform", dataclasses.replace(PROFILE, layers=3, kv_heads=2))
    kv = record(tokens=21, profile=profile).kv
    shape = tuple(kv.shape[1:])
    second = [to_buffer(bytes(codec.encode(layer, number))) for number, layer in enumerate(kv)]
    assert [int(section[0]) for section in second] == [2, 2, 2]
    first = []
    for section in second:
        k, v = np.zeros((4, 42), np.uint8), np.zeros(168, np.uint8)
        assert not sum(part.size for part in transform_2.unpack_layer(Unpacker(), section.numpy().data[1:], k, v))
        first.append(to_buffer(b"\x01" + first_section(*(x.view(np.int8).astype(np.int16) for x in (k, v)))))
    mixed = [first[0], second[1], first[2]]
    expected = codec.decode(second, kv.dtype, shape)
    assert torch.equal(codec.decode(first, kv.dtype, shape), expected)
    assert torch.equal(codec.decode(mixed, kv.dtype, shape), expected)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 300])
def test_what_is_decoded_is_the_product_and_the_mean_rounded_once(dtype, tokens, monkeypatch):
    monkeypatch.setattr(basis_module, "_FLOATS", 50)
    profile = dataclasses.replace(PROFILE, dtype=dtype, layers=3, kv_heads=2, head_dim=8)
    made = basis(profile)
    draw = torch.Generator().manual_seed(tokens)
    k = torch.randint(-256, 257, (3, 8, 2, tokens), generator=draw)
    v = torch.randint(-256, 257, (3, 2, tokens, 8), generator=draw)
    sections = []
    for layer in range(3):
        parts = transform_2.pack_layer(k[layer].reshape(8, -1).short().numpy(), v[layer].reshape(-1).short().numpy())
        sections.append(to_buffer(b"\x02" + parts))
    true_k = made.means[:, 0].double().unsqueeze(-2) + k.double().permute(0, 2, 3, 1) @ made.matrices.double()
    true_v = made.means[:, 1].double().unsqueeze(-2) + v.double() * made.steps.double().view(-1, 1, 1, 1)
    found = Transform(made).decode(sections, DTYPES[dtype], (2, 2, tokens, 8))
    eps = torch.finfo(DTYPES[dtype]).eps
    assert torch.allclose(found.double(), torch.stack([true_k, true_v], 1), rtol=0.51 * eps + 2**-20, atol=2**-14)


@pytest.mark.parametrize("fast", [True, False])
def test_products_of_bf16_and_of_fp32_numbers_give_the_same_within_a_rounding(fast, monkeypatch):
    monkeypatch.setattr(basis_module, "_BF16_PRODUCTS", fast)
    codec, profile = codec_for("transform", dataclasses.replace(PROFILE, layers=3))
    kv = record(tokens=40, profile=profile).kv
    sections = [torch.frombuffer(bytearray(codec.encode(layer, n)), dtype=torch.uint8) for n, layer in enumerate(kv)]
    found = codec.decode(sections, kv.dtype, tuple(kv.shape[1:]))
    assert all(codec.basis.holds(layer, true, number) for number, (layer, true) in enumerate(zip(found, kv, strict=True)))


# --- the basis ---


def transform_store(tmp_path) -> tuple[FolderStore, KVRecord, str]:
    objects = FolderStore(tmp_path)
    store = KVStore(objects)
    codec = store.codecs.add(basis(PROFILE))
    written = record(profile=dataclasses.replace(PROFILE, codec=codec.name))
    store.put(written)
    return objects, written, f"basis/{codec.basis.digest}"


def test_another_process_reads_with_the_basis_that_it_finds_in_the_store(tmp_path):
    objects, written, _ = transform_store(tmp_path)
    found = KVStore(objects).get(written.key, written.profile)
    assert isinstance(found, KVRecord)
    assert ((found.kv.double() - written.kv.double()).abs() <= allowed(Transform(basis(PROFILE)), written.kv)).all()


def test_a_basis_with_any_byte_flipped_or_cut_is_damage_and_never_used(tmp_path):
    objects, written, name = transform_store(tmp_path)
    good = basis(PROFILE).to_bytes()
    for position in range(len(good)):
        bad = bytearray(good)
        bad[position] ^= 1
        objects.put(name, [bytes(bad)])
        assert KVStore(objects).get(written.key, written.profile) is Miss.DAMAGED, position
    for length in (0, 1, 20, len(good) - 1):
        objects.put(name, [good[:length]])
        assert KVStore(objects).get(written.key, written.profile) is Miss.DAMAGED
    objects.put(name, [good])
    assert isinstance(KVStore(objects).get(written.key, written.profile), KVRecord)


def test_without_its_basis_an_object_is_absent_and_cannot_be_written(tmp_path):
    objects, written, name = transform_store(tmp_path)
    objects.delete(name)
    store = KVStore(objects)
    assert store.get(written.key, written.profile) is Miss.ABSENT
    with pytest.raises(StorageUnavailable, match="basis"):
        store.put(written)


def test_a_basis_of_absurd_size_is_damage_and_is_not_read(tmp_path, monkeypatch):
    objects, written, _ = transform_store(tmp_path)
    store = KVStore(objects)
    monkeypatch.setattr(objects, "size", lambda name: MAX_BYTES + 1)
    monkeypatch.setattr(objects, "read_into", None)
    assert store.get(written.key, written.profile) is Miss.DAMAGED


def test_an_object_of_one_basis_is_not_read_with_another(tmp_path):
    objects, written, _ = transform_store(tmp_path)
    store = KVStore(objects)
    other = store.codecs.add(basis(PROFILE, seed=1))
    assert store.get(written.key, dataclasses.replace(PROFILE, codec=other.name)) is Miss.WRONG_LAYOUT


@pytest.mark.parametrize("name", ["transform", "transform:", "transform:" + "g" * 64, "nope", "int16"])
def test_a_codec_of_no_such_name_is_a_wrong_layout(tmp_path, name):
    assert CodecShelf(FolderStore(tmp_path)).find(name) is Miss.WRONG_LAYOUT


def test_a_basis_of_another_shape_is_refused():
    codec = Transform(basis(dataclasses.replace(PROFILE, layers=1)))
    with pytest.raises(ValueError, match="basis"):
        encode(record(profile=dataclasses.replace(PROFILE, codec=codec.name)), codec)
    small = struct.pack("<8s3I", b"PRBASIS1", 1, 1, 2)
    with pytest.raises(ValueError, match="no basis"):
        Basis.from_bytes(small, hashlib.sha256(small).hexdigest())


def test_the_note_says_which_basis_a_model_has(tmp_path):
    shelf = CodecShelf(FolderStore(tmp_path))
    assert shelf.noted("ab" * 32) is Miss.ABSENT
    codec = shelf.add(basis(PROFILE))
    shelf.note("ab" * 32, codec)
    found = CodecShelf(FolderStore(tmp_path)).noted("ab" * 32)
    assert isinstance(found, Transform)
    assert found.name == codec.name
    FolderStore(tmp_path).put("basis-of/" + "ab" * 32, [b"\xff" * 64])
    assert CodecShelf(FolderStore(tmp_path)).noted("ab" * 32) is Miss.WRONG_LAYOUT
