"""A second look at what was found: a tiny cross-encoder with random weights, and the cosine where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_library import HashedWords, Library
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from retrieval.reranker import CosineReranker, CrossEncoderReranker
from retrieval.search import Retriever
from storage.errors import UserError
from storage.types import indexed_text

WORDS = "[PAD] [UNK] [CLS] [SEP] kiwi fruit bird fig tree the a of green".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-cross-encoder"
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=64, num_labels=1, initializer_range=0.5,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


TEXTS = ["kiwi fruit", "kiwi bird", "the green fig tree of a kiwi", "fig"]


def test_scores_are_between_nothing_and_one_and_do_not_depend_on_the_neighbours(folder: Path) -> None:
    reranker = CrossEncoderReranker(str(folder))
    together = reranker.scores("kiwi", TEXTS)
    assert all(0 <= score <= 1 for score in together)
    assert len(set(together)) == len(TEXTS)
    assert together == pytest.approx([reranker.scores("kiwi", [text])[0] for text in TEXTS], abs=1e-5)
    assert reranker.scores("fig", TEXTS) != pytest.approx(together, abs=1e-4)  # the query counts
    assert reranker.scores("kiwi", []) == []
    assert reranker.name == "tiny-cross-encoder"


def test_a_search_with_a_reranker_is_in_its_order_and_within_the_askers_rights(library: Library, folder: Path) -> None:
    for number, content in enumerate(TEXTS):
        library.put("vs_1", f"d{number}", content)
    library.put("vs_1", "closed", "kiwi fruit bird", access=["ann"])
    reranker = CrossEncoderReranker(str(folder))
    retriever = Retriever(library.catalogue, library.index, library.embedder, reranker)
    found = retriever.search(tenant_id="t1", corpus_ids=["vs_1"], query="kiwi fig", top_k=4)
    scores = reranker.scores("kiwi fig", [indexed_text(c.text, c.headings, c.path) for c in found])
    assert [chunk.score for chunk in found] == pytest.approx(scores, abs=1e-5)
    assert scores == sorted(scores, reverse=True)
    assert sorted(chunk.text for chunk in found) == sorted(TEXTS)


def test_a_folder_that_is_no_cross_encoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cross-encoder"):
        CrossEncoderReranker(str(tmp_path))


def test_without_one_the_cosine_ranks_and_the_name_says_so() -> None:
    embedder = HashedWords()
    reranker = CosineReranker(embedder)
    assert reranker.name == "cosine:hashed@1"
    scores = reranker.scores("kiwi fruit", TEXTS)
    assert np.argmax(scores) == 0
    assert scores[0] == pytest.approx(1)
    assert all(0 <= score <= 1 for score in scores)
