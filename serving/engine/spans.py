"""An answer's stages as spans, made when it has ended from the times in its report: threads that hand a request to each other
need to know nothing of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from storage import tracing

if TYPE_CHECKING:
    from serving.engine.generation import Emitted


def record(generation: Emitted) -> None:
    """`engine.answer` as a part of the request, and in it queue, fetch, turn (waiting for it), blend and decode, as far as it
    came; the first token is an event."""
    if generation.context is None:
        return
    end = time.time_ns()
    born = end - int(generation.elapsed_ms() * 1e6)
    ms, report, tracer = generation.report.ms, generation.report, tracing.tracer()
    attributes: dict[str, int | str | bool] = {
        "preread.method": report.method, "preread.chunks": report.chunks, "preread.tokens_prompt": generation.plan.tokens,
        "preread.tokens_reused": report.tokens_reused, "preread.tokens_recomputed": report.tokens_recomputed,
        "preread.tokens_computed": report.tokens_computed, "preread.bytes_fetched": report.bytes_fetched,
        "preread.resumed": report.resumed, "preread.ended": generation.outcome is not None,
    }  # fmt: skip
    if generation.outcome is not None:
        attributes["preread.tokens_completion"] = generation.outcome.completion_tokens
    answer = tracer.start_span("engine.answer", generation.context, attributes=attributes, start_time=born)
    with tracing.inside(answer):
        for name, (begun, ended) in _stages(ms, (end - born) / 1e6).items():
            tracer.start_span(f"engine.{name}", start_time=born + int(begun * 1e6)).end(born + int(ended * 1e6))
    if "first_token" in ms:
        answer.add_event("first_token", timestamp=born + int(ms["first_token"] * 1e6))
    answer.end(end)


def _stages(ms: dict[str, float], whole: float) -> dict[str, tuple[float, float]]:
    """Begin and end of each stage, in milliseconds since the request was made."""
    found: dict[str, tuple[float, float]] = {}
    fetched = ms.get("queue", 0.0) + ms.get("fetch", 0.0)
    if "queue" in ms:
        found["queue"] = (0.0, ms["queue"])
    if "fetch" in ms:
        found["fetch"] = (ms["queue"], fetched)
    if "first_token" in ms:
        begun = max(fetched, ms["first_token"] - ms.get("blend", ms["first_token"]))
        found |= {"turn": (fetched, begun), "blend": (begun, ms["first_token"]), "decode": (ms["first_token"], whole)}
    return found
