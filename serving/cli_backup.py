"""`preread backup` and `preread restore`: an installation as a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from serving.cli_output import Json, show, size
from serving.settings import load_settings

Folder = Annotated[Path, typer.Argument(help="The backup's folder.")]


def register(app: typer.Typer) -> None:
    app.command()(backup)
    app.command()(restore)


def backup(
    folder: Folder,
    kv: Annotated[bool, typer.Option("--kv", help="Copy stored KV as well, which could be computed again.")] = False,
    as_json: Json = False,
) -> None:
    """Copy catalogue, documents and secret into an empty folder, while everything runs. Keep it as safe as the originals."""
    from serving.backup import back_up

    made = back_up(load_settings(), folder, kv=kv)
    shown = {"folder": str(folder), "objects": made.objects, "bytes": made.bytes, "gone": made.gone, "kv": made.kv}
    show(shown, as_json, _made)


def _made(found: dict[str, Any]) -> str:
    gone = f"; {found['gone']} were deleted meanwhile" if found["gone"] else ""
    return f"{found['objects']} objects ({size(found['bytes'])}) and the catalogue are in {found['folder']}{gone}"


def restore(folder: Folder, as_json: Json = False) -> None:
    """Put a backup into an installation that holds nothing yet and does not run."""
    from serving.backup import restore as put_back

    made = put_back(load_settings(), folder)
    owed = "" if made.kv else "; stored KV is computed again as it is missed, or at once by `preread storage verify --repair`"
    show({"objects": made.objects, "kv": made.kv}, as_json, lambda r: f"{r['objects']} objects and the catalogue restored{owed}")
