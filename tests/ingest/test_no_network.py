"""A parser's process reaches nothing: not through Python, not through C, not from a process of its own."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ingest import pipes
from ingest.isolate import ParserPool

ENFORCED = sys.platform == "linux" and platform.machine() in {"x86_64", "aarch64"}
needs_filter = pytest.mark.skipif(not ENFORCED, reason="the system's own way is known for Linux on two machines only")


def run(code: str) -> str:
    """What a process without network prints; it runs as a parser's child does."""
    program = f"from ingest.no_network import cut_network\nenforced = cut_network()\n{code}"
    done = subprocess.run([sys.executable, "-c", program], env=pipes.environment(), capture_output=True, check=False)
    assert not done.stderr, done.stderr.decode()
    return done.stdout.decode().strip()


def test_python_makes_no_socket_and_asks_no_name_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        tries = [
            f"socket.create_connection(('127.0.0.1', {port}), 2)", "socket.socket()", "socket.getaddrinfo('localhost', 80)",
            "socket.socketpair()", f"urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=2)",
        ]  # fmt: skip
        body = "".join(f"try:\n    {line}\n    print('reached')\nexcept OSError as e:\n    print('refused')\n" for line in tries)
        assert run(f"import socket, urllib.request\n{body}").split() == ["refused"] * len(tries)
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()


@needs_filter
def test_c_code_makes_no_socket() -> None:
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(enforced, libc.socket(2, 1, 0), ctypes.get_errno(), libc.socket(10, 2, 0), libc.socket(1, 1, 0),"
        " libc.socketpair(1, 1, 0, (ctypes.c_int * 2)()), libc.syscall(425, 8, None), ctypes.get_errno())"
    )
    assert run(code) == "True -1 13 -1 -1 -1 -1 13"


@needs_filter
def test_a_process_started_from_there_has_no_network_either() -> None:
    inner = "import socket\ntry:\n    socket.socket()\n    print('reached')\nexcept PermissionError:\n    print('refused')"
    assert run(f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {inner!r}], check=True)") == "refused"


def test_files_and_pipes_still_work() -> None:
    assert (
        run("import os, tempfile\nr, w = os.pipe()\nos.write(w, b'x')\nprint(os.read(r, 1), open(os.devnull).read())") == "b'x'"
    )


@needs_filter
def test_the_children_of_a_pool_are_filtered() -> None:
    with ParserPool() as pool:
        assert pool.parse(b"text", "a.txt").text == "text"
        process = pool._all[0]._process
        assert process is not None
        assert "Seccomp:\t2" in Path(f"/proc/{process.pid}/status").read_text()
