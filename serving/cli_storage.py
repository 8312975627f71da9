"""`preread storage`: the object store and the catalogue, looked after on the machine that has their settings.

These commands open the catalogue and the store themselves: they belong to the operator, not to a tenant's key.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from serving import cli_storage_view
from serving.cli_output import Json, note, show, size, table
from serving.settings import load_settings
from storage.errors import NotFound, UserError
from storage.policy.sizes import size as bytes_of

if TYPE_CHECKING:
    from serving.parts import Wiring

app = typer.Typer(
    help="The object store: what lies where; check, clean up, limit, re-encrypt.", no_args_is_help=True, rich_markup_mode=None
)
cli_storage_view.register(app)


@contextmanager
def _parts() -> Iterator[Wiring]:
    from serving.parts import Wiring

    wiring = Wiring(load_settings())
    try:
        yield wiring
    finally:
        wiring.close()


@app.command()
def verify(
    sample: Annotated[float, typer.Option(min=0, max=1, help="Share of the objects whose content is read.")] = 1.0,
    repair: Annotated[bool, typer.Option("--repair", help="Have broken KV and codecs' bases made again.")] = False,
    as_json: Json = False,
) -> None:
    """Hold the catalogue and the object store against each other; exit code 1 if something is broken and not repaired."""
    from ingest.recompute import queue_recompute
    from ingest.verify import Verifier

    with _parts() as parts:
        broken: list[str] = []

        def owe(key: str) -> bool:
            broken.append(key)
            return True

        elsewhere = parts.parent.stored if parts.parent else lambda _: ()
        steps = (owe, parts.restore_basis) if repair else (None, None)
        found = Verifier(parts.catalogue, parts.objects, sample, steps[0], elsewhere, steps[1]).run()
        with parts.catalogue.write() as session:
            queue_recompute(session, broken)
    show(found.shown(), as_json, _findings)
    raise typer.Exit(int(found.unrepaired > 0))


def _findings(found: dict[str, Any]) -> str:
    rooms = {room: found[room] for room in ("kv", "raw", "basis")}
    rows = [("", *found["kv"]), *((room, *counts.values()) for room, counts in rooms.items())]
    named = [f"{problem['problem']}: {problem['name']}" for problem in found["problems"]]
    return "\n".join([table(rows, ""), *named])


@app.command()
def gc(
    grace_hours: Annotated[float, typer.Option(min=0, help="Leave alone what is younger.")] = 24.0,
    as_json: Json = False,
) -> None:
    """Delete objects that no row knows, codecs' bases that nothing names, and uploads that were never finished."""
    from ingest.bases import collect_bases
    from ingest.garbage import PARTS, Collected, collect
    from ingest.purge import sweep

    with _parts() as parts:
        found = Collected()
        for part in PARTS:
            while (taken := collect(parts.catalogue, parts.objects, part, grace_s=grace_hours * 3600)).taken:
                found += Collected(taken.taken, taken.bytes)
                sweep(parts.catalogue, parts.kv_store.delete)
            found += taken
        found += collect_bases(parts.objects, grace_hours * 3600)
        uploads = parts.objects.sweep(grace_hours * 3600)
    result = {**asdict(found), "uploads": uploads}
    show(result, as_json, lambda r: f"{r['taken']} orphans ({size(r['bytes'])}) and {r['uploads']} unfinished uploads "
         f"deleted; {r['young']} orphans are too young")  # fmt: skip


@app.command()
def quota(
    tenant: Annotated[str, typer.Option(help="The tenant's id.")] = "default",
    limit: Annotated[str | None, typer.Option("--set", help="New limit, such as 500GB, or none.")] = None,
    as_json: Json = False,
) -> None:
    """Show or set how much a tenant may store: KV and uploaded files together."""
    from storage.catalogue.schema import Tenant
    from storage.quota import usage

    wanted = None if limit is None else _bytes(limit)
    with _parts() as parts, parts.catalogue.write() as session:
        row = session.get(Tenant, tenant)
        if row is None:
            raise NotFound(f"no tenant {tenant!r}")
        if limit is not None:
            row.quota_bytes = wanted
            session.flush()
        used = usage(session, tenant)
    shown = {"tenant": tenant, "kv_bytes": used.kv, "raw_bytes": used.raw, "limit_bytes": used.limit}
    of = "no limit" if used.limit is None else f"of {size(used.limit)}"
    show(shown, as_json, lambda _: f"{tenant}: {size(used.total)} {of} (KV {size(used.kv)}, files {size(used.raw)})")


def _bytes(text: str) -> int | None:
    """`500GB` as a number of bytes; None for `none`."""
    return None if text.strip().lower() == "none" else bytes_of(text)


@app.command()
def rekey(as_json: Json = False) -> None:
    """Encrypt under the newest key what is under an older one, or not encrypted yet."""
    from storage.errors import ObjectMissing
    from storage.sealed import SealedStore

    done = kept = failed = 0
    with _parts() as parts:
        store = parts.objects
        if not isinstance(store, SealedStore):
            raise UserError("PREREAD_ENCRYPTION_KEYS is not set: objects are not encrypted")
        for name in store.list(""):
            try:
                changed = store.rekey(name)
                done, kept = done + changed, kept + (not changed)
            except ObjectMissing as error:  # deleted meanwhile, or damaged
                note(str(error))
                failed += 1
    show(
        {"rekeyed": done, "unchanged": kept, "failed": failed},
        as_json,
        lambda r: f"{r['rekeyed']} objects re-encrypted, {r['unchanged']} were so already, {r['failed']} could not be read",
    )
