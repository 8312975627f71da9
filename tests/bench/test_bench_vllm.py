"""The benchmarks of vLLM over a small server: what is compared with what, and what counts as no figure."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from pathlib import Path

import pytest
from fixtures_models import Models
from typer.testing import CliRunner
from vllm_server_kit import SECRET, VLLMServer, keyed_chunks, spec_of, vllm_server

from bench import gpu, vllm_trace
from bench.cli import app
from bench.vllm_site import VLLMSite, tree_cpu_seconds
from bench.vllm_ttft import measure
from serving.connector.plan import Plan, Told
from serving.engine.vllm import VLLMEngine
from storage.errors import UserError


@pytest.fixture
def site(tiny_models: Models) -> Iterator[tuple[VLLMServer, VLLMSite]]:
    with vllm_server(tiny_models.reader("llama")) as server:
        spec = spec_of(tiny_models.folder("llama"))
        owners = lambda keys: frozenset({("t", "g")})  # noqa: E731
        engine = VLLMEngine(spec, server.url, secret=SECRET, owners=owners, max_requests=32)
        yield server, VLLMSite(engine, {300: keyed_chunks()}, os.getpid(), server.url)
        engine.close()


def test_methods_take_turns_and_no_round_finds_anothers_blocks(site: tuple[VLLMServer, VLLMSite]) -> None:
    server, bench = site
    rows = measure(bench, 300, ("full", "default"), rounds=2)
    assert [(row["method"], row["about"], len(row["ttft_s_all"])) for row in rows] == [("full", 300, 2), ("default", 300, 2)]
    salts = [body["cache_salt"] for body in server.bodies]
    assert len(set(salts)) == len(salts) == 6
    blended = ["kv_transfer_params" in body for body in server.bodies]
    assert blended == [False, True, True, False, False, True]
    assert all(isinstance(plan, Plan) for plan in server.plans)
    assert {len(body["prompt"]) for body in server.bodies} == {rows[0]["tokens"]}, "both are asked the same"
    assert rows[1]["reused"] == 100
    assert all(0 < seconds < 60 for row in rows for seconds in row["ttft_s_all"])


def test_a_figure_of_kv_that_was_not_used_is_none(site: tuple[VLLMServer, VLLMSite]) -> None:
    server, bench = site
    key = str(bench.prompts[300][1].kv_key)
    server.told = Told(reused=50, missed={key: "absent"})
    with pytest.raises(UserError, match="not used: absent"):
        asyncio.run(bench.ask(bench.request(300, "default", 1)))
    bench.prompts[300] = tuple(replace(chunk, token_ids=chunk.token_ids * 20) for chunk in bench.prompts[300])
    with pytest.raises(UserError, match="no room"):
        asyncio.run(bench.ask(bench.request(300, "default", 2)))


def test_the_gpus_record_has_gates_throughput_and_what_was_left_out(site: tuple[VLLMServer, VLLMSite]) -> None:
    _, bench = site
    gates = gpu._gates(bench, 300, "float32")
    assert gates == {"exact_max_logprob_difference": 0.0, "exact_passed": True, "default_same_first_token": True}
    through = asyncio.run(gpu._throughput(bench, 300, "full"))
    assert through["answer_tokens_per_s"] * through["seconds"] == pytest.approx(gpu.AT_ONCE * gpu.ANSWER_TOKENS)
    record: dict[str, object] = {"left_out": []}
    gpu._do(record, "in time", lambda: 1, time.monotonic() + 60)
    gpu._do(record, "too late", lambda: 2, time.monotonic() - 1)
    assert record == {"left_out": ["too late"], "in time": 1}


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_cpu_time_is_that_of_all_that_a_process_has_started() -> None:
    burn = "import time\nwhile time.process_time() < 1.0: pass\nprint(flush=True); time.sleep(60)"
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {burn!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    try:
        assert tree_cpu_seconds(process.pid) >= 0.95
    finally:
        for child in children:
            os.kill(int(child), 9)
        process.wait()
        process.stdout.close()


def test_an_engine_that_is_none_and_an_environment_without_vllm_are_told_in_one_line(tmp_path: Path, tiny_models: Models) -> None:
    wrong = CliRunner().invoke(app, ["ttft", "--engine", "tensorrt"])
    assert isinstance(wrong.exception, UserError)
    assert str(wrong.exception) == "--engine is one of torch, vllm, not 'tensorrt'"
    folder = str(tiny_models.folder("llama"))
    arguments = ["--vllm", str(tmp_path), "--workdir", str(tmp_path), "--model", folder, "--dtype", "float32", "--tokens", "600"]
    absent = CliRunner().invoke(app, ["ttft", "--engine", "vllm", *arguments])
    assert isinstance(absent.exception, UserError), absent.exception
    assert "make vllm" in str(absent.exception)


def test_a_trace_asks_every_method_the_same_and_gives_up_what_takes_too_long(
    site: tuple[VLLMServer, VLLMSite], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, bench = site
    monkeypatch.setattr(vllm_trace, "PICKED", 2)
    bench.prompts[vllm_trace.POOL] = bench.prompts[300]
    for trace in ("recurring", "prefix"):
        server.bodies.clear()
        for method in ("full", "lmcache", "default"):
            prompts = vllm_trace._prompts(bench, trace, method, 2, 7)
            asked = asyncio.run(vllm_trace._offer(bench, prompts, [0.0, 0.01, 0.02]))
            assert all(one.finished and one.ttft is not None for one in asked)
        sent = sorted(body["prompt"] for body in server.bodies if body["max_tokens"] == 2)
        assert len(sent) == 9
        assert sent[::3] == sent[1::3] == sent[2::3], "each prompt three times"
        full, lmcache = (sorted(server.bodies[at : at + 3], key=itemgetter("prompt")) for at in (0, 3))
        assert full == lmcache, "LMCache's vLLM is asked as the one without it"
    monkeypatch.setattr(vllm_trace, "PATIENCE_S", 0.3)
    server.pause = 0.5
    [late] = asyncio.run(vllm_trace._offer(bench, vllm_trace._prompts(bench, "recurring", "full", 50, 8), [0.0]))
    assert (late.finished, late.error) == (False, "TimeoutError")
    deadline = time.monotonic() + 60
    while not server.given_up:
        assert time.monotonic() < deadline, "vLLM is told"
        time.sleep(0.05)
