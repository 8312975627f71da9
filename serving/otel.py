"""Traces by OpenTelemetry, where OTEL_EXPORTER_OTLP_ENDPOINT says where to. All its settings are the SDK's own variables."""

from __future__ import annotations

import os
from collections.abc import Callable

from storage import tracing
from storage.errors import UserError

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def wanted() -> bool:
    return any(os.environ.get(name) for name in ENDPOINTS) and os.environ.get("OTEL_SDK_DISABLED", "").lower() != "true"


def configure(process: str) -> Callable[[], object]:
    """Have this process's spans sent; what is returned sends the last of them. `process`: serve or worker. Raises UserError
    if traces are wanted and the packages for them are not there."""
    if not wanted():
        return lambda: None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        raise UserError(
            f"{ENDPOINTS[0]} is set, but traces need an extra: pip install 'preread[otel]'; or unset the variable"
        ) from None
    named = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": f"preread-{process}"}
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    tracing.use(provider)
    flush: Callable[[], object] = provider.shutdown
    return flush
