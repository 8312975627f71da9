"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from serving.api.access import Parts, Reader
from serving.api.answer import Stream, begin, whole
from serving.api.chat_request import ChatBody

router = APIRouter(prefix="/v1/chat", tags=["chat"])


@router.post("/completions", response_model=None)
async def create_chat_completion(
    parts: Parts, who: Reader, body: ChatBody, request: Request
) -> Stream | dict[str, Any]:
    answer = await begin(parts, request.app.state.metrics, who, body, request)
    if body.stream:
        return Stream(answer, bool(body.stream_options and body.stream_options.include_usage))
    return await whole(answer, request)
