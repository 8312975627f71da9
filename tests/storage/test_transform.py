"""The transform codec: its products, its way out, and the basis as an object of the store."""

from __future__ import annotations

import dataclasses
import hashlib
import struct

import pytest
import torch
from codec_samples import allowed, basis, codec_for
from kv_samples import PROFILE, record, to_buffer

from storage.codecs import basis as basis_module
from storage.codecs import transform_3
from storage.codecs.basis import MAX_BYTES, Basis
from storage.codecs.shelf import CodecShelf
from storage.codecs.transform import Transform
from storage.errors import StorageUnavailable
from storage.folder import FolderStore
from storage.format import DTYPES, encode
from storage.kvstore import KVStore
from storage.types import KVProfile, KVRecord, Miss


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
    assert section[0] == 3
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


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 300])
def test_what_is_decoded_is_the_product_and_the_mean_rounded_once(dtype, tokens):
    profile = dataclasses.replace(PROFILE, dtype=dtype, layers=3, kv_heads=2, head_dim=8)
    made = basis(profile)
    draw = torch.Generator().manual_seed(tokens)
    k = torch.randint(-256, 257, (3, 8, 2, tokens), generator=draw)
    v = torch.randint(-256, 257, (3, 2, tokens, 8), generator=draw)
    sections = []
    for layer in range(3):
        parts = transform_3.pack_layer(k[layer].reshape(8, -1).short().numpy(), v[layer].reshape(-1).short().numpy())
        sections.append(to_buffer(b"\x03" + parts))
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
