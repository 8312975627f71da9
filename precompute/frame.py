"""The fixed start of every grounded prompt (the frame), and the rest of it, in token ids.

    frame | label 1, chunk 1 | label 2, header 2, chunk 2 | … | caller's system text, history, question, answer cue

The chat template is rendered once with placeholders where text goes and cut there: template pieces are encoded with
control markers, everything that people or documents wrote without. Nothing is ever re-tokenised as a whole.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain

from jinja2.exceptions import TemplateError

from precompute.tokenizer import ReaderTokenizer
from storage.errors import UserError

GROUNDING = (
    "Answer from the numbered passages below and from nothing else. Name the passage you used by its number, like [1]. "
    "If they do not hold the answer, say so.\n\nPassages:"
)
_MARK = "\ue000{}\ue001"
_MARKS = re.compile("\ue000([0-9]+)\ue001")


@dataclass(frozen=True)
class Turn:
    role: str  # system | user | assistant
    content: str


@contextmanager
def _refusals_told() -> Iterator[None]:
    """A template may refuse an order of roles, such as two turns of the user in a row."""
    try:
        yield
    except TemplateError as error:
        raise UserError(f"The model's chat template refuses these messages: {str(error).rstrip('.')}.") from error


class PromptFormat:
    """Builds prompts for one tokenizer and its chat template. Raises UserError for messages that the template refuses."""

    def __init__(self, tokenizer: ReaderTokenizer) -> None:
        self._tokenizer = tokenizer
        self._encode: Callable[[str], list[int]] = tokenizer.encode
        self._encode_control: Callable[[str], list[int]] = tokenizer.encode_control

    def remembering(self) -> PromptFormat:
        """The same, for a prompt that is tried in many sizes: it encodes each text once. Its answers are not to be changed."""
        same = copy(self)
        same._encode, same._encode_control = cache(self._encode), cache(self._encode_control)
        return same

    @cached_property
    def frame(self) -> list[int]:
        """Ids from the first token of the prompt to the end of the grounding rules."""
        before, _ = self._around_documents(("user",))
        return [*self._encode_control(before), *self._encode(GROUNDING)]

    @property
    def frame_hash(self) -> str:
        return hashlib.sha256(repr(self.frame).encode()).hexdigest()

    def label(self, number: int) -> list[int]:
        """Ids that stand before passage `number` (from 1)."""
        return self._encode(f"\n\n[{number}] ")

    def header(self, text: str) -> list[int]:
        """Ids that stand between the label and a chunk that begins inside a table: the table's header."""
        return self._encode(f"{text}\n")

    def tail(self, turns: Sequence[Turn]) -> list[int]:
        """Ids from the end of the last passage to the answer's first token."""
        system = "\n\n".join(t.content for t in turns if t.role == "system")
        spoken = [t for t in turns if t.role != "system"]
        _, after = self._around_documents(tuple(t.role for t in spoken))
        ids = self._encode(f"\n\n{system}" if system else "\n")
        return [*ids, *chain.from_iterable(self._pieces(after, [t.content for t in spoken]))]

    def plain(self, turns: Sequence[Turn]) -> list[int]:
        """Ids of a prompt without documents."""
        return list(chain.from_iterable(self.plain_pieces(turns)))

    def plain_pieces(self, turns: Sequence[Turn]) -> list[list[int]]:
        """Those ids in pieces: the template's, a text's, the template's, a text's, and so on to the template's end."""
        try:
            rendered = self._render_marks(turns)
        except TemplateError:
            rendered = ""
        system = [t.content for t in turns if t.role == "system"]
        if system and not {int(number) for number in _MARKS.findall(rendered)}.issuperset(range(len(turns))):
            # A template without a system role refuses or drops one: its text goes before the first turn's.
            first, *rest = [t for t in turns if t.role != "system"] or [Turn("user", "")]
            turns = [Turn(first.role, "\n\n".join([*system, first.content])), *rest]
            rendered = ""
        if not rendered:
            with _refusals_told():
                rendered = self._render_marks(turns)
        return self._pieces(rendered, [t.content for t in turns])

    def _render_marks(self, turns: Sequence[Turn]) -> str:
        return self._render([(t.role, _MARK.format(i)) for i, t in enumerate(turns)])

    def _around_documents(self, roles: tuple[str, ...]) -> tuple[str, str]:
        documents = _MARK.format("D")
        turns = [(role, _MARK.format(i)) for i, role in enumerate(roles)]
        try:
            rendered = self._render([("system", documents), *turns])
        except TemplateError:  # templates without a system role refuse one
            rendered = ""
        if documents not in rendered:
            first = turns[0][0], documents + "\n\n" + turns[0][1]
            with _refusals_told():
                rendered = self._render([first, *turns[1:]])
        before, _, after = rendered.partition(documents)
        return before, after

    def _render(self, turns: Sequence[tuple[str, str]]) -> str:
        if not self._tokenizer.template.chat_template:
            bos = self._tokenizer.template.bos_token or ""
            cues = {"system": "", "user": "Question: ", "assistant": "Answer: "}
            return bos + "".join(f"{cues[role]}{content}\n" for role, content in turns) + "Answer:"
        messages = [{"role": role, "content": content} for role, content in turns]
        return str(self._tokenizer.template.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    def _pieces(self, rendered: str, contents: Sequence[str]) -> list[list[int]]:
        pieces: list[list[int]] = []
        at = 0
        for i, content in enumerate(contents):
            mark = _MARK.format(i)
            found = rendered.find(mark, at)
            end, after = (len(rendered),) * 2 if found < 0 else (found, found + len(mark))
            pieces += [self._encode_control(rendered[at:end]), self._encode(content)]
            at = after
        return [*pieces, self._encode_control(rendered[at:])]
