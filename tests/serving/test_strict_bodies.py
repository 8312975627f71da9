"""A field that is misspelt is refused by its name, in plain words; what OpenAI's clients send and changes nothing is let be."""

from __future__ import annotations

from typing import Any

import pytest
from api_kit import Site
from openai.types import (
    completion_create_params,
    embedding_create_params,
    upload_complete_params,
    upload_create_params,
    vector_store_create_params,
    vector_store_search_params,
    vector_store_update_params,
)
from openai.types.chat import chat_completion_stream_options_param
from openai.types.chat import completion_create_params as chat_create_params
from openai.types.responses import file_search_tool_param, response_create_params
from openai.types.vector_stores import file_batch_create_params, file_create_params, file_update_params

from serving.api import (
    chat_request,
    completions,
    embeddings,
    file_search,
    responses_request,
    sampling,
    uploads,
    vector_store_files,
    vector_stores,
)
from serving.api.bodies import Body

FILE = {"file_id": "file-1"}
MISSPELT: list[tuple[str, dict[str, Any], str, str]] = [
    ("/v1/vector_stores", {"name": "x", "file_id": ["a"]}, "file_id", "file_ids"),
    ("/v1/vector_stores/vs_1", {"nam": "x"}, "nam", "name"),
    ("/v1/vector_stores/vs_1/search", {"query": "x", "max_result": 3}, "max_result", "max_num_results"),
    ("/v1/vector_stores/vs_1/search", {"query": "x", "filter": {}}, "filter", "filters"),
    ("/v1/vector_stores/vs_1/search", {"query": "x", "ranking_options": {"score_treshold": 0.5}},
     "ranking_options.score_treshold", "score_threshold"),
    ("/v1/vector_stores/vs_1/files", {**FILE, "attribute": {}}, "attribute", "attributes"),
    ("/v1/vector_stores/vs_1/files/file-1", {"attributes": {}, "acess": []}, "acess", ""),
    ("/v1/vector_stores/vs_1/file_batches", {"files": [FILE, {**FILE, "atributes": {}}]}, "files.1.atributes", "attributes"),
    ("/v1/rerank", {"query": "x", "documents": ["a"], "topn": 1}, "topn", "top_n"),
    ("/v1/rerank", {"query": "x", "documents": [{"txt": "a"}]}, "documents.0.txt", "text"),
    ("/v1/embeddings", {"model": "x", "input": "a", "dimension": 3}, "dimension", "dimensions"),
    ("/v1/uploads", {"filename": "a", "bytes": 1, "purpose": "assistants", "mime_type": "x", "mime": ""}, "mime", "mime_type"),
    ("/v1/uploads/upload_1/complete", {"part_ids": [], "parts": []}, "parts", "part_ids"),
    ("/v1/corpora/vs_1/sync", {"manifest": [], "delete_mising": True}, "delete_mising", "delete_missing"),
    ("/v1/jobs/job-1/retry", {"onyl": "all"}, "onyl", "only"),
    ("/v1/sites/site-1/push", {"corpus": ["a"]}, "corpus", "corpora"),
    ("/retrieval", {"knowledge_id": "vs_1", "query": "x", "retrieval_setting": {"topk": 1}}, "retrieval_setting.topk", "top_k"),
]  # fmt: skip
CHAT = {"model": "echo-1", "messages": [{"role": "user", "content": "a question of some length"}]}
CHATS: list[tuple[dict[str, Any], str]] = [
    ({"preread": {"top_n": 3}}, "preread.top_n"),
    ({"preread": {"min_score": 2}}, "preread.min_score"),
    ({"preread": {"emphasis": {"terms/*": 2.0}}}, "preread.emphasis"),
    ({"preread": {"emphasis": {"doc-1": "much"}}}, "preread.emphasis.doc-1"),
    ({"tools": [{"type": "file_search", "vector_stores": ["vs_1"]}]}, "tools.0.vector_stores"),
    ({"tools": [{"type": "file_search", "max_num_results": 51}]}, "tools.0.max_num_results"),
    ({"tools": [{"type": "file_search", "max_num_results": "3x"}]}, "tools.0.max_num_results"),
    ({"tools": [{"type": "file_search", "vector_store_ids": "vs_1"}]}, "tools.0.vector_store_ids"),
    ({"tools": [{"type": "file_search", "filters": {"type": "equals", "key": "a", "value": 1}}]}, "tools.0.filters"),
    ({"tools": [{"type": "file_search", "ranking_options": {"hybrid_search": {}}}]}, "tools.0.ranking_options.hybrid_search"),
    ({"stream": True, "stream_options": {"include_use": True}}, "stream_options.include_use"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "meant"), MISSPELT)
def test_a_misspelt_field_is_refused_by_its_name(site: Site, path: str, body: dict[str, Any], param: str, meant: str) -> None:
    with site.http() as http:
        refused = http.post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["code"]) == (400, param, "unknown_parameter"), error
    assert f"Unknown parameter: {param!r}" in error["message"]
    assert not meant or f"did you mean {meant!r}?" in error["message"]


def test_so_it_is_in_a_chat(site: Site) -> None:
    with site.http() as http:
        for more, param in CHATS:
            refused = http.post("/v1/chat/completions", json={**CHAT, **more})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        assert not site.engine.requests


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/rerank", {"query": "x", "documents": ["a"], "return_documents": 0}, "return_documents"),
        ("/v1/uploads", {"filename": "a", "bytes": False, "purpose": "assistants", "mime_type": "x"}, "bytes"),
        ("/v1/vector_stores/vs_1/search", {"query": "x", "as_of": False}, "as_of"),
        ("/v1/vector_stores/vs_1/search", {"query": "x", "max_num_results": "3"}, "max_num_results"),
        ("/v1/tenants", {"id": "new", "tokens_per_day": False}, "tokens_per_day"),
        ("/v1/completions", {"model": "echo-1", "prompt": [-1]}, "prompt"),
        ("/v1/completions", {"model": "echo-1", "prompt": 0}, "prompt"),
        ("/v1/embeddings", {"model": "x", "input": 0}, "input"),
        ("/v1/responses", {"model": "echo-1", "input": [{"type": {}}]}, "input.0.type"),
        ("/v1/chat/completions", {**CHAT, "stream": 1}, "stream"),
    ],
)
def test_a_value_of_another_kind_is_refused_and_not_made_to_fit(site: Site, path: str, body: dict[str, Any], param: str) -> None:
    with site.http() as http:
        refused = http.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_a_form_has_no_unknown_fields_either(site: Site) -> None:
    with site.http() as http:
        for field, param in (("purpos", "purpos"), ("expires_after[anchor]", "expires_after")):
            refused = http.post("/v1/files", files={"file": ("a.txt", b"x")}, data={"purpose": "assistants", field: "x"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text
        assert http.get("/v1/files").json()["data"] == []


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        ({"query": 5}, "query: a text or a list is expected"),
        ({"query": ["x"] * 21}, "query: at most 20 items, not 21"),
        ({"query": "x", "max_num_results": "many"}, "max_num_results: a whole number is expected"),
        ({"query": "x", "filters": {"type": "equals", "key": "a", "value": 1}}, "eq, ne, gt, gte, lt, lte, in, nin, and, or"),
        ({"query": "x", "filters": {"type": "and", "filters": [{"type": "eq", "key": "a"}]}}, "has the fields key, type, value"),
        ({"query": "x", "ranking_options": {"ranker": "best"}}, "'none', 'auto' or 'default-2024-11-15'"),
        ({}, "query is missing"),
    ],
)
def test_a_refusal_is_in_plain_words(site: Site, sent: dict[str, Any], said: str) -> None:
    with site.http() as http:
        refused = http.post("/v1/vector_stores/vs_1/search", json=sent)
    message = refused.json()["error"]["message"]
    assert refused.status_code == 400
    assert said in message
    for word in ("constrained", "Input should", "validation", "function-", "instance of", "[type="):
        assert word not in message


def test_a_filter_on_an_attribute_that_nobody_has_finds_nothing(site: Site) -> None:
    corpus = site.corpus_of("handbook", {"a.txt": "invoices are due in March"})
    with site.http() as http:
        body = {"query": "invoices", "filters": {"type": "eq", "key": "nobody has it", "value": "x"}}
        assert http.post(f"/v1/vector_stores/{corpus}/search", json=body).json()["data"] == []


@pytest.mark.parametrize(
    ("sent", "served"),
    [
        (vector_store_create_params.VectorStoreCreateParams, vector_stores.NewStoreBody),
        (vector_store_update_params.VectorStoreUpdateParams, vector_stores.StoreBody),
        (vector_store_search_params.VectorStoreSearchParams, vector_stores.SearchBody),
        (vector_store_search_params.RankingOptions, file_search.RankingOptions),
        (file_search_tool_param.FileSearchToolParam, file_search.FileSearch),
        (file_search_tool_param.RankingOptions, file_search.RankingOptions),
        (completion_create_params.CompletionCreateParamsStreaming, completions.CompletionBody),
        (chat_create_params.CompletionCreateParamsStreaming, chat_request.ChatBody),
        (response_create_params.ResponseCreateParamsStreaming, responses_request.ResponsesBody),
        (chat_completion_stream_options_param.ChatCompletionStreamOptionsParam, sampling.StreamOptions),
        (response_create_params.StreamOptions, sampling.StreamOptions),
        (file_create_params.FileCreateParams, vector_store_files.AttachBody),
        (file_update_params.FileUpdateParams, vector_store_files.AttributesBody),
        (file_batch_create_params.FileBatchCreateParams, vector_store_files.BatchBody),
        (upload_create_params.UploadCreateParams, uploads.UploadBody),
        (upload_complete_params.UploadCompleteParams, uploads.CompleteBody),
        (embedding_create_params.EmbeddingCreateParams, embeddings.EmbeddingsBody),
    ],
)
def test_every_field_that_openai_s_client_sends_is_known(sent: Any, served: type[Body]) -> None:
    """It is served, changes nothing, or is among those that are refused as not served."""
    in_the_path = {"vector_store_id"}
    fields = (sent.__required_keys__ | sent.__optional_keys__) - in_the_path
    assert fields
    assert fields <= served.model_fields.keys() | served.ignored | served.not_served.keys()
    assert not served.not_served.keys() & (served.model_fields.keys() | served.ignored)


SEARCH = {"query": "x"}
BODIES: list[tuple[str, dict[str, Any], type[Body]]] = [
    ("/v1/chat/completions", CHAT, chat_request.ChatBody),
    ("/v1/completions", {"model": "echo-1", "prompt": "x"}, completions.CompletionBody),
    ("/v1/responses", {"model": "echo-1", "input": "x"}, responses_request.ResponsesBody),
    ("/v1/vector_stores", {"name": "x"}, vector_stores.NewStoreBody),
    ("/v1/vector_stores/{corpus}", {"name": "x"}, vector_stores.StoreBody),
    ("/v1/vector_stores/{corpus}/search", SEARCH, vector_stores.SearchBody),
    ("/v1/vector_stores/{corpus}/files", FILE, vector_store_files.AttachBody),
    ("/v1/uploads", {"filename": "a", "bytes": 1, "purpose": "assistants", "mime_type": "x"}, uploads.UploadBody),
]


@pytest.mark.parametrize(("path", "body", "served"), BODIES, ids=[path for path, *_ in BODIES])
def test_what_is_not_served_is_refused_as_that_and_let_be_where_it_is_not_used(
    site: Site, path: str, body: dict[str, Any], served: type[Body]
) -> None:
    path = path.replace("{corpus}", site.corpus_of("handbook", {"a.txt": "words"}))
    assert served.not_served
    with site.http() as http:
        plain = http.post(path, json=body).status_code
        for name, unserved in served.not_served.items():
            refused = http.post(path, json={**body, name: {"model": "some"}})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, name, "unsupported_parameter")
            assert error["message"] == f"{name} is not served: {unserved.instead}"
            for unused in unserved.unused:
                assert http.post(path, json={**body, name: unused}).status_code == plain


@pytest.mark.parametrize("weights", [{"embedding_weight": 1, "text_weight": 0}, {}])
def test_weights_of_the_two_searches_are_refused_by_their_place(site: Site, weights: dict[str, float]) -> None:
    options = {"ranking_options": {"hybrid_search": weights}}
    tool = {"type": "file_search", "vector_store_ids": ["vs_1"], **options}
    sent: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/chat/completions", {**CHAT, "tools": [tool]}, "tools.0."),
        ("/v1/responses", {"model": "echo-1", "input": "x", "tools": [tool]}, "tools.0."),
        ("/v1/vector_stores/vs_1/search", {**SEARCH, **options}, ""),
    ]
    with site.http() as http:
        for path, body, before in sent:
            error = http.post(path, json=body).json()["error"]
            param = f"{before}ranking_options.hybrid_search"
            assert (error["param"], error["code"]) == (param, "unsupported_parameter")
            assert error["message"].startswith(f"{param} is not served: ")


def test_best_of_is_served_where_it_leaves_nothing_to_choose(site: Site) -> None:
    asked = {"model": "echo-1", "prompt": "x"}
    with site.http() as http:
        statuses = [
            http.post("/v1/completions", json={**asked, **more}).status_code
            for more in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": None}, {"best_of": 2}, {"best_of": 1, "n": 2})
        ]
    assert statuses == [200, 200, 200, 400, 400]


def test_a_store_has_the_description_that_it_was_given(site: Site) -> None:
    with site.http() as http:
        made = http.post("/v1/vector_stores", json={"name": "x", "description": "of a team"}).json()
        assert made["description"] == "of a team"
        http.put(f"/v1/corpora/{made['id']}/settings", json={"emphasis": {"a/*": 2.0}}).raise_for_status()
        again = http.post(f"/v1/vector_stores/{made['id']}", json={"name": "y"}).json()
        assert (again["name"], again["description"]) == ("y", "of a team")
        assert http.post("/v1/vector_stores", json={"name": "x"}).json()["description"] is None
        assert "description" not in http.get(f"/v1/corpora/{made['id']}/settings").json()


def test_what_changes_nothing_is_let_be(site: Site) -> None:
    with site.http() as http:
        assert http.post("/v1/embeddings", json={"model": "x", "input": "a", "user": "ann"}).status_code == 200
        for more in ({"user": "ann", "store": True}, {"prompt_cache_options": {"mode": "implicit"}, "verbosity": "low"}):
            assert http.post("/v1/chat/completions", json={**CHAT, **more}).status_code == 200


def test_a_whole_number_may_be_written_with_a_point_and_no_other_kind_of_value_is_taken_for_it(site: Site) -> None:
    with site.http() as http:
        assert http.post("/v1/chat/completions", json={**CHAT, "max_tokens": 3.0}).status_code == 200
        for wrong in (3.5, "3", True, 1e300):
            reply = http.post("/v1/chat/completions", json={**CHAT, "max_tokens": wrong})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_tokens")
