"""The commands' side of the REST API: where the server is, which key to show, and errors as one line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer

from serving.settings import Settings, load_settings
from serving.supervisor import running_address
from storage.errors import NotFound, UserError

ADMIN_KEY = "admin.key"
TERMINAL = ("completed", "completed_with_errors", "failed", "cancelled")
POLL_SECONDS = 0.5

Url = Annotated[
    str | None, typer.Option("--url", help="Address of the server; default: the one running here.")
]
KeyFile = Annotated[
    Path | None, typer.Option("--key-file", help="File that holds an API key; default: DATA_DIR/admin.key.")
]


class Api:
    """A REST client for one server and one key."""

    def __init__(self, address: str, key: str) -> None:
        self.address = address.rstrip("/").removesuffix("/v1")
        self._http = httpx.Client(
            base_url=f"{self.address}/v1",
            headers={"authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(600, connect=5),
        )

    def close(self) -> None:
        self._http.close()

    def call(self, method: str, path: str, **arguments: Any) -> Any:
        """The answer's JSON. Raises UserError with the server's own words."""
        try:
            answer = self._http.request(method, path, **arguments)
        except httpx.TransportError as error:
            raise UserError(
                f"no answer from {self.address} ({error}); start a server with `preread up`"
            ) from None
        _check(answer)
        return answer.json()

    def get(self, path: str, **query: Any) -> Any:
        return self.call("GET", path, params={k: v for k, v in query.items() if v is not None})

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return self.call("POST", path, json=body)

    def pages(self, path: str, **query: Any) -> Iterator[dict[str, Any]]:
        """Every object of a list, page by page."""
        after = None
        while True:
            page = self.get(path, limit=100, after=after, **query)
            yield from page["data"]
            if not page.get("has_more") or not page["data"]:
                return
            after = page["data"][-1]["id"]

    def upload(self, file: Path, name: str, **form: str) -> dict[str, Any]:
        """Upload a file; content the server has already is no error."""
        with file.open("rb") as body:
            parts = {"file": (name, body, "application/octet-stream")}
            done: dict[str, Any] = self.call(
                "POST", "/files", data={"purpose": "assistants", **form}, files=parts
            )
            return done

    def lines(self, path: str, **query: Any) -> Iterator[str]:
        """An answer's lines as they come."""
        told = {name: value for name, value in query.items() if value is not None}
        try:
            with self._http.stream("GET", path, params=told) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    _check(answer)
                yield from answer.iter_lines()
        except httpx.TransportError as error:
            raise UserError(f"the answer from {self.address} broke off ({error})") from None

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Server-sent events as (seconds since the request, event)."""
        start = time.perf_counter()
        try:
            with self._http.stream("POST", path, json={**body, "stream": True}) as answer:
                if answer.status_code >= 400:
                    answer.read()
                    _check(answer)
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        yield time.perf_counter() - start, _event(line[6:])
        except httpx.TransportError as error:
            raise UserError(f"the answer from {self.address} broke off ({error})") from None


def _event(text: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(text)
    if "error" in event:
        raise UserError(str(event["error"].get("message", event["error"])))
    return event


def _check(answer: httpx.Response) -> None:
    if answer.status_code < 400:
        return
    try:
        message = str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"the server answered {answer.status_code}"
    raise (NotFound if answer.status_code == 404 else UserError)(message)


def connect(url: str | None, key_file: Path | None, settings: Settings | None = None) -> Api:
    """A client for the server that the options, or the data folder, name. Raises UserError."""
    settings = settings or load_settings()
    path = key_file or settings.data_dir / ADMIN_KEY
    try:
        key = path.read_text(encoding="utf-8").strip()
    except OSError:
        raise UserError(f"no API key in {path}: run `preread up`, or name a file with --key-file") from None
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    return Api(url or running_address(settings) or f"http://{host}:{settings.port}", key)


def find_corpus(api: Api, name: str | None) -> dict[str, Any]:
    """The corpus of that name or id; without a name, the only one there is. Raises UserError."""
    corpora = list(api.pages("/vector_stores"))
    found = [c for c in corpora if name is None or name in (c["name"], c["id"])]
    if len(found) == 1:
        return found[0]
    if not corpora:
        raise NotFound("there is no corpus yet: make one with `preread ingest PATH`")
    known = ", ".join(sorted(str(c["name"]) for c in corpora))
    if name is None:
        raise UserError(f"name a corpus with --corpus: {known}")
    if found:
        raise UserError(f"several corpora are named {name!r}: use an id, {', '.join(c['id'] for c in found)}")
    raise NotFound(f"no corpus named {name!r}; there are: {known}")


def ensure_corpus(api: Api, name: str) -> dict[str, Any]:
    """The corpus of that name or id, made if there is none."""
    try:
        return find_corpus(api, name)
    except NotFound:
        made: dict[str, Any] = api.post("/vector_stores", {"name": name})
        return made


def wait_job(api: Api, job_id: str, watch: Any = None) -> dict[str, Any]:
    """Poll a job to its end; `watch(job)` sees every state on the way."""
    while True:
        job: dict[str, Any] = api.get(f"/jobs/{job_id}")
        if watch is not None:
            watch(job)
        if job["status"] in TERMINAL:
            return job
        time.sleep(POLL_SECONDS)
