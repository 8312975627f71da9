"""The unmodified `openai` client over the real API on a real socket: asynchronous, paging, polling, errors, parsing. Its
`webhooks.unwrap` is in test_webhooks.py, its story over a tiny reader in test_client_story.py."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from api_kit import Site

TEXT = "Invoices are due after thirty days.\n\nReminders cost five euros each."


def test_the_asynchronous_client_chats_and_streams(site: Site) -> None:
    site.corpus_of("handbook", {"terms.txt": TEXT})

    async def story() -> None:
        async with openai.AsyncOpenAI(base_url=f"{site.url}/v1", api_key=site.admin_key) as client:
            asked: Any = {"model": "echo-1@handbook", "messages": [{"role": "user", "content": "invoices due"}]}
            whole, models = await asyncio.gather(client.chat.completions.create(**asked), client.models.list())
            assert whole.choices[0].message.content == "[1] invoices due"
            assert [model.id async for model in models] == ["echo-1", "echo-1@handbook"]
            stream = await client.chat.completions.create(**asked, stream=True)
            said = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(said) == "[1] invoices due"
            response = await client.responses.create(model="echo-1@handbook", input="invoices due")
            assert response.output_text == "[1] invoices due"
            vectors = await client.embeddings.create(model="any", input=["one", "two"])
            assert len(vectors.data) == 2

    asyncio.run(story())


def test_lists_of_120_are_paged_through_by_themselves(site: Site) -> None:
    client = site.client()
    corpus = client.vector_stores.create(name="many").id
    files = [client.files.create(file=(f"f{n:03}.txt", f"text {n}".encode()), purpose="assistants").id for n in range(120)]
    batch = client.vector_stores.file_batches.create(corpus, file_ids=files)
    assert batch.file_counts.in_progress == batch.file_counts.total == 120
    for order in ("asc", "desc"):
        expected = files if order == "asc" else files[::-1]
        assert [f.id for f in client.files.list(limit=50, order=order)] == expected
        listed = client.vector_stores.files.list(corpus, limit=50, order=order)
        assert sorted(f.id for f in listed) == sorted(files)
        of_batch = client.vector_stores.file_batches.list_files(
            batch.id, vector_store_id=corpus, limit=50, order=order
        )
        assert [f.id for f in of_batch] == expected
    for n in range(120):
        client.vector_stores.create(name=f"s{n}")
    assert len({store.id for store in client.vector_stores.list(limit=50)}) == 121
    page = client.vector_stores.list(limit=50)
    assert (len(page.data), page.has_more) == (50, True)
    assert (page.first_id, page.last_id) == (page.data[0].id, page.data[-1].id)


def test_batches_are_polled_to_their_end_and_can_be_cancelled(site: Site) -> None:
    client = site.client()
    corpus = client.vector_stores.create(name="polled").id
    files = [client.files.create(file=(f"{n}.txt", b"some words"), purpose="user_data").id for n in range(3)]
    with site.ingesting():
        done = client.vector_stores.file_batches.create_and_poll(corpus, file_ids=files)
        uploaded = client.vector_stores.file_batches.upload_and_poll(corpus, files=[("x.txt", b"other words")])
    assert (done.status, done.file_counts.completed) == ("completed", 3)
    assert uploaded.file_counts.completed == 1
    waiting = client.vector_stores.file_batches.create(
        corpus, file_ids=[client.files.create(file=("y.txt", b"more"), purpose="user_data").id]
    )
    raw = client.vector_stores.file_batches.with_raw_response.retrieve(waiting.id, vector_store_id=corpus)
    assert int(raw.headers["openai-poll-after-ms"]) > 0
    assert client.vector_stores.file_batches.cancel(waiting.id, vector_store_id=corpus).status == "cancelled"
    assert client.vector_stores.file_batches.retrieve(waiting.id, vector_store_id=corpus).file_counts.cancelled == 1


def test_searches_take_filters_and_ranking_options(site: Site) -> None:
    client = site.client()
    corpus = site.corpus_of("handbook", {"terms.txt": TEXT, "other.txt": "Invoices of others are due at once."})
    files = {file.path: file.id for file in client.vector_stores.files.list(corpus)}
    client.vector_stores.files.update(files["terms.txt"], vector_store_id=corpus, attributes={"year": 2024, "draft": False})
    final = {"type": "eq", "key": "draft", "value": False}
    newest: Any = {"type": "and", "filters": [{"type": "gte", "key": "year", "value": 2024}, final]}
    found = client.vector_stores.search(corpus, query=["invoices due", "reminders"], filters=newest, rewrite_query=False)
    assert {hit.filename for hit in found} == {"terms.txt"}
    assert found.data[0].attributes == {"year": 2024, "draft": False}
    options: Any = {"ranker": "none", "score_threshold": 0.9999}
    few = client.vector_stores.search(corpus, query="invoices due", ranking_options=options, max_num_results=5)
    assert len(few.data) < len(client.vector_stores.search(corpus, query="invoices due", max_num_results=5).data)
    with pytest.raises(openai.BadRequestError):
        client.vector_stores.search(corpus, query="x", ranking_options={"ranker": "best"})


@pytest.mark.parametrize(
    ("call", "raised", "code"),
    [
        (lambda c: c.models.retrieve("none"), openai.NotFoundError, "model_not_found"),
        (lambda c: c.get("/nothing", cast_to=object), openai.NotFoundError, "unknown_url"),
        (lambda c: c.post("/models", cast_to=object), openai.APIStatusError, "method_not_allowed"),
        (lambda c: c.embeddings.create(model="x", input="x", dimensions=5), openai.BadRequestError, "invalid_value"),
        (lambda c: c.embeddings.create(model="x", input=[[10**6]]), openai.BadRequestError, "invalid_value"),
        (lambda c: c.embeddings.create(model="x", input="x" * (9 << 20)), openai.APIStatusError, "request_too_large"),
    ],
)
def test_errors_have_types_codes_and_request_ids(
    site: Site, call: Any, raised: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(raised) as caught:
        call(site.client(max_retries=0))
    assert caught.value.code == code
    assert caught.value.request_id
    assert caught.value.type == "invalid_request_error"


def test_a_structured_answer_is_parsed_by_the_client(site: Site) -> None:
    from pydantic import BaseModel

    class Person(BaseModel):
        name: str
        age: int

    site.engine.answer = '{"name": "Ann", "age": 30}'
    parsed = site.client().chat.completions.parse(
        model="echo-1", messages=[{"role": "user", "content": "who?"}], response_format=Person
    )
    assert parsed.choices[0].message.parsed == Person(name="Ann", age=30)
    shape = site.engine.requests[-1].shape
    assert shape is not None
    assert shape.schema["required"] == ["name", "age"]
    response = site.client().responses.parse(model="echo-1", input="who?", text_format=Person)
    assert response.output_parsed == Person(name="Ann", age=30)


def test_open_webui_s_first_requests(site: Site) -> None:
    """A model list with a bearer key, then a streamed chat with `stream_options`."""
    site.corpus_of("handbook", {"terms.txt": TEXT})
    headers = {"authorization": f"Bearer {site.admin_key}", "x-openwebui-user-name": "Ann"}
    with httpx.Client(base_url=f"{site.url}/v1", headers=headers) as http:
        models = http.get("/models").json()
        assert {"id", "object", "owned_by"} <= models["data"][1].keys()
        body = {
            "stream": True,
            "model": models["data"][1]["id"],
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": [{"type": "text", "text": "invoices"}]},
            ],
            "stream_options": {"include_usage": True},
        }
        lines = [line for line in http.post("/chat/completions", json=body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    frames = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert frames[-1]["usage"]["total_tokens"] > 0
    notes = [note for frame in frames if frame["choices"] for note in frame["choices"][0]["delta"].get("annotations", [])]
    assert notes[0]["type"] == "url_citation"
    assert set(notes[0]["url_citation"]) == {"start_index", "end_index", "title", "url"}
