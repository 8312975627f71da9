"""`langchain-openai`, unmodified: chat, streamed, with tools and structured answers, and both ways in which it embeds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import langchain_openai
import numpy as np
import openai
import pytest
import tiktoken
from api_kit import Site
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from promised import missing

from serving.api import token_ids
from storage.errors import UserError


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
def cl100k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client finds OpenAI's own table where it would have kept it after fetching it."""
    try:
        kept = token_ids.table_file(tmp_path)
    except UserError as error:
        missing("token-table", str(error))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(kept.parent))


TEXTS = ["words in the text größe 你好 \U0001f980", "text", "<|endoftext|> is text", " " * 9 + "\n\tif x:\r\n"]


@pytest.mark.usefixtures("cl100k")
def test_embeddings_as_langchain_asks_for_them_by_default_are_those_of_the_text(site: Site) -> None:
    by_ids = embeddings(site).embed_documents(TEXTS)
    by_text = embeddings(site, check_embedding_ctx_length=False).embed_documents(TEXTS)
    np.testing.assert_allclose(by_ids, by_text, atol=1e-6)
    np.testing.assert_allclose(by_text, site.parts.embedder.embed(TEXTS), atol=1e-6)
    assert embeddings(site).embed_query("text") == pytest.approx(by_text[1], abs=1e-6)


@pytest.mark.usefixtures("cl100k")
def test_a_text_that_langchain_sends_in_pieces_becomes_one_vector(site: Site) -> None:
    long = "The berth fee is forty crowns. " * 2000
    assert len(tiktoken.get_encoding("cl100k_base").encode(long)) > 8191, "more than a request of OpenAI's may have"
    [vector] = embeddings(site).embed_documents([long])
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    assert np.dot(vector, site.parts.embedder.embed(["The berth fee is forty crowns."])[0]) > 0.9


@pytest.mark.usefixtures("cl100k")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text())
def test_any_text_survives_the_way_through_its_token_ids(tmp_path: Path, text: str) -> None:
    ids = tiktoken.get_encoding("cl100k_base").encode(text, disallowed_special=())
    assert token_ids.texts_of(tmp_path, [ids]) == [text]


def test_token_ids_without_their_table_are_refused_with_the_way_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_ids, "PACKAGE", "no-such-package")
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False") as refused:
        site.client().embeddings.create(model="any", input=[[1, 2]])
    assert (refused.value.param, refused.value.code) == ("input", "token_ids_not_served")


@pytest.mark.usefixtures("cl100k")
def test_a_token_id_that_is_none_is_refused(site: Site) -> None:
    for wrong in ([10**6], [[-1]]):
        with pytest.raises(openai.BadRequestError, match=r"no token|token ids"):
            site.client().embeddings.create(model="any", input=wrong)


@pytest.mark.usefixtures("cl100k")
def test_a_table_in_the_data_folder_serves_where_the_package_is_not_installed(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packaged, data = token_ids.table_file(tmp_path), site.parts.settings.data_dir
    monkeypatch.setattr(token_ids, "PACKAGE", "no-such-package")
    token_ids.install_table(packaged, data)
    assert token_ids.table_file(data).parent == data
    np.testing.assert_allclose(embeddings(site).embed_documents(TEXTS), site.parts.embedder.embed(TEXTS), atol=1e-6)
    assert [path.name for path in data.glob("*.part")] == []


@pytest.mark.parametrize("spoil", [lambda table: table[:-1], lambda table: table + b"\n", lambda _: b"eA== 0\n", lambda _: b""])
@pytest.mark.usefixtures("cl100k")
def test_what_is_not_the_table_to_the_byte_is_not_installed_and_not_believed(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bytes], bytes]
) -> None:
    data = site.parts.settings.data_dir
    wrong = tmp_path / "wrong"
    wrong.write_bytes(spoil(token_ids.table_file(tmp_path).read_bytes()))
    with pytest.raises(UserError, match="is not cl100k_base"):
        token_ids.install_table(wrong, data)
    assert not (data / token_ids.NAME).exists()
    monkeypatch.setattr(token_ids, "PACKAGE", "no-such-package")
    (data / token_ids.NAME).write_bytes(wrong.read_bytes())
    with pytest.raises(openai.BadRequestError, match="is not cl100k_base"):
        site.client().embeddings.create(model="any", input=[[1, 2]])
