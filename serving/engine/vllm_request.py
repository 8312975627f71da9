"""From a planned prompt to what vLLM is sent: token ids, sampling parameters, the signed plan of stored KV, and a cache salt."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from precompute.spec import ReaderSpec
from serving.connector.plan import Plan, Span, token_hash
from serving.engine.guide import lark
from serving.engine.plain import QUESTION
from serving.engine.types import GenerateRequest
from serving.engine.vllm_labels import Label
from serving.prompt import Passage, PromptPlan
from storage.errors import UserError

PLAN_LIFE_S = 1800  # longer than a request waits in vLLM's queue
_FULL = "preread-full:"


def refuse(request: GenerateRequest) -> None:
    """Raises UserError for what vLLM cannot do."""
    if request.emphasis:
        raise UserError(
            "emphasis is not served by the vllm engine: leave out preread.emphasis, and the corpus's standing rules",
            code="unsupported_parameter",
        )


def prompt_ids(plan: PromptPlan) -> list[int]:
    """The whole prompt's tokens."""
    ids = list(plan.frame)
    for label, header, chunk in zip(plan.labels, plan.headers, plan.chunks, strict=True):
        ids += [*label, *header, *chunk.token_ids]
    return [*ids, *plan.tail]


def kv_plan(
    reader: ReaderSpec, request: GenerateRequest, plan: PromptPlan, passages: Sequence[Passage],
    owners: frozenset[tuple[str, str]], now: float, thread: str, labels: Sequence[Label] = (),
) -> Plan | None:  # fmt: skip
    """Where stored KV goes in this prompt; None where there is none. `owners`: tenant and sharing group of the keys; `thread`:
    see `thread_of`; `labels`: those with stored KV, before the first chunks."""
    spans = []
    for number, each in enumerate(passages):
        if (key := each.chunk.kv_key) is None:
            continue
        # A label tells of the chunk that it stands right before.
        if plan.frame and number < len(labels) and not plan.headers[number] and plan.labels[number] == labels[number].ids:
            spans.append(labels[number].span(each.start - len(labels[number].ids)))
        own = each.chunk.token_ids[each.skip : each.skip + each.end - each.start]
        codec = reader.codec_named(each.chunk.codec) if each.chunk.codec else ""
        best = bool(plan.frame) and number == 0
        spans.append(Span(each.start, len(own), key, token_hash(own), skip=each.skip, best=best, codec=codec))
    if not spans:
        return None
    tenants, groups = zip(*sorted(owners), strict=True) if owners else (("",), ("",))
    return Plan(
        reader.profile, tuple(spans), request.method, _tail_start(plan, spans), ",".join(dict.fromkeys(tenants)),
        ",".join(dict.fromkeys(groups)), int(now) + PLAN_LIFE_S, thread=thread, plain=not plan.frame,
    )  # fmt: skip


def _tail_start(plan: PromptPlan, spans: Sequence[Span]) -> int:
    """Where the question begins: behind the passages; of a plain prompt that ends with one, its last turn."""
    if plan.frame:
        return plan.tokens - len(plan.tail)
    if plan.turns and plan.tokens - spans[-1].end < QUESTION:
        return plan.turns[-1].start
    return spans[-1].end


def thread_of(request: GenerateRequest) -> str:
    """A conversation goes on with what its first question has chosen; another one chooses for itself. Empty for a plain prompt
    of which nothing may be kept for later ones."""
    if not request.chunks and not request.scope:
        return ""
    first = next((m.content for m in request.messages if m.role == "user"), "")
    return hashlib.sha256("\0".join((request.scope, first)).encode("utf-8", "surrogatepass")).hexdigest()


def full_salt(secret: bytes, request: GenerateRequest, plan: PromptPlan) -> str:
    """For prompts without stored KV, so that vLLM's prefix cache is shared among those only who may read what stands in them:
    the asker's own prompts, or prompts over the same corpora; and never with blended ones."""
    shared = request.scope or ",".join(sorted({chunk.corpus_id for chunk in plan.chunks}))
    if not shared:
        return _FULL + secrets.token_hex(32)
    return _FULL + hmac.new(secret, repr(("full", bool(request.scope), shared)).encode(), hashlib.sha256).hexdigest()


def body(
    reader: ReaderSpec, model: str, request: GenerateRequest, ids: Sequence[int], salt: str, params: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Of POST /v1/completions. All that vLLM would else take from the model's generation config is said."""
    made: dict[str, Any] = {
        "model": model, "prompt": list(ids), "stream": True, "stream_options": {"include_usage": True},
        "return_token_ids": True, "add_special_tokens": False, "cache_salt": salt,
        "max_tokens": request.max_tokens, "temperature": request.temperature, "top_p": request.top_p,
        "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": request.presence_penalty, "frequency_penalty": request.frequency_penalty,
        "ignore_eos": request.ignore_eos,
        "stop_token_ids": [] if request.ignore_eos else sorted(reader.stop_ids),
    }  # fmt: skip
    if params is not None:
        made["kv_transfer_params"] = dict(params)
    if request.seed is not None:
        made["seed"] = request.seed
    if request.stop:
        made["stop"] = list(request.stop)
    if request.logit_bias:
        made["logit_bias"] = {str(token): value for token, value in request.logit_bias.items()}
    if request.logprobs is not None:
        made |= {"logprobs": request.logprobs, "return_tokens_as_token_ids": True}
    if request.shape is not None:
        made["structured_outputs"] = {"grammar": lark(request.shape)}
    return made
