"""`preread audit` and `preread tenant`: for auditors and operators.

`audit verify`, `audit prune` and `tenant operator-key` run on the machine of the database and the master secret: who has both
is the operator."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving.cli_client import KeyFile, Url, connect
from serving.cli_output import Json, note, show, table
from serving.settings import load_settings, master_secret
from storage.errors import UserError

if TYPE_CHECKING:
    from storage.catalogue.audit import Found
    from storage.catalogue.engine import Catalogue

audit = typer.Typer(help="The audit log: export, verify, prune.", no_args_is_help=True, rich_markup_mode=None)
tenant = typer.Typer(help="Tenants, for an operator's key.", no_args_is_help=True, rich_markup_mode=None)
Id = Annotated[str, typer.Argument(metavar="ID")]
Bytes = Annotated[int | None, typer.Option(help="Bytes of files and stored KV; -1 takes the limit away.", min=-1)]
Tokens = Annotated[int | None, typer.Option(help="Tokens of prompts and answers a day; -1 takes the limit away.", min=-1)]


@audit.command("export")
def export(
    since: Annotated[str | None, typer.Option(help="From this day or time on, e.g. 2026-01-31 (UTC).")] = None,
    until: Annotated[str | None, typer.Option(help="Up to this day or time.")] = None,
    url: Url = None,
    key_file: KeyFile = None,
) -> None:
    """Print the tenant's events as JSON Lines, oldest first."""
    query = {"since": since and _seconds(since), "until": until and _seconds(until)}
    for line in connect(url, key_file).lines("/audit/export", **query):
        print(line)


@audit.command("verify")
def verify_(
    against: Annotated[
        Path | None, typer.Option(help="An earlier export: its events must still be there, unchanged.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Look at every tenant's chain; exit code 1 if one is broken. Run it where the database and the secret are."""
    from sqlalchemy import select

    from storage.catalogue.audit import audit_key, verify
    from storage.catalogue.schema import AuditHead

    with _here() as (catalogue, secret), catalogue.read() as session:
        tenants = session.scalars(select(AuditHead.tenant_id).order_by(AuditHead.tenant_id)).all()
        found = [verify(session, tenant_id, audit_key(secret)) for tenant_id in tenants]
        lacking = _lacking(session, against) if against else []
    told = {"chains": [vars(each) for each in found], "lacking": lacking}
    show(told, as_json, lambda _: "\n".join([*map(_chain, found), *lacking]) or "no events")
    if lacking or any(each.broken is not None for each in found):
        raise typer.Exit(1)


@audit.command("prune")
def prune_(
    before: Annotated[str, typer.Option(help="Events from before this day or time go, e.g. 2026-01-31 (UTC).")],
    tenant_id: Annotated[str, typer.Option("--tenant", help="Of this tenant.")] = "default",
) -> None:
    """Delete old events, and write down that it was done. Export them first."""
    from storage.catalogue.audit import Entry, prune

    with _here() as (catalogue, _), catalogue.write() as session:
        gone = prune(session, tenant_id, _seconds(before), Entry(tenant_id, "", "", time.time()))
    note(f"{gone} events removed")


@tenant.command()
def create(
    id: Id, quota_bytes: Bytes = None, tokens_per_day: Tokens = None, url: Url = None, key_file: KeyFile = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make a tenant, and print its first admin key, this once."""
    body = {"id": id, **_limits(quota_bytes, tokens_per_day)}
    made = connect(url, key_file).post("/tenants", body)
    show(made, as_json, lambda t: f"{t['id']}  {t['api_key']['key']}")


@tenant.command("list")
def list_(url: Url = None, key_file: KeyFile = None, as_json: Json = False) -> None:
    """List the tenants with what they may."""
    head = ("ID", "CREATED", "STATE", "QUOTA BYTES", "TOKENS A DAY")
    tenants = connect(url, key_file).get("/tenants")["data"]
    show(tenants, as_json, lambda found: table([head, *map(_row, found)], "no tenants"))


@tenant.command()
def change(
    id: Id,
    disable: Annotated[bool | None, typer.Option("--disable/--enable", help="Whether its keys open nothing.")] = None,
    quota_bytes: Bytes = None,
    tokens_per_day: Tokens = None,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Set a tenant's limits, or disable it."""
    body = _limits(quota_bytes, tokens_per_day) | ({} if disable is None else {"disabled": disable})
    changed = connect(url, key_file).post(f"/tenants/{id}", body)
    show(changed, as_json, lambda t: "  ".join(_row(t)))


@tenant.command()
def share(
    group: Annotated[str, typer.Argument(help="Name of the sharing group.")],
    tenants: Annotated[list[str], typer.Argument(help="The tenants that may declare corpora shared under it.")],
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Let tenants share KV, in corpora that each declares shared."""
    made = connect(url, key_file).call("PUT", f"/sharing_groups/{group}", json={"tenants": tenants})
    show(made, as_json, lambda g: f"{g['name']}: {', '.join(g['tenants'])}")


@tenant.command("operator-key")
def operator_key(name: Annotated[str, typer.Argument(help="What the key is for.")] = "operator") -> None:
    """Make a key that stands above tenants, without a server: for installations that have none yet."""
    from serving.auth import DEFAULT_TENANT, NewKey, add_key
    from storage.catalogue.audit import Entry, append

    with _here() as (catalogue, secret), catalogue.write() as session:
        row, key = add_key(session, secret, DEFAULT_TENANT, NewKey(name, ("operator",)), time.time())
        append(session, Entry(DEFAULT_TENANT, "api_key.create", row.id, time.time()))
    print(f"{row.id}  {key}")


@contextmanager
def _here() -> Iterator[tuple[Catalogue, bytes]]:
    """This installation's catalogue and secret."""
    from storage.catalogue.audit import audit_key
    from storage.catalogue.engine import migrate, open_catalogue

    settings = load_settings()
    secret = master_secret(settings)
    migrate(settings.database)
    catalogue = open_catalogue(settings.database, audit_key(secret))
    try:
        yield catalogue, secret
    finally:
        catalogue.close()


def _lacking(session: Any, export: Path) -> list[str]:
    """Events of an export that are gone or differ, but for those that were put out of date."""
    from storage.catalogue.schema import AuditEvent, AuditHead

    lacking = []
    for number, line in enumerate(export.read_text(encoding="utf-8").splitlines(), 1):
        try:
            told = json.loads(line)
            event_id, tenant_id, mac = int(told["id"].removeprefix("audit-")), told["tenant_id"], told["mac"]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{export}:{number}: not a line of an export") from None
        row, head = session.get(AuditEvent, event_id), session.get(AuditHead, tenant_id)
        out_of_date = head is not None and (told["seq"] or 0) <= head.pruned_seq
        if not out_of_date and (row is None or row.mac != mac):
            lacking.append(f"{told['id']} ({told['action']}) is gone or changed")
    return lacking


def _chain(found: Found) -> str:
    state = "whole" if found.broken is None else f"BROKEN: {found.reason}"
    older = f", {found.unchained} from before there was a chain" if found.unchained else ""
    return f"{found.tenant_id}: {found.events} events{older}, {state}"


def _seconds(day: str) -> float:
    try:
        moment = datetime.fromisoformat(day)
    except ValueError:
        raise UserError(f"{day!r} is no day or time: write 2026-01-31 or 2026-01-31T12:00") from None
    return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()


def _limits(quota_bytes: int | None, tokens_per_day: int | None) -> dict[str, int | None]:
    given = {"quota_bytes": quota_bytes, "tokens_per_day": tokens_per_day}
    return {name: None if value == -1 else value for name, value in given.items() if value is not None}


def _row(told: dict[str, Any]) -> tuple[str, ...]:
    made = datetime.fromtimestamp(told["created_at"], UTC).strftime("%Y-%m-%d")
    limits = ("none" if told[name] is None else str(told[name]) for name in ("quota_bytes", "tokens_per_day"))
    return told["id"], made, "disabled" if told["disabled_at"] else "active", *limits
