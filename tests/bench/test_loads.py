"""`bench loads` and `bench plan`, whose figures are the product's word on load or compute and on what storing would save."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest
from fixtures_models import Models
from fixtures_s3 import S3Server
from test_benchmarks import bench

from bench import plan
from bench.narrow import STALLED, Gate, NarrowWire
from storage.errors import UserError
from storage.objects import open_store


@pytest.mark.services
def test_loads_measures_a_folder_and_s3_at_each_bandwidth_and_stalled(
    tmp_path: Path, tiny_models: Models, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"s3_endpoint": s3_server.endpoint, "s3_access_key": s3_server.access_key, "s3_secret_key": s3_server.secret_key}
    monkeypatch.setenv("PREREAD_OBJECT_STORE", "s3://bench-loads/x")
    for name, value in keys.items():
        monkeypatch.setenv(f"PREREAD_{name.upper()}", value)
    record = bench(tmp_path, tiny_models, "loads", "--tokens", "1100", "--rates", "400,0.01")
    rows = {(row["source"], row["mb_s"]): row for row in record["rows"]}
    assert set(rows) == {(source, rate) for source in ("folder", "S3") for rate in (400, 0.01, STALLED)}
    for (_, rate), row in rows.items():
        assert row["chunks"] == 2
        assert row["ratio_worst"] >= row["ratio"] > 0
        assert len(row["waits"]) == 3
        if rate != 400:
            assert (row["chunks_computed"], row["reasons"]) == (2, ["slow"]), "nothing came before computing had got there"
    store = open_store("s3://bench-loads/x", **keys)
    assert list(store.list("")) == [], "it leaves nothing behind"


def test_loads_without_a_server_measures_a_folder(
    tmp_path: Path, tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREREAD_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("PREREAD_OBJECT_STORE", raising=False)
    record = bench(tmp_path, tiny_models, "loads", "--tokens", "300", "--rates", "400")
    assert [(row["source"], row["mb_s"]) for row in record["rows"]] == [("folder", 400), ("folder", STALLED)]


def test_plan_measures_a_tiny_model_beside_its_formulae(tmp_path: Path, tiny_models: Models) -> None:
    record = bench(tmp_path, tiny_models, "plan", "--tokens", "64,256")
    assert [row["tokens"] for row in record["rows"]] == [64, 256, 1024]
    assert all(row["seconds"] > 0 and row["predicted_s"] > 0 for row in record["rows"])
    assert record["object"]["bytes"] == record["object"]["formula_bytes"] + record["object"]["header_bytes"]
    assert 0 < record["object"]["header_bytes"] < 8192


@pytest.mark.slow
def test_the_planners_prefill_time_is_that_of_the_embedded_model(embedded_folder: Path, tmp_path: Path) -> None:
    """Processor time, in which other programs take no part."""
    record = plan.run(
        model=str(embedded_folder), tokens=[256, 2048], out=None, workdir=tmp_path, device="cpu", dtype="bfloat16"
    )
    assert record["within_tolerance"], record["rows"]
    assert [row["tokens"] for row in record["rows"]] == [256, 1024, 2048]


# --- the narrow way -----------------------------------------------------------------------------------------------------


def answers(wire: NarrowWire) -> bytes:
    with socket.create_connection(("127.0.0.1", wire.server_address[1]), timeout=20) as asking:
        asking.sendall(b"give")
        return b"".join(iter(lambda: asking.recv(1 << 16), b""))


def serve(data: bytes) -> tuple[str, socket.socket]:
    """A server that answers anything with `data`, and its address."""
    listening = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                near, _ = listening.accept()
            except OSError:
                return
            with near:
                near.recv(4)
                near.sendall(data)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listening.getsockname()[1]}", listening


def test_a_narrow_wire_carries_all_bytes_no_faster_than_it_is_wide() -> None:
    data = bytes(range(256)) * 400
    address, listening = serve(data)
    with NarrowWire(address, Gate(500_000)) as wire:
        begun = time.monotonic()
        assert answers(wire) == data
        assert time.monotonic() - begun >= 0.9 * len(data) / 500_000
    listening.close()


def test_a_stalled_wire_lets_nothing_through_until_it_is_closed() -> None:
    address, listening = serve(b"something")
    got: list[bytes] = []
    with NarrowWire(address, Gate(STALLED)) as wire:
        asking = threading.Thread(target=lambda: got.append(answers(wire)))
        asking.start()
        asking.join(0.3)
        assert not got
    asking.join(20)
    assert not asking.is_alive()
    listening.close()


def test_a_server_that_is_not_plain_http_is_refused_in_one_sentence() -> None:
    for address in ("https://s3.example.com", ""):
        with pytest.raises(UserError, match="http://"):
            NarrowWire(address, Gate(STALLED))
