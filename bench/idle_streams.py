"""What streams cost that wait: memory of the API's process for each, and its CPU time while nothing happens."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from pathlib import Path
from typing import Any

import httpx

from bench.harness import write_record
from bench.live_service import Service, cpu_seconds, memory_mib, started_service
from storage.errors import UserError

WARM = 50
QUIET_SECONDS = 5.0
CHATS = 100  # are asked for; as many are taken as the engine has room for
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter, int]


def run(*, streams: int, out: Path | None, workdir: Path, model: str | None = None) -> dict[str, Any]:
    """Open `streams` streams of a job that waits, then chats until they are refused; the figures."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and streams + WARM + 200 > hard:
        raise UserError(f"this system allows {hard} open files to a process: too few for {streams} streams")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, streams + WARM + 200), hard))  # inherited by the service
    with started_service(workdir / "serve", model, names=("serve",)) as service:  # without a worker a job waits
        corpus = service.api.post("/vector_stores", {"name": "idle"})["id"]
        job = service.upload(corpus, [("a.txt", b"some words")])
        record = {"benchmark": "idle streams", **asyncio.run(_measure(service, job, streams))}
    write_record(record, out)
    return record


async def _measure(service: Service, job: str, count: int) -> dict[str, Any]:
    pid, port = service.pids["serve"], httpx.URL(service.api.address).port
    assert port is not None
    events = _get(f"/v1/jobs/{job}/events", service.key)
    for _ in range(2):  # what is needed once is not the streams'
        _close(await _open_all(port, events, WARM))
        await asyncio.sleep(1)
    before, cpu_before, began = memory_mib(pid), cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(QUIET_SECONDS)
    cpu_none = (cpu_seconds(pid) - cpu_before) / (time.monotonic() - began)
    opened = await _open_all(port, events, count)
    during, cpu_before, began = memory_mib(pid), cpu_seconds(pid), time.monotonic()
    await asyncio.sleep(QUIET_SECONDS)
    cpu = (cpu_seconds(pid) - cpu_before) / (time.monotonic() - began)
    during = max(during, memory_mib(pid))
    ended = sum(reader.at_eof() for reader, _, _ in opened)
    if ended:
        raise UserError(f"{ended} of {count} streams had ended before they were measured")
    _close(opened)
    await asyncio.sleep(2)
    after = memory_mib(pid)
    chat = {"model": service.model(), "stream": True, "messages": [{"role": "user", "content": "Say something."}]}
    chats = [await _open(port, _post("/v1/chat/completions", service.key, {**chat, "max_tokens": 512})) for _ in range(CHATS)]
    taken = [stream for stream in chats if stream[2] == 200]
    if strange := {stream[2] for stream in chats} - {200, 429}:
        raise UserError(f"chats were answered with status {min(strange)}")
    waiting = memory_mib(pid)
    _close(chats)
    return {
        "streams": count, "anonymous_mib_before": round(before, 1), "anonymous_mib_during": round(during, 1),
        "anonymous_mib_after": round(after, 1), "kib_per_stream": round(1024 * (during - before) / count, 1),
        "cpu_share_before": round(cpu_none, 3), "cpu_share_during": round(cpu, 3), "chats_taken": len(taken),
        "chats_refused": len(chats) - len(taken),
        "kib_per_chat": round(1024 * (waiting - after) / len(taken), 1) if taken else None,
    }  # fmt: skip


async def _open(port: int, request: bytes) -> Stream:
    """A stream whose first bytes have come, and its status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if status == 200:
        await reader.readuntil(b"\n\n")
    return reader, writer, status


async def _open_all(port: int, request: bytes, count: int) -> list[Stream]:
    """So many streams that have begun. Raises UserError if one is refused: what is not there costs nothing."""
    opened = [await _open(port, request) for _ in range(count)]
    refused = [status for _, _, status in opened if status != 200]
    if refused:
        _close(opened)
        raise UserError(f"{len(refused)} of {count} streams were refused, the first with status {refused[0]}")
    return opened


def _close(streams: list[Stream]) -> None:
    for _, writer, _ in streams:
        writer.close()


def _get(path: str, key: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\n\r\n".encode()


def _post(path: str, key: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content
