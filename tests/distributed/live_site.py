"""A site of real processes: broker, API, workers and beat, as an operator would start them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import openai
from sqlalchemy import select
from sqlalchemy.orm import Session

from serving.local_broker import LocalBroker, free_port
from storage.catalogue.engine import Catalogue, open_catalogue
from storage.catalogue.schema import KVObject
from storage.objects import open_store
from storage.types import ObjectStore

LEASE_SECONDS = 4.0
T = TypeVar("T")


def until(look: Callable[[], T], seconds: float, what: str) -> T:
    """The first true result of `look`; fails after `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited {seconds:g} s in vain for {what}")


@dataclass
class Backends:
    """Where a site keeps things, as settings. `shared_folder`: all processes on one data folder."""

    environ: dict[str, str]
    shared_folder: bool


@dataclass
class Site:
    folder: Path
    backends: Backends
    broker: LocalBroker | None
    model: Path
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, command: str, name: str | None = None, argv: list[str] | None = None) -> subprocess.Popen[bytes]:
        name = name or command
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                argv or [sys.executable, "-m", "serving.cli", command],
                env=self.environ(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.processes[name] = process
        return process

    def environ(self, name: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("PREREAD_")}
        data = self.folder / ("data" if self.backends.shared_folder else f"data-{name}")
        return {
            **kept,
            "PREREAD_DATA_DIR": str(data),
            "PREREAD_PORT": str(self.port),
            **({"PREREAD_BROKER_URL": self.broker.url} if self.broker else {}),
            "PREREAD_MODEL": str(self.model),
            "PREREAD_THREADS": "1",
            "PREREAD_LEASE_SECONDS": str(LEASE_SECONDS),
            "PREREAD_TICK_SECONDS": "0.5",
            "PREREAD_SECRET": "a secret for the tests, long enough to be one",
            **self.backends.environ,
        }

    def wait_ready(self, seconds: float = 300) -> None:
        def ready() -> bool:
            assert self.processes["serve"].poll() is None, self.log("serve")
            try:
                return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        until(ready, seconds, "readyz")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def key(self) -> str:
        return (Path(self.environ("serve")["PREREAD_DATA_DIR"]) / "admin.key").read_text().strip()

    def openai(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.key, timeout=60)

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        headers = {"authorization": f"Bearer {self.key}"}
        answer = httpx.request(method, f"{self.url}/v1{path}", headers=headers, timeout=60, **arguments)
        assert answer.status_code < 400, answer.text
        return answer.json()

    def job(self, job_id: str) -> dict[str, Any]:
        job: dict[str, Any] = self.call("GET", f"/jobs/{job_id}")
        return job

    def wait_job(self, job_id: str, seconds: float = 300) -> dict[str, Any]:
        ended = ("completed", "completed_with_errors", "failed", "cancelled")
        return until(
            lambda: (j := self.job(job_id))["status"] in ended and j, seconds, f"the end of {job_id}"
        )

    def catalogue(self) -> Catalogue:
        environ = self.environ("serve")
        default = f"sqlite:///{environ['PREREAD_DATA_DIR']}/catalogue.db"
        return open_catalogue(environ.get("PREREAD_DATABASE_URL", default))

    def objects(self) -> ObjectStore:
        environ = self.environ("serve")
        return open_store(
            environ.get("PREREAD_OBJECT_STORE", f"{environ['PREREAD_DATA_DIR']}/objects"),
            s3_endpoint=environ.get("PREREAD_S3_ENDPOINT"),
            s3_access_key=environ.get("PREREAD_S3_ACCESS_KEY"),
            s3_secret_key=environ.get("PREREAD_S3_SECRET_KEY"),
        )

    def kill_who_computes(self) -> int:
        """Kill -9 the worker that holds a lease on KV work; its process id."""
        catalogue = self.catalogue()
        pids = {p.pid for name, p in self.processes.items() if name.startswith("worker")}
        try:
            pid = until(lambda: self._holder(catalogue), 60, "a lease on KV work")
        finally:
            catalogue.close()
        assert pid in pids
        os.kill(pid, signal.SIGKILL)
        return pid

    def _holder(self, catalogue: Catalogue) -> int | None:
        def look(session: Session) -> str | None:
            return session.scalars(
                select(KVObject.lease_owner).where(KVObject.status == "leased").limit(1)
            ).first()

        with catalogue.read() as session:
            owner = look(session)
        return int(owner.split(":")[0].rsplit("-", 1)[1]) if owner else None

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
