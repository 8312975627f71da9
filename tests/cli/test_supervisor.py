"""The supervisor: children die with it, come back when they fall, and there is one per data folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from serving.settings import Settings
from serving.supervisor import (
    AlreadyRunning,
    Child,
    Supervisor,
    _end,
    _only_one,
    check_port,
    environment,
    last_line,
    running_address,
)
from storage.errors import UserError

SLEEP = "import time; time.sleep(60)"
CHILD = "from serving.supervisor import end_with_parent; import time; end_with_parent(); time.sleep(60)"


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.05)
    return False


def child(tmp_path: Path, code: str) -> Child:
    return Child("child", [sys.executable, "-c", code], tmp_path / "logs" / "child.log", dict(os.environ))


def test_a_child_that_falls_is_started_again_after_a_pause(tmp_path: Path) -> None:
    said: list[str] = []
    fallen = child(tmp_path, "raise SystemExit('no good')")
    fallen.start()
    assert until(lambda: not fallen.running)
    fallen.tend(said.append)
    assert "code 1" in said[0]
    assert fallen.process is None
    fallen.tend(said.append)
    assert fallen.process is None, "its pause is not over"
    fallen.start_at = 0.0
    fallen.tend(said.append)
    assert fallen.process is not None
    assert until(lambda: last_line(fallen.log) == "no good")
    _end([fallen])


def test_pauses_grow_while_it_keeps_falling(tmp_path: Path) -> None:
    said: list[str] = []
    fallen = child(tmp_path, "raise SystemExit(1)")
    for _ in range(3):
        fallen.start()
        assert until(lambda: not fallen.running)
        fallen.tend(said.append)
    assert [line.split("again in ")[1].split(" s")[0] for line in said] == ["0.5", "1", "2"]


def test_children_end_when_told(tmp_path: Path) -> None:
    children = [child(tmp_path, SLEEP) for _ in range(2)]
    for one in children:
        one.start()
    _end(children)
    assert not any(one.running for one in children)


def test_a_child_ends_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, sys.executable, CHILD], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert _alive(pid)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert until(lambda: not _alive(pid))


_PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.argv[1], "-c", sys.argv[2]], stdin=subprocess.PIPE)
time.sleep(1)
print(child.pid, flush=True)
time.sleep(60)
"""


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_a_second_one_on_the_same_folder_learns_the_address(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path)
    with _only_one(settings) as record:
        record({"pid": 1, "address": "http://127.0.0.1:9"})
        with pytest.raises(AlreadyRunning) as refused, _only_one(settings):
            pass
        assert refused.value.address == "http://127.0.0.1:9"
        assert running_address(settings) == "http://127.0.0.1:9"
    assert running_address(settings) is None
    with _only_one(settings):
        pass


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} .* --port"):
            check_port(Settings(data_dir=tmp_path, port=port))


def test_children_get_the_settings_as_they_are_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from serving.settings import load_settings

    monkeypatch.setenv("PREREAD_TOP_K", "3")
    settings = load_settings(port=9999, data_dir=tmp_path)
    assert load_settings(environment(settings)) == settings


@pytest.mark.parametrize(("set_here", "told"), [(None, "2"), ("8", "8")])
def test_children_share_what_memory_their_threads_have_freed_unless_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, set_here: str | None, told: str
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if set_here:
        monkeypatch.setenv("MALLOC_ARENA_MAX", set_here)
    assert environment(Settings(data_dir=tmp_path))["MALLOC_ARENA_MAX"] == told


def test_a_signal_ends_the_watch(tmp_path: Path) -> None:
    supervisor = Supervisor(Settings(data_dir=tmp_path), print)
    previous = signal.signal(signal.SIGTERM, supervisor.on_signal)
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        supervisor.watch()
    finally:
        signal.signal(signal.SIGTERM, previous)
    assert supervisor.stopping.is_set()


IGNORES = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def test_a_second_signal_ends_children_at_once_that_would_take_their_time(tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(Settings(data_dir=tmp_path), said.append)
    supervisor.children.append(child(tmp_path, IGNORES))
    supervisor.children[0].start()
    assert until(lambda: last_line(supervisor.children[0].log) == "deaf", 30)
    supervisor.on_signal()
    stopping = threading.Thread(target=supervisor.stop)
    stopping.start()
    assert until(lambda: bool(said))
    assert "answers that have begun are finished" in said[0]
    time.sleep(0.3)
    assert stopping.is_alive(), "it waits"
    supervisor.on_signal()
    stopping.join(10)
    assert not stopping.is_alive()
