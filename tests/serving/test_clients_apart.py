"""Clients that we did not write and whose pins are not ours, over the real API and a real model: LlamaIndex's OpenAILike, and
the benchmark of `lmcache-cli`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from clients_kit import program, run, tokenizer_only
from model_kit import LIMIT, Service, Shared

LLAMA_INDEX = """
import asyncio, json, sys
from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike
url, key, model = sys.argv[1:]
llm = OpenAILike(model=model, api_base=url, api_key=key, is_chat_model=True, is_function_calling_model=True, max_tokens=8,
                 temperature=0.0, max_retries=0, timeout=120)
asked = [ChatMessage(role="user", content="What is the speed limit for carts inside the harbour?")]
llm.chat(asked)  # its KV is in memory then: on a busy machine the store may be too late for the first answer
whole = llm.chat(asked)
plain = OpenAILike(model=model.partition("@")[0], api_base=url, api_key=key, is_chat_model=False, max_tokens=4,
                   temperature=0.0, timeout=120)
print(json.dumps({
    "whole": whole.message.content,
    "file": whole.raw.citations[0]["filename"],
    "streamed": [piece.delta for piece in llm.stream_chat(asked)],
    "async": asyncio.run(llm.achat(asked)).message.content,
    "completed": plain.complete("The harbour is").text,
    "pieces": [piece.delta for piece in plain.stream_complete("The harbour is")],
}))
"""


@pytest.fixture(scope="module")
def shared(embedded: Shared) -> Shared:
    return embedded


@pytest.mark.slow
def test_llama_index_chats_streams_and_completes(service: Service, tmp_path: Path) -> None:
    program("python")
    service.corpus("harbour", {"rules.md": f"# Harbour rules\n\n{LIMIT.format(10)}\n"})
    ended = run(
        "python", "-c", LLAMA_INDEX, f"{service.url}/v1", service.key, f"{service.model}@harbour", key=service.key, cwd=tmp_path
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["whole"]
    assert told["whole"] == "".join(told["streamed"]) == told["async"]
    assert told["file"] == "rules.md"
    assert told["completed"] == "".join(told["pieces"]) != ""


WORKLOADS: dict[str, list[str]] = {
    "long-doc-permutator": [
        "--ldp-num-contexts=2", "--ldp-context-length=40", "--ldp-system-prompt-length=10", "--ldp-num-permutations=2",
        "--ldp-max-output-length=2",
    ],
    "multi-round-chat": [
        "--mrc-shared-prompt-length=10", "--mrc-chat-history-length=20", "--mrc-user-input-length=5", "--mrc-output-length=2",
        "--mrc-qps=1", "--mrc-duration=2", "--ignore-eos",
    ],
    "rag-qa-quality": [
        "--rag-dataset=questions.json", "--rag-num-samples=2", "--rag-max-output-length=2", "--rag-doc-align-tokens=16",
        "--rag-output=answers.json",
    ],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_benchmark_of_lmcache_runs_without_a_failed_request(service: Service, tmp_path: Path, workload: str) -> None:
    program("lmcache")
    tokenizer_only(service.wiring.reader.folder, tmp_path)
    documents = [{"title": "Rules", "text": LIMIT.format(10)}, {"title": "Lamps", "text": "The lamps are lit at nine."}]
    question = {"question": "How fast may carts be?", "answers": ["10 knots"], "ctxs": documents}
    (tmp_path / "questions.json").write_text(json.dumps([{"id": str(n), **question} for n in range(2)]))
    ended = run(
        "lmcache", "bench", "engine", f"--engine-url={service.url}", f"--model={service.model}", f"--workload={workload}",
        "--tokens-per-gb-kvcache=100", "--kv-cache-volume=1", "--json", "-q", "--no-interactive", *WORKLOADS[workload],
        key=service.key, cwd=tmp_path,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    results: dict[str, Any] = json.loads((tmp_path / "bench_summary.json").read_text())["results"]
    assert results["failed_requests"] == 0
    assert results["successful_requests"] == results["total_requests"] >= 1
    assert results["total_input_tokens"] > 0
    assert results["total_output_tokens"] > 0
    if workload == "rag-qa-quality":
        assert (tmp_path / "answers.json").exists()
