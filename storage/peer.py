"""Objects of a parent site, over HTTP(S): ranges of signed URLs into the caller's memory, within a deadline."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from typing import Any

import httpx

from storage.breaker import Breaker
from storage.deadline import latest_end
from storage.errors import ObjectMissing, StorageTimeout, StorageUnavailable, UserError
from storage.names import check_name
from storage.site_key import SiteKey

CONNECT_SECONDS = 2.0
READ_SECONDS = 5.0  # without a byte
DEADLINE_SECONDS = 15.0  # for one call, however steadily its bytes drip
PAUSE_SECONDS = 2.0  # for which a parent that does not answer is left alone


class PeerStore:
    """The reading half of an ObjectStore, at a parent site. Safe to share between threads.

    A body that breaks off is resumed where it ended. A parent that does not answer once is left alone for a while; then one
    request tries it (see `Breaker`). What is read is not verified here: see `ReadThrough`.
    """

    def __init__(
        self,
        url: str,
        key: SiteKey,
        *,
        read_s: float = READ_SECONDS,
        deadline_s: float = DEADLINE_SECONDS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Raises UserError for an address that is none, or one where anybody on the way could read along."""
        self._base = f"{_checked(url)}/site/{key.site_id}"
        self._key, self._deadline_s, self._clock = key, deadline_s, clock
        self._http = httpx.Client(timeout=httpx.Timeout(read_s, connect=min(read_s, CONNECT_SECONDS)))
        self._breaker = Breaker(1, PAUSE_SECONDS, probe_s=2 * deadline_s, server="parent site")

    def size(self, name: str) -> int | None:
        """See ObjectStore. None also for what this site may not hold."""
        with self._mapped(f"size {name}"):
            answer = self._http.request("HEAD", self._url("HEAD", name), headers={"accept-encoding": "identity"})
            if answer.status_code == 404:
                return None
            _check(answer.status_code)
            return int(answer.headers["content-length"])

    def read_into(self, name: str, buffer: memoryview, offset: int = 0) -> int:
        """See ObjectStore. Also raises StorageTimeout."""
        end, done = latest_end(self._deadline_s), 0
        with self._mapped(f"read {name}"):
            while True:
                before = done
                try:
                    for piece in self._pieces(name, offset + done, offset + len(buffer), end):
                        piece = piece[: len(buffer) - done]
                        buffer[done : done + len(piece)] = piece
                        done += len(piece)
                    return done
                except (httpx.ReadError, httpx.RemoteProtocolError):
                    if done == before:  # not a byte further: the parent is not well
                        raise

    def call(self, name: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one of the calls that sites make; always tried. Raises StorageTimeout, StorageUnavailable."""
        content = json.dumps(body).encode()
        query = self._key.query("POST", name, self._clock(), content)
        with self._mapped(name, gated=False):
            answer = self._http.post(f"{self._base}/{name}?{query}", content=content)
            _check(answer.status_code)
            found: dict[str, Any] = answer.json()
            return found

    def close(self) -> None:
        self._http.close()

    def _url(self, method: str, name: str) -> str:
        return f"{self._base}/objects/{check_name(name)}?{self._key.query(method, name, self._clock())}"

    def _pieces(self, name: str, start: int, stop: int, end: float) -> Iterator[bytes]:
        """The object's bytes [start, stop), as they arrive; fewer where it ends."""
        if start >= stop:
            return
        headers = {"accept-encoding": "identity", "range": f"bytes={start}-{stop - 1}"}
        with self._http.stream("GET", self._url("GET", name), headers=headers) as answer:
            if answer.status_code == 416:
                return  # the object ends before `start`
            _check(answer.status_code)
            ranged = answer.headers.get("content-range", "").startswith(f"bytes {start}-")
            if start and not ranged:
                raise StorageUnavailable("the parent site ignored the range")
            for piece in answer.iter_raw():
                if time.monotonic() > end:
                    raise StorageTimeout("the parent site took too long")
                yield piece

    @contextlib.contextmanager
    def _mapped(self, action: str, gated: bool = True) -> Iterator[None]:
        """The one place where HTTP's troubles become ours. No message quotes a URL: it is signed."""
        probe = gated and self._breaker.enter()
        try:
            yield
        except (ObjectMissing, _Refused) as answered:
            self._breaker.succeeded()
            if isinstance(answered, _Refused):
                raise StorageUnavailable(f"parent site: {action}: it answered {answered}") from None
            raise
        except (StorageUnavailable, httpx.HTTPError, ValueError, KeyError) as error:
            self._breaker.failed(probe)
            slow = isinstance(error, StorageTimeout | httpx.TimeoutException)
            raise (StorageTimeout if slow else StorageUnavailable)(
                f"parent site: {action}: {type(error).__name__}"
            ) from None
        else:
            self._breaker.succeeded()


class _Refused(Exception):
    """The parent is there and says no; the message is the status."""


def _check(status: int) -> None:
    if status == 404:
        raise ObjectMissing("the parent site has no such object for this site")
    if status >= 500:
        raise StorageUnavailable(f"the parent site answered {status}")
    if status not in (200, 206):
        raise _Refused(str(status))


def _checked(url: str) -> str:
    try:
        parsed = httpx.URL(url)
    except (httpx.InvalidURL, TypeError):
        parsed = httpx.URL("")
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.userinfo:
        raise UserError(f"{url!r} is no address of a parent site; write https://host:port")
    if parsed.scheme == "http" and not _is_this_machine(parsed.host):
        raise UserError("a parent site on another machine is reached by https:// only: what it sends is confidential")
    return url.rstrip("/").removesuffix("/v1")


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
