"""LMCache's multi-process server, a peer of `preread bench serve --engine vllm --trace …`: a vLLM of the same arguments that asks
it for prefixes, in place of our connector.

What can be chosen is chosen for LMCache: its chunks are as small as vLLM's blocks, so that no token of a common prefix is lost to
rounding; they lie in memory that both processes map, not in messages; it has memory for all of a usual trace and does not share
the machine with our tiers; it looks a prompt up as soon as that waits. On a CPU it has only this mode, and only prefixes.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

import httpx

from bench.open_loop import PATIENCE_S
from bench.vllm_site import END_SECONDS, READY_SECONDS, VLLMSite, end
from serving.engine.types import GenerateRequest
from serving.local_broker import free_port
from serving.supervisor import last_line
from storage.errors import UserError

LMCACHE = "lmcache"  # the method's name
HOST = "127.0.0.1"
CHUNK_TOKENS = 128  # the CPU build's block
MEMORY_GIB = 4
_HITS = re.compile(r"^vllm:(external_)?prefix_cache_hits_total\{[^}]*\} (\S+)$", re.MULTILINE)


class Peer(TypedDict):
    """What `vllm_site` is given so that its vLLM uses a running server."""

    arguments: Sequence[str]
    variables: Mapping[str, str]


@contextmanager
def lmcache(vllm: Path, workdir: Path) -> Iterator[Peer]:
    """A server on loopback, from the packages beside vLLM's environment, as long as the block. Raises UserError."""
    python, packages = vllm.absolute() / "bin" / "python", vllm.absolute().with_name(LMCACHE)
    if not python.exists() or not (packages / "lmcache").is_dir():
        raise UserError(f"{packages} has no LMCache for {vllm}: make lmcache")
    port, variables, log = free_port(), environ(packages), workdir / "lmcache.log"
    workdir.mkdir(parents=True, exist_ok=True)
    argv = [str(python), "-m", "lmcache.v1.multiprocess.http_server", *options(port)]
    with log.open("wb") as out:
        process = subprocess.Popen(argv, env={**os.environ, **variables}, stdout=out, stderr=out)
    try:
        _wait_until_ready(process, port, log)
        yield Peer(arguments=("--kv-transfer-config", json.dumps(connector(port))), variables=variables)
    finally:
        end(process)


def environ(packages: Path) -> dict[str, str]:
    """What finds the packages beside those of vLLM's environment; and nothing is told to the internet."""
    paths = [path for path in (os.environ.get("PYTHONPATH"), str(packages)) if path]
    return {
        "PYTHONPATH": os.pathsep.join(paths), "LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING",
        "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    }  # fmt: skip


def options(port: int) -> list[str]:
    """Of the server."""
    return [
        "--host", HOST, "--port", str(port), "--http-host", HOST, "--http-port", str(free_port()),
        "--supported-transfer-mode", "engine_driven", "--chunk-size", str(CHUNK_TOKENS), "--l1-size-gb", str(MEMORY_GIB),
        "--disable-observability", "--no-l1-use-lazy", "--shm-name", f"preread-bench-{port}", "--eviction-policy", "LRU",
    ]  # fmt: skip


def connector(port: int) -> dict[str, object]:
    """vLLM's --kv-transfer-config."""
    return {
        "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{HOST}", "lmcache.mp.port": port, "lmcache.mp.eager_prefetch": True,
        },
    }  # fmt: skip


def _wait_until_ready(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    until = time.monotonic() + READY_SECONDS
    while time.monotonic() < until and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex((HOST, port)) == 0:
                return
        time.sleep(0.2)
    raise UserError(f"LMCache did not start: {last_line(log)}")


def prove(site: VLLMSite, request: GenerateRequest) -> None:
    """Raises UserError where LMCache has nothing of a prompt that vLLM has read and forgotten: no figure would mean anything."""
    asyncio.run(site.ask(request))
    until, reset = time.monotonic() + END_SECONDS, f"{site.url}/reset_prefix_cache"
    while not httpx.post(reset, timeout=PATIENCE_S, trust_env=False).raise_for_status().json()["success"]:
        if time.monotonic() > until:
            raise UserError("vLLM's own cache could not be emptied")
        time.sleep(0.2)
    before = hit_tokens(site.url)
    asyncio.run(site.ask(request))
    if hit_tokens(site.url)["connector"] <= before["connector"]:
        raise UserError("LMCache has answered nothing from its cache")


def hit_tokens(url: str) -> dict[str, float]:
    """Tokens of prompts so far whose KV was in vLLM's own cache, or that the connector brought (ours claims the whole prompt)."""
    told = httpx.get(f"{url}/metrics", timeout=PATIENCE_S, trust_env=False).raise_for_status().text
    hits = {"vllm": 0.0, "connector": 0.0}
    for outside, total in _HITS.findall(told):
        hits["connector" if outside else "vllm"] += float(total)
    return hits
