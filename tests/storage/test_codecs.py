"""Codecs: what comes back is within the stated bound, equal tensors give equal bytes, and a layer stands by itself."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_samples import EXACT, NAMES, allowed, codec_for
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kv_samples import PROFILE, record, same, to_buffer

from storage.codecs import CODECS, packing
from storage.codecs.basis import Basis
from storage.codecs.packing import pack, packed_length, unpack
from storage.codecs.transform import Transform
from storage.folder import FolderStore
from storage.format import DTYPES, Layers, decode, encode, open_layers
from storage.types import KVProfile, KVRecord, Miss

GOLDEN = Path(__file__).parent / "golden"
LOSSY = [name for name in NAMES if name not in EXACT]
KINDS = ("noise", "zeros", "constant", "outlier channel", "outlier token", "tiny", "huge", "mixed scales")


def tensor(kind: str, profile: KVProfile, tokens: int, seed: int) -> torch.Tensor:
    """Numbers that are hard for a quantiser, [layers, 2, kv_heads, tokens, head_dim]."""
    shape = (profile.layers, 2, profile.kv_heads, tokens, profile.head_dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    largest = {"float16": 6e4, "bfloat16": 9e37, "float32": 9e37}[profile.dtype]
    match kind:
        case "zeros":
            x = torch.zeros(shape)
        case "constant":
            x = torch.full(shape, -17.3)
        case "outlier channel":
            x[..., -1] += 300
        case "outlier token":
            x[..., 0, :] *= 1000
        case "tiny":
            x = x * 1e-7
        case "huge":
            x = x.sign() * largest
        case "mixed scales":
            x = x * 10.0 ** torch.randint(-4, 4, shape, generator=torch.Generator().manual_seed(seed))
    return x.to(DTYPES[profile.dtype])


def sections_of(codec, kv: torch.Tensor) -> list[torch.Tensor]:
    return [to_buffer(bytes(codec.encode(layer.contiguous(), number))) for number, layer in enumerate(kv)]


shapes = st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 5]), st.integers(1, 13), st.sampled_from([1, 2, 7, 8, 13]))


@settings(deadline=None, max_examples=250)
@given(st.sampled_from(NAMES), st.sampled_from(sorted(DTYPES)), shapes, st.sampled_from(KINDS), st.integers(0, 9))
@example("int8", "float16", (1, 2, 4, 1), "mixed scales", 0)  # once missed by the last rounding, below the normal numbers
def test_what_comes_back_is_as_near_as_the_codec_says(name, dtype, shape, kind, seed):
    layers, heads, tokens, width = shape
    base = dataclasses.replace(PROFILE, dtype=dtype, layers=layers, kv_heads=heads, head_dim=width)
    codec, profile = codec_for(name, base)
    kv = tensor(kind, profile, tokens, seed)
    written = KVRecord("ab" * 32, profile, tuple(range(tokens)), kv)
    data = b"".join(encode(written, codec))
    found = decode(to_buffer(data), written.key, profile, codec)
    assert isinstance(found, KVRecord)
    if name in EXACT:
        assert same(found, written)
    else:
        assert found.kv.dtype == kv.dtype
        assert ((found.kv.double() - kv.double()).abs() <= allowed(codec, kv)).all()
    assert b"".join(encode(dataclasses.replace(written, kv=kv.clone()), codec)) == data


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(DTYPES)), st.binary(min_size=1, max_size=16))
def test_lossless_keeps_every_bit_pattern(dtype, seed):
    kv = to_buffer((seed * 640)[:640]).view(DTYPES[dtype]).reshape(2, 2, -1, 5, 4)
    profile = dataclasses.replace(PROFILE, dtype=dtype, codec="lossless", kv_heads=kv.shape[2])
    written = KVRecord("ab" * 32, profile, (1, 2, 3, 4, 5), kv)
    assert same(decode(to_buffer(b"".join(encode(written))), written.key, profile), written)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_none_are_refused_by_codecs_that_round(name, number):
    codec, profile = codec_for(name, PROFILE)
    kv = record(profile=profile).kv.clone()
    kv[1, 1, 0, 2, 3] = number
    with pytest.raises(ValueError, match="quantised"):
        encode(dataclasses.replace(record(profile=profile), kv=kv), codec)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_numbers_beyond_the_quantisers_range_are_refused(name):
    kv = torch.full((1, 2, 1, 1, 4), 3e38)
    with pytest.raises(ValueError, match="quantised"):
        CODECS[name].encode(kv[0])


def test_sizes_fall_from_codec_to_codec():
    base = dataclasses.replace(PROFILE, layers=4, kv_heads=2, head_dim=64)
    kv = tensor("noise", base, 400, 1)
    sizes = {}
    for name in NAMES:
        codec, profile = codec_for(name, base)
        sizes[name] = sum(map(len, encode(KVRecord("ab" * 32, profile, tuple(range(400)), kv), codec)))
    assert sizes["raw"] > 1.2 * sizes["lossless"] > 1.5 * sizes["int8"] > 2.5 * sizes["int4"]
    assert sizes["int4"] < 0.28 * sizes["raw"]
    assert sizes["transform"] < sizes["int4"]


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([2, 4, 8]), st.lists(st.integers(0, 255), min_size=1, max_size=40))
def test_packed_integers_come_back(bits, values):
    values = np.array(values, np.uint16) >> (8 - bits)
    packed = pack(values, bits)
    assert len(packed) == packed_length(len(values), bits)
    for kind in (np.int16, np.float32):
        out = np.empty((2, len(values)), kind)
        unpack(np.stack([packed, packed]), bits, out)
        assert out.tolist() == [values.tolist()] * 2


# --- layers by themselves ---


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("at_once", [1, 100, 1 << 30])
def test_layers_are_the_same_however_many_are_decoded_together(name, at_once, monkeypatch):
    monkeypatch.setattr(packing, "AT_ONCE", at_once)
    codec, profile = codec_for(name, dataclasses.replace(PROFILE, layers=5))
    kv = record(tokens=7, profile=profile).kv
    kv[2] *= 1000  # for the basis too large: this one is stored without loss
    sections = [torch.frombuffer(bytearray(codec.encode(layer, n)), dtype=torch.uint8) for n, layer in enumerate(kv)]
    buffer = torch.cat(sections)
    views = list(buffer.split([len(section) for section in sections]))
    whole = codec.decode(views, kv.dtype, tuple(kv.shape[1:]))
    for number, section in enumerate(sections):
        alone = codec.decode([section], kv.dtype, tuple(kv.shape[1:]), number)[0]
        assert torch.equal(whole[number].view(torch.uint8), alone.view(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_read_from_its_own_bytes_alone(name, tmp_path):
    codec, profile = codec_for(name, dataclasses.replace(PROFILE, layers=3))
    written = record(tokens=5, profile=profile)
    data = b"".join(encode(written, codec))
    whole = decode(to_buffer(data), written.key, profile, codec)
    assert isinstance(whole, KVRecord)
    store = FolderStore(tmp_path)
    store.put("x", [data])
    asked: list[tuple[int, int]] = []

    def read_into(buffer, offset):
        asked.append((offset, len(buffer)))
        return store.read_into("x", buffer, offset)

    opened = open_layers(read_into, len(data), written.key, profile, codec)
    assert isinstance(opened, Layers)
    assert opened.token_ids() == written.token_ids
    for number in (2, 0, 1):
        asked.clear()
        found = opened.layer(number)
        assert torch.equal(found.view(torch.uint8), whole.kv[number].contiguous().view(torch.uint8))
        assert asked == [(opened.start + opened.sections[1 + number].offset, opened.sections[1 + number].length)]


@pytest.mark.parametrize("name", NAMES)
def test_damage_to_a_layer_spoils_that_layer_only(name):
    codec, profile = codec_for(name, PROFILE)
    written = record(profile=profile)
    data = bytearray(b"".join(encode(written, codec)))
    view = memoryview(data)

    def read_into(buffer, offset):
        part = view[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    opened = open_layers(read_into, len(data), written.key, profile, codec)
    assert isinstance(opened, Layers)
    data[opened.start + opened.sections[2].offset] ^= 1
    assert opened.layer(1) is Miss.DAMAGED
    assert isinstance(opened.layer(0), torch.Tensor)
    assert opened.token_ids() == written.token_ids


def test_a_stream_of_an_object_that_is_not_whole_is_a_miss_at_its_opening():
    written = record()
    data = b"".join(encode(written))

    def open_cut(content: bytes, size: int):
        def read_into(buffer, offset):
            part = content[offset : offset + len(buffer)]
            buffer[: len(part)] = part
            return len(part)

        return open_layers(read_into, size, written.key, written.profile)

    for length in range(len(data)):
        assert open_cut(data[:length], length) is Miss.DAMAGED, length
        assert open_cut(data[:length], len(data)) is Miss.DAMAGED, length
    for position in [*range(32), *range(len(data) - 32, len(data))]:
        flipped = bytearray(data)
        flipped[position] ^= 1
        assert isinstance(open_cut(bytes(flipped), len(data)), Miss), position


# --- golden objects ---


@pytest.mark.parametrize("name", [*NAMES, "transform-2", "transform-3"])  # "transform": sections of kind 1
def test_objects_of_version_1_are_read_for_ever(name):
    data = (GOLDEN / f"kv-object-1-{name}.bin").read_bytes()
    numbers = (GOLDEN / f"kv-object-1-{name}.values").read_bytes()
    codec, profile = codec_for(name.partition("-")[0], PROFILE)
    if name.startswith("transform"):
        stored = (GOLDEN / "basis-1.bin").read_bytes()
        codec = Transform(Basis.from_bytes(stored, hashlib.sha256(stored).hexdigest()))
        profile = dataclasses.replace(PROFILE, codec=codec.name)
    written = record(profile=profile)
    found = decode(to_buffer(data), written.key, profile, codec)
    assert isinstance(found, KVRecord)
    assert found.token_ids == written.token_ids
    expected = torch.frombuffer(bytearray(numbers), dtype=torch.bfloat16).view(found.kv.shape)
    assert torch.allclose(found.kv.float(), expected.float(), rtol=2**-7, atol=0)  # one rounding of a sum, whoever adds it
