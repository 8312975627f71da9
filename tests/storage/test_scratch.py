"""The memory that decoding uses again."""

from __future__ import annotations

import contextlib
import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from codec_samples import codec_for
from kv_samples import PROFILE, record

from storage.codecs import scratch as scratch_module
from storage.codecs import transform as transform_module
from storage.codecs.scratch import IDLE, KEPT, Scratch, ScratchPool


def fail_in(scratch: Scratch) -> None:
    with scratch.room():
        scratch.take((8,), torch.int8)
        raise ValueError("damage")


def test_arrays_taken_together_share_no_byte():
    scratch = Scratch()
    with scratch.room():
        shapes = [(3, 5), (1,), (7, 2, 3), (64,)]
        taken = [scratch.take(shape, dtype) for shape in shapes for dtype in (torch.int8, torch.bfloat16, torch.float32)]
        for number, each in enumerate(taken):
            each.fill_(number)
        assert [set(each.flatten().tolist()) for each in taken] == [{number} for number in range(len(taken))]
        assert all(each.data_ptr() % 64 == 0 for each in taken)


def test_what_a_room_gave_is_given_again_and_what_was_taken_before_it_is_not():
    scratch = Scratch()
    with scratch.room():
        kept = scratch.take((100,), torch.int8).fill_(1)
        with scratch.room():
            first = scratch.take((100,), torch.int8).data_ptr()
        again = scratch.take((100,), torch.int8).fill_(2)
        assert again.data_ptr() == first
        assert kept.tolist() == [1] * 100


def test_memory_comes_back_when_the_work_in_a_room_fails():
    scratch = Scratch()
    with scratch.room():
        place = scratch.take((8,), torch.int8).data_ptr()
    with pytest.raises(ValueError, match="damage"):
        fail_in(scratch)
    with scratch.room():
        assert scratch.take((8,), torch.int8).data_ptr() == place


def test_what_is_larger_than_is_kept_is_fresh_and_nothing_is_kept_of_it():
    scratch = Scratch()
    with scratch.room():
        small = scratch.take((KEPT - 64,), torch.int8).fill_(1)
        large = scratch.take((KEPT,), torch.int8).fill_(2)
        rest = scratch.take((64,), torch.int8).fill_(3)
        assert rest.data_ptr() - small.data_ptr() == KEPT - 64
        assert set(small.tolist()) == {1}
        assert large.numel() == KEPT
    assert scratch.take((0, 3), torch.float32).shape == (0, 3)


def test_two_decodings_at_once_share_nothing_and_the_next_one_uses_their_memory_again():
    pool = ScratchPool()
    with pool.borrowed() as one, pool.borrowed() as two:
        places = {scratch.take((8,), torch.int8).data_ptr() for scratch in (one, two)}
        assert len(places) == 2
    with pool.borrowed() as scratch, pytest.raises(ValueError, match="damage"):
        fail_in(scratch)
    with ThreadPoolExecutor(1) as threads, pool.borrowed() as first:
        second = threads.submit(lambda: pool.borrowed().__enter__().take((8,), torch.int8).data_ptr()).result()
        assert {first.take((8,), torch.int8).data_ptr(), second} == places


@pytest.mark.parametrize("kept", [64, KEPT])
def test_what_was_decoded_does_not_change_when_the_memory_is_used_again(kept, monkeypatch):
    """Nor does it depend on what was decoded before, whole or damaged, or on whether the memory is large enough."""
    monkeypatch.setattr(scratch_module, "KEPT", kept)
    monkeypatch.setattr(transform_module, "_POOL", ScratchPool())
    codec, profile = codec_for("transform", dataclasses.replace(PROFILE, layers=3))
    one, two = record(tokens=40, profile=profile).kv, -record(tokens=17, profile=profile).kv
    sections = [
        [torch.frombuffer(bytearray(codec.encode(layer, number)), dtype=torch.uint8) for number, layer in enumerate(kv)]
        for kv in (one, two)
    ]
    shapes = [tuple(kv.shape[1:]) for kv in (one, two)]
    first = codec.decode(sections[0], one.dtype, shapes[0])
    before = first.clone()
    codec.decode(sections[1], two.dtype, shapes[1])
    with pytest.raises(ValueError, match="section"):
        codec.decode([sections[0][0], sections[0][1][:9]], one.dtype, shapes[0])
    assert torch.equal(first, before)
    assert torch.equal(codec.decode(sections[0], one.dtype, shapes[0]), before)


def test_the_pool_keeps_no_more_than_a_few():
    pool = ScratchPool()
    with contextlib.ExitStack() as stack:
        for _ in range(2 * IDLE):
            stack.enter_context(pool.borrowed())
    assert len(pool._idle) == IDLE


def test_a_decoding_that_fails_gives_its_memory_back():
    pool = ScratchPool()
    with pytest.raises(ValueError, match="damage"), pool.borrowed() as scratch:
        fail_in(scratch)
    with pool.borrowed() as again:
        assert again is scratch


def test_many_threads_decode_the_same_as_one():
    codec, profile = codec_for("transform", dataclasses.replace(PROFILE, layers=3))
    work = []
    for tokens in range(1, 25):
        kv = record(tokens=tokens, profile=profile).kv
        sections = [torch.frombuffer(bytearray(codec.encode(layer, n)), dtype=torch.uint8) for n, layer in enumerate(kv)]
        work.append((sections, kv.dtype, tuple(kv.shape[1:])))
    alone = [codec.decode(*each) for each in work]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            found = list(pool.map(lambda each: codec.decode(*each), work))
            assert all(map(torch.equal, found, alone))
