"""What answers of all kinds are made of."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

Id = Annotated[str, Field(examples=["vs_1"])]
FileId = Annotated[str, Field(examples=["file-1"])]
DocumentId = Annotated[str, Field(examples=["doc-1"])]
JobId = Annotated[str, Field(examples=["job-1"])]
Time = Annotated[int, Field(description="Seconds since the epoch", examples=[1790000000])]
Moment = Annotated[float, Field(description="Seconds since the epoch", examples=[1790000000.5])]
Sha256 = Annotated[str, Field(examples=["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"])]
Name = Annotated[str, Field(examples=["handbook"])]
Path = Annotated[str, Field(examples=["terms/payment.md"])]
Count = Annotated[int, Field(ge=0, examples=[3])]
Attributes = Annotated[dict[str, str | float | bool], Field(examples=[{"year": 2024}])]
Secret = Annotated[str, Field(description="Shown this once", examples=["pr_…"])]


def told(model: Any) -> dict[int | str, dict[str, Any]]:
    """A route's `responses`: its success is of this shape."""
    return {200: {"model": model}}


class Listed(BaseModel):
    """A page of a list. `after=<last_id>` asks for the next one."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Deleted(BaseModel):
    id: Id
    object: Annotated[str, Field(examples=["file"])]
    deleted: Literal[True]
