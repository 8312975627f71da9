"""How likely each token was, in OpenAI's two shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from serving.engine.types import TokenLogprob

LEAST = -9999.0  # OpenAI's word for impossible; JSON has no infinity


def token_text(token: TokenLogprob) -> str:
    """Its text; of a token that is not whole characters, its bytes as OpenAI writes them."""
    try:
        return token.bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def _number(token: TokenLogprob) -> float:
    return token.logprob if math.isfinite(token.logprob) else LEAST


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Of a chat completion."""
    return {"content": [{**_chat(token), "top_logprobs": [_chat(one) for one in token.top]} for token in tokens], "refusal": None}


def _chat(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": _number(token), "bytes": list(token.bytes)}


def completion_logprobs(tokens: Sequence[TokenLogprob], start: int) -> dict[str, Any]:
    """Of a completion, whose first token begins at character `start` of the text."""
    offsets, at = [], start
    for token in tokens:
        offsets.append(at)
        at += len(token.bytes.decode(errors="ignore"))
    return {
        "tokens": [token_text(token) for token in tokens],
        "token_logprobs": [_number(token) for token in tokens],
        "top_logprobs": [{token_text(one): _number(one) for one in token.top} for token in tokens],
        "text_offset": offsets,
    }
