"""The span of a request: a part of its caller's trace, where it brings a W3C `traceparent`."""

from __future__ import annotations

import structlog
from opentelemetry.trace import SpanKind
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from storage import tracing

METHODS = frozenset("GET HEAD POST PUT PATCH DELETE OPTIONS".split())


class Traced:
    """Inside `RequestShell`, whose request id it notes. Never the path: that may hold anything; the route's template."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        method = scope["method"] if scope["method"] in METHODS else "_OTHER"
        parent = tracing.incoming(Headers(scope=scope).get(tracing.HEADER))
        attributes = {
            "http.request.method": method,
            "preread.request_id": structlog.contextvars.get_contextvars().get("request_id", ""),
        }
        with tracing.span(method, attributes, parent=parent, kind=SpanKind.SERVER) as span:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        tracing.failed(span, RuntimeError())
                await send(message)

            try:
                await self.app(scope, receive, noting)
            finally:
                route = getattr(scope.get("route"), "path", "unmatched")
                span.update_name(f"{method} {route}")
                span.set_attribute("http.route", route)
