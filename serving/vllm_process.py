"""vLLM as a process of this installation: `preread up --vllm` starts one, and so do benchmarks and tests.

vLLM lives in an environment of its own (`make vllm`), since its pins are not ours. This module imports nothing of it, and runs as
a program that becomes vLLM: `python -m serving.vllm_process ENVIRONMENT ARGUMENTS…`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from urllib.parse import urlsplit

from precompute.embedded import embedded_place
from serving.settings import Settings
from storage.errors import UserError

CONNECTOR = {
    "kv_connector": "PrereadConnector", "kv_connector_module_path": "serving.connector.adapter", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}  # fmt: skip
KEEP_ALIVE_S = 20  # between comments in a stream that has nothing to say
_PR_SET_PDEATHSIG = 1


def command(settings: Settings, environment: Path, *more: str) -> list[str]:
    """What starts vLLM from `environment` (a virtual environment's folder) at settings.vllm_url, with the reader model, whose
    folder is there. `more`: further arguments of `vllm serve`. Raises UserError where vLLM is not installed."""
    model = embedded_place() if settings.model == "embedded" else Path(settings.model)
    if not (environment / "bin" / "vllm").exists():
        raise UserError(f"{environment} has no vLLM: make vllm")
    url = urlsplit(settings.vllm_url)
    # The CPU build's compile mode takes a minute at every start, for a few percent.
    device = ("--enforce-eager",) if settings.device == "cpu" else ()
    return [
        sys.executable, "-m", "serving.vllm_process", str(environment.absolute()), "serve", str(model.absolute()),
        "--served-model-name", model.name, "--host", url.hostname or "127.0.0.1", "--port", str(url.port or 80),
        "--dtype", settings.dtype, "--generation-config", "vllm", "--enable-prompt-tokens-details",
        "--sse-keep-alive-interval", str(KEEP_ALIVE_S), "--kv-transfer-config", json.dumps(CONNECTOR), *device, *more,
    ]  # fmt: skip


def environ(settings: Settings, base: dict[str, str]) -> dict[str, str]:
    """The process's environment: `base`, which has the settings, and nothing that asks the internet."""
    made = {
        **base, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    }  # fmt: skip
    if settings.device == "cpu":
        threads = str(settings.threads or os.cpu_count() or 1)
        # Bound to cores of its own it would take them from the processes beside it.
        made |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}
        made.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    return made


def main(arguments: list[str]) -> None:
    """Become vLLM, and end when the process that started this one does."""
    environment, *rest = arguments
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            return
    program = Path(environment) / "bin" / "vllm"
    os.environ["PATH"] = f"{program.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    os.execv(program, [str(program), *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
