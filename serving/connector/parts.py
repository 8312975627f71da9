"""What a connector is made of besides vLLM: the installation's stores and secret, by the same settings as its other processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import structlog

from serving.connector.plan import plan_secret
from serving.engine.rates import Rates
from serving.settings import load_settings
from serving.storage_parts import StorageParts
from storage.fingerprint import weights_fingerprint
from storage.types import LAYOUT

log = structlog.get_logger(__name__)


class ConnectorParts(StorageParts):
    """`extra`: kv_connector_extra_config: `patience_s` is read, nothing else."""

    def __init__(self, extra: Mapping[str, Any]) -> None:
        settings = load_settings()
        super().__init__(settings, memory_bytes=settings.memory_cache_bytes, disk_bytes=settings.disk_cache)
        self.rates = Rates(float(extra["patience_s"]) if "patience_s" in extra else None)
        self._ending = threading.Event()

    @property
    def ring(self) -> Callable[[str], None]:
        """The beat finds what is owed: there is no broker here."""
        return lambda _queue: None

    @cached_property
    def plan_secret(self) -> bytes:
        return plan_secret(self.secret)

    def keep_in_step(self) -> None:
        """Forget what other processes delete, from a thread of its own, until the process ends."""
        thread = threading.Thread(target=self._stay, name="kv-in-step", daemon=True)
        thread.start()
        self._closers.append(self._ending.set)

    def _stay(self) -> None:
        pause = 0.0
        while not self._ending.wait(pause):
            try:
                pause = self.stay_in_step()
            except Exception as error:  # noqa: BLE001 - what a database's driver raises is its own
                log.warning("the catalogue cannot be asked what was deleted", error=str(error))
                pause = self.settings.tick_seconds


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
