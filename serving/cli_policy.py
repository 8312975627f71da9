"""`preread policy`: check a rules file, and ask what it would do. Both work on this machine's files and catalogue."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import select

from serving.cli_output import Json, note, show, table
from serving.settings import load_settings
from storage.catalogue.engine import Catalogue, open_catalogue, parse_url
from storage.catalogue.facts import facts_of, page_of
from storage.catalogue.schema import Corpus, Document
from storage.errors import NotFound, UserError
from storage.policy.file import read_policy
from storage.policy.rules import Policy
from storage.policy.source import PolicyError
from storage.policy.types import ACTIONS, DEFAULT_RULE, Decision, DocumentFacts, Keep, Prefetch

app = typer.Typer(help="The operator's rules for stored KV: check, explain.", no_args_is_help=True, rich_markup_mode=None)
MISTAKES = 2  # exit code


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="A rules file; nothing is put in force.")], as_json: Json = False
) -> None:
    """Say whether a rules file can be used: one line for each mistake."""
    try:
        policy = read_policy(file)
    except PolicyError as refused:
        for mistake in refused.mistakes:
            note(f"{file}: {mistake}")
        raise typer.Exit(MISTAKES) from None
    found = {"file": str(file), "rules": [rule.name for rule in policy.rules], "hook": policy.hook_name or None}
    show(found, as_json, lambda f: f"{file}: {len(f['rules'])} rules" + (f", hook {f['hook']}" if f["hook"] else ""))


@app.command()
def explain(
    corpus: Annotated[str | None, typer.Option(help="Name or id; default: every corpus.")] = None,
    path: Annotated[str | None, typer.Option(help="A document's path, there or imagined.")] = None,
    tag: Annotated[list[str] | None, typer.Option(help="An attribute KEY=VALUE; may be repeated.")] = None,
    file: Annotated[Path | None, typer.Option(help="Rules to try out; default: PREREAD_POLICY_FILE.")] = None,
    as_json: Json = False,
) -> None:
    """Say which rules match a document, or each corpus's documents, and what follows. Changes nothing."""
    settings = load_settings()
    chosen = file or (Path(settings.policy_file) if settings.policy_file else None)
    if chosen is None:
        raise UserError("there is no policy: name a file with --file, or set PREREAD_POLICY_FILE")
    policy, tags = read_policy(chosen), dict(_pair(each) for each in tag or ())
    with _catalogue(settings.database) as catalogue:
        if path is None:
            if tags:
                raise UserError("--tag describes a document: name its --path as well")
            show(list(_corpora(catalogue, policy, corpus)), as_json, _told)
        else:
            facts = _facts(catalogue, policy, corpus, path, tags)
            show(_document(facts, policy.decide(facts, time.time())), as_json, _shown)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise UserError(f"--tag {text!r} is not written as KEY=VALUE")
    return key, value


@contextmanager
def _catalogue(url: str) -> Iterator[Catalogue | None]:
    """The catalogue, or None where none has been made yet: a document may be imagined without one."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not Path(parsed.database or "").exists():
        yield None
        return
    catalogue = open_catalogue(url)
    try:
        yield catalogue
    finally:
        catalogue.close()


def _facts(
    catalogue: Catalogue | None, policy: Policy, corpus: str | None, path: str, tags: dict[str, str]
) -> DocumentFacts:
    """Of the document that stands at the path, or of one that is added there now. Tags that are named replace its own."""
    found: list[DocumentFacts] = []
    name, now = corpus or "", time.time()
    if catalogue is not None:
        with catalogue.read() as session:
            query = select(Document, Corpus.name).join(Corpus, Corpus.id == Document.corpus_id).where(Document.path == path)
            if corpus is not None:
                query = query.where((Corpus.name == corpus) | (Corpus.id == corpus))
            found = facts_of(session, [(d, n) for d, n in session.execute(query.limit(2))], policy.needs_use)
            named = session.get(Corpus, name)
            name = named.name if named is not None else name
    if len(found) > 1:
        raise UserError(f"several corpora have a document {path!r}: name one with --corpus")
    if not found:
        return DocumentFacts("", corpus or "", name, "", path, dict(tags), created_at=now)
    [one] = found
    attributes = {**one.attributes, **tags}
    return DocumentFacts(**{**one.__dict__, "attributes": attributes})


def _corpora(catalogue: Catalogue | None, policy: Policy, corpus: str | None) -> Iterator[dict[str, Any]]:
    """Of each corpus, how many documents fall under which rule."""
    if catalogue is None:
        raise NotFound("there is no catalogue yet: describe a document with --path")
    with catalogue.read() as session:
        rows = session.execute(select(Corpus.id, Corpus.name).order_by(Corpus.created_at, Corpus.id)).all()
    chosen = [row for row in rows if corpus is None or corpus in (row.id, row.name)]
    if corpus is not None and not chosen:
        raise NotFound(f"no corpus named {corpus!r}")
    for corpus_id, name in chosen:
        counts: dict[str, Counter[tuple[str, str]]] = {action: Counter() for action in ACTIONS}
        total, after, now = 0, "", time.time()
        while True:
            with catalogue.read() as session:
                page = page_of(session, [corpus_id], after)
                facts = facts_of(session, page, policy.needs_use)
            if not page:
                break
            total, after = total + len(page), page[-1][0].id
            for decision in (policy.decide(each, now) for each in facts):
                for action, rule in decision.by.items():
                    counts[action][rule, describe(getattr(decision.actions, action))] += 1
        said = [
            {"action": action, "rule": rule, "value": value, "documents": count}
            for action, found in counts.items()
            for (rule, value), count in sorted(found.items())
        ]
        yield {"corpus_id": corpus_id, "name": name, "documents": total, "rules": said}


def _document(facts: DocumentFacts, decision: Decision) -> dict[str, Any]:
    """By action, what holds and which rule says so."""
    said = {
        action: {"value": describe(getattr(decision.actions, action)), "rule": decision.by.get(action, DEFAULT_RULE)}
        for action in ACTIONS
    }
    shown = {"corpus": facts.corpus, "path": facts.path, "language": facts.language, "attributes": dict(facts.attributes)}
    return {**shown, "known": bool(facts.document_id), "actions": said}


def describe(value: object) -> str:
    """An action's value as people read it."""
    if isinstance(value, Prefetch):
        return f"into {value.tier} at cron {value.cron} {value.timezone}"
    if isinstance(value, Keep):
        return f"in {value.tier} for {value.seconds:g} s after use"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(value)
    return "-" if value is None else str(value)


def _shown(told: dict[str, Any]) -> str:
    where = "a document of" if told["known"] else "a document that is not there, in"
    head = f"{told['path']}: {where} {told['corpus'] or 'no corpus'}, language {told['language'] or 'unknown'}"
    rows = [(action, said["value"], said["rule"]) for action, said in told["actions"].items()]
    return f"{head}\n{table([('ACTION', 'WHAT FOLLOWS', 'RULE'), *rows], '')}"


def _told(corpora: Sequence[dict[str, Any]]) -> str:
    rows = [
        (one["name"], said["action"], said["value"], said["rule"], f"{said['documents']} of {one['documents']}")
        for one in corpora
        for said in one["rules"] or [{"action": "-", "value": "-", "rule": DEFAULT_RULE, "documents": one["documents"]}]
    ]
    return table([("CORPUS", "ACTION", "WHAT FOLLOWS", "RULE", "DOCUMENTS"), *rows], "no corpora")
