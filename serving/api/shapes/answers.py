"""Answers of the model: what chat/completions and completions share, and their objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from serving.api.shapes.common import Count, DocumentId, FileId, Id, Path, Sha256, Time
from serving.engine.types import Report

ModelId = Annotated[str, Field(examples=["reader@handbook"])]
Text = Annotated[str, Field(examples=["Invoices are due after 30 days [1]."])]
Logprob = Annotated[float, Field(examples=[-0.25])]
Finish = Literal["stop", "length", "tool_calls"]


@dataclass
class Provenance(Report):
    """`nothing_found`: documents were searched, in vain."""

    nothing_found: bool = False


class Place(BaseModel):
    """A passage of a document: characters [start, end) of its text, pages and lines counted from 1."""

    headings: Annotated[list[str], Field(examples=[["Payment"]])]
    page_start: int | None
    page_end: int | None
    line_start: Count
    line_end: Count
    start: Count
    end: Count


class Citation(Place):
    """A passage that the answer was made from. `quote` is the document's text from `start` to `end`, character by character."""

    n: Annotated[int, Field(description="The number in the answer's [n]", examples=[1])]
    cited: Annotated[bool, Field(description="The answer's text mentions it")]
    chunk_id: Annotated[int, Field(examples=[17])]
    file_id: FileId
    document_id: DocumentId
    corpus_id: Id
    filename: Path
    version: Sha256
    quote: Annotated[str, Field(examples=["Invoices are due 30 days after receipt."])]


class CitedAt(BaseModel):
    start_index: Count
    end_index: Count
    title: Path
    url: Annotated[str, Field(examples=["https://preread.example.com/#passage/vs_1/file-1/0-40"])]


class UrlCitation(BaseModel):
    type: Literal["url_citation"]
    url_citation: CitedAt


class PromptDetails(BaseModel):
    cached_tokens: Annotated[int, Field(description="Taken from stored KV", examples=[900])]


class TokenUsage(BaseModel):
    prompt_tokens: Annotated[int, Field(examples=[1000])]
    completion_tokens: Annotated[int, Field(examples=[12])]
    total_tokens: Annotated[int, Field(examples=[1012])]
    prompt_tokens_details: PromptDetails


class FunctionCalled(BaseModel):
    name: Annotated[str, Field(examples=["get_invoice"])]
    arguments: Annotated[str, Field(description="JSON", examples=['{"number": 7}'])]


class MadeCall(BaseModel):
    id: Annotated[str, Field(examples=["call_1"])]
    type: Literal["function"]
    function: FunctionCalled


class MadeCallPiece(MadeCall):
    index: Count


class TopLogprob(BaseModel):
    token: Annotated[str, Field(examples=["Inv"])]
    logprob: Logprob
    bytes: Annotated[list[int], Field(examples=[[73, 110, 118]])]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class Logprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None


class Message(BaseModel):
    role: Literal["assistant"]
    content: Text | None
    refusal: Annotated[str | None, Field(examples=[None])]
    annotations: list[UrlCitation]
    tool_calls: Annotated[list[MadeCall], Field(examples=[[]])] = []


class ChatChoice(BaseModel):
    index: Count
    message: Message
    finish_reason: Finish
    logprobs: Logprobs | None


class Delta(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: Text = ""
    refusal: Annotated[str, Field(examples=[""])] = ""
    annotations: list[UrlCitation] = []
    tool_calls: Annotated[list[MadeCallPiece], Field(examples=[[]])] = []


class ChatChunkChoice(BaseModel):
    index: Count
    delta: Delta
    finish_reason: Finish | None
    logprobs: Logprobs | None


class Envelope(BaseModel):
    id: Annotated[str, Field(examples=["chatcmpl-1"])]
    created: Time
    model: ModelId


class ChatCompletion(Envelope):
    """`preread`: how the prompt's KV came about."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: TokenUsage
    citations: list[Citation]
    preread: Provenance


class ChatCompletionChunk(Envelope):
    """One `data:` line of a stream. The last one of the first choice has `citations` and `preread`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: TokenUsage | None = None
    citations: list[Citation] = []
    preread: Provenance | None = None


class CompletionLogprobs(BaseModel):
    tokens: Annotated[list[str], Field(examples=[["Inv"]])]
    token_logprobs: Annotated[list[float], Field(examples=[[-0.25]])]
    top_logprobs: Annotated[list[dict[str, float]], Field(examples=[[{"Inv": -0.25}]])]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    index: Count
    text: Text
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None


class Completion(Envelope):
    """Of a stream each `data:` line is one too, with a piece of the text."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: TokenUsage | None = None
    preread: Provenance | None = None


# --- responses ---


class FileResult(BaseModel):
    file_id: FileId
    filename: Path
    score: Annotated[float, Field(ge=0, le=1, examples=[0.82])]
    text: Annotated[str, Field(examples=["Invoices are due 30 days after receipt."])]
    attributes: dict[str, Any]


class FileSearchCall(BaseModel):
    id: Annotated[str, Field(examples=["fs_1"])]
    type: Literal["file_search_call"]
    status: Literal["in_progress", "completed"]
    queries: Annotated[list[str], Field(examples=[["When are invoices due?"]])]
    results: list[FileResult] | None


class FileCitation(BaseModel):
    type: Literal["file_citation"]
    index: Count
    file_id: FileId
    filename: Path


class OutputText(BaseModel):
    type: Literal["output_text"]
    text: Text
    annotations: list[FileCitation]
    logprobs: list[TokenLogprob]


class Refusal(BaseModel):
    type: Literal["refusal"]
    refusal: Annotated[str, Field(examples=["I found nothing about this in the selected documents."])]


class OutputMessage(BaseModel):
    id: Annotated[str, Field(examples=["msg_1"])]
    type: Literal["message"]
    status: Literal["in_progress", "completed"]
    role: Literal["assistant"]
    content: list[OutputText | Refusal]


class FunctionCall(BaseModel):
    id: Annotated[str, Field(examples=["fc_1"])]
    type: Literal["function_call"]
    status: Literal["in_progress", "completed"]
    call_id: Annotated[str, Field(examples=["call_1"])]
    name: Annotated[str, Field(examples=["get_invoice"])]
    arguments: Annotated[str, Field(description="JSON", examples=['{"number": 7}'])]


class OutputDetails(BaseModel):
    reasoning_tokens: Literal[0]


class ResponseUsage(BaseModel):
    input_tokens: Annotated[int, Field(examples=[1000])]
    input_tokens_details: PromptDetails
    output_tokens: Annotated[int, Field(examples=[12])]
    output_tokens_details: OutputDetails
    total_tokens: Annotated[int, Field(examples=[1012])]


class Incomplete(BaseModel):
    reason: Literal["max_output_tokens"]


class ResponseText(BaseModel):
    format: Annotated[dict[str, Any], Field(examples=[{"type": "text"}])]


class Response(BaseModel):
    """Events of a stream have it whole in `response.created`, `response.in_progress` and the last one."""

    id: Annotated[str, Field(examples=["resp_1"])]
    object: Literal["response"]
    created_at: Time
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: Incomplete | None
    instructions: str | None
    max_output_tokens: int | None
    model: ModelId
    output: list[FileSearchCall | OutputMessage | FunctionCall]
    parallel_tool_calls: bool
    previous_response_id: None
    store: Literal[False]
    temperature: Annotated[float, Field(examples=[0.0])]
    text: ResponseText
    tool_choice: Annotated[str | dict[str, Any], Field(examples=["auto"])]
    tools: Annotated[list[dict[str, Any]], Field(examples=[[{"type": "file_search", "vector_store_ids": ["vs_1"]}]])]
    top_p: Annotated[float, Field(examples=[1.0])]
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    metadata: dict[str, Any]
    citations: list[Citation] = []
    preread: Provenance | None = None
