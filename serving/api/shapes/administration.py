"""Keys, the audit log, tenants, and what KV costs and saves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, Field

from serving.api.shapes.common import Count, Id, Listed, Moment, Name, Secret, Time

TenantId = Annotated[str, Field(examples=["subsidiary"])]
KeyId = Annotated[str, Field(examples=["key-1"])]
Money = Annotated[float | None, Field(examples=[1.25])]
Currency = Annotated[str | None, Field(examples=["EUR"])]


class ApiKey(BaseModel):
    """`hint`: the last characters of the key; `corpora`: null for all of the tenant's."""

    id: KeyId
    object: Literal["api_key"]
    name: Annotated[str, Field(examples=["chat page"])]
    hint: Annotated[str, Field(examples=["…x7Qa"])]
    scopes: Annotated[list[str], Field(examples=[["read"]])]
    corpora: Annotated[list[str] | None, Field(examples=[["vs_1"]])]
    principals: Annotated[list[str], Field(examples=[["group:legal"]])]
    user_id: Annotated[str | None, Field(examples=[None])]
    requests_per_minute: int | None
    tokens_per_minute: int | None
    created_at: Time
    expires_at: Time | None
    revoked_at: Annotated[int | None, Field(examples=[None])]


class NewApiKey(ApiKey):
    key: Secret


class RevokedApiKey(ApiKey):
    deleted: Literal[True]


class ApiKeyList(Listed):
    data: list[ApiKey]


class AuditEvent(BaseModel):
    id: Annotated[str, Field(examples=["audit-12"])]
    object: Literal["audit_event"]
    tenant_id: TenantId
    key_id: KeyId | None
    user_id: Annotated[str | None, Field(examples=[None])]
    action: Annotated[str, Field(examples=["api_key.create"])]
    target: Annotated[str, Field(examples=["key-1"])]
    at: Moment
    request_id: Annotated[str | None, Field(examples=["req-1"])]
    outcome: Literal["ok", "denied"]
    seq: Annotated[int | None, Field(examples=[12])]
    mac: Annotated[str | None, Field(examples=["9f86d081…"])]


class AuditEventList(Listed):
    data: list[AuditEvent]


class Tenant(BaseModel):
    id: TenantId
    object: Literal["tenant"]
    created_at: Time
    disabled_at: Annotated[int | None, Field(examples=[None])]
    quota_bytes: Annotated[int | None, Field(examples=[500_000_000_000])]
    tokens_per_day: Annotated[int | None, Field(examples=[20_000_000])]


class TenantWithKey(Tenant):
    api_key: NewApiKey


class TenantList(Listed):
    data: list[Tenant]


class SharingGroup(BaseModel):
    name: Annotated[str, Field(examples=["holding"])]
    object: Literal["sharing_group"]
    tenants: Annotated[list[str], Field(examples=[["default", "subsidiary"]])]
    created_at: Time


class SharingGroupList(BaseModel):
    object: Literal["list"]
    data: list[SharingGroup]


class Balance(BaseModel):
    """Null: not known yet."""

    gpu_seconds_saved: Money
    gpu_seconds_spent: Money
    money_saved: Money
    money_spent: Money
    currency: Currency


class Tier(BaseModel):
    """`refused`: pinned chunks that find no room; `codecs`: copies that came through another codec than the object's; `rules`:
    those that bring chunks into this tier or choose their codec there, and of how many documents."""

    chunks: Count
    bytes: Count
    pinned: Count
    refused: Count
    codecs: Annotated[dict[str, int], Field(examples=[{"int8": 3}])]
    rules: Annotated[dict[str, dict[str, int]], Field(examples=[{"pin": {"hot": 3}}])]


class CorpusStorage(Balance):
    corpus_id: Id
    name: Name
    tiers: Annotated[
        dict[str, Tier],
        Field(examples=[{"object": {"chunks": 12, "bytes": 1200, "pinned": 0, "refused": 0, "codecs": {}, "rules": {}}}]),
    ]
    rules: Annotated[dict[str, dict[str, int]], Field(examples=[{"pin": {"hot": 3}}])]
    not_stored: Annotated[dict[str, int], Field(examples=[{"drafts": 2}])]
    tokens_not_recomputed: Count
    cost_per_month: Annotated[float, Field(examples=[0.02])]


class PolicyState(BaseModel):
    version: Annotated[str | int, Field(examples=["9f86d081"])]
    status: Literal["ok", "outdated"]


class Speed(BaseModel):
    given: Annotated[float | None, Field(examples=[None])]
    measured: Annotated[float | None, Field(examples=[5400.0])]


class Storage(BaseModel):
    object: Literal["storage"]
    policy: PolicyState
    prefill_tokens_per_s: Speed
    corpora: list[CorpusStorage]


class UsageDetail(Balance):
    tokens_recomputed: Count
    tokens_compiled: Count
    bytes_fetched: Count


class UsageResult(BaseModel):
    """Of one corpus; `corpus_id` null: of answers without one. `kind` task: what chat pages ask for themselves, such as a
    title, whatever corpus is chosen there."""

    object: Literal["usage.result"]
    corpus_id: Id | None
    kind: Literal["answer", "task"]
    num_model_requests: Count
    input_tokens: Count
    input_cached_tokens: Count
    output_tokens: Count
    preread: UsageDetail


class UsageDay(BaseModel):
    object: Literal["bucket"]
    start_time: Time
    end_time: Time
    results: list[UsageResult]


class Stored(BaseModel):
    corpus_id: Id
    bytes: Annotated[dict[str, int], Field(examples=[{"object": 1200}])]
    cost_per_month: Annotated[float, Field(examples=[0.02])]


class StoredNow(BaseModel):
    stored: list[Stored]
    currency: Currency


class UsagePage(BaseModel):
    """A page of days; `page=<next_page>` asks for the next one."""

    object: Literal["page"]
    data: list[UsageDay]
    has_more: bool
    next_page: Annotated[str | None, Field(examples=[None])]
    preread: StoredNow
