"""vLLM in a process of its own, with our connector: reads orders from standard input and answers them, a line of JSON each.

Run by build/vllm/bin/python; nothing of the tests' own environment is needed here. Arguments: a JSON object for `LLM`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM's own words go to the log


class Engine:
    """`LLM` in this process, so that its scheduler can be looked at."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(**options)
        self.engine = self.llm.llm_engine
        core = self.engine.engine_core.engine_core
        self.scheduler = core.scheduler
        self.steps = self.preempted = 0
        preempt = self.scheduler._preempt_request

        def counted(*given: Any, **named: Any) -> Any:
            self.preempted += 1
            return preempt(*given, **named)

        self.scheduler._preempt_request = counted

    def run(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """Each request begins at step `at` and, where it says so, is aborted at step `abort`."""
        from vllm import SamplingParams

        first, outputs, aborted = self.steps, dict[str, Any](), set()
        while len(outputs) + len(aborted - outputs.keys()) < len(requests) or self.engine.has_unfinished_requests():
            now = self.steps - first
            for each in requests:
                if each.get("at", 0) == now:
                    options = SamplingParams(
                        temperature=0, max_tokens=each.get("max_tokens", 8), logprobs=each.get("logprobs"), ignore_eos=True,
                        extra_args={"kv_transfer_params": each["params"]} if "params" in each else None,
                    )
                    prompt = {"prompt_token_ids": each["prompt"]}
                    if each.get("salt"):
                        prompt["cache_salt"] = each["salt"]
                    self.engine.add_request(each["id"], prompt, options)
                if each.get("abort") == now:
                    self.engine.abort_request([each["id"]])
                    aborted.add(each["id"])
            for output in self.engine.step():
                if output.finished:
                    outputs[output.request_id] = {**shown(output), "step": now}
            self.steps += 1
        return outputs

    def counts(self) -> dict[str, Any]:
        """What is held when nothing runs. Two steps more than it took, so that what was given up is given back."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        while self.scheduler.has_requests():
            self.engine.step()
        pool = self.scheduler.kv_cache_manager.block_pool
        worker = get_kv_transfer_group()
        return {
            "scheduler": self.scheduler.connector.counts, "worker": worker.counts, "requests": len(self.scheduler.requests),
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(), "preempted": self.preempted,
        }

    def stall(self, seconds: float) -> dict[str, Any]:
        """From now on each object takes so long to be read."""
        from storage.folder import FolderStore

        self.read = getattr(self, "read", FolderStore.read_all)

        def read_all(*given: Any) -> int:
            time.sleep(seconds)
            return self.read(*given)

        FolderStore.read_all = read_all
        return {"done": True}

    def reset(self) -> dict[str, Any]:
        """Forget the prefix cache."""
        return {"done": self.llm.reset_prefix_cache()}

    def broken(self) -> dict[str, Any]:
        """Whether the worker blends, and whether layer by layer."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        rank = get_kv_transfer_group()._rank
        blends = type(rank).__name__ == "Rank"
        return {"rank": type(rank).__name__, "by_layer": blends and rank._model._model.sliced}


def shown(output: Any) -> dict[str, Any]:
    told = output.outputs[0]
    probabilities = [{str(token): each.logprob for token, each in step.items()} for step in told.logprobs or ()]
    return {
        "tokens": list(told.token_ids), "logprobs": probabilities, "params": output.kv_transfer_params,
        "cached": output.num_cached_tokens, "reason": told.finish_reason,
    }


def main() -> None:
    engine = Engine(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=ANSWERS, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        answer = getattr(engine, order.pop("do"))(**order)
        print(json.dumps(answer), file=ANSWERS, flush=True)
    engine.engine.engine_core.shutdown()
    os._exit(0)  # without waiting for what libraries clean up


if __name__ == "__main__":
    main()
