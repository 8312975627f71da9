"""Reading objects, plain and encrypted, from S3: our store beside a plain parallel download of the same objects.

The ceiling is what http.client gives with URLs signed beforehand, each object one GET straight into memory that is there
already. Rounds go through all clients in turn, each round from the next one on, so that what else the machine does, and
what the one before leaves behind, meets each of them alike; a ratio is that of one round, and the middle half of them is
shown. `measure` needs no server: `bench storage` uses it on a folder.
"""

from __future__ import annotations

import http.client
import os
import secrets
import statistics
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from rich.table import Table

from bench.harness import console, write_record
from serving.settings import Settings, load_settings
from storage.errors import UserError
from storage.objects import open_store
from storage.sealed import SealedStore
from storage.types import ObjectStore

MIB = 1 << 20
TOTAL = 128 * MIB  # read per client and round
Read = Callable[[str, memoryview], None]


@dataclass(frozen=True)
class Client:
    name: str
    read: Read
    names: Sequence[str]


def run(*, sizes: Sequence[int], readers: int, rounds: int, out: Path | None) -> dict[str, Any]:
    """Throughput and client CPU by object size (MiB) against the server of PREREAD_S3_*. Raises UserError."""
    settings = load_settings()
    if not settings.object_store.startswith("s3://"):
        raise UserError("set PREREAD_OBJECT_STORE=s3://bucket/prefix and PREREAD_S3_* to the server to measure")
    folder = f"bench/{uuid.uuid4().hex}"
    store = _open(settings)
    try:
        rows = [row for size in sizes for row in _measure(settings, store, folder, size, readers, rounds)]
    finally:
        store.delete_many(list(store.list(folder)))
    record = {"benchmark": "s3", "readers": readers, "rounds": rounds, "results": rows}
    write_record(record, out)
    console().print(reading_table(rows, "reading from S3"))
    return record


def _open(settings: Settings) -> ObjectStore:
    return open_store(
        settings.objects, s3_endpoint=settings.s3_endpoint, s3_access_key=settings.s3_access_key,
        s3_secret_key=settings.s3_secret_key, s3_region=settings.s3_region,
    )  # fmt: skip


def _measure(
    settings: Settings, store: ObjectStore, folder: str, size: int, readers: int, rounds: int
) -> list[dict[str, Any]]:
    client, idle = _boto3(settings), list[http.client.HTTPConnection]()

    def others(names: Sequence[str]) -> list[Client]:
        return [
            Client("plain download", _plain(settings, client, names, idle), names),
            Client("boto3 get_object", _get_object(settings, client), names),
            Client("store, size known", _from(store), names),
        ]

    try:
        return measure(store, folder, size, readers, rounds, others)
    finally:
        for connection in (client, *idle):
            connection.close()


def measure(
    store: ObjectStore, folder: str, size: int, readers: int, rounds: int,
    others: Callable[[Sequence[str]], list[Client]] = lambda names: [],
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each way to read objects of `size` MiB, which stay under `folder`: `others`, then the store as stored KV is
    read, plain and encrypted. Ratios are to the first of them."""
    sealed = SealedStore(store, [secrets.token_bytes(32)], owner=lambda name: "bench")
    count = max(1, TOTAL // (size * MIB))
    plain_names = [f"{folder}/{size}/plain/{number}" for number in range(count)]
    sealed_names = [f"{folder}/{size}/sealed/{number}" for number in range(count)]
    data = secrets.token_bytes(size * MIB)
    for plain_name, sealed_name in zip(plain_names, sealed_names, strict=True):
        store.put(plain_name, [data])
        sealed.put(sealed_name, [data])
    clients = [
        *others(plain_names),
        Client("store", _whole(store), plain_names),
        Client("store, encrypted", _whole(sealed), sealed_names),
    ]
    buffers = [memoryview(bytearray(size * MIB)) for _ in range(count)]
    taken: dict[str, list[tuple[float, float]]] = {each.name: [] for each in clients}
    with ThreadPoolExecutor(readers) as pool:
        for turn in range(rounds + 1):
            first = turn % len(clients)
            for each in (*clients[first:], *clients[:first]):
                cost = _timed(each, buffers, pool)
                if turn:  # the first warms connections and the server's page cache
                    taken[each.name].append(cost)
    if any(buffer != data for buffer in buffers):
        raise RuntimeError("what was read is not what was written")
    return [_row(name, size, costs, taken[clients[0].name]) for name, costs in taken.items()]


def _timed(client: Client, buffers: Sequence[memoryview], pool: ThreadPoolExecutor) -> tuple[float, float]:
    """Seconds, and this process's CPU seconds, for one read of all objects."""
    wall, cpu = time.perf_counter(), time.process_time()
    list(pool.map(client.read, client.names, buffers))
    return time.perf_counter() - wall, time.process_time() - cpu


def _row(
    name: str, size: int, costs: Sequence[tuple[float, float]], plain: Sequence[tuple[float, float]]
) -> dict[str, Any]:
    read = max(1, TOTAL // (size * MIB)) * size * MIB
    ratios = [p[0] / c[0] for p, c in zip(plain, costs, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return {
        "client": name,
        "object_mib": size,
        "mb_per_s": round(statistics.median(read / wall for wall, _ in costs) / 1e6, 1),
        "cpu_s_per_gb": round(statistics.median(cpu for _, cpu in costs) / (read / 1e9), 3),
        "of_first": round(middle, 3),
        "of_first_low": round(low, 3),
        "of_first_high": round(high, 3),
    }


# --- the clients -------------------------------------------------------------------------------------------


def _from(store: ObjectStore) -> Read:
    def read(name: str, buffer: memoryview) -> None:
        store.read_into(name, buffer)

    return read


def _whole(store: ObjectStore) -> Read:
    """As stored KV is read."""

    def read(name: str, buffer: memoryview) -> None:
        store.read_all(name, lambda size: buffer[:size])

    return read


def _boto3(settings: Settings) -> Any:
    return boto3.session.Session().client(
        "s3",
        endpoint_url=settings.s3_endpoint or None,
        aws_access_key_id=settings.s3_access_key or None,
        aws_secret_access_key=settings.s3_secret_key or None,
        region_name=settings.s3_region,
        config=Config(s3={"addressing_style": "path"}, response_checksum_validation="when_required"),
    )


def _place(settings: Settings, name: str) -> dict[str, str]:
    url = urlsplit(settings.objects)
    return {"Bucket": url.netloc, "Key": f"{url.path.strip('/')}/{name}".lstrip("/")}


def _get_object(settings: Settings, client: Any) -> Read:
    def read(name: str, buffer: memoryview) -> None:
        body, done = client.get_object(**_place(settings, name))["Body"], 0
        while count := body.readinto(buffer[done : done + MIB]):
            done += count

    return read


def _plain(
    settings: Settings, client: Any, names: Sequence[str], idle: list[http.client.HTTPConnection]
) -> Read:
    urls = {n: client.generate_presigned_url("get_object", Params=_place(settings, n)) for n in names}
    where = urlsplit(urls[names[0]])
    kind = http.client.HTTPSConnection if where.scheme == "https" else http.client.HTTPConnection

    def read(name: str, buffer: memoryview) -> None:
        connection = idle.pop() if idle else kind(where.netloc, timeout=60)
        connection.request("GET", urls[name].partition(where.netloc)[2])
        answer, done = connection.getresponse(), 0
        while done < len(buffer) and (count := answer.readinto(buffer[done:])):
            done += count
        answer.read()
        idle.append(connection)

    return read


def reading_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=f"{title}, {os.cpu_count()} cores")
    for head in ("client", "object MiB", "MB/s", "CPU s/GB", "of the first", "a quarter below", "a quarter above"):
        table.add_column(head, justify="left" if head == "client" else "right")
    for row in rows:
        table.add_row(*map(str, row.values()))
    return table
