"""An answer from its first byte to its last: what is generated, and where it comes from."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import copy_context
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from anyio import to_thread
from fastapi import Request

from serving.api import tools
from serving.api.citations import citations, url_citations
from serving.api.metrics import Metrics
from serving.engine.types import Generation, Outcome, Report, TokenLogprob
from storage.errors import Cancelled
from storage.types import RetrievedChunk

UNREAD = 16  # pieces of a choice that wait for the client here
NOTHING_FOUND = "I found nothing about this in the selected documents."


@dataclass(frozen=True)
class Piece:
    """What has become certain of a choice: text, with the tokens that begin in it, or calls of tools. `at`, `calls_at`: how
    many characters and calls of the choice come before; by the time that it is shown the choice may have got further."""

    text: str = ""
    tokens: tuple[TokenLogprob, ...] = ()
    calls: tuple[tools.Call, ...] = ()
    at: int = 0
    calls_at: int = 0


@dataclass
class Choice:
    """One of the answers to a request. `generation` None: nothing was found, and the fixed sentence is the answer."""

    index: int
    generation: Generation | None
    offered: tools.Tools | None = None
    text: str = ""
    tokens: list[TokenLogprob] = field(default_factory=list)
    calls: list[tools.Call] = field(default_factory=list)
    noted: bool = False  # with whoever counts what is spent

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answer as it comes; kept here too."""
        async for read in self._read():
            piece = replace(read, at=len(self.text), calls_at=len(self.calls))
            self.text += piece.text
            self.tokens += piece.tokens
            self.calls += piece.calls
            yield piece

    async def _read(self) -> AsyncIterator[Piece]:
        if self.generation is None:
            yield Piece(NOTHING_FOUND)
            return
        reader = tools.CallReader(self.offered.names, self.offered.parallel) if self.offered else None
        async for delta in self.generation:
            if reader is None:
                yield Piece(delta.text, delta.tokens)
                continue
            text, calls = reader.feed(delta.text)
            if text or calls or delta.tokens:
                yield Piece(text, delta.tokens, tuple(calls))
        if reader is not None:
            text, calls = reader.finish()
            yield Piece(text, (), tuple(calls))

    def outcome(self) -> Outcome:
        """How it ended. Raises Cancelled if it was stopped before its end."""
        if self.generation is None:
            return Outcome(NOTHING_FOUND, "stop", 0, 0, (), Report(method="none"))
        if self.generation.outcome is None:
            raise Cancelled("The answer was cancelled.")
        return self.generation.outcome

    @property
    def finish_reason(self) -> str:
        return "tool_calls" if self.calls else self.outcome().finish_reason


@dataclass
class Answer:
    """The answers to one request on their way. So many choices that follow one another are `per_prompt`. `note` may wait, and is
    called in a thread of its own. `refuses`: the fixed sentence goes out as a refusal, since JSON was asked
    for, which it is not, or no answer without a passage."""

    model: str
    base_url: str
    metrics: Metrics
    choices: list[Choice]
    still_there: Callable[[Sequence[RetrievedChunk]], frozenset[int]]
    note: Callable[[Outcome], None]
    per_prompt: int = 1
    refuses: bool = False
    logprobs: bool = False
    retrieval_ms: float | None = None
    nothing_found: bool = False  # documents were searched, in vain
    started: float = field(default_factory=time.perf_counter)
    first_text_ms: float | None = None
    kind: str = "chatcmpl"
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.kind}-{uuid.uuid4().hex}"

    async def pieces(self) -> AsyncIterator[tuple[Choice, Piece | None]]:
        """What comes of each choice, and None at its end."""
        # Bounded, so that what is not read waits in the engine, which gives up an answer that nobody reads.
        queue: asyncio.Queue[tuple[Choice, Piece | Exception | None]] = asyncio.Queue(UNREAD * len(self.choices))
        tasks = [asyncio.create_task(_run(choice, queue)) for choice in self.choices]
        try:
            left = len(tasks)
            while left:
                choice, piece = await queue.get()
                if isinstance(piece, Exception):
                    raise piece
                if piece is None:
                    left -= 1
                    choice.outcome()
                    if (handed := self._note(choice)) is not None:
                        await asyncio.shield(handed)
                elif choice.generation is not None and self.first_text_ms is None:
                    self.first_text_ms = 1000 * (time.perf_counter() - self.started)
                    self.metrics.ttft.observe(self.first_text_ms / 1000)
                yield choice, piece
        finally:
            for task in tasks:
                task.cancel()

    def _note(self, choice: Choice) -> asyncio.Future[None] | None:
        """Have counted what a choice has cost, ended or not, once; what the choices of a prompt share, with the first of them.
        It is handed over before anybody waits: who leaves meanwhile takes no count away."""
        made = choice.generation.so_far() if choice.generation is not None and not choice.noted else None
        if made is None:
            return None
        first = choice.index - choice.index % self.per_prompt
        shared = any(other.noted for other in self.choices[first : first + self.per_prompt])
        choice.noted = True
        if choice.generation is not None and choice.generation.outcome is not None:
            self.metrics.note_answer(made.report, made.completion_tokens)
        paid = _without_prompt(made) if shared else made
        return asyncio.get_running_loop().run_in_executor(None, copy_context().run, self.note, paid)

    async def close(self) -> None:
        """End what still runs, and count what it has cost so far."""
        self.cancel()
        if handed := [each for choice in self.choices if (each := self._note(choice)) is not None]:
            await asyncio.wait(handed)

    def cancel(self) -> None:
        for choice in self.choices:
            if choice.generation is not None:
                choice.generation.cancel()

    def refused(self, choice: Choice) -> bool:
        """Where JSON was asked for, a sentence goes where clients look for what is none."""
        return self.refuses and choice.generation is None

    def envelope(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}

    async def held(self, choice: Choice) -> frozenset[int]:
        """The chunks that may be cited: what was deleted or replaced while we answered is not."""
        used = choice.outcome().used_chunks
        return await to_thread.run_sync(self.still_there, used) if used else frozenset()

    def provenance(self, choice: Choice, held: frozenset[int]) -> dict[str, Any]:
        """What stands beside OpenAI's fields: sources, and how the prompt's KV came about."""
        report = asdict(choice.outcome().report)
        report["ms"] = {**report["ms"]}
        if self.retrieval_ms is not None:
            report["ms"]["retrieval"] = round(self.retrieval_ms, 2)
        report["nothing_found"] = self.nothing_found
        return {"citations": citations(choice.text, choice.outcome().used_chunks, held), "preread": report}

    def notes(self, choice: Choice, held: frozenset[int]) -> list[dict[str, Any]]:
        return url_citations(choice.text, choice.outcome().used_chunks, held, self.base_url)

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage; reused tokens are its cached tokens. Choices of one prompt share its tokens."""
        outcomes = [choice.outcome() for choice in self.choices]
        prompts = outcomes[:: self.per_prompt]
        written = sum(outcome.completion_tokens for outcome in outcomes)
        read = sum(outcome.prompt_tokens for outcome in prompts)
        return {
            "prompt_tokens": read,
            "completion_tokens": written,
            "total_tokens": read + written,
            "prompt_tokens_details": {"cached_tokens": sum(outcome.report.tokens_reused for outcome in prompts)},
        }


def _without_prompt(outcome: Outcome) -> Outcome:
    return replace(outcome, prompt_tokens=0, report=replace(outcome.report, tokens_reused=0, tokens_recomputed=0))


async def _run(choice: Choice, queue: asyncio.Queue[tuple[Choice, Piece | Exception | None]]) -> None:
    try:
        async for piece in choice.pieces():
            await queue.put((choice, piece))
        await queue.put((choice, None))
    except Exception as error:  # noqa: BLE001 - raised where the choices come together
        await queue.put((choice, error))


@asynccontextmanager
async def cancelled_with(request: Request, answer: Answer) -> AsyncIterator[None]:
    """Cancel the answer as soon as its client is gone, and close it in any case when the block ends."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        answer.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        await answer.close()


async def finished(answer: Answer, request: Request) -> Answer:
    """The answer, when all of it is there."""
    async with cancelled_with(request, answer):
        async for _ in answer.pieces():
            pass
    return answer
