"""Traces are on where the standard variable says so, and cost nothing where it does not."""

from __future__ import annotations

import subprocess
import sys

import pytest

from serving import otel
from storage import tracing
from storage.errors import UserError


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*otel.ENDPOINTS, "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def test_a_missing_extra_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(UserError, match=r"pip install 'preread\[otel\]'") as caught:
        otel.configure("serve")
    assert "\n" not in str(caught.value)
    assert not tracing.on()


@pytest.mark.parametrize("disabled", [True, False])
def test_without_the_variable_or_where_the_sdk_is_disabled_there_are_no_traces(
    disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if disabled:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
        monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    otel.configure("serve")()
    assert not otel.wanted()
    assert not tracing.on()
    with tracing.span("anything") as span:
        assert not span.is_recording()
        assert tracing.here() is None
        assert tracing.outgoing() is None


def test_no_exporter_is_imported_where_there_are_no_traces() -> None:
    code = (
        "import sys, serving.otel, serving.api.app; serving.otel.configure('serve'); "
        "print([m for m in sys.modules if 'otlp' in m or 'opentelemetry.sdk.trace' in m])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("bad", [None, "", "nonsense", "00-0-0-01", "00-" + 32 * "0" + "-b7ad6b7169203331-01"])
def test_what_is_no_traceparent_is_no_parent_and_no_link(bad: str | None) -> None:
    assert tracing.links([bad]) == []


def test_what_an_error_says_is_in_no_span() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra 'otel' is not installed")
    export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    kept, provider = export.InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tracing.use(provider)
    try:
        with pytest.raises(ValueError, match="secret"), tracing.span("outer"), tracing.span("inner"):
            raise ValueError("a secret text")
    finally:
        tracing.use(trace.NoOpTracerProvider())
        provider.shutdown()
    inner, outer = kept.get_finished_spans()
    assert "secret" not in inner.to_json() + outer.to_json()
    assert inner.parent.span_id == outer.context.span_id
    assert [span.status.description for span in (inner, outer)] == ["ValueError", "ValueError"]
