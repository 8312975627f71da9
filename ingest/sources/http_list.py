"""A list of URLs as a source: text with one to a line, JSON, or a sitemap."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import httpx

from ingest.fetch import FetchFailed
from ingest.sources.credentials import Credential
from ingest.sources.shelf import Shelf
from ingest.sources.types import FILE_BYTES, Asker, Entry, Left, Reach, Seen
from storage.errors import StorageUnavailable, UserError

MOST_URLS = 50_000  # as many as a sitemap may have
LIST_BYTES = 16 << 20
_NO_LIST = "the list is neither lines of URLs, nor a JSON array, nor a sitemap"


class HttpListSource:
    """The files that a list names, each at its `path` or that of its URL. One that has not changed is not sent again: the
    server is asked by ETag or date."""

    def __init__(
        self, url: str, reach: Reach, asker: Asker, credential: Credential | None = None, *, file_bytes: int = FILE_BYTES
    ) -> None:
        reach.hosts.check(url)
        self._url, self._asker, self._credential = url, asker, credential
        self._shelf = Shelf(reach, asker, file_bytes)
        self._urls: dict[str, str] = {}
        self.skipped: list[Left] = self._shelf.skipped
        self.seen: dict[str, Seen] = self._shelf.seen

    def manifest(self) -> list[Entry]:
        """See Source. Raises FetchFailed, HostRefused, StorageUnavailable, UserError."""
        listed = _listed(self._shelf.get(self._url, self._shown(self._url), LIST_BYTES).body)
        if len(listed) > MOST_URLS:
            raise UserError(f"the list names more than {MOST_URLS} URLs")
        for text, path in listed:
            self._name(text, path)
        for path, url in self._urls.items():
            self._asker.check()
            self._offer(path, url)
        return sorted(self._shelf.entries.values(), key=lambda entry: entry.path)

    def read(self, path: str) -> bytes:
        """See Source."""
        kept = self._shelf.kept(path)
        if kept is not None:
            return kept
        url = self._urls[path]
        return self._shelf.same(path, self._shelf.get(url, self._shown(url)).body)

    def close(self) -> None:
        """See Source."""
        self._shelf.close()

    def _name(self, text: str, path: str) -> None:
        """Note a URL of the list under its path; relative ones are meant from where the list is."""
        try:
            url = httpx.URL(self._url).join(text)
        except httpx.InvalidURL:
            self.skipped.append(Left(text[:200], "is no URL"))
            return
        path = path or path_of(url)
        if any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
            self.skipped.append(Left(path, "is no path"))
        elif path in self._urls:
            self.skipped.append(Left(path, "is listed twice"))
        else:
            self._urls[path] = str(url)

    def _offer(self, path: str, url: str) -> None:
        seen = self._asker.seen.get(path)
        of = f"{hashlib.sha256(url.encode()).hexdigest()[:16]} "  # a path may come to stand for another URL
        if seen is not None and not seen.tag.startswith(of):
            seen = None
        asked = {} if seen is None else _unless(seen.tag.removeprefix(of))
        try:
            got = self._shelf.get(url, {**self._shown(url), **asked})
            if got.answer.status == 304 and seen is None:
                raise FetchFailed("the server answered 304")
        except (UserError, StorageUnavailable) as error:  # also a host that the operator does not list
            self._shelf.failed(path, error)
            return
        if got.answer.status == 304 and seen is not None:
            self._shelf.known(path, seen)
        else:
            self._shelf.put(path, of + got.tag if got.tag else "", got.body)

    def _shown(self, url: str) -> dict[str, str]:
        """The credential, to the places it is for."""
        covered = self._credential is not None and self._credential.covers(url)
        return {"authorization": self._credential.basic} if self._credential is not None and covered else {}


def path_of(url: httpx.URL) -> str:
    """The path in the corpus of a URL's file: host and path, and what asks for it."""
    path = unquote(url.path)
    query = f"?{url.query.decode('ascii')}" if url.query else ""
    return url.netloc.decode("ascii") + (path + "index.html" if path.endswith("/") else path) + query


def _unless(tag: str) -> dict[str, str]:
    """The header that asks for a file unless it is still the one with this tag."""
    return {"if-none-match": tag} if tag.startswith(('"', "W/")) else {"if-modified-since": tag}


def _listed(body: bytes) -> list[tuple[str, str]]:
    """(URL, path or empty) of each line, item or `loc`. Raises FetchFailed for what is no list."""
    try:
        text = body.decode("utf-8-sig").strip()
        if text.startswith("["):
            return [_item(item) for item in json.loads(text)]
        if text.startswith("<"):
            return [(each, "") for each in _locations(text)]
    except (ValueError, RecursionError, ElementTree.ParseError):
        raise FetchFailed(_NO_LIST, retryable=False) from None
    lines = [line.strip() for line in text.splitlines()]
    urls = [line for line in lines if line and not line.startswith("#")]
    if any(len(url.split()) > 1 or url.startswith("{") for url in urls):  # prose: what a server says when it is not well
        raise FetchFailed(_NO_LIST, retryable=False)
    return [(url, "") for url in urls]


def _item(item: Any) -> tuple[str, str]:
    url, path = (item.get("url"), item.get("path", "")) if isinstance(item, dict) else (item, "")
    if not isinstance(url, str) or not isinstance(path, str):
        raise ValueError("an item is a URL, or has a url and a path")
    return url, path


def _locations(text: str) -> list[str]:
    root = ElementTree.fromstring(text)
    if root.tag.rpartition("}")[2] != "urlset":
        raise ValueError("no sitemap of pages")
    return [(each.text or "").strip() for each in root.iter() if each.tag.rpartition("}")[2] == "loc"]
