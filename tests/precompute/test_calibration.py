"""The basis of the transform codec: made once for a model, found again by every process, and good for its KV."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from fixtures_models import FAMILIES, SENTENCES, Models

from precompute import calibration
from precompute.calibration import STEPS, calibrate, use_codec
from precompute.reader import Reader
from storage.codecs import CODECS
from storage.codecs.shelf import CodecShelf
from storage.codecs.transform import Transform
from storage.folder import FolderStore
from storage.keys import kv_key
from storage.kvstore import KVStore
from storage.types import CODEC_NAMES, KVRecord


def reader(models: Models, family: str = "llama") -> Reader:
    return Reader(models.folder(family), dtype="float32", filler=1)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_a_basis_that_makes_its_chunks_small(tiny_models: Models, family: str, tmp_path: Path) -> None:
    read = reader(tiny_models, family)
    store = KVStore(FolderStore(tmp_path))
    use_codec(read, "transform", store.codecs)
    ids = tuple(read.tokenizer.encode(" ".join(SENTENCES)))
    [kv] = read.compile([ids])
    written = KVRecord(kv_key(read.profile, ids, "g", b"s"), read.profile, ids, kv)
    size = store.put(written)
    found = store.get(written.key, read.profile)
    assert isinstance(found, KVRecord)
    eighth = sum(len(CODECS["int8"].encode(layer)) for layer in kv)
    assert size < 0.8 * eighth
    off = (found.kv - kv).square().mean((2, 3, 4)).sqrt() / kv.std((2, 3, 4))
    assert 0 < float(off[:, 1].max()) < 0.15  # 0.4 of the deviation, over the square root of 12, and rounding
    assert 0 < float(off[:, 0].max()) < 0.5


def test_a_step_is_what_a_query_sees_of_it(tiny_models: Models) -> None:
    """K's error is measured in logits: with twice the step the logits of real queries are twice as far off."""
    read = reader(tiny_models)
    kv, queries, _ = calibration._read(read)
    off = []
    for step in (0.4, 0.8):
        basis = calibrate(read, step, 0.4)
        k = kv[1, 0].cpu()
        error = (basis.k_components(k, 1).round() @ basis.matrices[1].float()) + basis.means[1, 0].unsqueeze(-2) - k
        q = torch.cat(queries[1], 1).view(read.kv_heads, -1, read.head_dim)
        off.append(float((q @ error.transpose(1, 2)).square().mean().sqrt()))
    assert off == pytest.approx([0.4 / 12**0.5, 0.8 / 12**0.5], rel=0.2)


def test_a_second_process_finds_the_basis_of_the_first(tiny_models: Models, tmp_path: Path, monkeypatch) -> None:
    first, second = reader(tiny_models), reader(tiny_models)
    use_codec(first, "transform", CodecShelf(FolderStore(tmp_path)))

    def unexpected(*_: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(calibration, "calibrate", unexpected)
    use_codec(second, "transform", CodecShelf(FolderStore(tmp_path)))
    assert first.profile == second.profile
    assert first.profile.codec.startswith("transform:")


def test_a_rule_may_name_a_transform_codec_whose_basis_is_made_when_it_is_first_asked_for(
    tiny_models: Models, tmp_path: Path
) -> None:
    first, second, objects = reader(tiny_models), reader(tiny_models), FolderStore(tmp_path)
    for read in (first, second):
        use_codec(read, "raw", CodecShelf(objects))
    assert first.stored_as(None) == first.profile == first.stored_as("raw")
    assert list(objects.list("basis")) == [], "nobody has asked"
    named = first.stored_as("transform")
    assert isinstance(CodecShelf(objects).find(named.codec), Transform), "its basis is in the store"
    assert second.stored_as("transform") == named == dataclasses.replace(first.profile, codec=named.codec)
    assert first.stored_as("transform8") != named
    third = reader(tiny_models)
    use_codec(third, "transform", CodecShelf(objects))
    assert third.profile == named, "the same as where it is the default"


@pytest.mark.parametrize("what", ["basis", "basis-of"])
@pytest.mark.parametrize("damage", [b"", b"x" * 64])
def test_a_damaged_basis_or_note_is_made_again_and_is_the_same(
    tiny_models: Models, tmp_path: Path, what: str, damage: bytes
) -> None:
    first, second = reader(tiny_models), reader(tiny_models)
    objects = FolderStore(tmp_path)
    use_codec(first, "transform", CodecShelf(objects))
    [name] = objects.list(what + "/")
    whole = objects.size(name)
    objects.put(name, [damage])
    use_codec(second, "transform", CodecShelf(objects))
    assert second.profile == first.profile
    assert objects.size(name) == whole
    assert isinstance(CodecShelf(objects).find(first.profile.codec), Transform)


def test_every_codec_and_every_basis_has_keys_of_its_own(tiny_models: Models, tmp_path: Path) -> None:
    profiles = []
    for family in ("llama", "qwen2"):
        for name in CODEC_NAMES:
            read = reader(tiny_models, family)
            use_codec(read, name, CodecShelf(FolderStore(tmp_path)))
            profiles.append(dataclasses.replace(profiles[0] if profiles else read.profile, codec=read.profile.codec))
    # Of one model, so that nothing but the codec tells them apart: two bases by two sizes, and the table's once.
    assert len({kv_key(profile, (1, 2), "g", b"s") for profile in profiles}) == len(CODECS) + 2 * len(STEPS)


def test_calibration_repeats_itself_and_follows_the_steps(tiny_models: Models) -> None:
    read = reader(tiny_models)
    one, two = calibrate(read, 0.8, 0.4), calibrate(read, 0.8, 0.4)
    assert one.digest == two.digest
    coarse = calibrate(read, 1.6, 0.8)
    assert torch.allclose(coarse.steps, 2 * one.steps)
    assert coarse.digest != one.digest


SECOND = """
import sys
from pathlib import Path
from precompute import calibration
from precompute.reader import Reader
from storage.codecs.shelf import CodecShelf
from storage.objects import open_store

folder, objects, step, options = sys.argv[1], sys.argv[2], float(sys.argv[3]), dict(each.split("=", 1) for each in sys.argv[4:])
read = Reader(Path(folder), dtype="float32", filler=1)
make = calibration.calibrate

def when_both_are_ready(reader, *steps):
    basis = make(reader, step, 0.4)  # another machine's rounding makes another basis
    print("made", flush=True)
    sys.stdin.readline()
    return basis

calibration.calibrate = when_both_are_ready
calibration.use_codec(read, "transform", CodecShelf(open_store(objects, **options)))
print(read.profile.codec, flush=True)
"""


def _agree(tiny_models: Models, objects: str, **options: str) -> set[str]:
    """The codecs of two processes, each of which has made a basis of its own before either has noted one."""
    command = [sys.executable, "-c", SECOND, str(tiny_models.folder("llama")), objects]
    tail = [f"{name}={value}" for name, value in options.items()]
    environment = os.environ | {"PYTHONPATH": str(Path(calibration.__file__).parent.parent)}
    both = [
        subprocess.Popen([*command, step, *tail], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for step in ("0.5", "0.6")
    ]
    try:
        assert [process.stdout.readline() for process in both] == ["made\n", "made\n"]  # type: ignore[union-attr]
        for process in both:
            process.stdin.write("\n")  # type: ignore[union-attr]
            process.stdin.flush()  # type: ignore[union-attr]
        found = [process.communicate(timeout=120)[0].strip() for process in both]
    finally:
        for process in both:
            process.kill()
            process.wait()
    assert all(name.startswith("transform:") for name in found)
    return set(found)


def test_two_processes_that_make_a_basis_at_once_in_a_folder_use_one(tiny_models: Models, tmp_path: Path) -> None:
    assert len(_agree(tiny_models, str(tmp_path))) == 1


@pytest.mark.services
@pytest.mark.slow
def test_two_processes_that_make_a_basis_at_once_in_s3_use_one(tiny_models: Models, s3_server) -> None:
    keys = {"s3_access_key": s3_server.access_key, "s3_secret_key": s3_server.secret_key}
    store = f"s3://conformance/{uuid.uuid4().hex}"
    assert len(_agree(tiny_models, store, s3_endpoint=s3_server.endpoint, **keys)) == 1


def test_a_note_that_stands_is_kept_and_one_that_leads_nowhere_is_replaced(tmp_path: Path, tiny_models: Models) -> None:
    shelf, read = CodecShelf(FolderStore(tmp_path)), reader(tiny_models)
    one, two = (shelf.add(calibrate(read, step, 0.4)) for step in (0.5, 0.6))
    for codec in (one, two):
        shelf.note("ab" * 32, codec)
        assert shelf.noted("ab" * 32) is one
    FolderStore(tmp_path).delete(f"basis/{one.basis.digest}")
    later = CodecShelf(FolderStore(tmp_path))
    later.note("ab" * 32, two)
    found = later.noted("ab" * 32)
    assert isinstance(found, Transform)
    assert found.name == two.name
