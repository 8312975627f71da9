"""The embedded model itself: small, but real."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from retrieval.embedder import SentenceEmbedder, find_model
from storage.errors import FileError, UserError
from storage.types import TextEmbedder


@pytest.fixture(scope="module")
def embedder() -> SentenceEmbedder:
    return SentenceEmbedder(batch=4)


TEXTS = [
    "Parental leave lasts twenty weeks.",
    "word " * 400,
    "",
    "Trains are booked in second class.",
    "猫が好き",
    "a",
    "b",
]


def test_vectors_are_unit_and_in_the_order_of_the_texts(embedder: TextEmbedder) -> None:
    together = np.array(embedder.embed(TEXTS))
    assert together.shape == (len(TEXTS), embedder.dimensions) == (len(TEXTS), 384)
    assert np.linalg.norm(together, axis=1) == pytest.approx(1, abs=1e-5)
    alone = np.array([embedder.embed([text])[0] for text in TEXTS])
    assert np.abs(together - alone).max() < 1e-5


def test_vectors_are_those_of_sentence_transformers(embedder: SentenceEmbedder) -> None:
    from sentence_transformers import SentenceTransformer

    reference = SentenceTransformer(str(find_model("embedded")), device="cpu", local_files_only=True)
    expected = reference.encode(TEXTS, show_progress_bar=False)
    assert np.abs(np.array(embedder.embed(TEXTS)) - expected).max() < 1e-5


def test_meaning_is_near_meaning(embedder: TextEmbedder) -> None:
    leave, train, question = np.array(
        embedder.embed([TEXTS[0], TEXTS[3], "How much time off do new parents get?"])
    )
    assert question @ leave > question @ train + 0.2


def test_no_text_takes_its_neighbours_down(embedder: SentenceEmbedder) -> None:
    poison = ["fine", "\ud800 lone", "\x00", "x" * 3_000_000, "é" * 100_000, "\u202e" * 500]
    vectors = np.array(embedder.embed(poison))
    assert np.isfinite(vectors).all()
    assert np.abs(vectors[0] - embedder.embed(["fine"])[0]).max() < 1e-5


def test_a_text_the_model_fails_on_is_left_blank_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    embedder = SentenceEmbedder(batch=3)
    features = embedder._features
    (poison,) = embedder._pieces.ids(["poison"])

    def fail_on_poison(batch: list[list[int]]) -> dict:
        if any(poison[1] in one for one in batch):
            raise RuntimeError("kernel")
        return features(batch)

    monkeypatch.setattr(embedder, "_features", fail_on_poison)
    with caplog.at_level(logging.WARNING):
        good, bad, also_good = embedder.embed(["one", "poison", "two"])
    assert bad == pytest.approx(embedder.embed([""])[0], abs=1e-5)
    assert good == pytest.approx(embedder.embed(["one"])[0], abs=1e-5)
    assert also_good == pytest.approx(embedder.embed(["two"])[0], abs=1e-5)
    assert len(caplog.records) == 1
    assert "poison" not in caplog.text
    with pytest.raises(FileError) as refused:  # a broken model is not papered over
        embedder.embed(["poison", "poison pill"])
    assert refused.value.code == "embedding_failed"


def test_tokens_are_counted_as_the_model_sees_them(embedder: TextEmbedder) -> None:
    assert embedder.max_tokens == 256
    assert embedder.count_tokens("") == 2
    assert embedder.count_tokens("word " * 400) == 402


def test_identity_follows_the_content_and_not_the_place(embedder: SentenceEmbedder, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(find_model("embedded"), copy)
    fingerprint = embedder.identity.split("@")[1]
    assert SentenceEmbedder(str(copy)).identity == f"model@{fingerprint}"
    with next(copy.rglob("*.safetensors")).open("ab") as file:
        file.write(b" ")
    assert SentenceEmbedder(str(copy)).identity != f"model@{fingerprint}"
    assert SentenceEmbedder(str(copy)).cutting == embedder.cutting, "other weights cut texts the same way"
    with (copy / "tokenizer.json").open("a") as file:
        file.write(" ")
    assert SentenceEmbedder(str(copy)).identity != f"model@{fingerprint}"
    retokenized = SentenceEmbedder(str(copy)).cutting
    assert retokenized != embedder.cutting
    (copy / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    assert SentenceEmbedder(str(copy)).cutting != retokenized
    assert len(embedder.identity) < 64


def test_half_precision_is_another_identity_and_nearly_the_same_vectors(embedder: TextEmbedder) -> None:
    half = SentenceEmbedder(batch=4, dtype="bfloat16")
    assert half.identity == f"{embedder.identity}:bfloat16"
    exact, rounded = np.array(embedder.embed(TEXTS)), np.array(half.embed(TEXTS))
    assert np.abs(np.linalg.norm(rounded, axis=1) - 1).max() < 1e-5
    assert (exact * rounded).sum(1).min() > 0.999
    assert not np.array_equal(exact, rounded)


def test_vectors_are_unit_also_where_the_model_does_not_see_to_it(
    embedder: TextEmbedder, tmp_path: Path
) -> None:
    for entry in find_model("embedded").iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").unlink()
    (tmp_path / "modules.json").write_text(json.dumps(modules[:2]))  # without the last, which normalises
    expected = embedder.embed(TEXTS[:1])[0]
    assert SentenceEmbedder(str(tmp_path)).embed(TEXTS[:1])[0] == pytest.approx(expected, abs=1e-5)


def test_threads_share_one_embedder() -> None:
    embedder = SentenceEmbedder()
    results: dict[int, list[float]] = {}

    def work(number: int) -> None:
        for _ in range(3):
            results[number] = embedder.embed([TEXTS[number]])[0]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = embedder.embed(TEXTS[:6])
    assert all(results[number] == pytest.approx(expected[number], abs=1e-5) for number in range(6))


def test_a_folder_that_is_no_model_is_refused_with_what_is_wanted(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent", Path("sentence-transformers/all-MiniLM-L6-v2")):
        with pytest.raises(UserError, match="safetensors"):
            SentenceEmbedder(str(folder))


def test_a_question_takes_one_thread_and_changes_nobody_elses(
    embedder: SentenceEmbedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    embedder.embed(["a"])
    features, seen = embedder._features, []
    monkeypatch.setattr(embedder, "_features", lambda batch: (seen.append(torch.get_num_threads()), features(batch))[1])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        embedder.embed(["How long is parental leave?"])
        embedder.embed(["word " * 200])
        assert seen == [1, 2]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
