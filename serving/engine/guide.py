"""What the model may say next: an answer held to a JSON Schema, token by token (llguidance), and the bytes of tokens."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer

from precompute.spec import ReaderSpec
from serving.engine.types import Shape
from storage.errors import UserError

# One way to write what the schema leaves open: a small model could fill its whole answer with blanks between two tokens.
LAYOUT: dict[str, Any] = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

WALKED = 32  # tokens of a schema's beginning that are tried before a request is accepted
REMEMBERED = 64  # schemas


class Constraint:
    """One answer's place in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def mask(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [vocab] with -inf where a token would leave the grammar. Raises UserError."""
        refused = torch.from_numpy(self._allowed()[: len(logits)] == 0).to(logits.device)
        return logits.masked_fill(refused, -torch.inf)

    def walk(self, choice: int) -> None:
        """Say some tokens as the grammar allows them, of those allowed always the one at `choice`. Raises UserError."""
        for _ in range(WALKED):
            if self.complete:
                return
            allowed = self._allowed().nonzero()[0]
            if not len(allowed):
                return
            self.took(int(allowed[choice]))

    def _allowed(self) -> np.ndarray:
        allowed = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), np.uint8), bitorder="little")
        self._refuse_errors()
        return allowed

    def took(self, token: int) -> None:
        """`token` was said. Raises UserError."""
        self._matcher.consume_token(token)
        self._refuse_errors()

    @property
    def complete(self) -> bool:
        """Nothing more can follow."""
        return self._matcher.is_stopped()

    def _refuse_errors(self) -> None:
        if self._matcher.is_error():
            # What a schema costs shows only while it is followed: mostly in its first tokens, which `Guide.check` tries.
            raise UserError("This JSON schema is not served: it is too complex", code="invalid_json_schema")


class Guide:
    """Over one reader's tokens. The table of them is made at first use, which may take a second."""

    def __init__(self, reader: ReaderSpec) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._made: LLTokenizer | None = None
        self._well: OrderedDict[str, None] = OrderedDict()  # grammars that were checked of late

    @property
    def _tokens(self) -> LLTokenizer:
        with self._lock:
            if self._made is None:
                size = self._reader.vocabulary
                ends = sorted(self._reader.stop_ids)
                self._made = from_tokenizer(self._reader.tokenizer.template, n_vocab=size, eos_token=ends)
            return self._made

    def check(self, shape: Shape) -> None:
        """Raises UserError for a schema that cannot be served, as far as its beginning tells."""
        grammar = _grammar(shape)
        if grammar in self._well:
            return
        problem = LLMatcher.validate_grammar(grammar, self._tokens)
        if problem:
            reason = problem.splitlines()[0].rpartition("failed to compile JSON schema: ")[2]
            raise UserError(f"This JSON schema is not served: {reason}", code="invalid_json_schema")
        for choice in (0, -1):
            self.constraint(shape).walk(choice)
        with self._lock:
            self._well[grammar] = None
            while len(self._well) > REMEMBERED:
                self._well.popitem(last=False)

    def constraint(self, shape: Shape) -> Constraint:
        """For one answer."""
        return Constraint(LLMatcher(self._tokens, _grammar(shape), log_level=0))

    def bytes_of(self, token: int) -> bytes:
        """What a token stands for, not always whole characters; of a control marker, its name."""
        if self._tokens.is_special_token(token):
            return str(self._reader.tokenizer.template.convert_ids_to_tokens(token)).encode()
        return bytes(self._tokens.decode_bytes([token]))


def lark(shape: Shape) -> str:
    """The grammar in llguidance's own language. Raises UserError for what is no schema."""
    try:
        schema = json.dumps(_laid_out(shape.schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError("the schema is not JSON", code="invalid_json_schema") from error
    before, after = (f"{json.dumps(text)} " if text else "" for text in (shape.before, shape.after))
    return f"start: {before}value {after}\nvalue: %json {schema}\n"


def _grammar(shape: Shape) -> str:
    return str(LLMatcher.grammar_from_lark(lark(shape)))


def _laid_out(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {**schema, "x-guidance": LAYOUT}
