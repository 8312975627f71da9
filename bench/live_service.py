"""A service to be measured: its own processes on a fresh data folder, or one that runs already."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from bench.harness import emptied
from precompute.embedded import embedded_place
from serving import vllm_process
from serving.cli_client import TERMINAL, Api
from serving.cli_server import check_model, first_key
from serving.local_broker import free_port
from serving.settings import load_settings
from serving.supervisor import environment, last_line
from storage.errors import UserError

READY_SECONDS = 600.0  # on a busy machine
END_SECONDS = 20.0
JOB_SECONDS = 1800.0
ALL = ("serve", "worker", "beat")


@dataclass
class Service:
    """`pids`: the process ids of what was started here, by name."""

    api: Api
    key: str
    pids: Mapping[str, int]

    def corpus(self, name: str, files: Sequence[tuple[str, bytes]]) -> str:
        """A corpus with these documents, its KV stored; its id."""
        corpus: str = self.api.post("/vector_stores", {"name": name})["id"]
        job = self.upload(corpus, files)
        end = time.monotonic() + JOB_SECONDS
        while (shown := self.api.get(f"/jobs/{job}"))["status"] not in TERMINAL and time.monotonic() < end:
            time.sleep(0.5)
        if shown["status"] != "completed":
            raise UserError(f"the corpus could not be made: its job is {shown['status']}, {shown['errors'][:1]}")
        return corpus

    def upload(self, corpus: str, files: Sequence[tuple[str, bytes]]) -> str:
        """Put documents there; the job's id."""
        sent = [("files", (name, content)) for name, content in files]
        job: str = self.api.call("POST", f"/corpora/{corpus}/documents", files=sent)["id"]
        return job

    def model(self) -> str:
        name: str = min((each["id"] for each in self.api.get("/models")["data"]), key=len)
        return name


@contextmanager
def running_service(url: str, key: str) -> Iterator[Service]:
    """A service that others have started."""
    api = Api(url, key)
    try:
        yield Service(api, key, {})
    finally:
        api.close()


@contextmanager
def started_service(
    folder: Path, model: str | None, names: Sequence[str] = ALL, vllm: Path | None = None, **changes: Any
) -> Iterator[Service]:
    """The processes of `names` by the environment's settings, on a folder that is emptied first; `vllm`: an environment with
    vLLM, which is started as their engine. Raises UserError."""
    emptied(folder)
    given = load_settings(model=model)
    check_model(given)
    chosen = str(embedded_place()) if given.model == "embedded" else given.model
    if vllm is not None:
        changes |= {"engine": "vllm", "vllm_url": f"http://127.0.0.1:{free_port()}"}
    settings = replace(given, data_dir=folder.resolve(), host="127.0.0.1", port=free_port(), model=chosen, **changes)
    key = first_key(settings)
    assert key is not None
    address, environ = f"http://127.0.0.1:{settings.port}", environment(settings)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        commands = {name: [sys.executable, "-m", "serving.cli", name, "--supervised"] for name in names}
        if vllm is not None:
            commands["vllm"] = vllm_process.command(settings, vllm)
            environ = vllm_process.environ(settings, environ)
        for name, command in commands.items():
            with (folder / f"{name}.log").open("wb") as log:
                processes[name] = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log)
        _wait_until_ready(address, processes, folder)
        with running_service(address, key) as service:
            yield replace(service, pids={name: process.pid for name, process in processes.items()})
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdin is not None:
                process.stdin.close()


def _wait_until_ready(address: str, processes: Mapping[str, subprocess.Popen[bytes]], folder: Path) -> None:
    end = time.monotonic() + READY_SECONDS
    needed = [name for name in ("serve", "vllm") if name in processes]
    path = "readyz" if "vllm" in processes else "healthz"  # the rest needs no waiting for
    ended: list[str] = []
    while time.monotonic() < end and not ended:
        try:
            if httpx.get(f"{address}/{path}", timeout=5).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
        ended = [name for name in needed if processes[name].poll() is not None]
    name = (ended or needed)[-1]
    raise UserError(f"{'vLLM' if name == 'vllm' else 'the API'} did not start: {last_line(folder / f'{name}.log')}")


def memory_mib(pid: int) -> float:
    """Anonymous memory in MiB: what a process holds of its own, without files that are mapped."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise UserError("this system does not say how much memory a process holds")


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has had so far."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
