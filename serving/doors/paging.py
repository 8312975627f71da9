"""Cursor paging over rows with `created_at` and `id`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sqlalchemy import Select, and_, or_
from sqlalchemy.orm import Session


@dataclass(frozen=True)
class Page:
    """A window on a list: `limit` items after the item with id `after`."""

    limit: int = 20
    after: str | None = None
    order: Literal["asc", "desc"] = "desc"


def window(
    session: Session, query: Select[Any], table: Any, page: Page, cursor: Any
) -> tuple[Sequence[Any], bool]:
    """The page's rows, and whether more follow. `cursor`: the row of `page.after`, or None for the start."""
    down = page.order == "desc"
    if cursor is not None:
        before = table.created_at < cursor.created_at if down else table.created_at > cursor.created_at
        same = table.id < cursor.id if down else table.id > cursor.id
        query = query.where(or_(before, and_(table.created_at == cursor.created_at, same)))
    order = (table.created_at.desc(), table.id.desc()) if down else (table.created_at, table.id)
    rows = session.scalars(query.order_by(*order).limit(page.limit + 1)).all()
    return rows[: page.limit], len(rows) > page.limit


def listing(items: list[dict[str, Any]], has_more: bool) -> dict[str, Any]:
    """OpenAI's list object."""
    first, last = (items[0]["id"], items[-1]["id"]) if items else (None, None)
    return {"object": "list", "data": items, "first_id": first, "last_id": last, "has_more": has_more}
