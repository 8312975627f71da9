"""Everything on one machine: the broker, the API, a worker and the beat as child processes of one supervisor.

Children hold the reading end of a pipe whose writing end is the supervisor's: when it dies, however it dies,
they end too. A child that dies is started again, after a pause that grows while it keeps dying.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import httpx

from serving import vllm_process
from serving.celery_app import broker_file
from serving.local_broker import LocalBroker, server_binary
from serving.settings import PREFIX, Settings, data_folder
from storage.errors import UserError

STOP_SECONDS = 45.0  # longer than `drain.GRACE_SECONDS`, so that answers that have begun are finished
READY_SECONDS = 180.0  # the models are loaded, on a busy machine slowly
VLLM_READY_SECONDS = 600.0
STEADY_SECONDS = 30.0  # a child that lived this long starts again without a long pause
LONGEST_PAUSE = 30.0
# Else glibc gives threads arenas of their own, and what one has freed no other gets: a busy API grew by 5 % in 1,500 requests.
ARENAS = {"MALLOC_ARENA_MAX": "2"}
Say = Callable[[str], None]


class AlreadyRunning(UserError):
    """Another supervisor holds this data folder; `address` is where it answers."""

    code = "already_running"

    def __init__(self, message: str, address: str) -> None:
        super().__init__(message)
        self.address = address


@dataclass
class Child:
    """A process of ours and how often it had to be started."""

    name: str
    argv: list[str]
    log: Path
    environ: dict[str, str]
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    start_at: float = 0.0
    falls: int = 0
    leads: bool = False  # what it starts itself may outlive it, and is ended with it

    def start(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self.process = subprocess.Popen(
                self.argv,
                env=self.environ,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self.started = time.monotonic()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """What it held is leased, and another worker takes it over."""
        if self.process is not None and self.running:
            self.process.kill()

    def forget(self) -> None:
        """Let go of a process that has ended, and of what it has left behind."""
        if self.process is not None and self.leads:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
        self.process = None

    def tend(self, say: Say) -> None:
        """Start it again if it died and its pause is over."""
        now = time.monotonic()
        if self.running:
            return
        if self.process is not None:
            self.falls = 1 if now - self.started > STEADY_SECONDS else self.falls + 1
            pause = min(LONGEST_PAUSE, 0.5 * 2.0 ** (self.falls - 1))
            say(f"{self.name} ended with code {self.process.returncode}; again in {pause:g} s ({self.log})")
            self.forget()
            self.start_at = now + pause
        elif now >= self.start_at:
            self.start()


@dataclass
class Supervisor:
    """Starts, watches and ends the processes of one data folder."""

    settings: Settings
    say: Say
    children: list[Child] = field(default_factory=list)
    broker: LocalBroker | None = None
    stopping: threading.Event = field(default_factory=threading.Event)
    interrupt: bool = False  # a signal also raises KeyboardInterrupt, once
    vllm: Path | None = None  # an environment with vLLM, which is started too

    def on_signal(self, *_: object) -> None:
        """The first one ends all in good order, the second one at once."""
        if self.stopping.is_set():
            for child in self.children:
                child.kill()
        self.stopping.set()
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt

    @property
    def address(self) -> str:
        return f"http://{_reachable(self.settings.host)}:{self.settings.port}"

    def start(self) -> None:
        """Start the broker and all children; returns at once after."""
        self._start_broker()
        logs, environ = self.settings.data_dir / "logs", environment(self.settings)
        for name in ("serve", "worker", "beat"):
            argv = [sys.executable, "-m", "serving.cli", name, "--supervised"]
            child = Child(name, argv, logs / f"{name}.log", environ)
            self.children.append(child)
            child.start()
        if self.vllm is not None:
            self._start_vllm(self.vllm, logs, environ)

    def _start_vllm(self, environment: Path, logs: Path, environ: dict[str, str]) -> None:
        argv = vllm_process.command(self.settings, environment)
        child = Child("vllm", argv, logs / "vllm.log", vllm_process.environ(self.settings, environ), leads=True)
        self.children.append(child)
        child.start()

    def _start_broker(self) -> None:
        if self.settings.broker_url:
            return
        binary = server_binary()
        if binary is None:
            broker_file(self.settings).unlink(missing_ok=True)
            self.say("no Valkey or Redis here: workers are woken through files, a second later")
            return
        self.broker = LocalBroker(binary, self.settings.data_dir / "broker", broker_file(self.settings))
        self.broker.start()

    def wait_ready(self) -> None:
        """Return when the API says it is ready. Raises UserError if it does not get there."""
        seconds = READY_SECONDS if self.vllm is None else VLLM_READY_SECONDS
        until = time.monotonic() + seconds
        reason = "no answer yet"
        while time.monotonic() < until and not self.stopping.is_set():
            try:
                answer = httpx.get(f"{self.address}/readyz", timeout=5)
                if answer.status_code == 200:
                    return
                reason = answer.text[:300]
            except httpx.HTTPError as error:
                reason = str(error)
            self.tend()
            for child in self.children:
                if child.name in ("serve", "vllm") and child.falls >= 3:
                    name = "the API" if child.name == "serve" else "vLLM"
                    raise UserError(f"{name} does not start: {last_line(child.log)}")
            self.stopping.wait(0.2)
        if not self.stopping.is_set():
            raise UserError(f"the API is not ready after {seconds:g} s: {reason}")

    def tend(self) -> None:
        """One look at every child."""
        if self.broker is not None and not self.broker.alive():
            self.say("the local broker died: starting another, and everything that talks to it")
            self.broker.start()
            for child in self.children:
                _end([child])
                child.start()
        for child in self.children:
            child.tend(self.say)

    def watch(self) -> None:
        """Keep everything alive until told to stop."""
        while not self.stopping.wait(0.5):
            self.tend()

    def stop(self) -> None:
        """End all children, by their ids, and the broker last."""
        self.stopping.set()
        self.say("stopping: answers that have begun are finished, files in work are handed over (Ctrl-C again: at once)")
        _end(self.children)
        if self.broker is not None:
            self.broker.stop()


def environment(settings: Settings) -> dict[str, str]:
    """This process's environment with the settings as they are here, options included."""
    values = {f.name: getattr(settings, f.name) for f in fields(Settings)}
    changed = {f.name: values[f.name] for f in fields(Settings) if values[f.name] != f.default}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIX)}  # what a file has said is in the settings
    return ARENAS | kept | {PREFIX + name.upper(): str(value) for name, value in changed.items()}


def _end(children: list[Child]) -> None:
    for child in children:
        if child.process is not None and child.running:
            child.process.terminate()
    until = time.monotonic() + STOP_SECONDS
    for child in children:
        if child.process is None:
            continue
        try:
            child.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.kill()
            child.process.wait()
        child.forget()


@contextmanager
def supervised(
    settings: Settings, say: Say, prepare: Callable[[], object] = lambda: None, vllm: Path | None = None
) -> Iterator[Supervisor]:
    """A started and ready Supervisor on this data folder, all of it ended on exit. `prepare` is run before anything is
    started, where nothing stands in the way. `vllm`: see there. Raises AlreadyRunning, UserError if the port is taken."""
    with _only_one(settings) as record:
        check_port(settings)
        prepare()
        supervisor = Supervisor(settings, say, vllm=vllm)
        previous = {s: signal.signal(s, supervisor.on_signal) for s in _SIGNALS}
        try:
            record({"pid": os.getpid(), "address": supervisor.address})
            supervisor.start()
            supervisor.wait_ready()
            yield supervisor
        finally:
            supervisor.stop()
            for number, handler in previous.items():
                signal.signal(number, handler)


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def _only_one(settings: Settings) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Hold the data folder's lock; the kernel frees it when the process dies."""
    path = data_folder(settings) / "up.json"
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            address = running_address(settings) or "an address not written down yet"
            raise AlreadyRunning(f"already running on {settings.data_dir}: {address}", address) from None

        def record(value: dict[str, Any]) -> None:
            file.seek(0)
            file.truncate()
            json.dump(value, file)
            file.flush()

        try:
            yield record
        finally:
            file.truncate(0)


def running_address(settings: Settings) -> str | None:
    """The address that a supervisor of this data folder wrote down, if any."""
    try:
        return str(json.loads((settings.data_dir / "up.json").read_text(encoding="utf-8"))["address"])
    except (OSError, ValueError, KeyError):
        return None


def end_with_parent() -> None:
    """Called in a supervised child: end as if told to, when the supervisor is gone."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(STOP_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def last_line(path: Path) -> str:
    """The last line of a log that says something."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    except OSError:
        return "no log"
    return lines[-1][:500] if lines else "its log is empty"


def _reachable(host: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
    return f"[{shown}]" if ":" in shown and not shown.startswith("[") else shown


def check_port(settings: Settings) -> None:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise UserError(
                f"port {settings.port} of {settings.host} cannot be used ({error.strerror}): set PREREAD_PORT, or try --port"
            ) from None
