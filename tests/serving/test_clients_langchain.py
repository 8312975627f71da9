"""`langchain-openai`, unmodified: chat, streamed, with tools and structured answers, and both ways in which it embeds."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from api_kit import Site

tiktoken = pytest.importorskip("tiktoken")
langchain_openai = pytest.importorskip("langchain_openai")


@pytest.fixture
def site_with_text(site: Site) -> Site:
    site.corpus_of("handbook", {"terms.txt": "Invoices are due after thirty days."})
    return site


def chat(site: Site, **extra: Any) -> Any:
    return langchain_openai.ChatOpenAI(
        model="echo-1@handbook", base_url=f"{site.url}/v1", api_key=site.admin_key, max_retries=0, **extra
    )


def test_chat_answers_streams_and_counts(site_with_text: Site) -> None:
    asked = [("system", "Be kind."), ("human", "invoices due")]
    answer = chat(site_with_text, temperature=0.5, max_tokens=20, seed=3, stop=["x"], n=1).invoke(asked)
    assert answer.content == "[1] invoices due"
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    pieces = list(chat(site_with_text, stream_usage=True).stream(asked))
    assert "".join(piece.content for piece in pieces) == "[1] invoices due"
    assert sum(piece.usage_metadata["total_tokens"] for piece in pieces if piece.usage_metadata) > 0


def test_chat_by_the_responses_api(site_with_text: Site) -> None:
    answer = chat(site_with_text, use_responses_api=True).invoke("invoices due")
    assert answer.text == "[1] invoices due"


def test_tools_are_bound_and_called(site_with_text: Site) -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    site_with_text.engine.answer = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    answer = chat(site_with_text).bind_tools([add]).invoke("what is 1 + 2?")
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 1, "b": 2})]


def test_a_structured_answer_is_read(site_with_text: Site) -> None:
    schema = {"title": "person", "type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    site_with_text.engine.answer = '{"name": "Ann"}'
    assert chat(site_with_text).with_structured_output(schema, method="json_schema").invoke("who?") == {"name": "Ann"}


def embeddings(site: Site, **extra: Any) -> Any:
    return langchain_openai.OpenAIEmbeddings(
        model="any", base_url=f"{site.url}/v1", api_key=site.admin_key, max_retries=0, **extra
    )


@pytest.fixture
def cl100k(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of its form, with a few words in it, for client and server: OpenAI's own is not to be had here."""
    words = [b"words", b" in", b" the", "größe".encode(), b"text"]
    grown = [word[:size] for word in words for size in range(2, len(word) + 1)]
    ranks = {token: id for id, token in enumerate(dict.fromkeys([*(bytes([n]) for n in range(256)), *grown]))}
    made = tiktoken.Encoding("cl100k_base", pat_str=r" ?\S+|\s+", mergeable_ranks=ranks, special_tokens={})
    monkeypatch.setitem(tiktoken.registry.ENCODINGS, "cl100k_base", made)
    lines = [base64.b64encode(token) + b" %d\n" % id for token, id in ranks.items()]
    Path(site.parts.settings.data_dir, "cl100k_base.tiktoken").write_bytes(b"".join(lines))


@pytest.mark.usefixtures("cl100k")
def test_embeddings_by_token_ids_are_those_of_the_text(site: Site) -> None:
    texts = ["words in the text größe 你好", "text"]
    by_ids = embeddings(site).embed_documents(texts)
    by_text = embeddings(site, check_embedding_ctx_length=False).embed_documents(texts)
    np.testing.assert_allclose(by_ids, by_text, atol=1e-6)
    np.testing.assert_allclose(by_text, site.parts.embedder.embed(texts), atol=1e-6)
    assert embeddings(site).embed_query("text") == pytest.approx(by_text[1], abs=1e-6)


def test_token_ids_without_their_table_are_refused_with_the_way_out(site: Site) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False") as refused:
        site.client().embeddings.create(model="any", input=[[1, 2]])
    assert (refused.value.param, refused.value.code) == ("input", "token_ids_not_served")


@pytest.mark.usefixtures("cl100k")
def test_a_token_id_that_is_none_is_refused(site: Site) -> None:
    import openai

    for wrong in ([10**6], [[-1]]):
        with pytest.raises(openai.BadRequestError, match="no token"):
            site.client().embeddings.create(model="any", input=wrong)
