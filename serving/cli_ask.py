"""`preread ask`: a question to a corpus, answered as it is written, with its sources."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from serving.cli_client import Api, KeyFile, Url, connect, find_corpus
from serving.cli_output import Json


def register(app: typer.Typer) -> None:
    app.command()(ask)


@dataclass
class Answered:
    """A whole answer, as its stream told it."""

    text: str = ""
    first_token_s: float | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    preread: dict[str, Any] = field(default_factory=dict)
    citations: list[dict[str, Any]] = field(default_factory=list)

    def take(self, seconds: float, event: dict[str, Any]) -> str:
        """Note an event; the text it brought."""
        self.usage = event.get("usage") or self.usage
        self.preread = event.get("preread") or self.preread
        self.citations = event.get("citations") or self.citations
        text = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
        if text and self.first_token_s is None:
            self.first_token_s = seconds
        self.text += text
        return text


def answer(
    api: Api,
    corpus_id: str,
    question: str,
    *,
    method: str | None = None,
    max_tokens: int = 200,
    on_text: Callable[[str], None] = lambda _: None,
) -> Answered:
    """Ask, and hear the answer out. Raises UserError."""
    body: dict[str, Any] = {
        "model": f"{reader_id(api)}@{corpus_id}",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "stream_options": {"include_usage": True},
    }
    if method:
        body["preread"] = {"method": method}
    answered = Answered()
    for seconds, event in api.stream("/chat/completions", body):
        on_text(answered.take(seconds, event))
    return answered


def reader_id(api: Api) -> str:
    """The plain model's id."""
    return next(str(model["id"]) for model in api.get("/models")["data"] if "@" not in model["id"])


def sources(answered: Answered, all_of_them: bool = False) -> str:
    """The sources that the answer names; if it names none, the first one."""
    cited = [c for c in answered.citations if c["cited"] or all_of_them] or answered.citations[:1]
    return "\n".join(f"  [{c['n']}] {_place(c)}" for c in cited)


def _place(citation: dict[str, Any]) -> str:
    where = _range("page", citation["page_start"], citation["page_end"]) if citation["page_start"] else ""
    where = where or _range("line", citation["line_start"], citation["line_end"])
    heading = f" ({' > '.join(citation['headings'])})" if citation["headings"] else ""
    return f"{citation['filename']}, {where}{heading}"


def _range(unit: str, first: int, last: int) -> str:
    return f"{unit} {first}" if first == last else f"{unit}s {first}-{last}"


def cost(answered: Answered) -> str:
    """How the prompt came about, in one line."""
    report = answered.preread
    first = "-" if answered.first_token_s is None else f"{1000 * answered.first_token_s:.0f} ms"
    return (
        f"first token after {first}; prompt tokens: {report.get('tokens_reused', 0)} reused, "
        f"{report.get('tokens_recomputed', 0)} recomputed, {report.get('tokens_computed', 0)} computed"
    )


def ask(
    question: Annotated[str, typer.Argument(metavar="QUESTION")],
    corpus: Annotated[str | None, typer.Option(help="Name or id; default: the only corpus.")] = None,
    method: Annotated[
        str | None, typer.Option(help="default, full, reuse, epic:K, cacheblend:R or question:R; default: the server's.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 256,
    url: Url = None,
    key_file: KeyFile = None,
    as_json: Json = False,
) -> None:
    """Ask a corpus a question."""
    api = connect(url, key_file)
    found = find_corpus(api, corpus)

    def on_text(text: str) -> None:
        if not as_json:
            sys.stdout.write(text)
            sys.stdout.flush()

    done = answer(api, found["id"], question, method=method, max_tokens=max_tokens, on_text=on_text)
    if as_json:
        print(json.dumps({"question": question, "corpus": found["id"], **done.__dict__}, ensure_ascii=False))
        return
    print(f"\n\nsources:\n{sources(done)}\n{cost(done)}" if done.citations else "\n\nno sources")
