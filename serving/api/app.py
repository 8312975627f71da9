"""The API as one ASGI app, made of its parts."""

from __future__ import annotations

from functools import partial

from fastapi import FastAPI
from fastapi.routing import APIRoute

from serving import otel
from serving.api import (
    admin,
    chat,
    completions,
    corpora,
    docs,
    economics,
    embeddings,
    errors,
    files,
    health,
    hooks,
    jobs,
    login,
    models,
    openapi,
    page,
    passages,
    rerank,
    responses,
    retrieval,
    schedules,
    sites,
    tenants,
    uploads,
    vector_store_files,
    vector_stores,
    webhooks,
)
from serving.api.drain import Drain, Draining
from serving.api.economy_metrics import EconomyMetrics
from serving.api.job_watch import JobWatch
from serving.api.metrics import Metrics
from serving.api.middleware import AuditTrail, Authentication, BodyLimit, RequestShell
from serving.api.parts import ApiParts
from serving.api.site_metrics import SiteMetrics
from serving.api.storage_metrics import StoreMetrics, TierMetrics
from serving.api.tracing import Traced
from serving.api.unread import CutUnread
from serving.doors.jobs import count_by_status

ROUTERS = (
    models,
    chat,
    completions,
    responses,
    embeddings,
    rerank,
    retrieval,
    files,
    uploads,
    vector_stores,
    vector_store_files,
    passages,
    corpora,
    jobs,
    schedules,
    sites,
    hooks,
    webhooks,
    admin,
    login,
    tenants,
    economics,
    health,
    docs,
    page,
)


def operation_id(route: APIRoute) -> str:
    """What generated clients call the operation: each route's function has a name of its own."""
    return route.name


def build_app(parts: ApiParts) -> FastAPI:
    """The app over these parts. It starts nothing and closes nothing: the parts are their maker's."""
    app = FastAPI(
        title="Preread", version="1", redirect_slashes=False, docs_url=None, redoc_url=None,
        generate_unique_id_function=operation_id,
    )  # fmt: skip
    app.state.parts = parts
    parts.meter.spent = parts.limiter.spent
    app.state.drain = drain = Drain(parts.engine)
    app.state.job_watch = JobWatch(parts.catalogue, lambda: drain.begun)
    app.state.metrics = Metrics(partial(count_by_status, parts.catalogue), parts.engine)
    for collector in (
        EconomyMetrics(parts.catalogue, parts.placement),
        TierMetrics(parts.kv_store.chain.counters),
        StoreMetrics(lambda: parts.objects.counters()),
        SiteMetrics(parts),
    ):
        app.state.metrics.registry.register(collector)
    errors.install(app)
    for module in ROUTERS:
        app.include_router(module.router)
    openapi.install(app)
    # The last one added is the first to see a request.
    app.add_middleware(AuditTrail, parts=parts)
    app.add_middleware(Authentication, parts=parts)
    app.add_middleware(BodyLimit, max_upload_bytes=parts.settings.max_upload_bytes)
    if otel.wanted():
        app.add_middleware(Traced)
    app.add_middleware(Draining, drain=app.state.drain)
    app.add_middleware(RequestShell, metrics=app.state.metrics)
    app.add_middleware(CutUnread)
    return app
