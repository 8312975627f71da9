"""The whole story as an unmodified OpenAI client tells it, over a tiny reader of random weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import openai
import pytest
from model_kit import LIMIT, Service, Shared, counted, serving

NOTHING = "I found nothing about this in the selected documents."
QUESTION = "What is the speed limit for carts inside the harbour?"


def rules(limit: int) -> str:
    filler = " ".join(f"Berth {n} is swept by the night watch before the tide turns." for n in range(12))
    return f"# Harbour rules\n\n{LIMIT.format(limit)}\n\n# Sweeping\n\n{filler}\n"


def cites(service: Service, answer: Any) -> None:
    """Three forms of one truth: marks in the text, annotations, and citations whose quotes are exact."""
    assert [c["n"] for c in answer.citations] == list(range(1, len(answer.citations) + 1))
    for citation in answer.citations:
        assert service.source_of(citation)[citation["start"] : citation["end"]] == citation["quote"]
    message = answer.choices[0].message
    marked = {c["n"]: c["filename"] for c in answer.citations if c["cited"]}
    assert sorted(n.url_citation.title for n in message.annotations) == sorted(marked.values())
    for note in message.annotations:
        mark = message.content[note.url_citation.start_index : note.url_citation.end_index]
        assert mark.startswith("[")
        assert mark.endswith("]")


def test_the_client_story(service: Service) -> None:
    client = service.client
    store = client.vector_stores.create(name="harbour")
    file = client.files.create(file=("rules.md", rules(10).encode()), purpose="assistants")
    with service.working():
        done = client.vector_stores.files.create_and_poll(file.id, vector_store_id=store.id, poll_interval_ms=50)
        other = client.vector_stores.files.upload_and_poll(
            vector_store_id=store.id, file=("lamps.txt", b"The lamps on the pier are lit at nine."), poll_interval_ms=50
        )
    assert (done.status, other.status) == ("completed", "completed")

    found = client.vector_stores.search(store.id, query=QUESTION).data
    assert found[0].filename == "rules.md"
    assert LIMIT.format(10) in found[0].content[0].text
    model = f"{service.model}@harbour"
    assert model in [m.id for m in client.models.list().data]
    assert client.models.retrieve(model).id == model

    answer = service.chat("harbour", QUESTION, max_tokens=40)
    assert answer.choices[0].message.content.strip()
    report = counted(answer)
    assert report["tokens_reused"] > report["tokens_computed"] > 0
    assert report["not_reused"] == []
    assert report["bytes_fetched"] > 0
    assert set(report["ms"]) == {"plan", "queue", "fetch", "assemble", "blend", "first_token", "retrieval"}
    assert answer.citations[0]["filename"] == "rules.md"
    assert LIMIT.format(10) in answer.citations[0]["quote"]
    cites(service, answer)

    _streamed(service, answer)
    _forget_and_change(service, store.id, file.id)


def _streamed(service: Service, whole: Any) -> None:
    """The same question as a stream is the same answer, with the same sources at its end."""
    events: list[Any] = list(
        service.chat("harbour", QUESTION, max_tokens=40, stream=True, stream_options={"include_usage": True})
    )
    text = "".join(e.choices[0].delta.content or "" for e in events if e.choices)
    assert text == whole.choices[0].message.content
    last = next(e for e in events if e.choices and e.choices[0].finish_reason)
    assert last.choices[0].finish_reason == whole.choices[0].finish_reason
    assert last.citations == whole.citations
    assert last.preread["tokens_reused"] == whole.preread["tokens_reused"]
    assert events[-1].usage == whole.usage


def _forget_and_change(service: Service, store: str, old: str) -> None:
    """A changed document answers at once with what is new; a deleted one with nothing."""
    service.upload(store, {"rules.md": rules(20)})
    texts = [c.text for hit in service.client.vector_stores.search(store, query=QUESTION).data for c in hit.content]
    assert not any("10 knots" in text for text in texts)
    assert any("20 knots" in text for text in texts)
    answer = service.chat("harbour", QUESTION)
    assert "20 knots" in answer.citations[0]["quote"]
    assert not any("10 knots" in c["quote"] for c in answer.citations)
    assert counted(answer)["not_reused"] == []
    cites(service, answer)

    files = service.client.vector_stores.files.list(store).data
    assert old not in [file.id for file in files]
    for file in files:
        assert service.client.vector_stores.files.delete(file.id, vector_store_id=store).deleted
    answer = service.chat("harbour", QUESTION)
    assert answer.choices[0].message.content == NOTHING
    assert answer.citations == []
    assert answer.choices[0].message.annotations == []
    assert service.client.vector_stores.search(store, query=QUESTION).data == []


def test_a_request_chooses_its_method(service: Service) -> None:
    service.corpus("harbour", {"rules.md": rules(10)})
    reused = counted(service.chat("harbour", QUESTION, method="reuse"))
    assert reused["tokens_recomputed"] == 0
    full = service.chat("harbour", QUESTION, method="full")
    assert counted(full)["method"] == "full"
    assert full.usage.prompt_tokens_details.cached_tokens == 0
    assert {miss["reason"] for miss in full.preread["not_reused"]} == {"method"}
    for method in ("epic:8", "cacheblend:0.15"):
        report = counted(service.chat("harbour", QUESTION, method=method))
        assert report["method"] == method
        assert 0 < report["tokens_recomputed"] < report["tokens_reused"] < reused["tokens_reused"]
        assert 0 < report["recomputed_fraction"] < 0.5
    for unknown in ("magic", "epic:none", "cacheblend:7"):
        with pytest.raises(openai.BadRequestError, match="unknown method") as refused:
            service.chat("harbour", QUESTION, method=unknown)
        assert refused.value.type == "invalid_request_error"


def test_a_short_question_is_understood_by_the_turn_before(service: Service) -> None:
    service.corpus("harbour", {"rules.md": rules(10), "cats.txt": "Cats of the customs house sleep all day."})
    first = service.chat("harbour", QUESTION)
    said = first.choices[0].message.content
    second = service.chat("harbour", QUESTION, said, "And at night?")
    assert counted(second)["tokens_reused"] > 0
    assert second.citations[0]["filename"] == "rules.md"
    assert second.usage.prompt_tokens > first.usage.prompt_tokens


def test_one_edited_line_recomputes_what_it_touches(service: Service) -> None:
    sections = {n: f"# Shed {n}\n\nShed {n} holds " + "ropes and tar, " * 40 + f"and {n} barrels.\n\n" for n in range(6)}
    files = {"sheds.md": "".join(sections.values()), "quay.txt": "The quay is made of oak."}
    store = service.client.vector_stores.create(name="sheds").id

    def sync(files: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
        manifest = [{"path": p, "sha256": hashlib.sha256(t.encode()).hexdigest()} for p, t in files.items()]
        started = service.call("POST", f"/corpora/{store}/sync", json={"manifest": manifest, "delete_missing": True})
        for path in (*started["added"], *started["modified"]):
            service.client.files.create(file=(path, files[path].encode()), purpose="assistants")
        service.work()
        job = service.call("GET", f"/jobs/{started['job_id']}")
        assert job["status"] == "completed", job
        return started, job["progress"]

    _, progress = sync(files)
    chunks = progress["chunks_total"]
    assert chunks > 6
    assert (progress["chunks_computed"], progress["chunks_reused"]) == (chunks, 0)

    files["sheds.md"] = files["sheds.md"].replace("and 3 barrels", "and 33 barrels")
    started, progress = sync(files)
    assert started["modified"] == ["sheds.md"]
    assert started["unchanged_count"] == 1
    assert progress["chunks_total"] == chunks - 1
    assert progress["chunks_computed"] == 1
    assert progress["chunks_reused"] == chunks - 2
    assert progress["kv_bytes_reused"] > progress["kv_bytes_written"] > 0

    report = counted(service.chat("sheds", "How many barrels does shed 3 hold?"))
    assert report["not_reused"] == []


def test_a_folder_on_the_server_is_synced(tmp_path: Path, shared: Shared) -> None:
    roots = tmp_path / "roots"
    (roots / "harbour").mkdir(parents=True)
    (roots / "harbour" / "rules.md").write_text(rules(10))
    (roots / "harbour" / "lamps.txt").write_text("The lamps on the pier are lit at nine.")
    with serving(shared, tmp_path / "data", dtype="float32", source_roots=str(roots)) as service:
        store = service.client.vector_stores.create(name="harbour").id
        source = {"type": "folder", "path": str(roots / "harbour")}
        service.call("PUT", f"/corpora/{store}/sources", json={"source": source})

        def sync() -> dict[str, Any]:
            job_id = service.call("POST", f"/corpora/{store}/sync", json={})["job_id"]
            service.work()
            job: dict[str, Any] = service.call("GET", f"/jobs/{job_id}")
            assert job["status"] == "completed", job
            return job["progress"]  # type: ignore[no-any-return]

        assert sync()["chunks_computed"] == 3
        (roots / "harbour" / "rules.md").write_text(rules(20))
        progress = sync()
        assert (progress["files_done"], progress["chunks_computed"]) == (1, 1)
        (roots / "harbour" / "rules.md").unlink()
        sync()
        answer = service.chat("harbour", QUESTION)
        assert [c["filename"] for c in answer.citations] == ["lamps.txt"]


def test_a_second_turn_takes_up_the_first_and_forgets_with_the_document(tmp_path: Path, shared: Shared) -> None:
    with serving(shared, tmp_path, dtype="float32", blended_cache_bytes=256 << 20) as service:
        store = service.corpus("harbour", {"rules.md": rules(10), "lamps.txt": "The lamps on the pier are lit at nine."})
        first = service.chat("harbour", QUESTION)
        said = first.choices[0].message.content or "Ten."
        second = service.chat("harbour", QUESTION, said, "And on Sundays, inside the harbour?")
        assert (first.preread["resumed"], second.preread["resumed"]) == (False, True)
        assert counted(second)["bytes_fetched"] == 0
        assert [c["quote"] for c in second.citations] == [c["quote"] for c in first.citations]
        [file] = [f for f in service.client.vector_stores.files.list(store).data if "rules" in service.name_of(f.id)]
        service.client.vector_stores.files.delete(file.id, vector_store_id=store)
        third = service.chat("harbour", QUESTION)
        assert not third.preread["resumed"]
        assert {c["filename"] for c in third.citations} == {"lamps.txt"}
        assert service.wiring.engine.keys_in_memory() == set(service.kv_keys("lamps"))
