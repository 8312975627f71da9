"""What a connector is made of besides vLLM: the installation's stores and secret, by the same settings as its other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog

from serving.connector.plan import plan_secret
from serving.connector.uses import Uses
from serving.engine.rates import Rates
from serving.placement import PASS_SECONDS
from serving.settings import load_settings
from serving.storage_parts import StorageParts
from storage.audit import stored_profile
from storage.errors import PrereadError
from storage.fingerprint import weights_fingerprint
from storage.tiers.store import object_name
from storage.types import LAYOUT, KVProfile

log = structlog.get_logger(__name__)


class ConnectorParts(StorageParts):
    """`extra`: kv_connector_extra_config: `patience_s` is read, nothing else."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        settings = load_settings()
        super().__init__(settings, memory_bytes=settings.memory_cache_bytes, disk_bytes=settings.disk_cache)
        self.rates = Rates(float(extra["patience_s"]) if "patience_s" in extra else None)
        self._ending = threading.Event()
        self._own: Callable[[], Mapping[str, Any]] = dict
        self._profiles: dict[str | None, tuple[float, KVProfile | None]] = {}  # codec → since when, and which

    @property
    def ring(self) -> Callable[[str], None]:
        """The beat finds what is owed: there is no broker here."""
        return lambda _queue: None

    @cached_property
    def _own_part(self) -> Mapping[str, Any]:
        return self._own()

    @cached_property
    def _uses(self) -> Uses:
        return Uses(self.catalogue, self.tiers)

    @cached_property
    def plan_secret(self) -> bytes:
        return plan_secret(self.secret)

    def keep_in_step(self, own: Callable[[], Mapping[str, Any]]) -> None:
        """Forget what other processes delete, and have in this process's tiers what the operator's rules say, until the process
        ends: from a thread each, since a fetch may take long. `own`: see `own_profile`, which reads all weights."""
        self._closers.append(self._ending.set)
        self._own = own
        for name, act in (("kv-in-step", self._stay), ("kv-placement", self._place)):
            threading.Thread(target=act, name=name, daemon=True).start()

    def stored_as(self, codec: str | None, newest: str, since: float) -> KVProfile | None:
        """See StorageParts. The newest object says it itself: frame and tokenizer are the API's to know."""
        known, profile = self._profiles.get(codec, (0.0, None))
        if known < since:
            found = stored_profile(self.kv_objects, object_name(newest))
            if isinstance(found, KVProfile):
                ours = all(getattr(found, name) == value for name, value in self._own_part.items())
                profile = found if ours else None
                self._profiles[codec] = since, profile
        return profile

    def _stay(self) -> None:
        pause = 0.0
        while not self._ending.wait(pause):
            try:
                pause = self.stay_in_step()
            except Exception as error:  # noqa: BLE001 - what a database's driver raises is its own
                log.warning("the catalogue cannot be asked what was deleted", error=str(error))
                pause = self.settings.tick_seconds

    def _place(self) -> None:
        pause = self.settings.tick_seconds
        while not self._ending.wait(pause):
            try:
                self.placement.used(self._uses.new(self.policy.current()))
                self.placement.tick()
                pause = self.settings.tick_seconds
            except Exception as error:  # noqa: BLE001 - nothing may be raised into vLLM, and the next look may do
                reason = str(error) if isinstance(error, PrereadError) else type(error).__name__
                log.warning("the operator's rules are not followed", error=reason)
                pause = PASS_SECONDS


def own_profile(model: Any) -> dict[str, Any]:
    """What a plan's profile must say of the model that vLLM's model_config describes."""
    return {
        "weights": weights_fingerprint(Path(model.model)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "layers": int(model.hf_text_config.num_hidden_layers),
        "kv_heads": int(model.get_total_num_kv_heads()),
        "head_dim": int(model.get_head_size()),
        "layout": LAYOUT,
        "adapter": "",
    }
