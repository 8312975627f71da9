"""How vLLM is started beside the other processes, with a stand-in for the program."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from serving import vllm_process
from serving.settings import Settings
from serving.supervisor import Supervisor, environment
from storage.errors import UserError

# Writes down its process id and arguments, and waits.
STAND_IN = """#!{python}
import json, os, sys, time
with open(os.environ["TOLD"] + ".part", "w") as out:
    json.dump([os.getpid(), sys.argv[1:], dict(os.environ)], out)
os.rename(os.environ["TOLD"] + ".part", os.environ["TOLD"])
time.sleep(120)
"""
# Starts what outlives it.
LEADER = """#!{python}
import os, subprocess, sys, time
process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
with open("{told}.part", "w") as out:
    out.write(str(process.pid))
os.rename("{told}.part", "{told}")
time.sleep(120)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An environment with a program called vllm."""
    program = tmp_path / "environment" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    return tmp_path / "environment"


def settings(tmp_path: Path, **changes: object) -> Settings:
    base = {"data_dir": tmp_path / "data", "engine": "vllm", "vllm_url": "http://127.0.0.1:8765", "model": "models/lion"}
    return Settings(**{**base, **changes})  # type: ignore[arg-type]


def started(folder: Path, tmp_path: Path, argv: list[str], environ: dict[str, str]) -> tuple[subprocess.Popen[bytes], Path]:
    told = tmp_path / "told"
    return subprocess.Popen(argv, env={**environ, "TOLD": str(told)}), told


def read(told: Path) -> tuple[int, list[str], dict[str, str]]:
    end = time.monotonic() + 60
    while not told.exists():
        assert time.monotonic() < end
        time.sleep(0.05)
    pid, arguments, environ = json.loads(told.read_text())
    return pid, arguments, environ


def test_the_program_is_told_the_address_the_model_and_our_connector(folder: Path, tmp_path: Path) -> None:
    given = settings(tmp_path, threads=3, dtype="float32")
    argv = vllm_process.command(given, folder, "--max-num-seqs", "4")
    process, told = started(folder, tmp_path, argv, vllm_process.environ(given, environment(given)))
    try:
        pid, arguments, environ = read(told)
        assert pid == process.pid, "it is not a child of what was started, but that itself"
    finally:
        process.kill()
        process.wait()
    said = dict(pairwise(arguments))
    assert arguments[:2] == ["serve", str(Path("models/lion").absolute())]
    assert (said["--host"], said["--port"], said["--dtype"]) == ("127.0.0.1", "8765", "float32")
    assert said["--served-model-name"] == "lion"
    connector = json.loads(said["--kv-transfer-config"])
    assert connector["kv_connector_module_path"] == "serving.connector.adapter"
    assert connector["kv_load_failure_policy"] == "recompute"
    assert arguments[-2:] == ["--max-num-seqs", "4"]
    assert "--enforce-eager" in arguments
    assert (environ["OMP_NUM_THREADS"], environ["HF_HUB_OFFLINE"], environ["VLLM_NO_USAGE_STATS"]) == ("3", "1", "1")
    assert environ["PREREAD_DATA_DIR"] == str(tmp_path / "data")


def test_on_an_accelerator_nothing_is_said_that_is_for_the_cpu_build(folder: Path, tmp_path: Path) -> None:
    given = settings(tmp_path, device="cuda")
    assert "--enforce-eager" not in vllm_process.command(given, folder)
    assert not {"OMP_NUM_THREADS", "VLLM_CPU_KVCACHE_SPACE"} & set(vllm_process.environ(given, {}))


def test_where_vllm_is_not_installed_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="make vllm"):
        vllm_process.command(settings(tmp_path), tmp_path / "nowhere")


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is signalled on Linux only")
def test_it_ends_when_what_started_it_is_killed(folder: Path, tmp_path: Path) -> None:
    argv = vllm_process.command(settings(tmp_path), folder)
    start = f"import subprocess, time; subprocess.Popen({argv!r}); time.sleep(120)"
    parent, told = started(folder, tmp_path, [sys.executable, "-c", start], dict(os.environ))
    pid, _, _ = read(told)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    end = time.monotonic() + 30
    while _alive(pid):
        assert time.monotonic() < end, "it outlives its parent"
        time.sleep(0.05)


def test_what_it_has_started_is_not_left_behind_when_it_is_killed(folder: Path, tmp_path: Path) -> None:
    told = tmp_path / "told"
    (folder / "bin" / "vllm").write_text(LEADER.format(python=sys.executable, told=str(told)))
    supervisor = Supervisor(settings(tmp_path), lambda _said: None, vllm=folder)
    supervisor._start_vllm(folder, tmp_path / "logs", dict(os.environ))
    [child] = supervisor.children
    assert child.process is not None
    until(told.exists)
    engine = int(told.read_text())
    child.process.kill()
    child.process.wait()
    assert _alive(engine)
    child.tend(lambda _said: None)
    until(lambda: not _alive(engine))


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def test_the_supervisor_starts_it_with_the_others_and_says_when_it_does_not_start(folder: Path, tmp_path: Path) -> None:
    (folder / "bin" / "vllm").write_text(f"#!{sys.executable}\nraise SystemExit('no memory for this model')\n")
    supervisor = Supervisor(settings(tmp_path), lambda _said: None, vllm=folder)
    supervisor._start_vllm(folder, tmp_path / "logs", dict(os.environ))
    [child] = supervisor.children
    try:
        assert child.process is not None
        child.process.wait(60)
        child.falls = 2
        with pytest.raises(UserError, match="vLLM does not start: no memory for this model"):
            supervisor.wait_ready()
    finally:
        child.kill()
        child.forget()
