"""A vLLM process with our connector to be measured, on a folder of its own, with prompts whose chunks are stored there."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from bench.harness import emptied, reader_folder
from bench.live_service import cpu_seconds
from bench.ttft import QUESTION, chunks_for
from serving.engine.types import GenerateRequest, Message, Outcome
from serving.engine.vllm import VLLMEngine
from serving.local_broker import free_port
from serving.parts import Wiring
from serving.settings import Settings, load_settings
from serving.supervisor import environment, last_line
from serving.vllm_process import command, environ
from storage.catalogue.schema import KVObject
from storage.errors import EngineUnavailable, UserError
from storage.keys import group_secret, kv_key
from storage.types import KVRecord, RetrievedChunk

READY_SECONDS = 900.0  # on a busy machine
END_SECONDS = 30.0
GROUP = "bench"
AT_ONCE = 64  # nothing is refused here: vLLM has the queue


@dataclass
class Answered:
    """Seconds from handing in a prompt to its first token, CPU seconds of all of vLLM's processes until then, and the rest."""

    ttft_s: float
    cpu_s: float
    outcome: Outcome


@dataclass
class VLLMSite:
    """`prompts`: by length, the chunks of one of about so many tokens. `pid`: of vLLM's first process. `url`: vLLM's."""

    engine: VLLMEngine
    prompts: dict[int, tuple[RetrievedChunk, ...]]
    pid: int
    url: str

    def request(self, tokens: int, method: str, number: int, max_tokens: int = 1) -> GenerateRequest:
        """Question `number` about a prompt, whose chunks stand in an order of its own. Equal numbers may find each other's blocks
        in vLLM's prefix cache, others not: what is computed in full is shared by corpus, what is blended by order."""
        order = random.Random(number).sample(self.prompts[tokens], len(self.prompts[tokens]))
        chunks = tuple(replace(chunk, corpus_id=f"bench-{number}") for chunk in order)
        messages = (Message("user", f"{QUESTION} ({number})"),)
        return GenerateRequest(messages, chunks, method=method, max_tokens=max_tokens, ignore_eos=True)

    async def ask(self, request: GenerateRequest) -> Answered:
        """Raises UserError where not all chunks have a place, or stored KV was not used: such a figure would mean nothing."""
        prepared = await asyncio.to_thread(self.engine.prepare, request)
        if len(prepared.plan.chunks) < len(request.chunks):
            raise UserError(f"the model's context has no room for {len(request.chunks)} chunks")
        before, begun = tree_cpu_seconds(self.pid), time.perf_counter()
        generation, ttft, cpu = self.engine.submit(request, prepared), 0.0, 0.0
        async for _ in generation:
            if not ttft:
                ttft, cpu = time.perf_counter() - begun, tree_cpu_seconds(self.pid) - before
        assert generation.outcome is not None
        report = generation.outcome.report
        if request.method != "full" and report.not_reused:
            raise UserError(f"stored KV was not used: {report.not_reused[0].reason}")
        return Answered(ttft, cpu, generation.outcome)


@contextmanager
def vllm_site(
    model: str | None, workdir: Path, vllm: Path, lengths: Sequence[int], *, device: str = "cpu", dtype: str = "bfloat16",
    arguments: Sequence[str] = (), variables: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[VLLMSite]:  # fmt: skip
    """vLLM from the environment `vllm`, and chunks for prompts of `lengths` in its store. `arguments` and `variables`: further
    ones of its process; the last of an argument counts. Raises UserError."""
    folder = emptied((workdir / "vllm").resolve())
    chosen = str(reader_folder(model).resolve())
    given = load_settings(model=chosen, device=device, dtype=dtype, engine="vllm")
    settings = replace(given, data_dir=folder, vllm_url=f"http://127.0.0.1:{free_port()}", max_requests=AT_ONCE)
    prompts = _store(settings, lengths)
    argv = command(settings, vllm, *arguments)
    with (folder / "vllm.log").open("wb") as log:
        process = subprocess.Popen(argv, env={**environ(settings, environment(settings)), **variables}, stdout=log, stderr=log)
    wiring = Wiring(settings)
    try:
        _wait_until_ready(wiring.engine, process, folder / "vllm.log")
        assert isinstance(wiring.engine, VLLMEngine)
        yield VLLMSite(wiring.engine, prompts, process.pid, settings.vllm_url)
    finally:
        wiring.close()
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process, in good order if it does so in time."""
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _store(settings: Settings, lengths: Sequence[int]) -> dict[int, tuple[RetrievedChunk, ...]]:
    """Compile and store the chunks, as a worker does; nothing of it stays in this process."""
    wiring = Wiring(settings)
    reader, secret = wiring.reader, group_secret(wiring.secret, GROUP)
    if reader.full_prefill_reason:
        raise UserError(f"{reader.name} is served by full prefill only: {reader.full_prefill_reason}")
    prompts, stored = {}, set()
    for length in lengths:
        if length + 64 > reader.max_positions:
            raise UserError(f"{reader.name} takes {reader.max_positions} tokens, so {length} cannot be measured")
        texts = [tuple(ids) for ids in chunks_for(reader, length)]
        keys = [kv_key(reader.profile, ids, GROUP, secret) for ids in texts]
        new = [(key, ids) for key, ids in zip(keys, texts, strict=True) if key not in stored]
        for at in range(0, len(new), 8):
            batch = new[at : at + 8]
            for (key, ids), kv in zip(batch, reader.compile([ids for _, ids in batch]), strict=True):
                wiring.kv_store.put(KVRecord(key, reader.profile, ids, kv))
                with wiring.catalogue.write() as session:
                    session.add(_row(key, len(ids)))
                stored.add(key)
        prompts[length] = tuple(_retrieved(n, ids, key) for n, (ids, key) in enumerate(zip(texts, keys, strict=True)))
    wiring.close()
    del wiring, reader
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # vLLM takes what is free
    return prompts


def _row(key: str, tokens: int) -> KVObject:
    return KVObject(key=key, tenant_id=GROUP, sharing_group=GROUP, status="done", tokens=tokens, created_at=time.time())


def _retrieved(number: int, ids: tuple[int, ...], key: str) -> RetrievedChunk:
    return RetrievedChunk(
        chunk_id=number, document_id="d", corpus_id="bench", file_id="f", path="p", version="v", text="", token_ids=ids, start=0,
        end=0, headings=(), page_start=None, page_end=None, line_start=1, line_end=1, score=1.0, kv_key=key,
    )  # fmt: skip


def _wait_until_ready(engine: object, process: subprocess.Popen[bytes], log: Path) -> None:
    assert isinstance(engine, VLLMEngine)
    end = time.monotonic() + READY_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            engine.check()
        except EngineUnavailable:
            time.sleep(0.5)
        else:
            return
    raise UserError(f"vLLM did not start: {last_line(log)}")


def tree_cpu_seconds(pid: int) -> float:
    """CPU time of a process and of all that it has started."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents.setdefault(int(words[1]), []).append(int(path.parent.name))
    total, left = 0.0, [pid]
    while left:
        each = left.pop()
        left += parents.get(each, [])
        try:
            total += cpu_seconds(each)
        except OSError:
            continue
    return total
