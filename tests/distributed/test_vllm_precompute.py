"""The whole product where vLLM compiles the chunks too: the objects are our own reader's, and so are answers over them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from sqlalchemy import select
from vllm_product_kit import ROOT, SECRET, START_S, VLLM, Product, product, wait

from precompute.reader import Reader
from serving.connector.plan import Told, plan_secret, sign
from serving.engine.types import GenerateRequest, Message
from serving.engine.vllm import VLLMEngine
from serving.parts import Wiring
from serving.settings import Settings
from storage.catalogue.schema import ChunkRow, Corpus, KVObject
from storage.conditioning import readings
from storage.tiers.store import object_name
from storage.types import KVRecord

QUESTION = "What is the highest price per night for a hotel room in Zurich?"
OTHERS = ("What is the mileage rate for using a private car?", "How large is the home office allowance?")
VISITORS = "Which rules hold for visitors?"
# Of K and V against our own reader's: in fp32 the largest difference; in bf16 that of a layer by its norm, where each of the two
# engines is 1 % (K) and 2 % (V) from what fp32 gives.
CLOSE, NEAR = 1e-4, 0.04
Measured = Callable[[str, object], None]  # pytest's record_property
NOISE = 0.3  # of log-probabilities in bf16, whatever computes them in batches of another shape

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(not (VLLM / "bin" / "vllm").exists(), reason="vLLM is not installed: make vllm"),
]


def policies(*names: str) -> dict[str, str]:
    folder = ROOT / "samples" / "policies"
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if not names or path.stem in names}


@dataclass
class Inside:
    """The installation as a process of its own sees it."""

    wiring: Wiring

    def rows(self, corpus: str) -> list[tuple[str, str, tuple[int, ...], tuple[tuple[int, ...], ...]]]:
        """Of each chunk its key, the state of its KV, its tokens, and how it is read."""
        found = []
        with self.wiring.catalogue.read() as session:
            conditioning = session.get_one(Corpus, corpus).settings.get("conditioning", "none")
            query = select(ChunkRow.document_id, ChunkRow.token_ids, ChunkRow.kv_key, KVObject.status)
            query = query.join(KVObject, KVObject.key == ChunkRow.kv_key).where(ChunkRow.corpus_id == corpus)
            rows = session.execute(query.order_by(ChunkRow.document_id, ChunkRow.ordinal)).all()
        for document in dict.fromkeys(row.document_id for row in rows):
            own = [row for row in rows if row.document_id == document]
            ids = [tuple(memoryview(row.token_ids).cast("I")) for row in own]
            for row, chunk, reading in zip(own, ids, readings(ids, conditioning), strict=True):
                found.append((row.kv_key, row.status, chunk, reading))
        return found

    def differences(self, corpus: str, reader: Reader, norm: bool) -> tuple[float, float, int]:
        """The largest of K and of V between what is stored and what `reader` compiles, and of how many chunks; `norm`: of a
        layer, by the norm of the reader's."""
        most, rows = torch.zeros(2), self.rows(corpus)
        for key, status, ids, reading in rows:
            assert status == "done"
            record = self.wiring.kv_store.get(key, reader.profile)
            assert isinstance(record, KVRecord)
            assert record.token_ids == ids
            [expected] = reader.compile_readings([reading])
            apart = (record.kv.float() - expected.float()).flatten(2)
            found = apart.norm(dim=2) / expected.float().flatten(2).norm(dim=2) if norm else apart.abs().amax(2)
            most = torch.maximum(most, found.amax(0))
        return float(most[0]), float(most[1]), len(rows)


def inside(made: Product, model: Path, dtype: str) -> Inside:
    url = made.vllm_url
    return Inside(Wiring(Settings(data_dir=made.data, model=str(model), dtype=dtype, secret=SECRET, engine="vllm", vllm_url=url)))


def told(answer: Any) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


def logprobs(answer: Any) -> dict[str, float]:
    """Of the first token, by the likeliest ones."""
    return {each["token"]: each["logprob"] for each in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}


def gap(a: dict[str, float], b: dict[str, float]) -> float:
    shared = a.keys() & b.keys()
    assert len(shared) >= 5
    return max(abs(a[token] - b[token]) for token in shared)


# --- in fp32: the same numbers, and the same words ---


def test_in_fp32_the_objects_and_all_greedy_answers_are_those_of_the_torch_engine(
    tmp_path: Path, embedded_folder: Path, record_property: Measured
) -> None:
    files, ours, theirs = policies("travel", "expenses", "remote-work"), tmp_path / "ours", tmp_path / "theirs"
    asked = [(question, method) for question in (QUESTION, *OTHERS) for method in ("default", "reuse", "full")]

    def answers(made: Product, corpus: str) -> list[str]:
        found = [made.ask(corpus, question, method, max_tokens=24) for question, method in asked]
        assert [each["preread"]["tokens_reused"] > 0 for each in found] == [method != "full" for _, method in asked]
        return [told(each) for each in found]

    with product(ours, embedded_folder, dtype="float32") as made:
        corpus = made.corpus(files)
        conditioned = made.http.post("/v1/vector_stores", json={"name": "windows"}).json()["id"]
        settings = made.http.put(f"/v1/corpora/{conditioned}/settings", json={"conditioning": "document"})
        assert settings.status_code == 200, settings.text
        made.ended(made.upload(conditioned, policies("travel")))
        by_vllm = answers(made, corpus)
        look, reader = inside(made, embedded_folder, "float32"), Reader(embedded_folder, dtype="float32")
        for each in (corpus, conditioned):
            k, v, chunks = look.differences(each, reader, norm=False)
            record_property(f"fp32, of {chunks} chunks: max |dK|, max |dV|", f"{k:.2g}, {v:.2g}")
            assert max(k, v) < CLOSE
            assert chunks > 3
        assert any(len(reading) > 1 for _, _, _, reading in look.rows(conditioned))
        look.wiring.close()
    with product(ours, embedded_folder, dtype="float32", vllm=False) as made:
        assert answers(made, corpus) == by_vllm, "the torch engine, over what vLLM has compiled"
    with product(theirs, embedded_folder, dtype="float32", vllm=False) as made:
        assert answers(made, made.corpus(files)) == by_vllm, "the torch engine, over what it has compiled itself"


# --- in bf16, as it is served ---


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, embedded_folder: Path) -> Iterator[Product]:
    with product(tmp_path_factory.mktemp("served") / "data", embedded_folder, dtype="bfloat16") as made:
        yield made


@pytest.fixture(scope="module")
def look(served: Product, embedded_folder: Path) -> Iterator[Inside]:
    made = inside(served, embedded_folder, "bfloat16")
    yield made
    made.wiring.close()


@pytest.fixture(scope="module")
def corpus(served: Product) -> str:
    return served.corpus(policies(), "policies")


def test_in_bf16_the_objects_are_those_of_our_reader_within_the_rounding(
    corpus: str, look: Inside, embedded_folder: Path, record_property: Measured
) -> None:
    k, v, chunks = look.differences(corpus, Reader(embedded_folder), norm=True)
    record_property(f"bf16, of {chunks} chunks: a layer's dK, dV by its norm", f"{k:.2%}, {v:.2%}")
    assert max(k, v) < NEAR
    assert chunks > 20


def test_chunks_that_vllm_compiled_are_reused_and_computing_all_again_is_full_prefill(
    served: Product, corpus: str, record_property: Measured
) -> None:
    options = {"logprobs": True, "top_logprobs": 20}
    full, exact, default = (served.ask(corpus, QUESTION, m, **options) for m in ("full", "cacheblend:1.0", "default"))
    assert full["preread"]["tokens_reused"] == 0
    assert default["preread"]["tokens_reused"] > 500
    assert not default["preread"]["not_reused"]
    exact_gap, default_gap = (gap(logprobs(full), logprobs(each)) for each in (exact, default))
    record_property("bf16, log-probabilities: full to all again, to default", f"{exact_gap:.3f}, {default_gap:.3f}")
    assert exact_gap < NOISE
    assert told(exact) == told(full)


def test_a_plain_prompt_over_http_never_reads_blended_blocks_and_a_repeated_plan_does(
    served: Product, look: Inside, corpus: str
) -> None:
    engine = look.wiring.engine
    assert isinstance(engine, VLLMEngine)
    with look.wiring.catalogue.read() as session:
        tenant = session.get_one(Corpus, corpus).tenant_id
    found = look.wiring.api.retriever.search(tenant_id=tenant, corpus_ids=[corpus], query=VISITORS, top_k=6)
    request = GenerateRequest((Message("user", VISITORS),), tuple(found), method="reuse", max_tokens=1)
    prepared = engine.prepare(request)
    assert prepared.stored is not None
    params = sign(prepared.stored, plan_secret(SECRET.encode()))
    blended = completion(served, prepared.ids, cache_salt=prepared.salt, kv_transfer_params=params)
    again = completion(served, prepared.ids, cache_salt=prepared.salt, kv_transfer_params=params)
    plain = completion(served, prepared.ids)
    alone = completion(served, prepared.ids, cache_salt="nobody else's")
    first, then = (Told.read(each["kv_transfer_params"]) for each in (blended, again))
    assert first.reused > 500
    assert first.tiers
    assert (then.tiers, cached(again) > 500) == ({}, True), "a repeated plan finds its blocks, and fetches nothing"
    assert (cached(plain), cached(alone)) == (0, 0)
    assert gap(likely(plain), likely(alone)) < 1e-3, "the same computation twice"
    assert gap(likely(plain), likely(blended)) > 1e-3, "else the blend has not been looked at"


def completion(made: Product, ids: Any, **more: Any) -> Any:
    """What vLLM itself answers, past the API."""
    body = {"model": served_name(made), "prompt": list(ids), "max_tokens": 1, "temperature": 0, "logprobs": 10, **more}
    answer = httpx.post(f"{made.vllm_url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def served_name(made: Product) -> str:
    name: str = httpx.get(f"{made.vllm_url}/v1/models").json()["data"][0]["id"]
    return name


def cached(answer: Any) -> int:
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def likely(answer: Any) -> dict[str, float]:
    found: dict[str, float] = answer["choices"][0]["logprobs"]["top_logprobs"][0]
    return found


def test_a_deleted_files_kv_is_gone_and_no_plan_names_it(served: Product, look: Inside) -> None:
    secret = "The password of the lighthouse's cellar is a cormorant's name, said backwards and in a whisper."
    made = served.corpus({"cellar.md": secret}, "cellar")
    question = "What is the password of the lighthouse's cellar?"
    before = served.ask(made, question, "default")
    assert before["preread"]["chunks"] == 1
    assert not before["preread"]["not_reused"]
    [(key, status, _, _)] = look.rows(made)
    assert status == "done"
    assert look.wiring.objects.size(object_name(key)) is not None
    [file] = served.http.get(f"/v1/vector_stores/{made}/files").json()["data"]
    assert served.http.delete(f"/v1/files/{file['id']}").status_code == 200
    wait(lambda: look.wiring.objects.size(object_name(key)) is None, 60)
    after = served.ask(made, question, "default")
    assert after["preread"]["chunks"] == after["preread"]["tokens_reused"] == 0
    assert look.wiring._owners([key]) == frozenset()


@pytest.mark.parametrize("who", ["worker", "bin/vllm"])
def test_who_is_killed_while_chunks_are_compiled_loses_nothing(
    served: Product, look: Inside, who: str, record_property: Measured
) -> None:
    corpus = served.http.post("/v1/vector_stores", json={"name": who}).json()["id"]
    job = served.upload(corpus, {path: text.replace(" the ", f" the {who} ") for path, text in policies().items()})
    wait(lambda: any(status == "done" for _, status, _, _ in look.rows(corpus)), START_S)
    assert any(status != "done" for _, status, _, _ in look.rows(corpus)), "it was too quick to be killed in the middle"
    os.kill(served.child(who), signal.SIGKILL)
    begun = time.monotonic()
    assert served.ended(job)["progress"]["files_failed"] == 0
    record_property(f"{who} killed: seconds until the job's end", round(time.monotonic() - begun))
    assert {status for _, status, _, _ in look.rows(corpus)} == {"done"}
    wait(lambda: served.http.get("/readyz").status_code == 200, START_S)
    assert told(served.ask(corpus, QUESTION, "default"))
