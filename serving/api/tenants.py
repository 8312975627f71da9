"""/v1/tenants and /v1/sharing_groups, for operators."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field

from serving.api.access import Operator, Parts
from serving.api.bodies import Body
from serving.api.json_body import StrictJSON
from serving.api.shapes import administration
from serving.api.shapes.common import told
from serving.doors import tenants
from serving.doors.paging import listing

router = APIRouter(prefix="/v1", tags=["tenants"], route_class=StrictJSON)
Amount = Annotated[int, Field(ge=0, le=2**53)]  # as far as every reader of JSON is exact


class TenantLimits(Body):
    """What is left out stays as it is; null takes a limit away."""

    quota_bytes: Amount | None = None  # of files and stored KV together
    tokens_per_day: Amount | None = None  # of prompts and answers, by UTC

    def given(self) -> dict[str, int | None]:
        return {name: getattr(self, name) for name in ("quota_bytes", "tokens_per_day") if name in self.model_fields_set}


class NewTenant(TenantLimits):
    id: Annotated[str, Field(json_schema_extra={"pattern": "^[a-z0-9][a-z0-9_-]{0,47}$"})]


class TenantChange(TenantLimits):
    disabled: bool | None = None


class GroupBody(Body):
    tenants: Annotated[list[str], Field(max_length=1000)]


@router.post("/tenants", responses=told(administration.TenantWithKey))
def create_tenant(parts: Parts, who: Operator, body: NewTenant) -> dict[str, Any]:
    """The answer holds the tenant's first admin key, this once."""
    return tenants.create(parts, who, body.id, body.given())


@router.get("/tenants", responses=told(administration.TenantList))
def list_tenants(parts: Parts, who: Operator) -> dict[str, Any]:
    return listing(tenants.show_all(parts), has_more=False)


@router.get("/tenants/{tenant_id}", responses=told(administration.Tenant))
def retrieve_tenant(parts: Parts, who: Operator, tenant_id: str) -> dict[str, Any]:
    return tenants.show(parts, tenant_id)


@router.post("/tenants/{tenant_id}", responses=told(administration.Tenant))
def change_tenant(parts: Parts, who: Operator, tenant_id: str, body: TenantChange) -> dict[str, Any]:
    return tenants.change(parts, who, tenant_id, body.given(), body.disabled)


@router.get("/sharing_groups", responses=told(administration.SharingGroupList))
def list_sharing_groups(parts: Parts, who: Operator) -> dict[str, Any]:
    return {"object": "list", "data": tenants.groups(parts)}


@router.put("/sharing_groups/{name}", responses=told(administration.SharingGroup))
def set_sharing_group(parts: Parts, who: Operator, name: str, body: GroupBody) -> dict[str, Any]:
    return tenants.set_group(parts, who, name, body.tenants)
