"""Chunks compiled by vLLM: each reading goes as one prompt, behind frame and filler, with a signed plan of what to store of it
(`serving.connector.saving`). No weights are loaded here.

Of what vLLM says nothing is believed: a key is stored when its object has been read back whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from precompute.spec import ReaderSpec
from precompute.types import Made, Wanted
from serving.connector.plan import Span, token_hash
from serving.engine.vllm_client import VLLMClient
from serving.engine.vllm_saved import STORED_S, Shelf, saving_body, told_of
from storage.errors import Cancelled, EngineUnavailable, Overloaded, PrereadError
from storage.types import Miss

log = logging.getLogger(__name__)
AT_ONCE = 4  # prompts in vLLM: a question that comes waits for no more of them, and their KV in its memory is bounded
CHECK_S = 0.1  # between two looks whether the batch is still wanted


@dataclass
class _Sent:
    """`answered`: what vLLM has read; `unstored`: what it could not be asked; `failed`: what it refused."""

    answered: list[Wanted] = field(default_factory=list)
    unstored: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


class VLLMCompiler:
    """`Compiler` by the vLLM at `url`, which serves the model in `reader`'s folder and writes to what `shelf` reads. `secret`:
    the installation's; `token`: vLLM's API key; `check`: raises Stopping or Cancelled when the batch is to go no further."""

    def __init__(
        self, reader: ReaderSpec, url: str, shelf: Shelf, *, secret: bytes, check: Callable[[], None], token: str = "",
        stored_s: float = STORED_S,
    ) -> None:  # fmt: skip
        self._reader, self._url, self._shelf = reader, url, shelf
        self._secret, self._check, self._token, self._stored_s = secret, check, token, stored_s

    def compile(self, batch: Sequence[Wanted]) -> Callable[[], Made]:
        """See `Compiler`. A batch that is wanted no more ends behind the prompts that vLLM has already: so what it writes of them
        is known, and deleted again."""
        return partial(self._made, asyncio.run(self._read(batch)))

    # --- reading ---

    async def _read(self, batch: Sequence[Wanted]) -> _Sent:
        client = VLLMClient(self._url, AT_ONCE, self._token)
        try:
            name = (await client.served()).name
            return await self._read_all(client, name, list(prompts(batch)))
        finally:
            await client.close()

    async def _read_all(self, client: VLLMClient, name: str, waiting: list[list[Wanted]]) -> _Sent:
        sent, running = _Sent(), set[asyncio.Task[None]]()
        try:
            while waiting or running:
                if not self._is_wanted():
                    sent.unstored += [each.key for together in waiting for each in together]
                    waiting = []
                while waiting and len(running) < AT_ONCE:
                    running.add(asyncio.create_task(self._read_one(client, name, waiting.pop(0), sent)))
                if running:
                    done, running = await asyncio.wait(running, timeout=CHECK_S, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
        finally:  # whoever is told to stop leaves at once, upon which vLLM gives up what it was asked
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
        return sent

    def _is_wanted(self) -> bool:
        """Raises Stopping."""
        try:
            self._check()
        except Cancelled:
            return False
        return True

    async def _read_one(self, client: VLLMClient, name: str, together: Sequence[Wanted], sent: _Sent) -> None:
        keys = [each.key for each in together]
        try:
            told = told_of(await client.complete(self._body(name, together)))
        except (EngineUnavailable, Overloaded) as error:
            log.warning("vLLM could not read %d chunks: %s", len(keys), error)
            sent.unstored += keys
        except PrereadError as error:
            log.warning("vLLM does not read %d chunks: %s", len(keys), error)
            sent.failed += keys
        else:
            if told.refused:
                log.warning("vLLM stores nothing of %d chunks: %s", len(keys), told.refused)
                sent.failed += keys
            else:
                sent.answered += together

    def _body(self, name: str, together: Sequence[Wanted]) -> dict[str, Any]:
        """Of POST /v1/completions. All are beginnings of the last one's reading."""
        reader = self._reader
        ids, ends = reader.behind_prefix(together[-1].reading)
        saves = [self._span(each, len(reader.prefix_ids) + ends[len(each.reading) - 1]) for each in together]
        return saving_body(reader, name, [*reader.prefix_ids, *ids], saves, together[0].sharing_group, self._secret)

    def _span(self, wanted: Wanted, end: int) -> Span:
        chunk, codec = wanted.reading[-1], self._reader.stored_as(wanted.codec).codec
        return Span(end - len(chunk), len(chunk), wanted.key, token_hash(chunk), codec=codec)

    # --- what was written ---

    def _made(self, sent: _Sent) -> Made:
        written: dict[str, int] = {}
        unstored, failed = [*sent.unstored], [*sent.failed]
        end = time.monotonic() + self._stored_s
        for each in sent.answered:
            found = self._shelf.await_object(each.key, self._reader.stored_as(each.codec), each.reading[-1], end)
            if isinstance(found, int):
                written[each.key] = found
            elif found in (Miss.TIMEOUT, Miss.UNAVAILABLE):
                unstored.append(each.key)
            else:
                log.warning("what vLLM was to store is not there: %s (%s)", each.key[:12], found)
                failed.append(each.key)
        return Made(written, unstored, failed)


def prompts(batch: Sequence[Wanted]) -> Iterator[list[Wanted]]:
    """Which of a batch are read in one prompt, shorter readings first: those of a sharing group that begin as the longest of them
    does. Two keys of the same reading are stored from two prompts, since a plan's stretches do not overlap."""
    left = list(batch)
    while left:
        longest = max((each for each in left if each.sharing_group == left[0].sharing_group), key=lambda each: len(each.reading))
        found: dict[int, Wanted] = {}
        for each in left:
            alike = longest.reading[: len(each.reading)] == each.reading
            if alike and each.sharing_group == longest.sharing_group:
                found.setdefault(len(each.reading), each)
        found[len(longest.reading)] = longest
        yield [found[chunks] for chunks in sorted(found)]
        left = [each for each in left if found.get(len(each.reading)) is not each]
