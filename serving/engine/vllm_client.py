"""vLLM's HTTP interface as far as the engine needs it: what it serves, and the events of one completion."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from storage.errors import EngineUnavailable, Overloaded, PrereadError, UserError

CONNECT_S = 5.0
PROBE_S = 2.5  # less than readyz waits
SILENCE_S = 300.0  # in which nothing at all comes: a long queue, or nobody there
KEPT = 16  # idle connections


@dataclass(frozen=True)
class Served:
    """What a vLLM process serves."""

    name: str
    max_model_len: int | None


class VLLMClient:
    """One vLLM process, or what balances several. Every method belongs to one event loop. At most `connections` at once; who
    finds none free waits. `token`: its `--api-key`, if it has any."""

    def __init__(self, url: str, connections: int, token: str = "", *, silence_s: float = SILENCE_S) -> None:
        self.url = url.rstrip("/")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(silence_s, connect=CONNECT_S),
            limits=httpx.Limits(max_connections=connections, max_keepalive_connections=KEPT),
            trust_env=False,  # a proxy of the machine's has no part in this
        )
        self._closing: set[asyncio.Future[None]] = set()

    async def served(self) -> Served:
        """Raises EngineUnavailable."""
        with _troubles(self.url):
            reply = await self._http.get("/v1/models", timeout=PROBE_S)
        await _refuse(reply)
        try:
            first = reply.json()["data"][0]
            length = first.get("max_model_len")
            return Served(str(first["id"]), length if isinstance(length, int) else None)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise EngineUnavailable(f"what answers at {self.url} is not vLLM") from None

    async def well(self) -> None:
        """Raises EngineUnavailable where it is not there, or its engine has died."""
        with _troubles(self.url):
            reply = await self._http.get("/health", timeout=PROBE_S)
        await _refuse(reply)

    @asynccontextmanager
    async def completion(self, body: Mapping[str, Any]) -> AsyncIterator[AsyncIterator[dict[str, Any]]]:
        """The events of POST /v1/completions. Leaving the block before their end makes vLLM give the answer up. Raises
        EngineUnavailable, Overloaded, and UserError for what vLLM says the caller should change."""
        with _troubles(self.url):
            reply = await self._http.send(self._http.build_request("POST", "/v1/completions", json=body), stream=True)
            try:
                await _refuse(reply)
                yield _events(reply)
            finally:
                await self._closed(reply)

    async def _closed(self, reply: httpx.Response) -> None:
        """In a task of its own: who is cancelled in the middle of it would leave the connection open, vLLM computing for it, and
        its place among the connections taken for ever."""
        closing = asyncio.ensure_future(reply.aclose())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        await asyncio.shield(closing)

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """An answer in one piece. Raises as `completion` does."""
        with _troubles(self.url):
            reply = await self._http.post("/v1/completions", json=body)
        await _refuse(reply)
        try:
            found = reply.json()
        except ValueError:
            raise EngineUnavailable("vLLM sent what is no answer") from None
        return found if isinstance(found, dict) else {}

    async def close(self) -> None:
        await self._http.aclose()


class _troubles:
    """HTTP's troubles as ours: none of them says anything of what was asked."""

    def __init__(self, url: str) -> None:
        self._url = url

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise EngineUnavailable(f"vLLM cannot be reached at {self._url}; try again in a few seconds") from None
        if isinstance(error, httpx.TimeoutException):
            raise EngineUnavailable("vLLM did not answer in time; try again in a few seconds", code="engine_timeout") from None
        if isinstance(error, httpx.HTTPError):
            raise EngineUnavailable("vLLM broke off in the middle of the answer; try again in a few seconds") from None


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """What the stream holds until its end is said. Raises EngineUnavailable where it is not."""
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue  # a comment that keeps the connection alive
        text = line[5:].strip()
        if text == "[DONE]":
            return
        try:
            event = json.loads(text)
        except ValueError:
            raise EngineUnavailable("vLLM sent what is no event") from None
        if isinstance(event, dict) and "error" in event:
            raise _error(_code(event["error"]), _message(event))
        if isinstance(event, dict):
            yield event
    raise EngineUnavailable("vLLM broke off in the middle of the answer; try again in a few seconds")


async def _refuse(reply: httpx.Response) -> None:
    if reply.status_code == 200:
        return
    await reply.aread()
    try:
        message = _message(reply.json())
    except ValueError:
        message = ""
    raise _error(reply.status_code, message)


def _error(status: int, message: str) -> PrereadError:
    if status in (400, 422):
        said = message.strip().splitlines()[0][:300].rstrip(".") if message.strip() else "it does not say why"
        return UserError(f"vLLM does not serve this request: {said}.", code="unsupported_parameter")
    if status == 429:
        return Overloaded("vLLM has too many requests already; try again in a few seconds")
    if status in (401, 403):
        return EngineUnavailable("vLLM refuses the service's key: VLLM_API_KEY is another one there")
    if status == 404:
        return EngineUnavailable("vLLM no longer serves the model that it did; try again in a few seconds")
    return EngineUnavailable(f"vLLM failed with {status}; try again in a few seconds")


def _message(body: Any) -> str:
    """Of either form of vLLM's errors."""
    found = body.get("error", body) if isinstance(body, dict) else {}
    return str(found.get("message", "")) if isinstance(found, dict) else str(found)


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, int) else 500
