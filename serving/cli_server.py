"""Commands that are processes: serve, worker, beat, and `up`, which runs all of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from serving.cli_client import ADMIN_KEY
from serving.cli_output import Json, note, show
from serving.settings import Settings, load_settings
from storage.errors import ModelUnsupported, UserError

Port = Annotated[int | None, typer.Option(help="Port to listen on; default: PREREAD_PORT or 8321.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on; default: PREREAD_HOST or 127.0.0.1.")]
VLLM = Annotated[Path | None, typer.Option("--vllm", help="Environment with vLLM (make vllm), which is started as the engine.")]
Supervised = Annotated[bool, typer.Option("--supervised", hidden=True)]


def register(app: typer.Typer) -> None:
    for command in (up, serve, worker, beat):
        app.command()(command)


def up(port: Port = None, host: Host = None, as_json: Json = False, vllm: VLLM = None) -> None:
    """Start the broker, the API, a worker and the beat on this machine; Ctrl-C ends them."""
    from serving.supervisor import AlreadyRunning, supervised

    settings = load_settings(port=port, host=host, engine="vllm" if vllm else None)
    check_policy(settings)
    key = first_key(settings)
    try:
        with supervised(settings, note, lambda: _prepared(settings), vllm) as supervisor:
            if not supervisor.stopping.is_set():
                show(
                    _welcome(settings, supervisor.address, key), as_json, lambda w: _welcome_text(settings, w)
                )
            supervisor.watch()
    except AlreadyRunning as already:
        message = str(already)
        show({"address": already.address, "started": False}, as_json, lambda _: message)


def _prepared(settings: Settings) -> None:
    check_model(settings)
    note(f"starting broker, API, worker and beat on {settings.data_dir}, and loading the models …")


def check_model(settings: Settings) -> None:
    """Refuse a device that is not there and a model that is no folder, and convert the embedded one, before anything is
    started."""
    if settings.device != "cpu":  # to ask takes seconds
        from precompute.reader import check_device

        check_device(settings.device)
    if settings.model == "embedded":
        convert_embedded()
    elif not (Path(settings.model) / "config.json").exists():
        raise UserError(f"PREREAD_MODEL={settings.model}: no model folder (config.json is missing)")


def check_policy(settings: Settings) -> None:
    """Refuse a policy file with mistakes at the start; later ones leave the version before them in force. The file of
    logins is read once."""
    if settings.policy_file:
        from storage.policy.file import read_policy

        read_policy(Path(settings.policy_file))
    if settings.oidc_file:
        from serving.oidc_file import read_oidc

        read_oidc(Path(settings.oidc_file))


def convert_embedded() -> None:
    """Convert the embedded model in a process of its own, if this user's cache does not have it yet."""
    from precompute.embedded import embedded_place, is_there

    if is_there(embedded_place()):
        return
    note("converting the embedded model into this user's cache, once for all data folders (about 20 s) …")
    code = "import precompute.embedded as e; e.embedded_model()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ModelUnsupported(last.rpartition("ModelUnsupported: ")[2])


def first_key(settings: Settings) -> str | None:
    """On a new data folder: the tables, the first admin key, and its private copy for the commands here."""
    from serving.auth import ensure_admin_key
    from serving.local_broker import write_private
    from serving.settings import master_secret
    from storage.catalogue.audit import audit_key
    from storage.catalogue.engine import migrate, open_catalogue

    migrate(settings.database)
    secret = master_secret(settings)
    catalogue = open_catalogue(settings.database, audit_key(secret))
    try:
        key = ensure_admin_key(catalogue, secret)
    finally:
        catalogue.close()
    if key is not None:
        write_private(settings.data_dir / ADMIN_KEY, key)
    return key


def _welcome(settings: Settings, address: str, key: str | None) -> dict[str, object]:
    return {
        "address": address,
        "started": True,
        "admin_key": key,
        "admin_key_file": str(settings.data_dir / ADMIN_KEY),
        "logs": str(settings.data_dir / "logs"),
    }


def _welcome_text(settings: Settings, welcome: dict[str, object]) -> str:
    path = welcome["admin_key_file"]
    lines = [f"Preread is ready at {welcome['address']}/v1 (logs: {welcome['logs']})"]
    if welcome["admin_key"]:
        lines.append(
            f"admin key, kept in {path} for your eyes only and not shown again: {welcome['admin_key']}"
        )
    lines.append(f'try: curl -H "Authorization: Bearer $(cat {path})" {welcome["address"]}/v1/models')
    return "\n".join(lines)


def serve(port: Port = None, host: Host = None, supervised: Supervised = False) -> None:
    """Run the API with its engine in this process."""
    from serving.otel import configure

    settings = _begin(load_settings(port=port, host=host), supervised)
    flush = configure("serve")
    key = first_key(settings)
    if key is not None:
        note(f"admin key kept in {settings.data_dir / ADMIN_KEY}, readable by its owner only")
    from serving.http_protocol import PatientProtocol
    from serving.http_server import run_until_told
    from serving.processes import build_api

    run_until_told(
        build_api(settings, flush),
        host=settings.host,
        port=settings.port,
        log_level="warning",
        timeout_graceful_shutdown=5,
        server_header=False,
        http=PatientProtocol,
    )


def worker(
    queues: Annotated[
        str, typer.Option(help="Queues to work on, separated by commas.")
    ] = "ingest,precompute",
    supervised: Supervised = False,
) -> None:
    """Run a worker that ingests documents and computes KV."""
    from serving.otel import configure
    from serving.processes import run_worker

    settings = _begin(load_settings(), supervised)
    flush = configure("worker")
    try:
        run_worker(settings, [q.strip() for q in queues.split(",") if q.strip()])
    finally:
        flush()


def beat(supervised: Supervised = False) -> None:
    """Run the tick: schedules, leases of dead workers, garbage."""
    from serving.processes import run_beat

    run_beat(_begin(load_settings(), supervised))


def _begin(settings: Settings, supervised: bool) -> Settings:
    from serving.logs import configure
    from serving.supervisor import end_with_parent

    configure(sys.stderr)
    check_policy(settings)
    # Models are folders here: nothing is looked up on a hub, and a log needs no progress bars.
    os.environ.update(HF_HUB_OFFLINE="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="true")
    if supervised:
        end_with_parent()
    return settings
