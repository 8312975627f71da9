"""Spans of what is done, for OpenTelemetry: nothing but a few calls that do nothing unless a process has set up the SDK
(`serving/otel.py`). Attributes are ids and counts: never text, names, paths, keys, or what an error says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

Values = Mapping[str, str | int | float | bool]
HEADER = "traceparent"  # W3C Trace Context
_W3C = TraceContextTextMapPropagator()


# Not the process's global one: libraries make spans too (FastAPI does), and theirs may hold what an error says.
_provider: trace.TracerProvider = trace.NoOpTracerProvider()


def use(provider: trace.TracerProvider) -> None:
    """Have spans made by the SDK from now on."""
    global _provider
    _provider = provider


def tracer() -> trace.Tracer:
    return _provider.get_tracer("preread")


def on() -> bool:
    """Whether spans go anywhere."""
    return not isinstance(_provider, trace.NoOpTracerProvider)


@contextmanager
def span(
    name: str,
    attributes: Values | None = None,
    *,
    parent: Context | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    links: Sequence[Link] = (),
) -> Iterator[Span]:
    """What the block does, as a part of what goes on in this thread or of `parent`. Of an error only its type is noted."""
    if not on():
        yield trace.INVALID_SPAN
        return
    with tracer().start_as_current_span(
        name, parent, kind, attributes, links, record_exception=False, set_status_on_exception=False
    ) as made:
        try:
            yield made
        except Exception as error:
            failed(made, error)
            raise


@contextmanager
def inside(parent: Span) -> Iterator[None]:
    """What the block does is a part of `parent`, which stays open."""
    with trace.use_span(parent, record_exception=False, set_status_on_exception=False):
        yield


def failed(span: Span, error: BaseException) -> None:
    span.set_status(Status(StatusCode.ERROR, type(error).__name__))


def here() -> Context | None:
    """What goes on in this thread, to be handed to another one; None if nobody is to hear of it."""
    return context.get_current() if trace.get_current_span().is_recording() else None


def outgoing() -> str | None:
    """What goes on in this thread as a `traceparent`, for work that is done later; None if nobody traces it."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return carrier.get(HEADER)


def incoming(traceparent: str | None) -> Context:
    """The context that a `traceparent` names; an empty one if it is none, or not a good one."""
    return _W3C.extract({HEADER: traceparent or ""}, Context())


def links(traceparents: Sequence[str | None]) -> list[Link]:
    """Links to what these name."""
    found = [trace.get_current_span(incoming(each)).get_span_context() for each in traceparents]
    return [Link(each) for each in found if each.is_valid]
