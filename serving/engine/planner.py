"""What every engine does before it computes: refuse what the model cannot serve, and plan the prompt."""

from __future__ import annotations

from collections.abc import Sequence

from precompute.spec import ReaderSpec
from serving.engine.guide import Guide
from serving.engine.types import GenerateRequest
from serving.prompt import PromptPlan, plan_prompt, plan_text
from storage.errors import UserError
from storage.types import RetrievedChunk


class Planner:
    """Over one reader. Threads may share it."""

    def __init__(self, reader: ReaderSpec) -> None:
        self._reader = reader
        self.guide = Guide(reader)

    def check(self, request: GenerateRequest) -> None:
        """Raises UserError; see `Engine.prepare`."""
        named = [*request.logit_bias, *(() if isinstance(request.prompt, str) else request.prompt or ())]
        vocabulary = self._reader.vocabulary
        if unknown := next((id for id in named if not 0 <= id < vocabulary), None):
            raise UserError(f"there is no token {unknown}: this model has {vocabulary}", code="invalid_value")
        if request.shape is not None:
            self.guide.check(request.shape)
        if request.logprobs is not None:
            self.guide.bytes_of(0)

    def plan(self, request: GenerateRequest, chunks: Sequence[RetrievedChunk], max_model_len: int) -> PromptPlan:
        """The prompt with as many of `chunks` as fit. Raises UserError(code="context_length_exceeded")."""
        if request.prompt is not None:
            ids = self._reader.tokenizer.encode(request.prompt) if isinstance(request.prompt, str) else request.prompt
            return plan_text(ids, max_model_len, request.max_tokens)
        room = (max_model_len, request.max_tokens)
        plan = plan_prompt(self._reader.format, request.messages, chunks, *room, grounded=request.grounded)
        if request.needs_chunks and not plan.chunks:
            raise UserError("No passage fits beside so long a question.", code="context_length_exceeded")
        return plan
