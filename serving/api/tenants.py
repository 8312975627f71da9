"""/v1/tenants and /v1/sharing_groups, for operators."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from serving.api.access import Operator, Parts
from serving.doors import tenants
from serving.doors.paging import listing

router = APIRouter(prefix="/v1", tags=["tenants"])
Amount = Annotated[int, Field(ge=0, le=2**62)]


class TenantLimits(BaseModel):
    """What is left out stays as it is; null takes a limit away."""

    model_config = ConfigDict(extra="forbid")
    quota_bytes: Amount | None = None  # of files and stored KV together
    tokens_per_day: Amount | None = None  # of prompts and answers, by UTC

    def given(self) -> dict[str, int | None]:
        return {name: getattr(self, name) for name in ("quota_bytes", "tokens_per_day") if name in self.model_fields_set}


class NewTenant(TenantLimits):
    id: str


class TenantChange(TenantLimits):
    disabled: bool | None = None


class GroupBody(BaseModel):
    model_config = ConfigDict(extra="forbid")
    tenants: Annotated[list[str], Field(max_length=1000)]


@router.post("/tenants")
def create_tenant(parts: Parts, who: Operator, body: NewTenant) -> dict[str, Any]:
    """The answer holds the tenant's first admin key, this once."""
    return tenants.create(parts, who, body.id, body.given())


@router.get("/tenants")
def list_tenants(parts: Parts, who: Operator) -> dict[str, Any]:
    return listing(tenants.show_all(parts), has_more=False)


@router.get("/tenants/{tenant_id}")
def retrieve_tenant(parts: Parts, who: Operator, tenant_id: str) -> dict[str, Any]:
    return tenants.show(parts, tenant_id)


@router.post("/tenants/{tenant_id}")
def change_tenant(parts: Parts, who: Operator, tenant_id: str, body: TenantChange) -> dict[str, Any]:
    return tenants.change(parts, who, tenant_id, body.given(), body.disabled)


@router.get("/sharing_groups")
def list_sharing_groups(parts: Parts, who: Operator) -> dict[str, Any]:
    return {"object": "list", "data": tenants.groups(parts)}


@router.put("/sharing_groups/{name}")
def set_sharing_group(parts: Parts, who: Operator, name: str, body: GroupBody) -> dict[str, Any]:
    return tenants.set_group(parts, who, name, body.tenants)
