"""The wire of these tests breaks as it says: with an end, or with a reset."""

from __future__ import annotations

import socket
import threading

import pytest
from wire import Wire


@pytest.mark.parametrize("reset", [False, True])
def test_a_cut_is_an_end_or_a_reset_for_both_sides(reset: bool) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    wire = Wire(f"http://127.0.0.1:{server.getsockname()[1]}")
    seen: list[bytes | str] = []

    def read(end: socket.socket) -> None:
        end.settimeout(30)
        try:
            seen.append(end.recv(10))
        except ConnectionResetError:
            seen.append("reset")

    with socket.create_connection(("127.0.0.1", int(wire.url.rsplit(":", 1)[1]))) as client, server:
        far, _ = server.accept()
        client.sendall(b"x")
        assert far.recv(1) == b"x"
        readers = [threading.Thread(target=read, args=(end,)) for end in (client, far)]
        for reader in readers:
            reader.start()
        wire.cut(reset=reset)
        for reader in readers:
            reader.join(30)
        far.close()
    wire.close()
    assert seen == (["reset"] * 2 if reset else [b""] * 2)
