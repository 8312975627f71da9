"""What became of a plan, asked for afterwards: vLLM's streams do not carry `kv_transfer_params`, answers in one piece do.

The API sends a request for one token with `ask(params)`; the connector, which has kept what it told of the plan by the plan's
signature, answers with that. Nobody but the API knows a signature.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from serving.connector.plan import FIELD, Told

ASK = "preread_told"
MOST = 4096  # plans whose end is kept until it is asked for


def ask(params: Mapping[str, Any]) -> dict[str, Any]:
    """The `kv_transfer_params` that ask about a request with `params`."""
    return {ASK: params[FIELD]["signature"]}


def read(params: Any) -> Told | None:
    """What is told, or None where nothing is known (yet)."""
    given = params.get(ASK) if isinstance(params, Mapping) else None
    return Told.read({FIELD: given}) if isinstance(given, Mapping) else None


class Kept:
    """What was told of the last plans, each until it is asked for."""

    def __init__(self) -> None:
        self._told: OrderedDict[str, Any] = OrderedDict()

    def finished(self, params: Any, told: dict[str, Any] | None) -> dict[str, Any] | None:
        """The `kv_transfer_params` of the answer to a request that came with `params`, whatever they are; `told`: of its plan."""
        if not isinstance(params, Mapping):
            return told
        if ASK in params:
            asked = params[ASK]
            return {ASK: self._told.pop(asked, None) if isinstance(asked, str) else None}
        plan = params.get(FIELD)
        signature = plan.get("signature") if isinstance(plan, Mapping) else None
        if told is not None and isinstance(signature, str):
            self._told[signature] = told[FIELD]
            while len(self._told) > MOST:
                self._told.popitem(last=False)
        return told
