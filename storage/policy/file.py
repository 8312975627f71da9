"""The operator's file in force: read again when it changes; a version with mistakes leaves the one before it in force."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from storage.errors import UserError
from storage.policy.parse import parse_policy
from storage.policy.rules import Policy
from storage.policy.source import MAX_BYTES

log = structlog.get_logger(__name__)
LOOK_SECONDS = 1.0  # between two looks at the file


def read_policy(path: Path) -> Policy:
    """The policy in a file. Raises PolicyError with its mistakes, UserError if it cannot be read."""
    return parse_policy(_bytes(path))


class PolicyFile:
    """The policy that is in force. No path: one that says nothing. Safe to share between threads.

    Raises UserError at the start if the file cannot be used: nothing should run under a policy that is not meant."""

    def __init__(self, path: Path | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._looked = clock()
        data = b"" if path is None else _bytes(path)
        self._policy = parse_policy(data)
        self.version = _digest(data)  # of the policy in force
        self.error: str | None = None  # what is wrong with the file as it is now, if it is not the one in force
        self.reloads = 0
        self.failures = 0

    def current(self) -> Policy:
        """The policy in force; looks at the file at most once a second."""
        if self._path is not None:
            with self._lock:
                if self._clock() - self._looked >= LOOK_SECONDS:
                    self._looked = self._clock()
                    self._look(self._path)
        return self._policy

    def _look(self, path: Path) -> None:
        # By content, not by time stamp: two versions within one tick of the file system's clock are two versions.
        try:
            data = _bytes(path)
            if _digest(data) != self.version:
                self._policy, self.version = parse_policy(data), _digest(data)
                self.reloads += 1
                log.info("policy_in_force", version=self.version, rules=len(self._policy.rules))
            self.error = None
        except UserError as error:
            if self.error != str(error):
                self.failures += 1
                log.error("policy_not_read", in_force=self.version, error=str(error))
            self.error = str(error)


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"the policy file {path} cannot be read: {error.strerror}") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]

