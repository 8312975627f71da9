"""Chunks that vLLM compiles: the same objects as our own reader's."""

from __future__ import annotations

import time

import pytest
import torch
from vllm_kit import VLLM, Installation

from storage.types import KVRecord, Miss

pytestmark = pytest.mark.timeout(1500)  # see test_connector_vllm
CLOSE = 1e-4


def test_a_chunk_compiled_by_vllm_is_the_one_that_our_reader_compiles(vllm: VLLM, installation: Installation) -> None:
    reader = installation.reader
    ids = [tuple(range(20 + n, 20 + n + length)) for n, length in enumerate((7, 64, 150))]
    keys = [f"{number:064x}" for number in (1, 2, 3)]
    answers = vllm.run(*map(installation.saving, ids, keys))
    found = [eventually(installation, key) for key in keys]
    for record, chunk, expected in zip(found, ids, reader.compile(ids), strict=True):
        assert record.token_ids == chunk
        assert float((record.kv - expected).abs().max()) < CLOSE
        assert float(expected.abs().max()) > 1  # so that the bound says something
    assert all(answer.told.saved in ([], [key]) for answer, key in zip(answers, keys, strict=True))  # a disk may be slow
    assert not any(answer.told.refused for answer in answers)


def test_a_forged_order_stores_nothing(vllm: VLLM, installation: Installation) -> None:
    request = installation.saving(tuple(range(10, 50)), "e" * 64)
    request["params"]["preread"]["saves"][0][2] = "f" * 64
    [answer] = vllm.run(request)
    assert "not signed" in answer.told.refused
    assert installation.store.get("f" * 64, installation.reader.profile) is Miss.ABSENT


def eventually(installation: Installation, key: str) -> KVRecord:
    """The record, as soon as it is written."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        if isinstance(found := installation.store.get(key, installation.reader.profile), KVRecord):
            assert not torch.isnan(found.kv).any()
            return found
        time.sleep(0.05)
    raise AssertionError("it was not stored")
