"""Memory over very many requests of all kinds: a day of a busy service, as quickly as it answers."""

from __future__ import annotations

import asyncio
import random
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.harness import write_record
from bench.live_service import Service, memory_mib, started_service

CLIENTS = 4
READINGS = 40
WARM_UP = 0.5  # of the requests; pools, caches and the allocator have their size by then, though some kinds are rare
LINES = [f"Berth {n} is swept by watch {n % 7} before tide {3 * n} turns." for n in range(40)]
TEXTS = [(f"berths-{n}.txt", "\n\n".join(LINES[n::4]).encode()) for n in range(4)]


def run(*, requests: int, out: Path | None, workdir: Path, model: str | None = None) -> dict[str, Any]:
    """Send so many mixed requests to a service started here; the figures. Memory in MiB, anonymous."""
    # Small caches are full after the warm-up: what grows after it is not a cache.
    small: dict[str, Any] = {"memory_cache_bytes": 16 << 20, "blended_cache_bytes": 16 << 20}
    with started_service(workdir / "serve", model, **small) as service:
        record = {**endure(service, requests), "settings": small}
    write_record(record, out)
    return record


def endure(service: Service, requests: int) -> dict[str, Any]:
    """The same against a service that runs, whose processes are looked at."""
    corpus = service.corpus("endurance", TEXTS)
    mix = Mix(service.model(), corpus, requests, service.pids)
    begun = time.monotonic()
    asyncio.run(mix.send(service.api.address, service.key))
    taken = {name: [reading[name] for reading in mix.readings] for name in service.pids}
    return {
        "benchmark": "endurance", "requests": requests, "seconds": round(time.monotonic() - begun, 1),
        "kinds": dict(mix.kinds), "unexpected": dict(mix.unexpected),
        "anonymous_mib": {name: [round(value, 1) for value in values] for name, values in taken.items()},
        "growth": {name: growth(values, requests) for name, values in taken.items()},
    }  # fmt: skip


def growth(readings: list[float], requests: int) -> dict[str, float]:
    """How memory went on after the warm-up: Theil and Sen's slope (the median of all pairs', so that single peaks do not
    count), as a share of what was there and in KiB a request."""
    steady = readings[int(WARM_UP * len(readings)) :]
    slopes = [
        (steady[b] - steady[a]) / (b - a) for a in range(len(steady)) for b in range(a + 1, len(steady))
    ]
    slope = statistics.median(slopes) if slopes else 0.0
    total = slope * (len(steady) - 1)
    per_request = 1024 * slope * len(readings) / requests
    return {"share": round(total / statistics.median(steady), 4), "kib_per_request": round(per_request, 3)}


@dataclass
class Mix:
    """Requests of all kinds in a seeded order, from clients that each wait for their answers."""

    model: str
    corpus: str
    requests: int
    pids: Mapping[str, int]
    kinds: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    readings: list[dict[str, float]] = field(default_factory=list)

    async def send(self, address: str, key: str) -> None:
        draw = random.Random(0)
        names, weights = zip(*((name, weight) for name, (weight, _) in KINDS.items()), strict=True)
        order = enumerate(draw.choices(names, weights, k=self.requests))
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=f"{address}/v1", headers=headers, timeout=120) as http:

            async def client() -> None:
                for number, kind in order:  # shared: who is free takes the next
                    self.kinds[kind] += 1
                    problem = await KINDS[kind][1](self, http, number)
                    if problem:
                        self.unexpected[f"{kind}: {problem}"] += 1
                    if number % max(1, self.requests // READINGS) == 0:
                        self.readings.append({name: memory_mib(pid) for name, pid in self.pids.items()})

            await asyncio.gather(*(client() for _ in range(CLIENTS)))

    def chat(self, number: int, **changes: Any) -> dict[str, Any]:
        question = [{"role": "user", "content": f"Which watch sweeps berth {number % 40}? ({number})"}]
        return {"model": f"{self.model}@{self.corpus}", "max_tokens": 4, "messages": question, "preread": {"top_k": 3}, **changes}


async def _whole(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    return _status(await http.post("/chat/completions", json=mix.chat(number)), 200)


async def _streamed(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    reply = await http.post("/chat/completions", json=mix.chat(number, stream=True))
    return _status(reply, 200) or (None if reply.text.endswith("data: [DONE]\n\n") else "no end")


async def _left(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    """A client that goes away after the first piece."""
    async with http.stream("POST", "/chat/completions", json=mix.chat(number, stream=True, max_tokens=64)) as reply:
        async for _ in reply.aiter_lines():
            break
        return _status(reply, 200)


async def _responses(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    tool = {"type": "file_search", "vector_store_ids": [mix.corpus], "max_num_results": 3}
    body = {"model": mix.model, "input": f"Which watch sweeps berth {number % 40}?", "tools": [tool], "max_output_tokens": 16}
    reply = await http.post("/responses", json={**body, "stream": number % 2 == 0})
    ended = any(f"event: response.{how}\n" in reply.text for how in ("completed", "incomplete"))  # incomplete: by its length
    return _status(reply, 200) or (None if number % 2 or ended else "no end")


async def _completion(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    prompt: Any = f"Berth {number % 40} is swept" if number % 2 else [number % 400 + n for n in range(8)]
    return _status(await http.post("/completions", json={"model": mix.model, "prompt": prompt, "max_tokens": 4}), 200)


async def _plain(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    """A prompt that names no corpus and holds the text of a stored document, as an agent's would. It begins like no other one,
    so that the text is looked up, and not taken from an earlier prompt."""
    _, text = TEXTS[number % len(TEXTS)]
    said = [{"role": "user", "content": f"({number}) {text.decode()}\n\nWhich watch sweeps berth {number % 40}?"}]
    reply = await http.post("/chat/completions", json={"model": mix.model, "messages": said, "max_tokens": 4})
    return _status(reply, 200) or (None if reply.json()["preread"]["in_text"] else "stored text not found")


async def _embeddings(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    texts = [f"berth {number}", f"tide {number}"]
    encoding = "base64" if number % 2 else "float"
    return _status(await http.post("/embeddings", json={"model": "any", "input": texts, "encoding_format": encoding}), 200)


async def _parts(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    """A file that comes in two parts, and goes."""
    content = f"Note {number}. ".encode() * 2000
    about = {"filename": f"parts/{number}.txt", "bytes": len(content), "mime_type": "text/plain", "purpose": "assistants"}
    upload = (await http.post("/uploads", json=about)).json()["id"]
    halves = content[: len(content) // 2], content[len(content) // 2 :]
    sent = [await http.post(f"/uploads/{upload}/parts", files={"data": ("part", half)}) for half in halves]
    joined = await http.post(f"/uploads/{upload}/complete", json={"part_ids": [each.json()["id"] for each in sent]})
    return _status(joined, 200) or _status(await http.delete(f"/files/{joined.json()['file']['id']}"), 200)


async def _events(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    """A document is replaced, and its job's events are followed to their end."""
    text = f"Log {number}: tide {number % 11} came on day {number}.".encode()
    job = await http.post(f"/corpora/{mix.corpus}/documents", files={"files": (f"log-{number % CLIENTS}.txt", text)})
    if problem := _status(job, 200):
        return problem
    last = ""
    async with http.stream("GET", f"/jobs/{job.json()['id']}/events") as reply:
        async for line in reply.aiter_lines():
            last = line if line.startswith("data:") else last
    return _status(reply, 200) or (None if '"completed"' in last else f"the last event was {last[:80]}")


async def _search(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    body = {"query": f"berth {number % 40}, tide {number}"}
    return _status(await http.post(f"/vector_stores/{mix.corpus}/search", json=body), 200)


async def _refused(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    reply = await http.post("/chat/completions", json=mix.chat(number, model=f"{mix.model}@vs_{number}"))
    broken = await http.post("/chat/completions", content=b'{"model": ', headers={"content-type": "application/json"})
    return _status(reply, 404) or _status(broken, 400)


async def _document(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    """A document comes, is ingested and deleted."""
    text = f"Note {number}: crane {number % 11} was oiled on day {number}.".encode()
    sent = await http.post("/files", files={"file": (f"notes/{number}.txt", text)}, data={"purpose": "assistants"})
    file, store = sent.json()["id"], f"/vector_stores/{mix.corpus}/files"
    if problem := _status(await http.post(store, json={"file_id": file}), 200):
        return problem
    end = time.monotonic() + 120
    while (state := (await http.get(f"{store}/{file}")).json()["status"]) == "in_progress" and time.monotonic() < end:
        await asyncio.sleep(0.2)
    gone = _status(await http.delete(f"{store}/{file}"), 200) or _status(await http.delete(f"/files/{file}"), 200)
    return gone or (None if state == "completed" else state)


async def _lists(mix: Mix, http: httpx.AsyncClient, number: int) -> str | None:
    return _status(await http.get("/jobs"), 200) or _status(await http.get("/models"), 200)


def _status(reply: httpx.Response, *expected: int) -> str | None:
    return None if reply.status_code in expected else f"status {reply.status_code}"


Kind = Callable[[Mix, httpx.AsyncClient, int], Awaitable[str | None]]
KINDS: dict[str, tuple[float, Kind]] = {
    "chat": (0.18, _whole), "stream": (0.15, _streamed), "left": (0.05, _left), "responses": (0.06, _responses),
    "completion": (0.05, _completion), "plain": (0.04, _plain), "embeddings": (0.05, _embeddings), "search": (0.22, _search),
    "refused": (0.08, _refused), "document": (0.02, _document), "parts": (0.02, _parts), "events": (0.03, _events),
    "lists": (0.05, _lists),
}  # fmt: skip


def tiny_model(workdir: Path) -> Path:
    """A folder with the embedded model's tokenizer and shape, but two thin layers of random weights."""
    folder = workdir / "models" / "tiny"
    if (folder / "model.safetensors").exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from precompute.embedded import embedded_model

    source = embedded_model()
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    config = AutoConfig.from_pretrained(source)
    thin = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config.update({**thin, "num_key_value_heads": 2, "head_dim": 16})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)  # type: ignore[no-untyped-call]
    return folder
