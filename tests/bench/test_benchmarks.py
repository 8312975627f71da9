"""The benchmarks over a tiny model: their records have the promised form, and figures that can be known are right."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fixtures_models import SENTENCES, Models
from typer.testing import CliRunner

from bench import ingest_scale
from bench.blend import bootstrap
from bench.cli import app
from bench.harness import emptied, exact, f1, trim
from bench.peers import Absent
from bench.questions import own_examples
from bench.trace import replay
from precompute.reader import Reader
from storage.errors import UserError
from storage.folder import FolderStore

METHODS = "full,none,reuse,epic:4,cacheblend:0.15,question:1.0,default,default@document"


def bench(tmp_path: Path, tiny_models: Models, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    folder = str(tiny_models.folder("llama"))
    common = ["--json", str(out), "--workdir", str(tmp_path / "work"), "--model", folder, "--dtype", "float32"]
    result = CliRunner().invoke(app, [*arguments, *common], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    record: dict[str, Any] = json.loads(out.read_text())
    return record


def test_blend_compares_each_method_with_full_prefill(tmp_path: Path, tiny_models: Models) -> None:
    data = tmp_path / "questions.jsonl"
    records = [
        {"id": str(n), "chunks": list(SENTENCES[n : n + 3]), "question": "Who?", "answers": ["nobody does", "x"], "document": "d"}
        for n in range(3)
    ]
    del records[2]["document"]
    data.write_text("\n".join(map(json.dumps, records)))
    record = bench(tmp_path, tiny_models, "blend", "--data", str(data), "--methods", METHODS, "--max-tokens", "200")
    assert (record["model"], record["data"], record["n"]) == (tiny_models.folder("llama").name, "questions.jsonl", 3)
    methods = record["methods"]
    assert set(methods) == set(METHODS.split(","))
    fields = {"n", "nll", "d_nll", "d_nll_se", "kl", "f1", "em", "recomputed", "ttft_s", "bytes_per_token"}
    assert all(fields <= set(m) and m["n"] == 3 for m in methods.values())
    assert methods["full"]["kl"] == methods["full"]["d_nll"] == methods["full"]["d_f1"] == 0
    assert methods["question:1.0"]["kl"] == pytest.approx(0, abs=1e-5)
    assert methods["question:1.0"]["recomputed"] == 1
    assert methods["reuse"]["kl"] > 1e-4
    assert methods["reuse"]["recomputed"] == 0
    assert methods["none"]["kl"] > methods["default"]["kl"] != methods["default@document"]["kl"]
    assert methods["default"]["d_nll_ci"][0] <= methods["default"]["d_nll"] <= methods["default"]["d_nll_ci"][1]


def test_storage_judges_codecs_beside_raw_encryption_and_eviction_without_a_server(
    tmp_path: Path, tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.s3.TOTAL", 8 << 20)
    monkeypatch.setattr("bench.storage.replay", partial(replay, 200, 2000))
    data = tmp_path / "questions.jsonl"
    records = [
        {"id": str(n), "chunks": list(SENTENCES[n : n + 3]), "question": "Who?", "answers": ["nobody does"]} for n in range(2)
    ]
    data.write_text("\n".join(map(json.dumps, records)))
    record = bench(tmp_path, tiny_models, "storage", "--data", str(data), "--limit", "2", "--max-tokens", "200")
    codecs = record["codecs"]
    assert record["default"] in codecs
    assert set(codecs) == {"raw", "lossless", "int8", "int4", "transform", "transform8"}
    assert all(m["encode_gb_s"] > 0 and m["decode_gb_s"] > 0 for m in codecs.values())
    assert all(m["by_data"]["questions.jsonl"]["n"] == 2 for m in codecs.values())
    assert codecs["raw"]["kl_delta"] == codecs["lossless"]["kl_delta"] == codecs["raw"]["d_nll"] == 0
    assert codecs["int4"]["kl_delta"] != 0
    assert codecs["transform8"]["ratio_to_bf16"] < codecs["transform"]["ratio_to_bf16"] < codecs["int8"]["ratio_to_bf16"]
    assert codecs["raw"]["bytes_per_token"] > codecs["raw"]["ratio_to_bf16"] > 1
    plain, sealed = record["encryption"]
    assert (plain["client"], sealed["client"]) == ("store", "store, encrypted")
    assert plain["mb_per_s"] > 0 < sealed["mb_per_s"]
    assert record["eviction"] == replay(200, 2000), "the same code and the same trace as of `bench trace`"
    assert list(FolderStore(tmp_path / "work" / "storage").list("bench")) == [], "it leaves no object behind"


def test_storage_has_questions_of_its_own(tiny_models: Models) -> None:
    reader = Reader(tiny_models.folder("llama"), dtype="float32")
    examples = own_examples(reader, 100, 1500)
    assert len(examples) > 10
    assert all(1 < len(e.chunks) <= 12 and sum(map(len, e.chunks)) <= 1500 and e.answers for e in examples)
    assert [e.id for e in own_examples(reader, 2, 1500)] == [e.id for e in examples[:2]]


def test_ttft_has_a_row_per_length_method_and_source(
    tmp_path: Path, tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PREREAD_S3_ENDPOINT", raising=False)
    record = bench(tmp_path, tiny_models, "ttft", "--tokens", "512,1024")
    rows = {(r["tokens"], r["method"], r["source"]): r for r in record["rows"]}
    cases = [("full", "memory"), ("default", "memory"), ("default", "disk")]
    assert set(rows) == {(n, *case) for n in (512, 1024) for case in cases}
    assert all(r["ttft_s"] > 0 for r in rows.values())
    assert rows[512, "default", "disk"]["recomputed"] > 0


def test_peers_that_cannot_run_are_listed_with_the_reason(
    tmp_path: Path, tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: object) -> tuple[list[float], str]:
        raise Absent("not installed: pip install it")

    def broken(_: object) -> tuple[list[float], str]:
        raise RuntimeError("no such device")

    from bench import peers

    monkeypatch.setattr(peers, "PEERS", {**peers.PEERS, "vllm prefix": away, "kvboost": broken})
    record = bench(tmp_path, tiny_models, "peers", "--tokens", "512")
    rows = {r["peer"]: r for r in record["rows"]}
    assert rows["vllm prefix"] == {"peer": "vllm prefix", "ttft_s": None, "note": "not installed: pip install it"}
    assert rows["kvboost"]["note"] == "failed: RuntimeError: no such device"
    ran = ("preread full", "preread default", "transformers full", "transformers prefix")
    assert [rows[name]["note"] for name in ran if rows[name]["ttft_s"] is None] == []


def test_answers_are_scored_as_squad_does() -> None:
    assert f1("The Exeter  College!", ["exeter college"]) == 1
    assert f1("at Exeter College, Oxford", ["Exeter College"]) == pytest.approx(2 * 2 / (4 + 2))
    assert f1("no idea", ["Exeter College", "idea"]) == pytest.approx(2 / 3)
    assert exact("An exeter college.", ["Exeter College"]) == 1
    assert exact("Exeter", ["Exeter College"]) == 0


def test_long_chunks_are_trimmed_to_one_length() -> None:
    chunks = [[1] * 10, [2] * 50, [3] * 100]
    assert [len(c) for c in trim(chunks, 90)] == [10, 40, 40]
    assert trim(chunks, 1000) == chunks


def test_the_bootstrap_interval_is_that_of_the_mean() -> None:
    low, high = bootstrap([0.0, 1.0] * 200)
    assert low == pytest.approx(0.5 - 1.96 * 0.025, abs=0.01)
    assert high == pytest.approx(0.5 + 1.96 * 0.025, abs=0.01)
    assert bootstrap([2.0]) == [2.0, 2.0]


@pytest.mark.services
def test_s3_compares_the_store_with_a_plain_download(s3_server, tmp_path, monkeypatch):
    from bench.s3 import run
    from storage.objects import open_store

    keys = {"s3_endpoint": s3_server.endpoint, "s3_access_key": s3_server.access_key, "s3_secret_key": s3_server.secret_key}
    monkeypatch.setenv("PREREAD_OBJECT_STORE", "s3://bench-s3/x")
    for name, value in keys.items():
        monkeypatch.setenv(f"PREREAD_{name.upper()}", value)
    monkeypatch.setattr("bench.s3.TOTAL", 4 << 20)
    record = run(sizes=[2], readers=2, rounds=1, out=tmp_path / "s3.json")
    clients = {row["client"]: row for row in record["results"]}
    assert clients["plain download"]["of_first"] == 1.0
    assert {"store", "store, encrypted"} < set(clients)
    assert all(row["mb_per_s"] > 0 and row["cpu_s_per_gb"] > 0 for row in clients.values())
    assert json.loads((tmp_path / "s3.json").read_text())["results"] == record["results"]
    store = open_store("s3://bench-s3/x", **keys)
    assert list(store.list("")) == [], "it leaves nothing behind"
    store.close()


@pytest.mark.parametrize("kind", ["text", "pictures"])
def test_ingest_scale_ingests_all_files_and_reads_memory_along_the_way(tmp_path: Path, tiny_models: Models, kind: str) -> None:
    folder = str(tiny_models.folder("llama"))
    options = {"files": 5, "file_bytes": 1500, "kind": kind, "seconds": 300.0, "out": None}
    record = ingest_scale.run(**options, workdir=tmp_path, model=folder)
    assert (record["ingested_files"], record["errors"], record["first_error"]) == (5, 0, None)
    assert record["chunks"] >= 5
    assert record["memory_at_end"]["anonymous"] > 10


@pytest.mark.parametrize(("arguments", "folder"), [
    (["ingest", "samples"], "ingest"), (["plan", "--tokens", "64"], "plan"), (["ttft"], "ttft"), (["loads"], "loads"),
    (["search"], "search"), (["agent"], "agent"), (["ingest-scale"], "scale"), (["serve", "--tiny", "--requests", "1"], "serve"),
])  # fmt: skip
def test_what_no_benchmark_has_made_is_never_deleted(
    tmp_path: Path, tiny_models: Models, arguments: list[str], folder: str
) -> None:
    """`--workdir .` in a checkout would else end its folder ingest/."""
    precious = tmp_path / folder / "precious.txt"
    precious.parent.mkdir()
    precious.write_text("years of work")
    model = [] if arguments[0] in ("search", "serve") else ["--model", str(tiny_models.folder("llama"))]
    with pytest.raises(UserError, match="choose another --workdir"):
        CliRunner().invoke(app, [*arguments, "--workdir", str(tmp_path), *model], catch_exceptions=False)
    assert precious.read_text() == "years of work"


def test_a_benchmark_empties_what_it_has_made_itself(tmp_path: Path) -> None:
    old = emptied(tmp_path / "work" / "ingest") / "catalogue.db"
    old.parent.mkdir()
    old.touch()
    assert not emptied(old.parent).exists()
    assert not old.exists()
